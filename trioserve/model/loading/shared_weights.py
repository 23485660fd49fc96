"""Weights that another process of this machine has put into shared memory: a segment that holds what a safetensors file
does, so that its header says what lies where, and reading it is reading a file."""

from __future__ import annotations

from pathlib import Path

from trioserve.contracts.errors import ModelLoadError
from trioserve.model.loading.file_tensor import PLAIN_DTYPES, FileTensor
from trioserve.model.loading.safetensors import tensors_in_file

__all__ = ["SEGMENTS", "shared_file", "shared_tensors"]

SEGMENTS = Path("/dev/shm")
"""Where Linux shows the segments of POSIX shared memory as files."""

NAME_CHARACTERS_MAX = 200


def shared_file(name: str) -> Path:
    """That of a segment, whether or not it is there. Raises ModelLoadError for what is no name of one."""
    if not name or len(name) > NAME_CHARACTERS_MAX or name != Path(name).name or not name.isprintable():
        raise ModelLoadError("a segment of shared memory is called by a plain name, without slashes")
    return SEGMENTS / name


def shared_tensors(name: str) -> dict[str, FileTensor]:
    """Every tensor of a segment, by its name out there. Raises ModelLoadError if there is none, or it holds something
    else."""
    path = shared_file(name)
    try:
        return tensors_in_file(path, tuple(PLAIN_DTYPES))
    except FileNotFoundError:
        raise ModelLoadError(f"there is no segment {name} of shared memory on this machine") from None
    except OSError as error:
        raise ModelLoadError(f"cannot read the segment {name} of shared memory: {error.strerror or error}") from error
