"""The tensors of a checkpoint's prediction layer (multi-token prediction, MTP).

DeepSeek-V3 (arXiv 2412.19437, 2.2) and GLM-4.5 store it as model.layers.N, where N is the number of layers. It is a
layer like the last one, with the additional tensors enorm, hnorm, eh_proj and shared_head.
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
"""Vocabulary of the prediction layer as a model. Its embedding and last norm are zeros and are never read."""
BESIDE = ("embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head")


class MtpLayer:
    """The prediction layer as a Checkpoint with one layer.

    Args:
        config: description of the target model.
        stored: tensors of the layer, by their names without "model.layers.N.".
        files: files of the checkpoint.

    Raises:
        ModelLoadError: a tensor is missing, unknown, or has the wrong shape.
    """

    vision = None
    continues_texts = True
    tokenizer_directory = None
    gguf_metadata = None

    def __init__(self, config: ModelConfig, stored: Mapping[str, FurtherTensor], files: tuple[Path, ...]) -> None:
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
    """The prediction layer of a checkpoint. Only headers are read until `read` is called.

    Args:
        checkpoint: the target model.

    Attributes:
        config: description of the target model.
        layer: the part that is an ordinary layer.

    Raises:
        StartupError: the checkpoint has no prediction layer.
        ModelLoadError: the layer is incomplete.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        stored = checkpoint.further_tensors() if isinstance(checkpoint, SafetensorsCheckpoint) else {}
        if not stored:
            raise StartupError(
                "the model's own prediction layers (mtp) must provide draft tokens, but its files have none that can "
                "be read: use safetensors whose config.json has num_nextn_predict_layers, or name a draft model"
            )
        self.config: ModelConfig = checkpoint.config
        self._checkpoint = checkpoint
        self._beside = {name: stored.pop(f"{name}.weight") for name in BESIDE if f"{name}.weight" in stored}
        self.layer = MtpLayer(checkpoint.config, stored, checkpoint.files)

    def read(self, name: str, *shape: int) -> npt.NDArray[Any]:
        """Read a tensor that is not part of the ordinary layer.

        Args:
            name: its name without "model.layers.N." and ".weight".
            shape: expected shape.

        Returns:
            The values as float32.

        Raises:
            ModelLoadError: the tensor is missing or has another shape.
        """
        tensor = self._beside.get(name)
        if tensor is None:
            raise ModelLoadError(f"the prediction layer (mtp) has no {name}: download the checkpoint again")
        if tuple(tensor.shape) != shape:
            raise ModelLoadError(
                f"{name} of the prediction layer (mtp) has shape {list(tensor.shape)}, but the config requires "
                f"{list(shape)}"
            )
        return tensor.stored(name, TensorPlace(name, shape)).read("float32")

    def read_or_shared(self, name: str, shared: str, *shape: int) -> npt.NDArray[Any]:
        """Read a tensor of the prediction layer, or the target model's tensor if it is not stored.

        Args:
            name: name of the prediction layer's tensor, see `read`.
            shared: name of the target model's tensor.
            shape: expected shape of the prediction layer's tensor.

        Returns:
            The values as float32.
        """
        if name in self._beside:
            return self.read(name, *shape)
        return self.read_shared(shared)

    def read_shared(self, name: str) -> npt.NDArray[Any]:
        """Read a tensor of the target model.

        Args:
            name: its name.

        Returns:
            The values as float32.
        """
        return next(tensor for tensor in self._checkpoint.tensors() if tensor.name == name).read("float32")


def _zeros(name: str, shape: tuple[int, ...]) -> StoredTensor:
    def read(dtype: Dtype) -> Values:
        return np.zeros_like(empty_values(shape, dtype))

    return StoredTensor(name, shape, "float32", read, lambda: b"")
