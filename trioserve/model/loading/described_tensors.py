"""Matches tensors that another process sends with the tensors of a model, and stores their values.

The tensors have the names of transformers, and arrive without a config. Until the values of a tensor arrive, only its
shape and dtype are known.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Protocol

import msgspec

from trioserve.contracts.errors import ModelLoadError
from trioserve.model.loading.names import TRANSFORMERS, Shape, TensorPlace, match_tensors, outside_name
from trioserve.model.loading.stored_tensor import StoredTensor
from trioserve.model.model_config import ModelConfig
from trioserve.model.number_formats import Dtype, Values, convert, empty_values

__all__ = ["ArrivingTensor", "DescribedTensor", "check_same_model", "described_tensors"]


class ArrivingTensor:
    """Tensor whose values arrive later.

    Attributes:
        values: values of the tensor while loading slots are filled. None before and after.
    """

    def __init__(self, shape: Shape, dtype: Dtype) -> None:
        self.shape = shape
        self.dtype: Dtype = dtype
        self.values: Values | None = None

    def stored(self, name: str, place: TensorPlace) -> StoredTensor:
        """Return some rows of this tensor as a tensor of the model.

        Args:
            name: name of the result, see loading/names.py.
            place: describes the rows of this tensor.
        """
        read = functools.partial(self._read, place)
        return StoredTensor(name, place.shape, self.dtype, functools.partial(place.read, read), bytes)

    def _read(self, place: TensorPlace, wanted: Dtype) -> Values:
        assert self.values is not None, "read before the values arrived"
        shape = place.rows_shape
        rows = self.values if shape == self.shape else self.values[place.first_row :][: shape[0]]
        result = empty_values(shape, wanted)
        convert(rows.reshape(shape), result)
        return result


NOT_COMPUTED = ("context_tokens_max", "bos_token_id", "eos_token_ids", "dtype_name", "row_factors")
"""Fields of a ModelConfig that do not affect the computation after the weights are read."""

PLACES_ALIKE = 6  # Number of significant digits that are compared. GGUF files store numbers in 32 bits.


class DescribedTensor(Protocol):
    """Description of a tensor. Its method returns rows of the tensor that can be read later."""

    @property
    def shape(self) -> Shape: ...

    def stored(self, name: str, place: TensorPlace) -> StoredTensor: ...


def described_tensors(config: ModelConfig, tensors: Mapping[str, DescribedTensor]) -> dict[str, list[StoredTensor]]:
    """Return, for each given tensor, the tensors of the model that it contains.

    Most given tensors contain only one tensor of the model. If the embedding is also the model's head, a given head is
    ignored. The keys of the result are the names of the given tensors.

    Args:
        config: model.
        tensors: given tensors, by transformers' names.

    Raises:
        ModelLoadError: names or shapes do not belong to the model.
    """
    if config.row_factors:
        raise ModelLoadError("this model's files contain factors for its tensors: replace the weights from files")

    tied = outside_name("lm_head.weight", config.family, TRANSFORMERS)

    def is_ignored(name: str) -> bool:
        return name.endswith("rotary_emb.inv_freq") or (name == tied and config.tie_word_embeddings)

    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    given: dict[str, list[StoredTensor]] = {name: [] for name in tensors}
    for name, place in match_tensors(config, shapes, TRANSFORMERS, ignored=is_ignored).items():
        given[place.name].append(tensors[place.name].stored(name, place))
    return given


def check_same_model(own: ModelConfig, other: ModelConfig) -> None:
    """Check that the served model's code can compute the weights of another model.

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
