"""The layer behind a model's own that predicts one token more (MTP), as its checkpoint has it.

DeepSeek-V3 (arXiv 2412.19437, 2.2) and GLM-4.5 store it as model.layers.N, where N is the number of layers: a layer
like the last one, and beside it enorm, hnorm, eh_proj and shared_head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from trioserve.contracts.errors import ModelLoadError, StartupError
from trioserve.model.loading.checkpoint import Checkpoint
from trioserve.model.loading.names import TRANSFORMERS, TensorPlace, match_tensors
from trioserve.model.loading.safetensors import EMBEDDING_NAME, FurtherTensor, SafetensorsCheckpoint
from trioserve.model.loading.stored_tensor import StoredTensor
from trioserve.model.model_config import ModelConfig
from trioserve.model.number_formats import Dtype, Values, empty_values

__all__ = ["MtpCheckpoint", "MtpLayer"]

UNUSED_VOCAB_SIZE = 64
"""Of the layer by itself, whose rows are all given: its embedding and its last norm are zeros, and never read."""
BESIDE = ("embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head")


class MtpLayer:
    """The layer as a Checkpoint of one layer."""

    vision = None
    continues_texts = True
    tokenizer_directory = None
    gguf_metadata = None

    def __init__(self, config: ModelConfig, stored: Mapping[str, FurtherTensor], files: tuple[Path, ...]) -> None:
        """stored: by their names behind the layer's number. Raises ModelLoadError."""
        self.files = files
        self.sampling_defaults: dict[str, float | int] = {}
        self.config: ModelConfig = msgspec.structs.replace(
            config,
            vocab_size=UNUSED_VOCAB_SIZE,
            layers=config.layers[-1:],
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_ids=(),
        )
        self._stored = {f"model.layers.0.{name}": tensor for name, tensor in stored.items()}
        shapes = {name: tensor.shape for name, tensor in self._stored.items()}
        shapes[EMBEDDING_NAME], shapes["model.norm.weight"] = (
            (UNUSED_VOCAB_SIZE, config.hidden_size),
            (config.hidden_size,),
        )
        self._places = match_tensors(
            self.config, shapes, TRANSFORMERS, ignored=lambda name: name.endswith("rotary_emb.inv_freq")
        )
        self.weight_bytes = sum(tensor.byte_count for tensor in self.tensors())

    def tensors(self) -> Iterator[StoredTensor]:
        for name, place in self._places.items():
            tensor = self._stored.get(place.name)
            yield _zeros(name, place.shape) if tensor is None else tensor.stored(name, place)


class MtpCheckpoint:
    """config: of the model. layer: what is computed as any other layer."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Reads headers alone. Raises StartupError if there is no such layer, ModelLoadError if it is not whole."""
        stored = checkpoint.further_tensors() if isinstance(checkpoint, SafetensorsCheckpoint) else {}
        if not stored:
            raise StartupError(
                "drafts are to come from the model's own further layers (mtp), and its files have none that are read "
                "here: take safetensors whose config.json has num_nextn_predict_layers, or name a draft model"
            )
        self.config: ModelConfig = checkpoint.config
        self._checkpoint = checkpoint
        self._beside = {name: stored.pop(f"{name}.weight") for name in BESIDE if f"{name}.weight" in stored}
        self.layer = MtpLayer(checkpoint.config, stored, checkpoint.files)

    def read(self, name: str, *shape: int) -> npt.NDArray[Any]:
        """One of what is beside the layer, float32. Raises ModelLoadError."""
        tensor = self._beside.get(name)
        if tensor is None:
            raise ModelLoadError(f"the layer that predicts further tokens has no {name}: fetch the checkpoint again")
        if tuple(tensor.shape) != shape:
            raise ModelLoadError(
                f"{name} of the layer that predicts further tokens has shape {list(tensor.shape)}, but the config asks "
                f"for {list(shape)}"
            )
        return tensor.stored(name, TensorPlace(name, shape)).read("float32")

    def read_or_shared(self, name: str, shared: str, *shape: int) -> npt.NDArray[Any]:
        """The same, or where it is not stored what the model has in its place."""
        if name in self._beside:
            return self.read(name, *shape)
        return self.read_shared(shared)

    def read_shared(self, name: str) -> npt.NDArray[Any]:
        """One of the model's own, float32."""
        return next(tensor for tensor in self._checkpoint.tensors() if tensor.name == name).read("float32")


def _zeros(name: str, shape: tuple[int, ...]) -> StoredTensor:
    def read(dtype: Dtype) -> Values:
        return np.zeros_like(empty_values(shape, dtype))

    return StoredTensor(name, shape, "float32", read, lambda: b"")
