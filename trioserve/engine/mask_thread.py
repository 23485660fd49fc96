"""The thread that fills token masks while the forward pass runs.

It runs beside the compute thread and fills the masks of one step after another. A library does most of the work without
the GIL, so the event loop stays responsive. Only the sampler waits for the masks.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from types import TracebackType

from trioserve.contracts.guide import GuidedRows
from trioserve.contracts.token_masks import TokenMasks
from trioserve.engine.mask_rows import MaskBuffers, MaskRows
from trioserve.trio_tools.interrupts import uninterrupted

__all__ = ["MaskThread"]


@uninterrupted
class MaskThread:
    """A `MaskMaker` with its own thread: `with MaskThread(vocab_size) as masks: ...`.

    Leaving the context ends the thread after the guide that it is filling. Every method belongs to the thread of the
    core. The queue is short: it holds the masks of the steps in flight, and of abandoned steps. Of an abandoned step
    the thread fills at most the current guide.

    Args:
        vocab_size: number of token ids.

    Attributes:
        seconds_total: time spent on filling so far.
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
        self._buffers.give_back(masks)

    def _work(self) -> None:
        while (rows := self._jobs.get()) is not None:
            began_at = time.perf_counter()
            row_count = rows.row_count
            rows.fill()
            del rows  # its guides may use much memory
            self.seconds_total += time.perf_counter() - began_at
            self.rows_total += row_count
