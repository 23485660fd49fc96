"""Common interface of checkpoints in all file formats: config, tensors by the names of loading/names.py, and the path
of the tokenizer.

Opening a checkpoint reads only headers. A tensor is read when it is requested. Opening and reading do not need torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from trioserve.contracts.errors import ModelLoadError
from trioserve.model.loading.audio_part import AudioPart
from trioserve.model.loading.fields import one_line
from trioserve.model.loading.gguf_checkpoint import GgufCheckpoint
from trioserve.model.loading.safetensors import SafetensorsCheckpoint
from trioserve.model.loading.stored_tensor import StoredTensor
from trioserve.model.model_config import ModelConfig
from trioserve.model.vision.part import VisionPart

__all__ = ["Checkpoint", "open_checkpoint"]


class Checkpoint(Protocol):
    """An opened checkpoint.

    Attributes:
        config: description of the model.
        files: files that contain the weights.
        weight_bytes: size of all tensors in total.
        tokenizer_directory: directory with the tokenizer's files. None if gguf_metadata has the tokenizer.
        gguf_metadata: metadata of a GGUF file. None for other formats.
        vision: image encoder of the model. None if the model has no image encoder, or one that is not supported.
        audio: audio encoder of the model. None if the model has none.
        sampling_defaults: sampling parameters that the model's authors recommend, with the names of SamplingParams.
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
    def audio(self) -> AudioPart | None: ...
    @property
    def continues_texts(self) -> bool:
        """True if the model has an output head. A model without a head can only compute embeddings of texts."""
        ...

    @property
    def sampling_defaults(self) -> Mapping[str, float | int]: ...

    def tensors(self) -> Iterator[StoredTensor]:
        """Yield every tensor of the model, in the order in which a forward pass uses them, without reading it."""
        ...


def open_checkpoint(path: Path, *, context_tokens: int | None = None, uses_further_layers: bool = False) -> Checkpoint:
    """Open a directory with safetensors, a directory with exactly one .gguf file, or a .gguf file.

    Args:
        path: directory or file.
        context_tokens: longest context to be served, in tokens. It selects longrope's factors for short or for long
            contexts. None is the model's limit.
        uses_further_layers: the caller uses the prediction layers after the model's layers for draft tokens. False: a
            log line reports that these layers are not used.

    Raises:
        ModelLoadError: the path has no checkpoint, or the checkpoint is damaged. The message is one sentence that
            begins with the path.
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
