"""The files of an EAGLE-3 head: one layer that reads hidden states of the model that it was trained for.

Source: `LlamaForCausalLMEagle3` (Li, Wei, Zhang, Zhang: EAGLE-3, arXiv 2503.01840). config.json describes a Llama with
one layer. model.safetensors contains fc, midlayer, norm, lm_head and d2t. d2t maps the head's smaller vocabulary: added
to a token id of the head, it gives the token id of the target model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt

from trioserve.contracts.errors import ModelLoadError, StartupError
from trioserve.model.loading.fields import Fields
from trioserve.model.loading.file_tensor import PLAIN_DTYPES, STORAGE_BYTES
from trioserve.model.loading.hf_config import model_config_from, read_json_object
from trioserve.model.loading.safetensors import stored_tensors
from trioserve.model.loading.stored_tensor import read_plain
from trioserve.model.model_config import MlpConfig, ModelConfig

__all__ = ["EagleCheckpoint", "is_eagle", "open_eagle"]

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
TAPPED_COUNT = 3
OWN_FIELDS = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids", "eagle_config", "norm_before_residual")
WEIGHTS_NAME = "model.safetensors"


@dataclass(frozen=True, slots=True)
class EagleCheckpoint:
    """Files of an EAGLE-3 head.

    Attributes:
        path: the file with the weights.
        config: description of the head's layer, with the vocabulary of the target model.
        vocab_size: number of tokens that the head can propose.
        tapped_layers: layers of the target model whose inputs the head reads. None is EAGLE-3's default choice.
        norms_residual: True if the residual of attention is the hidden state after its norm, False if before.
    """

    path: Path
    config: ModelConfig
    vocab_size: int
    tapped_layers: tuple[int, ...] | None
    norms_residual: bool

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """Read all tensors.

        Returns:
            Arrays by name without "model." in front: int64 for integer tensors, float32 for the others.

        Raises:
            ModelLoadError: a tensor is stored in a type that is not supported.
        """
        found: dict[str, npt.NDArray[Any]] = {}
        for name, stored in stored_tensors(self.path.parent, tuple(STORAGE_BYTES)).items():
            name = name.removeprefix("model.")
            if stored.storage == "I64":
                found[name] = stored.bytes().view("<i8").reshape(stored.shape)
            elif stored.storage in PLAIN_DTYPES:
                found[name] = read_plain(stored.path, stored.offset, stored.shape, stored.dtype, "float32")
            elif name != "t2d":  # the inverse of d2t, not needed
                raise ModelLoadError(f"{name} in {self.path} is stored as {stored.storage}, which is not supported")
        return found

    def tapped_of(self, layer_count: int) -> tuple[int, ...]:
        """Return the layers of the target model whose inputs the head reads.

        Args:
            layer_count: layers of the target model.

        Raises:
            StartupError: the target model has too few layers.
        """
        layers = self.tapped_layers or (2, layer_count // 2, layer_count - 3)
        if len(set(layers)) != TAPPED_COUNT or not all(0 <= layer < layer_count for layer in layers):
            raise StartupError(
                f"the EAGLE-3 head in {self.path.parent} reads the inputs of layers {', '.join(map(str, layers))}, "
                f"but the model has {layer_count} layers: name the head that was trained for this model"
            )
        return layers


def is_eagle(directory: Path) -> bool:
    """Return True if the directory contains an EAGLE-3 head.

    Args:
        directory: directory with a config.json, or without one.

    Raises:
        ModelLoadError: config.json cannot be read.
    """
    if not (directory / "config.json").is_file():
        return False
    names = read_json_object(directory / "config.json").get("architectures")
    return isinstance(names, list) and any(name in ARCHITECTURES for name in names)


def open_eagle(directory: Path) -> EagleCheckpoint:
    """Open an EAGLE-3 head. Only its config.json is read.

    Args:
        directory: directory with config.json and model.safetensors.

    Raises:
        ModelLoadError: a file is missing or cannot be read, or the config does not describe an EAGLE-3 head.
    """
    values = read_json_object(directory / "config.json")
    path = directory / WEIGHTS_NAME
    if not path.is_file():
        raise ModelLoadError(f"the EAGLE-3 head in {directory} has no {WEIGHTS_NAME}: download that file")
    fields = Fields(values, "config.json")
    config = model_config_from(
        {**values, "architectures": ["LlamaForCausalLM"], "model_type": "llama"},
        {},
        dtype_name="float32",
        also_read=OWN_FIELDS,
    )
    if config.layer_count != 1 or not isinstance(config.layers[0].mlp, MlpConfig):
        raise ModelLoadError(f"the EAGLE-3 head has {config.layer_count} layers, but must have one")
    eagle = fields.group_or_none("eagle_config")
    tapped = fields.wholes("eagle_aux_hidden_state_layer_ids")
    if eagle is not None:
        tapped = tapped or eagle.wholes("eagle_aux_hidden_state_layer_ids")
    if tapped and len(tapped) != TAPPED_COUNT:
        raise ModelLoadError(f"eagle_aux_hidden_state_layer_ids has {len(tapped)} layers, it must have {TAPPED_COUNT}")
    return EagleCheckpoint(
        path=path,
        config=config,
        vocab_size=fields.whole_or("draft_vocab_size", config.vocab_size),
        tapped_layers=tapped or None,
        norms_residual=fields.flag_or("norm_before_residual", False),
    )
