"""Tests that adapters in columns of fixed tensors give the products of adapters that multiply their own rows."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from trioserve.contracts.weights import AdapterId
from trioserve.model.torch_step.adapters import NO_ADAPTER, AdapterColumns, TorchAdapter

LINEARS = (
    SimpleNamespace(inputs=6, parts={"q_proj": 4, "k_proj": 2, "v_proj": 2}),
    SimpleNamespace(inputs=4, parts={"o_proj": 6}),
)
MATRICES = {name: (size, linear.inputs) for linear in LINEARS for name, size in linear.parts.items()}
COLUMNS = 12


class Loaded:
    """Adapters by number, and the device columns with the matrices of some adapters."""

    def __init__(self) -> None:
        self.adapters: dict[AdapterId, TorchAdapter] = {}
        device = torch.device("cpu")
        self.columns = AdapterColumns(LINEARS, self.adapters, COLUMNS, dtype=torch.float32, device=device)

    def load(self, number: int, rank: int, without: str = "") -> None:
        generator = torch.Generator().manual_seed(number)
        matrices = {
            name: (torch.randn(rank, inputs, generator=generator), torch.randn(outputs, rank, generator=generator))
            for name, (outputs, inputs) in MATRICES.items()
            if name != without
        }
        self.adapters[AdapterId(number)] = TorchAdapter(rank, matrices)

    def remove(self, number: int) -> None:
        del self.adapters[AdapterId(number)]
        self.columns.forget(AdapterId(number))

    def place(self, *numbers: int) -> bool:
        return self.columns.place([AdapterId(number) for number in numbers])

    def products(self, linear: Any, values: Tensor, numbers: list[int]) -> tuple[Tensor, Tensor]:
        """Return the products computed from the columns, and the expected products of each row with its adapter."""
        shape = len(values), sum(linear.parts.values())
        got, wanted = torch.ones(shape), torch.ones(shape)
        self.columns.rows(torch.tensor(numbers, dtype=torch.int32)).add_(got, values, linear.parts)
        for row, number in enumerate(numbers):
            first = 0
            for name, size in linear.parts.items():
                adapter = self.adapters.get(AdapterId(number))
                if adapter is not None and name in adapter.matrices:
                    a, b = adapter.matrices[name]
                    wanted[row, first : first + size] += b @ (a @ values[row])
                first += size
        return got, wanted


def check(loaded: Loaded, numbers: list[int]) -> None:
    for linear in LINEARS:
        values = torch.randn(len(numbers), linear.inputs, generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(*loaded.products(linear, values, numbers))


@pytest.mark.parametrize("seed", range(20))
def test_columns_give_the_products_of_each_row_while_adapters_come_and_go(seed: int) -> None:
    draw = random.Random(seed)
    loaded, placed = Loaded(), 0
    for number in range(1, 40):
        loaded.load(number, draw.randint(1, 6), draw.choice(["", *MATRICES]))
        if len(loaded.adapters) > 5:
            loaded.remove(draw.choice([*loaded.adapters]))
        wanted = draw.sample([*loaded.adapters], draw.randint(1, len(loaded.adapters)))
        ranks = sum(loaded.adapters[id].rank_max for id in wanted)
        assert loaded.place(*wanted) == (ranks <= COLUMNS)
        if ranks <= COLUMNS:
            placed += 1
            check(loaded, [draw.choice([NO_ADAPTER, *wanted]) for _ in range(9)])
    assert placed > 10


def test_adapters_keep_their_columns_until_other_adapters_need_them(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = Loaded()
    written: list[int] = []
    write = AdapterColumns._write

    def noted(self: AdapterColumns, id: AdapterId, first: int) -> None:
        written.append(id)
        write(self, id, first)

    monkeypatch.setattr(AdapterColumns, "_write", noted)
    layers = loaded.columns._layers.values()
    tensors = [loaded.columns._owners, *(part for layer in layers for part in (layer.a, *layer.b))]
    addresses = [tensor.data_ptr() for tensor in tensors]
    for number, rank in ((1, 5), (2, 4), (3, 3), (4, 4)):
        loaded.load(number, rank)
    for numbers, new in (
        ([1, 2, 3], {1, 2, 3}),
        ([1, 3], set()),
        ([2, 1], set()),
        ([4], {4}),  # in the columns of 3 and 2, which were unused for longer than 1
        ([1], set()),
    ):
        del written[:]
        assert loaded.place(*numbers)
        assert set(written) == new
        check(loaded, [*numbers, NO_ADAPTER])
    assert [tensor.data_ptr() for tensor in tensors] == addresses


def test_free_columns_between_adapters_of_the_step_are_joined() -> None:
    loaded = Loaded()
    for number, rank in ((1, 3), (2, 4), (3, 3), (4, 6)):
        loaded.load(number, rank)
    assert loaded.place(1)
    assert loaded.place(1, 2)
    assert loaded.place(1, 2, 3)
    loaded.remove(1)
    assert loaded.place(2, 4)  # 2 lies in the middle, so 6 adjacent columns are free only after it moves.
    check(loaded, [2, 4, NO_ADAPTER])


def test_overflow_in_one_adapter_does_not_affect_rows_of_other_adapters() -> None:
    loaded = Loaded()
    loaded.load(1, 2)
    loaded.load(2, 2)
    for a, _ in loaded.adapters[AdapterId(1)].matrices.values():
        a.fill_(3e38)
    assert loaded.place(1, 2)
    for linear in LINEARS:
        got, _ = loaded.products(linear, torch.full((3, linear.inputs), 2.0), [1, 2, NO_ADAPTER])
        assert not got[0].isfinite().any()
        assert got[1:].isfinite().all()
        assert torch.equal(got[2], torch.ones_like(got[2]))
