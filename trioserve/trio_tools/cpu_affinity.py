"""Has a thread begin its job on the CPU of whoever asks for it, who is about to wait.

Elsewhere it would wait first: for a CPU to wake up, or, where another program has taken its last one, until that
program stops or the system moves the thread, which can take a millisecond while the asker's CPU idles. Only where the
system tells a thread's CPU and takes a wish for it (Linux); everywhere else nothing is done.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys

__all__ = ["CpuAffinity"]


class CpuAffinity:
    """Of one thread; made where every CPU is allowed that the thread is to run on."""

    def __init__(self) -> None:
        self._cpu = None if sys.platform != "linux" else getattr(ctypes.CDLL(None), "sched_getcpu", None)
        self._allowed = os.sched_getaffinity(0) if sys.platform == "linux" else set[int]()

    def pin_to_caller(self, thread_id: int) -> None:
        """Have the thread, which sleeps, wake on the CPU of the thread that calls this, and stay until it is free."""
        if self._cpu is None:
            return
        try:
            os.sched_setaffinity(thread_id, (self._cpu(),))
        except OSError:  # the system does not let us
            self._cpu = None

    def unpin(self) -> None:
        """Called by the thread itself: it may run on every CPU again."""
        with contextlib.suppress(OSError):  # none of them is ours any more: the system has chosen others
            os.sched_setaffinity(0, self._allowed)
