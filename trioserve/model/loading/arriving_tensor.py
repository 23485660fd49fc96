"""Tensor that another process sends later. Until then only shape and dtype are known."""

from __future__ import annotations

import functools

from trioserve.model.loading.names import Shape, TensorPlace
from trioserve.model.loading.stored_tensor import StoredTensor
from trioserve.model.number_formats import Dtype, Values, convert, empty_values

__all__ = ["ArrivingTensor"]


class ArrivingTensor:
    """Tensor whose values arrive later.

    Attributes:
        values: set while its slots are filled, and None before and after.
    """

    def __init__(self, shape: Shape, dtype: Dtype) -> None:
        self.shape = shape
        self.dtype: Dtype = dtype
        self.values: Values | None = None

    def stored(self, name: str, place: TensorPlace) -> StoredTensor:
        """Return the part of this tensor that a place describes.

        Args:
            name: our name of the part.
            place: rows of this tensor.
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
