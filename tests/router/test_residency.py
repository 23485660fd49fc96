"""Tests the index of blocks that endpoints report."""

from __future__ import annotations

from trioserve.contracts.endpoint import EndpointId
from trioserve.router.residency import ResidencyIndex

A, B = EndpointId("a"), EndpointId("b")


def names(text: str) -> list[bytes]:
    return [letter.encode() for letter in text]


def matched(index: ResidencyIndex, endpoint: EndpointId, text: str) -> int | None:
    """Return the number of matched blocks. Each block has one token."""
    return index.matched_tokens(endpoint, {1: names(text)})


def test_residency_match_ends_at_the_first_block_that_the_endpoint_lacks():
    index = ResidencyIndex()
    index.replace(A, 1, names("abc"))
    index.replace(B, 1, names("bc"))
    assert matched(index, A, "abxc") == 2
    assert matched(index, B, "abc") == 0
    assert matched(index, A, "") == 0


def test_empty_and_unknown_residency_are_different():
    index = ResidencyIndex()
    assert matched(index, A, "a") is None
    index.add(A, names("a"))
    assert matched(index, A, "a") is None
    index.replace(A, 1, [])
    assert matched(index, A, "a") == 0
    assert index.matched_tokens(A, {2: names("a")}) is None, "there are no hashes for its block size"
    index.forget(A)
    assert matched(index, A, "a") is None


def test_changes_update_a_snapshot_and_a_new_snapshot_replaces_all_blocks():
    index = ResidencyIndex()
    index.replace(A, 1, names("ab"))
    index.add(A, names("c"))
    index.remove(A, names("bx"))
    assert [matched(index, A, letter) for letter in "abc"] == [1, 0, 1]
    index.replace(A, 1, names("b"))
    assert [matched(index, A, letter) for letter in "abc"] == [0, 1, 0]
    assert index.block_count(A) == 1


def test_index_bounds_the_blocks_of_an_endpoint_and_never_adds_unreported_blocks():
    index = ResidencyIndex(blocks_max=3)
    index.replace(A, 1, names("abcd"))
    index.replace(B, 1, names("xy"))
    assert index.block_count(A) == 3
    index.add(A, names("e"))
    assert matched(index, A, "e") == 0
    index.remove(A, names("ad"))  # The second block is not in the index.
    index.add(A, names("fg"))
    assert index.block_count(A) == 3
    assert [matched(index, A, letter) for letter in "abcdefg"] == [0, 1, 1, 0, 0, 1, 0]
    assert matched(index, B, "xy") == 2


def test_match_with_an_attention_window_needs_only_the_blocks_within_the_window():
    index = ResidencyIndex()
    index.replace(A, 1, names("defg"), 4)  # A token attends to itself and to three earlier tokens.
    index.replace(B, 1, names("defg"))
    assert matched(index, A, "abcdefgx") == 7
    assert matched(index, A, "abcdefx") == 6
    assert matched(index, A, "abcdex") == 0, "x attends to c, which is missing"
    assert matched(index, B, "abcdefgx") == 0
    assert index.likely_holders({1: names("abcdefgx")}, 2) == [A, B]
    index.remove(A, names("e"))
    assert matched(index, A, "abcdefgx") == 0
    index.forget(A)
    assert index.likely_holders({1: names("abcdefgx")}, 2) == [], "without a window, the first block must match"
