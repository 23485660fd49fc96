"""The thread that fills masks while the forward pass runs.

It stands beside the compute thread and takes one step's masks after another. Most of the work is a library's, without
the GIL, so the event loop stays live. Whoever samples waits for the masks, and no sooner.
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
    """`with MaskThread(vocab_size) as masks:`; a MaskMaker inside. Leaving ends the thread, after the row at hand.

    Every method belongs to the thread of the core. At most as many steps wait for their masks as are in flight, and
    those that were given up, of which nothing more is filled than the guide at hand.
    seconds_total, rows_total: what filling took so far, and how many rows it were.
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
            del rows  # what it holds may be large
            self.seconds_total += time.perf_counter() - began_at
            self.rows_total += row_count
