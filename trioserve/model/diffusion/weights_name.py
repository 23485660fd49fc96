"""A name for a directory's weights, so that an engine that is opened anew, or another one, knows whether it has the
same."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from trioserve.contracts.errors import ModelLoadError
from trioserve.model.diffusion.directory import ImageDirectory

__all__ = ["name_of_weights"]

DIGEST_BYTES = 8
SAMPLES, SAMPLE_BYTES = 64, 4096  # of each file, all over it


def name_of_weights(directory: ImageDirectory) -> str:
    """Equal for equal files. Weights are looked at in many places and not read whole, which would take as long as
    loading does; whoever trains a model changes all of them. Raises ModelLoadError."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    try:
        for path in _files(directory):
            size = path.stat().st_size
            digest.update(f"{path.relative_to(directory.path)} {size}\n".encode())
            with path.open("rb") as file:
                for sample in range(SAMPLES):
                    file.seek(size * sample // SAMPLES)
                    digest.update(file.read(SAMPLE_BYTES))
    except OSError as error:
        raise ModelLoadError(f"{directory.path} cannot be read: {error.strerror}") from None
    return f"{directory.pipeline.family}-{digest.hexdigest()}"


def _files(directory: ImageDirectory) -> Iterator[Path]:
    yield directory.path / "model_index.json"
    for component in sorted([*directory.pipeline.classes, "scheduler"]):
        yield from sorted(path for path in (directory.path / component).iterdir() if path.is_file())
