"""A forward pass over several rows in which the bits of a row do not depend on the other rows.

Matrix products, convolutions and norms choose the order of their sums by the size of their input. exp and sin compute
the last numbers of a tensor with different code than the rest. All these functions are called once for each row.
Elementwise sums and products, and copies, round equally at every position of a tensor. They are called once for all
rows, so the pass is almost as fast as an ordinary pass over all rows.

The module lists the functions of both groups. If the network calls a function in neither list, UnknownFunction ends the
pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["RowByRow", "UnknownFunction"]

# In bytes. torch aligns its allocations to 64 bytes, and a product may use different code at an unaligned address.
ALIGNMENT = 64

FIRST_HOLDS_ROWS = """
__pow__ conv1d conv2d cos gelu group_norm layer_norm linear mean pow rms_norm rsqrt sigmoid silu sin softmax std tanh
var
"""
TWO_HOLD_ROWS = "__matmul__ bmm matmul"
THREE_HOLD_ROWS = "baddbmm scaled_dot_product_attention"
BY_ROW = {
    name: count
    for count, names in enumerate((FIRST_HOLDS_ROWS, TWO_HOLD_ROWS, THREE_HOLD_ROWS), start=1)
    for name in names.split()
}
HOLD_ROWS = frozenset(("attn_mask", "input", "key", "query", "value"))  # keyword arguments whose tensors have rows

EXACT = """
__add__ __eq__ __ge__ __gt__ __iadd__ __imul__ __isub__ __itruediv__ __le__ __lt__ __mul__ __ne__ __neg__ __radd__
__rmul__ __rsub__ __rtruediv__ __sub__ __truediv__ abs add add_ clamp div div_ mul mul_ neg rsub sqrt sub sub_ where
bfloat16 bool cpu double float half int long to type type_as
"""
MOVES = """
__getitem__ __setitem__ cat chunk clone concat contiguous detach dropout einsum embedding expand expand_as flatten
interpolate narrow pad permute pixel_shuffle repeat repeat_interleave reshape select split split_with_sizes squeeze
stack swapaxes t transpose unbind unflatten unsqueeze view view_as
"""
LOOKS = """
__get__ __len__ __set__ dim element_size is_complex is_contiguous is_floating_point ndimension numel size
storage_offset stride
"""
# These functions create only tensors without rows, such as positions, frequencies and masks. Every pass creates equal
# tensors.
MAKES = "__rpow__ arange as_tensor empty exp full new_ones new_zeros ones outer tensor zeros zeros_like ones_like"
AS_IT_IS = frozenset(" ".join((EXACT, MOVES, LOOKS, MAKES)).split())


class UnknownFunction(Exception):
    """The network called a function that is in neither list, so its result may depend on the other rows."""


class RowByRow(TorchFunctionMode):
    """Context in which the bits of a row do not depend on other rows: `with RowByRow(rows): network(...)`.

    Args:
        rows: number of rows. The first dimension of every tensor is a multiple of this number, and the entries of one
            row are adjacent.
        apart: modules whose output is equal for all rows, and whose input tensors have no rows.
    """

    def __init__(self, rows: int, apart: Iterable[torch.nn.Module] = ()) -> None:
        super().__init__()
        self._rows = rows
        self._apart = tuple(apart)
        self._depth = 0  # number of nested calls of modules in `apart`
        self._handles: list[Any] = []

    def __enter__(self) -> Any:
        for module in self._apart:
            self._handles.append(module.register_forward_pre_hook(self._enter_apart))
            self._handles.append(module.register_forward_hook(self._leave_apart, always_call=True))
        return super().__enter__()  # type: ignore[no-untyped-call]  # torch has no types here

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]  # nor here

    def _enter_apart(self, *_: object) -> None:
        self._depth += 1

    def _leave_apart(self, *_: object) -> None:
        self._depth -= 1

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if self._depth or name in AS_IT_IS:
            self._check(name, args, kwargs)
            return function(*args, **kwargs)
        count = BY_ROW.get(name)
        if count is None:
            raise UnknownFunction(name)
        return self._by_row(function, count, args, kwargs)

    def _check(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise UnknownFunction for arguments with which a function of AS_IT_IS does more than copy."""
        if self._depth == 0 and (
            (name == "einsum" and len(args) > 2)
            or (name == "interpolate" and kwargs.get("mode", "nearest") not in ("nearest", "nearest-exact"))
        ):
            raise UnknownFunction(f"{name} that sums")

    def _by_row(self, function: Callable[..., Any], count: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        parts = [self._parts(argument) for argument in args[:count]]
        named = {
            key: self._parts(value)
            for key, value in kwargs.items()
            if key in HOLD_ROWS and isinstance(value, torch.Tensor)
        }
        if not parts and not named:
            raise UnknownFunction("a call without row tensors")
        rest = args[count:]
        if not named:
            return torch.cat([function(*mine, *rest, **kwargs) for mine in zip(*parts, strict=True)])
        results = []
        for row in range(self._rows):
            mine = {key: named[key][row] if key in named else value for key, value in kwargs.items()}
            results.append(function(*(part[row] for part in parts), *rest, **mine))
        return torch.cat(results)

    def _parts(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        if not isinstance(tensor, torch.Tensor) or tensor.dim() == 0 or tensor.shape[0] % self._rows:
            raise UnknownFunction(f"a call whose tensor does not have {self._rows} rows")
        parts = tensor.chunk(self._rows)
        apart_bytes = tensor.stride(0) * (tensor.shape[0] // self._rows) * tensor.element_size()
        if tensor.data_ptr() % ALIGNMENT == 0 and apart_bytes % ALIGNMENT == 0:
            return parts
        return [part if part.data_ptr() % ALIGNMENT == 0 else part.clone() for part in parts]
