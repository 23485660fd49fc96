"""Tests of the memory for token masks, and of the thread that fills it."""

from __future__ import annotations

import ctypes
import threading

from trioserve.contracts.guide import GuidedRows
from trioserve.engine.structured_output import SPARE_MAX, MaskBuffers, MaskThread
from trioserve.testing.automaton_guide import AutomatonGuide

VOCAB = 70
GUIDE = AutomatonGuide((((1, 0), (69, 0)),))


def bits(masks, row):
    words = (ctypes.c_uint32 * masks.words_per_row).from_address(masks.address + 4 * masks.words_per_row * row)
    return {token for token in range(32 * masks.words_per_row) if words[token // 32] >> token % 32 & 1}


class Held(AutomatonGuide):
    """A guide that does not fill its mask until the test allows it."""

    def __init__(self):
        super().__init__(GUIDE.automaton)
        self.begun, self.let = threading.Event(), threading.Event()

    def fill_masks(self, address, words_per_row, draft):
        self.begun.set()
        assert self.let.wait(10)
        super().fill_masks(address, words_per_row, draft)


class Broken(AutomatonGuide):
    def fill_masks(self, address, words_per_row, draft):
        ctypes.memset(address, 0xFF, 4 * words_per_row)
        raise ValueError("inside")


def test_masks_of_consecutive_steps_are_filled_in_order():
    with MaskThread(VOCAB) as maker:
        for _ in range(5):
            masks = maker.begin([GuidedRows(GUIDE, 0, (1, 69)), GuidedRows(GUIDE, 3)], 4)
            masks.wait()
            assert ctypes.c_int.from_address(masks.filled_address).value == 1
            assert [bits(masks, row) for row in range(4)] == [{1, 69}] * 4
            maker.end(masks)
    assert maker.rows_total == 20
    assert maker.seconds_total > 0


def test_failing_guide_leaves_an_empty_mask_and_other_masks_are_filled(caplog):
    with MaskThread(VOCAB) as maker:
        masks = maker.begin([GuidedRows(Broken(GUIDE.automaton), 0), GuidedRows(GUIDE, 1)], 2)
        masks.wait()
        assert [bits(masks, row) for row in range(2)] == [set(), {1, 69}]
    assert "a mask could not be filled" in caplog.text


def test_library_panic_does_not_end_the_mask_thread():
    class PanicException(BaseException):
        pass

    class Panicking:
        def fill_masks(self, *_):
            raise PanicException("called `Option::unwrap()` on a `None` value")

    with MaskThread(VOCAB) as maker:
        for _ in range(2):
            masks = maker.begin([GuidedRows(Panicking(), 0), GuidedRows(GUIDE, 1)], 2)
            masks.wait()
            assert [bits(masks, row) for row in range(2)] == [set(), {1, 69}]


def test_abandoned_masks_keep_their_memory_until_filled():
    held = Held()
    with MaskThread(VOCAB) as maker:
        first = maker.begin([GuidedRows(held, 0), GuidedRows(GUIDE, 1)], 2)
        assert held.begun.wait(10)
        maker.end(first)
        second = maker.begin([GuidedRows(GUIDE, 0)], 1)
        assert second.address != first.address
        held.let.set()
        second.wait()
        first.wait()
        assert bits(first, 0) == {1, 69}
        assert bits(first, 1) == set(), "nobody reads the rest"
        maker.end(second)
        third = maker.begin([GuidedRows(GUIDE, 0)], 2)
        assert third.address in (first.address, second.address)
        third.wait()
    assert "trioserve-masks" not in [thread.name for thread in threading.enumerate()]


def test_mask_memory_is_reused_and_bounded():
    buffers = MaskBuffers(VOCAB)
    taken = [buffers.take([GuidedRows(GUIDE, 0)], count) for count in (1, 2, 3, 8, 20, 64)]
    for rows in taken:
        rows.fill()
    for rows in taken:
        buffers.release_rows(rows)
    assert len(buffers._spare) == SPARE_MAX
    assert buffers.take([], 33) is taken[-1]
