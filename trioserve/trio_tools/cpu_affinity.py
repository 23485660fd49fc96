"""Starts a thread's job on the CPU of its caller, when the caller is about to wait.

On another CPU, the job would wait for that CPU to wake up. If another program had taken the CPU, the job would wait
until that program stops, or until the system moves the thread. This can take a millisecond, while the caller's CPU
idles. Only Linux supports it. Elsewhere, the functions do nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys

__all__ = ["CpuAffinity"]


class CpuAffinity:
    """CPU affinity of one thread. Make it where all CPUs are allowed on which the thread may run."""

    def __init__(self) -> None:
        self._cpu = None if sys.platform != "linux" else getattr(ctypes.CDLL(None), "sched_getcpu", None)
        self._allowed = os.sched_getaffinity(0) if sys.platform == "linux" else set[int]()

    def pin_to_caller(self, thread_id: int) -> None:
        """Make a sleeping thread wake up on the caller's CPU, and stay there until it calls `unpin`.

        Args:
            thread_id: Native id of the thread.
        """
        if self._cpu is None:
            return
        try:
            os.sched_setaffinity(thread_id, (self._cpu(),))
        except OSError:  # not permitted: do not try again
            self._cpu = None

    def unpin(self) -> None:
        """Let the calling thread run on every allowed CPU again."""
        with contextlib.suppress(OSError):  # the system has taken all of these CPUs from the process
            os.sched_setaffinity(0, self._allowed)
