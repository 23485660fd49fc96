"""Matching of tensors that come without a config, under the names of transformers, with the tensors of a model."""

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
"""Fields of a ModelConfig that do not affect the computation after the weights are read."""

PLACES_ALIKE = 6  # significant digits to compare, because a GGUF file stores numbers in 32 bits


class DescribedTensor(Protocol):
    """Description of a tensor, which returns readable parts of it."""

    @property
    def shape(self) -> Shape: ...

    def stored(self, name: str, place: TensorPlace) -> StoredTensor: ...


def described_tensors(config: ModelConfig, tensors: Mapping[str, DescribedTensor]) -> dict[str, list[StoredTensor]]:
    """Return the tensors of the model that each given tensor contains, by the given tensor's name.

    Most given tensors contain one tensor of the model. If the model ties embedding and head, a given head is ignored.

    Args:
        config: model.
        tensors: given tensors, by transformers' names.

    Raises:
        ModelLoadError: names or shapes do not belong to the model.
    """
    if config.row_factors:
        raise ModelLoadError("this model's files contain factors for its tensors: replace the weights from files")

    def is_ignored(name: str) -> bool:
        return name.endswith("rotary_emb.inv_freq") or (name == TIED_HEAD and config.tie_word_embeddings)

    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    given: dict[str, list[StoredTensor]] = {name: [] for name in tensors}
    for name, place in match_tensors(config, shapes, TRANSFORMERS, ignored=is_ignored).items():
        given[place.name].append(tensors[place.name].stored(name, place))
    return given


def check_same_model(own: ModelConfig, other: ModelConfig) -> None:
    """Check that weights of one model can be computed as those of another.

    Args:
        own: config of the model that is served.
        other: config of the new weights.

    Raises:
        ModelLoadError: the architectures differ. The message names the field.
    """
    mine, theirs = _computed(own), _computed(other)
    for field in sorted(mine.keys() | theirs.keys()):
        if mine.get(field) != theirs.get(field):
            raise ModelLoadError(
                f"its config differs in {field} from the model that is served: the weights have another architecture"
            )


def _computed(config: ModelConfig) -> dict[str, object]:
    fields = msgspec.to_builtins(config)
    return {name: _rounded_to_places(value) for name, value in fields.items() if name not in NOT_COMPUTED}


def _rounded_to_places(value: object) -> object:
    if isinstance(value, float):
        return float(f"{value:.{PLACES_ALIKE}g}")
    if isinstance(value, dict):
        return {key: _rounded_to_places(inner) for key, inner in value.items()}
    return [_rounded_to_places(inner) for inner in value] if isinstance(value, list | tuple) else value
