"""Tests of RankPages: the KV caches of several ranks are read and written like one KV cache."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import pytest

from trioserve.contracts.ids import BlockIndex
from trioserve.contracts.kv_transfer import KVLayout
from trioserve.model.kv_storage import KVMemory
from trioserve.ranks.ranked_runner import HeadRange, RankPages, StagePages, head_ranges

LAYOUT = KVLayout(model="m", layer_count=2, block_size=4, kv_head_count=1, head_dim=8, dtype="float32")
BLOCKS = 3


@pytest.fixture
def descriptors() -> Iterator[list[int]]:
    found = [os.memfd_create(f"test-{rank}") for rank in range(3)]
    yield found
    for descriptor in found:
        os.close(descriptor)


def written(heads: Sequence[HeadRange], descriptors: Sequence[int]) -> list[np.ndarray]:
    """Fill the KV caches of all ranks with random values.

    Returns:
        For each layer, float32 [BLOCKS, block_size, 2, heads of the model, head_dim].
    """
    count = max(own.end for own in heads)
    shape = (BLOCKS, LAYOUT.block_size, 2, count, LAYOUT.head_dim)
    layers = [np.random.default_rng(layer).standard_normal(shape, np.float32) for layer in range(LAYOUT.layer_count)]
    for own, descriptor in zip(heads, descriptors, strict=False):
        memory = KVMemory(descriptor)
        for layer in layers:
            part = np.ascontiguousarray(layer[:, :, :, own.first : own.end])
            memory.take(part.nbytes)[:] = part.reshape(-1).view(np.uint8)
    return layers


SPLITS = [
    [HeadRange(0, 3)],
    [HeadRange(0, 2), HeadRange(2, 1)],
    [HeadRange(0, 1), HeadRange(1, 1), HeadRange(2, 1)],
    [HeadRange(0, 1), HeadRange(0, 1), HeadRange(1, 2)],  # The first two ranks have copies of a head.
    [HeadRange(0, 3), HeadRange(0, 3)],  # Every rank has all heads.
]


@pytest.mark.parametrize("heads", SPLITS)
def test_block_read_from_ranks_has_the_layout_of_one_process(heads: list[HeadRange], descriptors: list[int]) -> None:
    layers = written(heads, descriptors)
    pages = RankPages(LAYOUT, BLOCKS, heads, descriptors[: len(heads)])
    assert pages.layout.kv_head_count == 3
    for layer, values in enumerate(layers):
        for block in range(BLOCKS):
            assert bytes(pages.read(layer, BlockIndex(block))) == values[block].tobytes()


@pytest.mark.parametrize("heads", SPLITS)
@pytest.mark.parametrize("part", ["all", "middle"])
def test_block_write_reaches_every_rank_that_has_the_head(
    heads: list[HeadRange], part: str, descriptors: list[int]
) -> None:
    layers = written(heads, descriptors)
    pages = RankPages(LAYOUT, BLOCKS, heads, descriptors[: len(heads)])
    content = np.random.default_rng(9).integers(0, 256, layers[0][0].nbytes, np.uint8)
    start, end = (0, len(content)) if part == "all" else (100, 333)
    pages.write(1, BlockIndex(2), start, memoryview(content[start:end]))
    expected = bytearray(layers[1][2].tobytes())
    expected[start:end] = content[start:end].tobytes()
    assert bytes(pages.read(1, BlockIndex(2))) == bytes(expected)
    assert bytes(pages.read(0, BlockIndex(2))) == layers[0][2].tobytes()
    assert bytes(pages.read(1, BlockIndex(1))) == layers[1][1].tobytes()
    by_head = np.frombuffer(bytes(expected), np.float32).reshape(LAYOUT.block_size, 2, 3, LAYOUT.head_dim)
    for own, descriptor in zip(heads, descriptors, strict=False):
        memory = KVMemory(descriptor)
        byte_count = BLOCKS * by_head[:, :, own.first : own.end].nbytes
        memory.take(byte_count)
        found = memory.take(byte_count).view(np.float32).reshape(BLOCKS, LAYOUT.block_size, 2, own.count, -1)
        assert np.array_equal(found[2], by_head[:, :, own.first : own.end], equal_nan=True)


def test_layers_of_stages_follow_one_another(descriptors: list[int]) -> None:
    halves = [HeadRange(0, 1), HeadRange(1, 1)]
    layers = written(halves, descriptors)
    one = RankPages(LAYOUT, BLOCKS, halves, descriptors[:2])
    values = np.random.default_rng(4).standard_normal((BLOCKS, LAYOUT.block_size, 2, 2, LAYOUT.head_dim), np.float32)
    KVMemory(descriptors[2]).take(values.nbytes)[:] = values.reshape(-1).view(np.uint8)
    other = RankPages(msgspec.structs.replace(LAYOUT, layer_count=1), BLOCKS, [HeadRange(0, 2)], descriptors[2:])
    pages = StagePages([one, other])
    assert pages.layout.layer_count == 3
    for layer, expected in enumerate([*layers, values]):
        assert bytes(pages.read(layer, BlockIndex(1))) == expected[1].tobytes()
    content = values[0].tobytes()
    pages.write(2, BlockIndex(2), 0, memoryview(content))
    assert bytes(pages.read(2, BlockIndex(2))) == content
    assert bytes(pages.read(1, BlockIndex(2))) == layers[1][2].tobytes()


def test_kv_head_of_several_ranks_is_read_from_the_first_rank() -> None:
    found, count = head_ranges([HeadRange(0, 2), HeadRange(1, 2), HeadRange(2, 1), HeadRange(3, 1)])
    assert found == (HeadRange(0, 2), HeadRange(2, 1), HeadRange(3, 0), HeadRange(3, 1))
    assert count == 4
