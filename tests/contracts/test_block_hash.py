"""Names of blocks: equal for equal prefixes, on every machine and at every start."""

from __future__ import annotations

import pytest

from trioserve.contracts.block_hash import hash_block, root_hash


def chain(salt: str | None, *blocks: tuple[int, ...]) -> bytes:
    name = root_hash(salt)
    for block in blocks:
        name = hash_block(name, block)
    return name


def test_the_name_is_the_same_on_every_machine():
    # Computed once from the definition: blake2b with 16 bytes over the parent and the tokens as little-endian uint32.
    # Another value here means that engines and routers of different versions do not understand each other.
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
def test_different_prefixes_have_different_names(first, second):
    assert chain(*first) != chain(*second)


def test_lists_and_tuples_name_the_same_block():
    assert hash_block(root_hash(None), [1, 2]) == hash_block(root_hash(None), (1, 2))


def test_any_string_is_a_salt():
    assert len(root_hash("\ud800")) == 16
    assert len(chain("é" * 1000, (0, 2**32 - 1))) == 16
