"""Tests of collectives in shared memory: sums, votes and gathers, in threads and in real processes."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from trioserve.model.parallel.collectives import (
    Arrivals,
    NativeCallbacks,
    SharedMemoryCollectives,
    make_shared_memory,
)
from trioserve_kernels.native import Library, NoNativeKernels, load_library
from trioserve_kernels.structs import CollectivesStruct

DEADLINE_SECONDS = 60.0


@pytest.fixture(scope="module")
def library() -> Library:
    try:
        return load_library()
    except NoNativeKernels as error:
        pytest.skip(f"no native kernels: {error}")


@pytest.fixture(params=(2, 3))
def ranks(request: pytest.FixtureRequest, library: Library) -> Iterator[list[SharedMemoryCollectives]]:
    descriptor = make_shared_memory(request.param)
    made = [SharedMemoryCollectives(library, descriptor, rank, request.param) for rank in range(request.param)]
    os.close(descriptor)
    yield made
    for rank in made:
        rank.close()


def together(ranks: list[Any], work: Callable[[Any], Any]) -> list[Any]:
    """Run a function for each rank in its own thread, and return the results."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        return [run.result(DEADLINE_SECONDS) for run in [pool.submit(work, rank) for rank in ranks]]


def drawn(rank: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(rank).standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize("shape", [(1,), (3, 5), (16, 576), (2, 65536), (3, 70001)])
def test_shared_memory_sum_uses_rank_order_and_is_equal_in_all_ranks(
    ranks: list[SharedMemoryCollectives], shape: tuple[int, ...]
) -> None:
    """Sizes are smaller than a SIMD vector and larger than a slot."""
    wanted = drawn(0, *shape)
    for rank in range(1, len(ranks)):
        wanted += drawn(rank, *shape)

    def work(rank: SharedMemoryCollectives) -> np.ndarray:
        values = drawn(rank.rank, *shape)
        assert not rank.sum_(values)
        return values

    for values in together(ranks, work):
        assert values.tobytes() == wanted.tobytes()


def test_shared_memory_sum_writes_only_its_values(ranks: list[SharedMemoryCollectives]) -> None:
    def work(rank: SharedMemoryCollectives) -> np.ndarray:
        memory = np.ones(40, dtype=np.float32)
        rank.sum_(memory[:19])
        return memory

    for memory in together(ranks, work):
        assert memory.tolist() == [len(ranks)] * 19 + [1] * 21


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_tensors_of_half_formats_are_added_in_float32_and_rounded_once(
    ranks: list[SharedMemoryCollectives], dtype: torch.dtype
) -> None:
    parts = [torch.from_numpy(drawn(rank, 37, 5)).to(dtype) for rank in range(len(ranks))]
    wanted = parts[0].float()
    for part in parts[1:]:
        wanted = wanted + part.float()

    def work(rank: SharedMemoryCollectives) -> torch.Tensor:
        values = parts[rank.rank].clone()
        rank.sum_(values)
        return values

    for values in together(ranks, work):
        assert torch.equal(values, wanted.to(dtype))


def test_uint16_arrays_contain_bfloat16(ranks: list[SharedMemoryCollectives]) -> None:
    def work(rank: SharedMemoryCollectives) -> int:
        ones = np.full(3, 0x3F80, dtype=np.uint16)
        rank.sum_(ones)
        return int(ones[2])

    assert together(ranks, work) == [{2: 0x4000, 3: 0x4040}[len(ranks)]] * len(ranks)


def test_abandonment_by_one_rank_reaches_all_ranks(ranks: list[SharedMemoryCollectives]) -> None:
    """A vote is valid for one sum only, and may come with an empty array."""

    def work(rank: SharedMemoryCollectives) -> list[bool]:
        said = [(0, 1), (-1, 4), (len(ranks) - 1, 0), (-1, 0), (-1, 0)]
        return [rank.sum_(np.ones(count, dtype=np.float32), rank.rank == who) for who, count in said]

    assert together(ranks, work) == [[True, False, True, False, False]] * len(ranks)


@pytest.mark.parametrize("make", [np.array, torch.tensor])
@pytest.mark.parametrize("count", [0, 1, 100_000])
def test_gather_returns_the_values_of_all_ranks(ranks: list[SharedMemoryCollectives], make: Any, count: int) -> None:
    def work(rank: SharedMemoryCollectives) -> list[list[int]]:
        found: list[list[int]] = rank.gather(make([rank.rank * 7 - 1] * count)).tolist()
        return found

    wanted = [[rank * 7 - 1] * count for rank in range(len(ranks))]
    assert together(ranks, work) == [wanted] * len(ranks)


def test_arrivals_show_the_missing_ranks(library: Library) -> None:
    descriptor = make_shared_memory(3)
    arrivals = Arrivals(descriptor, 3)
    ranks = [SharedMemoryCollectives(library, descriptor, rank, 3) for rank in range(3)]
    os.close(descriptor)
    assert arrivals.counts() == (0, 0, 0)
    assert arrivals.missing() == ()
    values = np.zeros(3, dtype=np.float32)
    with ThreadPoolExecutor(2) as pool:
        first = [pool.submit(ranks[rank].sum_, values.copy()) for rank in (0, 2)]
        give_up_at = time.monotonic() + DEADLINE_SECONDS
        while arrivals.counts() != (1, 0, 1) and time.monotonic() < give_up_at:
            os.sched_yield()
        missing = arrivals.missing()
        ranks[1].sum_(values)
        assert not any(run.result(DEADLINE_SECONDS) for run in first)
    assert missing == (1,)
    assert arrivals.missing() == ()
    arrivals.close()
    for rank in ranks:
        rank.close()


@pytest.mark.slow
def test_collectives_of_processes_equal_those_of_threads(group: Callable[..., list[Any]]) -> None:
    """The processes start at different times, and make a hundred sums of different sizes with gathers between."""
    shapes = [(16, 576), (1, 1), (5, 30_000), (0, 3)]
    first, second, third = group("sums", 3, shapes, 25)
    assert first == second == third
    expect = 0.0
    for _ in range(25):
        for shape in shapes:
            expect += float(sum(drawn(rank, *shape) for rank in range(3)).sum(dtype=np.float64))
    assert first == pytest.approx([expect, 25 * (0 + 1 + 2)], rel=1e-4)


def test_native_kernels_call_collectives_in_python(ranks: list[SharedMemoryCollectives]) -> None:
    callbacks = [NativeCallbacks(rank) for rank in ranks]

    def work(mine: NativeCallbacks) -> tuple[bool, list[float], list[int]]:
        struct = CollectivesStruct.from_address(mine.native)
        values, own = (ctypes.c_float * 3)(1, 2, struct.rank), (ctypes.c_uint8 * 2)(struct.rank, 9)
        total = (ctypes.c_float * 3)()
        assert struct.room(None, 3) is None
        everything = (ctypes.c_uint8 * (2 * struct.size))()
        addresses = ctypes.addressof(values), ctypes.addressof(total)
        is_abandoned = struct.sum(None, addresses[0], 3, struct.rank == 1, addresses[1])
        assert list(values) == [1, 2, struct.rank]
        assert not struct.sum(None, None, 0, False, None)
        struct.gather(None, ctypes.addressof(own), 2, ctypes.addressof(everything))
        mine.check()
        return bool(is_abandoned), list(total), list(everything)

    size = len(ranks)
    ids = [number for rank in range(size) for number in (rank, 9)]
    assert together(callbacks, work) == [(True, [size, 2 * size, size * (size - 1) / 2], ids)] * size


class Broken:
    """Collectives whose connection is lost."""

    rank, size, native = 0, 2, None

    def sum_(self, values: Any, is_abandoned: bool = False) -> bool:
        raise ConnectionError("gone")

    def gather(self, own: Any) -> Any:
        raise AssertionError("nothing is called behind a failure")

    def close(self) -> None:
        pass


def test_exception_in_a_callback_ends_the_step_and_is_raised_by_check() -> None:
    callbacks = NativeCallbacks(Broken())
    struct = CollectivesStruct.from_address(callbacks.native)
    assert struct.sum(None, None, 0, False, None)
    memory = (ctypes.c_uint8 * 2)()
    struct.gather(None, ctypes.addressof(memory), 1, ctypes.addressof(memory))
    with pytest.raises(ConnectionError):
        callbacks.check()
    callbacks.check()
