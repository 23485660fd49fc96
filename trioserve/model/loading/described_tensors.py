"""Tensors that come without a config, named as transformers names them: which of a model's each one is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from trioserve.contracts.errors import ModelLoadError
from trioserve.model.loading.names import TRANSFORMERS, Shape, TensorPlace, match_tensors
from trioserve.model.loading.stored_tensor import StoredTensor
from trioserve.model.model_config import ModelConfig

__all__ = ["DescribedTensor", "check_same_model", "described_tensors"]

TIED_HEAD = "lm_head.weight"
NOT_COMPUTED = ("context_tokens_max", "bos_token_id", "eos_token_ids", "dtype_name", "row_factors")
"""Fields of a ModelConfig that say nothing about what is computed with weights once they are read."""

PLACES_ALIKE = 6  # of a number, since a GGUF file has those of a config in 32 bits


class DescribedTensor(Protocol):
    """What there is to be known of a tensor, and how its rows are read then."""

    @property
    def shape(self) -> Shape: ...

    def stored(self, name: str, place: TensorPlace) -> StoredTensor: ...


def described_tensors(config: ModelConfig, tensors: Mapping[str, DescribedTensor]) -> dict[str, list[StoredTensor]]:
    """What of the model each of them gives, by its name out there; most give one tensor. Of a model whose matrices are
    tied, the second one counts for nothing. Raises ModelLoadError for names and shapes that are not the model's."""
    if config.row_factors:
        raise ModelLoadError("what this model's tensors are multiplied by stands in its files: replace them from files")

    def is_ignored(name: str) -> bool:
        return name.endswith("rotary_emb.inv_freq") or (name == TIED_HEAD and config.tie_word_embeddings)

    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    given: dict[str, list[StoredTensor]] = {name: [] for name in tensors}
    for name, place in match_tensors(config, shapes, TRANSFORMERS, ignored=is_ignored).items():
        given[place.name].append(tensors[place.name].stored(name, place))
    return given


def check_same_model(own: ModelConfig, other: ModelConfig) -> None:
    """Raises ModelLoadError, naming what differs, if the weights of one could not be computed as those of the other."""
    mine, theirs = _computed(own), _computed(other)
    for field in sorted(mine.keys() | theirs.keys()):
        if mine.get(field) != theirs.get(field):
            raise ModelLoadError(
                f"its config says otherwise about {field} than the model that is served: the weights are another "
                "architecture's"
            )


def _computed(config: ModelConfig) -> dict[str, object]:
    fields = msgspec.to_builtins(config)
    return {name: _alike(value) for name, value in fields.items() if name not in NOT_COMPUTED}


def _alike(value: object) -> object:
    if isinstance(value, float):
        return float(f"{value:.{PLACES_ALIKE}g}")
    if isinstance(value, dict):
        return {key: _alike(inner) for key, inner in value.items()}
    return [_alike(inner) for inner in value] if isinstance(value, list | tuple) else value
