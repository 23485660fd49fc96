"""One way to look at a checkpoint, whatever its files: dimensions, tensors by our names, and where its tokenizer is.

Opening reads headers only; each tensor is read when it is asked for. torch is not needed for either.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from trioserve.contracts.errors import ModelLoadError
from trioserve.model.loading.fields import one_line
from trioserve.model.loading.gguf_checkpoint import GgufCheckpoint
from trioserve.model.loading.safetensors import SafetensorsCheckpoint
from trioserve.model.loading.stored_tensor import StoredTensor
from trioserve.model.loading.vision_part import VisionPart
from trioserve.model.model_config import ModelConfig

__all__ = ["Checkpoint", "open_checkpoint"]


class Checkpoint(Protocol):
    """files: those that hold the weights. weight_bytes: the size of all that tensors() gives, together.

    tokenizer_directory: where the tokenizer's files lie; None if they are in gguf_metadata, which is None otherwise.
    sampling_defaults: what the model's makers recommend, by the names of SamplingParams. vision: the part that sees
    images; None: it sees none, or none are served.
    """

    @property
    def config(self) -> ModelConfig: ...
    @property
    def files(self) -> tuple[Path, ...]: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def tokenizer_directory(self) -> Path | None: ...
    @property
    def gguf_metadata(self) -> Mapping[str, object] | None: ...
    @property
    def vision(self) -> VisionPart | None: ...
    @property
    def continues_texts(self) -> bool:
        """True if the model has a head. Without one, it makes vectors of texts only."""
        ...

    @property
    def sampling_defaults(self) -> Mapping[str, float | int]: ...

    def tensors(self) -> Iterator[StoredTensor]:
        """Every tensor of the model, not yet read, in the order of computing."""
        ...


def open_checkpoint(path: Path, *, context_tokens: int | None = None, uses_further_layers: bool = False) -> Checkpoint:
    """A directory with safetensors, a directory with exactly one .gguf, or a .gguf file.

    context_tokens: of the longest context that is to be served, which decides between longrope's factors for short and
    for long ones; None is what the model takes. uses_further_layers: those behind the model's own draft
    for it, and nobody has to be told that they do not.
    Raises ModelLoadError, one sentence that begins with the path, for everything else and for damaged files.
    """
    try:
        return _opened(path, context_tokens, uses_further_layers)
    except ModelLoadError as error:
        raise ModelLoadError(f"cannot load {path}: {one_line(str(error))}") from error
    except OSError as error:
        raise ModelLoadError(f"cannot load {path}: {error.strerror or error}") from error


def _opened(path: Path, context_tokens: int | None, uses_further_layers: bool) -> Checkpoint:
    if path.is_dir():
        if any(path.glob("*.safetensors")) or (path / "model.safetensors.index.json").is_file():
            return SafetensorsCheckpoint(path, context_tokens, uses_further_layers=uses_further_layers)
        path = _only_gguf(path)
    elif not path.exists():
        raise ModelLoadError("there is no such file or directory")
    elif path.suffix.lower() != ".gguf":
        raise ModelLoadError(
            "a model is a .gguf file or a directory with config.json and safetensors; name one of them"
        )
    return GgufCheckpoint(path, context_tokens)


def _only_gguf(directory: Path) -> Path:
    files = sorted(directory.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if files:
        names = ", ".join(path.name for path in files[:5])
        raise ModelLoadError(f"the directory holds {len(files)} GGUF files ({names}): name one of them")
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in directory.glob(pattern))
    if pickled:
        raise ModelLoadError(
            f"the directory has its weights only in {pickled[0]}, a format that can run code; "
            "safetensors are needed: fetch them or convert the model"
        )
    raise ModelLoadError("the directory has no weights; needed are config.json and *.safetensors, or one .gguf file")
