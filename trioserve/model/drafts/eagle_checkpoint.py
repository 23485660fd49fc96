"""An EAGLE-3 head as it is published: one layer that reads hidden states of the model that it was trained for.

`LlamaForCausalLMEagle3` (Li, Wei, Zhang, Zhang: EAGLE-3, arXiv 2503.01840): config.json of a Llama with one layer, and
in model.safetensors fc, midlayer, norm, lm_head, and d2t, which says by how much the id of a token of its smaller
vocabulary is less than the model's.
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
    """config: of its one layer, with the model's vocabulary. vocab_size: of what it proposes from. tapped_layers: whose
    inputs it reads; None: as EAGLE-3 has them for any model. norms_residual: what is added to the attention's result is
    the hidden state behind its norm, and not before it."""

    path: Path
    config: ModelConfig
    vocab_size: int
    tapped_layers: tuple[int, ...] | None
    norms_residual: bool

    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """By name, float32, or int64 where they are whole. Raises ModelLoadError."""
        found: dict[str, npt.NDArray[Any]] = {}
        for name, stored in stored_tensors(self.path.parent, tuple(STORAGE_BYTES)).items():
            name = name.removeprefix("model.")
            if stored.storage == "I64":
                found[name] = stored.bytes().view("<i8").reshape(stored.shape)
            elif stored.storage in PLAIN_DTYPES:
                found[name] = read_plain(stored.path, stored.offset, stored.shape, stored.dtype, "float32")
            elif name != "t2d":  # the same as d2t, in another form
                raise ModelLoadError(f"{name} in {self.path} is stored as {stored.storage}, which is not read here")
        return found

    def tapped_of(self, layer_count: int) -> tuple[int, ...]:
        """Raises StartupError if a model of so many layers does not have them."""
        layers = self.tapped_layers or (2, layer_count // 2, layer_count - 3)
        if len(set(layers)) != TAPPED_COUNT or not all(0 <= layer < layer_count for layer in layers):
            raise StartupError(
                f"the EAGLE-3 head in {self.path.parent} reads what goes into layers {', '.join(map(str, layers))}, "
                f"and the model has {layer_count}: name the head that was trained for it"
            )
        return layers


def is_eagle(directory: Path) -> bool:
    """Raises ModelLoadError if there is a config.json that cannot be read."""
    if not (directory / "config.json").is_file():
        return False
    names = read_json_object(directory / "config.json").get("architectures")
    return isinstance(names, list) and any(name in ARCHITECTURES for name in names)


def open_eagle(directory: Path) -> EagleCheckpoint:
    """Reads the description alone. Raises ModelLoadError."""
    values = read_json_object(directory / "config.json")
    path = directory / WEIGHTS_NAME
    if not path.is_file():
        raise ModelLoadError(f"the EAGLE-3 head in {directory} has no {WEIGHTS_NAME}: fetch it in that format")
    fields = Fields(values, "config.json")
    config = model_config_from(
        {**values, "architectures": ["LlamaForCausalLM"], "model_type": "llama"},
        {},
        dtype_name="float32",
        also_read=OWN_FIELDS,
    )
    if config.layer_count != 1 or not isinstance(config.layers[0].mlp, MlpConfig):
        raise ModelLoadError(f"the EAGLE-3 head has {config.layer_count} layers, and such a head has one")
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
