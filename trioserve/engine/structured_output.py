"""Compiles grammars in a thread while their requests wait, fills token masks, and shows metrics of both.

If a client leaves during the compilation, its request ends at once.

Masks are filled in reused memory, either synchronously or in a thread. Only `fill` may run in another thread. All other
methods must run in the thread of the core.
"""

from __future__ import annotations

import ctypes
import logging
import queue
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Protocol

import trio

from trioserve.admission.text_threads import TextThreads
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.guide import Guide, GuidedRows, TokenMasks, mask_words
from trioserve.contracts.sampling import SamplingParams
from trioserve.metrics.registry import Metrics
from trioserve.text.grammar_compiler import GrammarCompiler
from trioserve.text.guide_factory import GuideFactory, PreparedGuides, is_guided
from trioserve.trio_tools.interrupts import uninterrupted

__all__ = ["GuidePreparation", "MaskBuffers", "MaskRows", "MasksAtOnce", "MaskThread"]


class MaskTotals(Protocol):
    """Totals of a MaskMaker: seconds spent on filling masks, and number of rows filled."""

    seconds_total: float
    rows_total: int


def show_grammars(metrics: Metrics, compiler: GrammarCompiler) -> None:
    seen = [0, 0]

    def show() -> None:
        compiled, hits = compiler.compiles_total, compiler.hits_total
        metrics.forms_compiled_total.inc(compiled - seen[0])
        metrics.form_cache_hits_total.inc(hits - seen[1])
        seen[:] = compiled, hits

    metrics.on_scrape(show)


def show_masks(metrics: Metrics, totals: MaskTotals) -> Callable[[], None]:
    """Update the metrics of token masks at every scrape.

    Args:
        metrics: registry to update.
        totals: source of the counts.

    Returns:
        A function that stops the updates.
    """
    seen = [0.0, 0.0]

    def show() -> None:
        rows, seconds = totals.rows_total, totals.seconds_total
        metrics.mask_rows_total.inc(rows - seen[0])
        metrics.mask_seconds_total.inc(seconds - seen[1])
        seen[:] = rows, seconds

    return metrics.on_scrape(show)


class GuidePreparation:
    """Compiles the grammars of requests.

    Args:
        factory: compiles grammars. None: this engine does not support structured output.
        threads: threads that compile grammars, taking tenants in turn.
        metrics: receive the duration of each compilation.
    """

    def __init__(self, factory: GuideFactory | None, threads: TextThreads, metrics: Metrics) -> None:
        self._factory = factory
        self._threads = threads
        self._metrics = metrics
        if factory is not None:
            show_grammars(metrics, factory.compiler)

    async def prepare(
        self, sampling: SamplingParams, cache_salt: str | None, *, tenant: str | None
    ) -> PreparedGuides | None:
        """Compile the grammars of a request. Tenants take turns.

        Args:
            sampling: sampling options of the request.
            cache_salt: separates caches of different users.

        Returns:
            The guides. None if the request has no grammar or schema.

        Raises:
            InvalidRequest: the grammar or schema cannot be compiled.
            Overloaded: too many grammars of this tenant wait.
        """
        if not is_guided(sampling):
            return None
        factory = self._factory
        if factory is None:
            raise InvalidRequest("this engine does not support structured output", param="structured")
        prepared = factory.find(sampling, cache_salt)
        if prepared is not None:
            return prepared
        began_at = trio.current_time()
        try:
            return await self._threads.run_compile(partial(factory.prepare, sampling, cache_salt), tenant=tenant)
        finally:
            self._metrics.form_preparation_seconds.observe(trio.current_time() - began_at)


logger = logging.getLogger(__name__)

WORD_BYTES = 4
SPARE_MAX = 4  # Two steps may be in flight, and two abandoned steps may still have masks that are being filled.


class MaskRows:
    """The token masks of one step. Implements `TokenMasks`.

    Args:
        words_per_row: 32-bit words per row.
        row_capacity: number of rows for which memory is allocated.

    Attributes:
        row_count: rows that the current step uses.
        is_over: True when no code needs the rows any more.
    """

    def __init__(self, words_per_row: int, row_capacity: int) -> None:
        self.words_per_row = words_per_row
        self.row_capacity = row_capacity
        self.row_count = 0
        self.is_over = False
        self._words = array("I", bytes(WORD_BYTES * words_per_row * row_capacity))
        self._filled = array("i", (1,))
        self._is_filled = threading.Event()
        self._guided: Sequence[GuidedRows] = ()
        self.address = self._words.buffer_info()[0]
        self.filled_address = self._filled.buffer_info()[0]

    @property
    def is_filled(self) -> bool:
        return self._filled[0] == 1

    def begin(self, guided: Sequence[GuidedRows], row_count: int) -> None:
        """Assign this memory to another step.

        Args:
            guided: the guides that fill the rows.
            row_count: rows that the step needs, at most `row_capacity`.
        """
        assert row_count <= self.row_capacity
        self._filled[0] = 0
        self._is_filled.clear()
        self.row_count = row_count
        self.is_over = False
        self._guided = guided

    def wait(self) -> None:
        self._is_filled.wait()

    def fill(self) -> None:
        """Fill the rows. This may run in any thread. Once `is_over` is set, the remaining rows are not filled."""
        for rows in self._guided:
            if self.is_over:
                break
            self._fill_one(rows.guide, rows.row, rows.draft)
        self._guided = ()
        self._filled[0] = 1
        self._is_filled.set()

    def _fill_one(self, guide: Guide, row: int, draft: Sequence[int]) -> None:
        row_bytes = WORD_BYTES * self.words_per_row
        address = self.address + row * row_bytes
        try:
            guide.fill_masks(address, self.words_per_row, draft)
        # This includes a panic of the library. Without a filled mask, the sampler would wait forever.
        except BaseException:
            # Only this request fails, because its mask allows no token.
            logger.exception("a mask could not be filled")
            ctypes.memset(address, 0, row_bytes * (1 + len(draft)))


class MaskBuffers:
    """Lends mask memory to steps. If memory is returned while a thread still fills it, it is reused only after the
    fill.

    Args:
        vocab_size: number of token ids.
    """

    def __init__(self, vocab_size: int) -> None:
        self._words_per_row = mask_words(vocab_size)
        self._spare: list[MaskRows] = []
        self._leaving: list[MaskRows] = []  # Memory that was returned, and is still being filled.

    def take(self, guided: Sequence[GuidedRows], row_count: int) -> MaskRows:
        self._sweep()
        rows = next((rows for rows in self._spare if rows.row_capacity >= row_count), None)
        if rows is None:
            rows = MaskRows(self._words_per_row, 1 << (row_count - 1).bit_length())
        else:
            self._spare.remove(rows)
        rows.begin(guided, row_count)
        return rows

    def release_rows(self, rows: MaskRows) -> None:
        rows.is_over = True
        self._leaving.append(rows)
        self._sweep()

    def _sweep(self) -> None:
        if self._leaving:
            filled = [rows for rows in self._leaving if rows.is_filled]
            self._leaving = [rows for rows in self._leaving if not rows.is_filled]
            # Keep the largest buffers, because busy periods usually have more steps of their size.
            self._spare = sorted((*self._spare, *filled), key=lambda rows: rows.row_capacity)[-SPARE_MAX:]


class MasksAtOnce:
    """Fills masks synchronously, without a thread, for tests and simulations. Implements `MaskMaker`.

    Args:
        vocab_size: number of token ids.
    """

    def __init__(self, vocab_size: int) -> None:
        self._buffers = MaskBuffers(vocab_size)

    def begin(self, guided: Sequence[GuidedRows], row_count: int) -> TokenMasks:
        rows = self._buffers.take(guided, row_count)
        rows.fill()
        return rows

    def end(self, masks: TokenMasks) -> None:
        assert isinstance(masks, MaskRows)
        self._buffers.release_rows(masks)


@uninterrupted
class MaskThread:
    """A `MaskMaker` that uses its own thread: `with MaskThread(vocab_size) as masks: ...`.

    When the context is left, the thread finishes its current guide and ends. Call every method in the thread of the
    core. The queue is short, because it contains only the masks of the steps in flight and of abandoned steps. For an
    abandoned step, the thread finishes at most the current guide.

    Args:
        vocab_size: number of token ids.

    Attributes:
        seconds_total: seconds spent on filling so far.
        rows_total: number of rows filled so far.
    """

    def __init__(self, vocab_size: int) -> None:
        self._buffers = MaskBuffers(vocab_size)
        self._jobs: queue.SimpleQueue[MaskRows | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="trioserve-masks", daemon=True)
        self.seconds_total = 0.0
        self.rows_total = 0

    def __enter__(self) -> MaskThread:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._jobs.put(None)
        self._thread.join()

    def begin(self, guided: Sequence[GuidedRows], row_count: int) -> TokenMasks:
        rows = self._buffers.take(guided, row_count)
        self._jobs.put(rows)
        return rows

    def end(self, masks: TokenMasks) -> None:
        assert isinstance(masks, MaskRows)
        self._buffers.release_rows(masks)

    def _work(self) -> None:
        while (rows := self._jobs.get()) is not None:
            began_at = time.perf_counter()
            row_count = rows.row_count
            rows.fill()
            del rows  # Free the guides of these rows, because they may use much memory.
            self.seconds_total += time.perf_counter() - began_at
            self.rows_total += row_count
