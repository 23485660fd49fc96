"""Tests that block hashes are equal for equal prefixes, on every machine and after every start."""

from __future__ import annotations

import pytest

from trioserve.contracts.ids import hash_block, root_hash


def chain(salt: str | None, *blocks: tuple[int, ...]) -> bytes:
    parent = root_hash(salt)
    for block in blocks:
        parent = hash_block(parent, block)
    return parent


def test_block_hashes_are_equal_on_every_machine():
    # The expected hashes were computed from the definition: blake2b with 16 bytes over the parent and the tokens as
    # little-endian uint32. If these values change, engines and routers of different versions no longer find each
    # other's blocks.
    assert chain(None).hex() == "cae66941d9efbd404e4d88758ea67670"
    assert chain("tenant", (1, 2), (3, 4)).hex() == "b4993295c59f2e2f940c58050593c4a5"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((None,), ("",)),
        ((None,), ("None",)),
        (("a",), ("b",)),
        ((None, (1, 2)), (None, (2, 1))),
        ((None, (1, 2)), ("a", (1, 2))),
        ((None, (1, 2), (3, 4)), (None, (3, 4), (1, 2))),
        ((None, (1, 2), (3, 4)), (None, (9, 9), (3, 4))),
        ((None, (1, 2, 3)), (None, (1, 2))),
        ((None, (1,)), (None, (256,))),
        ((None, (0,)), (None, (0, 0))),
    ],
)
def test_different_prefixes_have_different_block_hashes(first, second):
    assert chain(*first) != chain(*second)


def test_lists_and_tuples_of_tokens_have_equal_block_hashes():
    assert hash_block(root_hash(None), [1, 2]) == hash_block(root_hash(None), (1, 2))


def test_salt_of_a_block_hash_may_be_any_string():
    assert len(root_hash("\ud800")) == 16
    assert len(chain("é" * 1000, (0, 2**32 - 1))) == 16
