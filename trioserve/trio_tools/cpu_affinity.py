"""Starts a thread's job on the CPU of the task that requested it, if that task is about to wait.

If the job started on another CPU, it would wait until that CPU wakes up. If another program was using that CPU, the job
would wait until the program stops, or until the system moves the thread. This can take a millisecond, while the
caller's CPU is idle. Only Linux supports this. On other systems, the functions do nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys

__all__ = ["CpuAffinity"]


class CpuAffinity:
    """CPU affinity of one thread. Create this object in a thread that is allowed to use all CPUs on which the other
    thread may run.
    """

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
        except OSError:  # the system does not permit it: do not try again
            self._cpu = None

    def unpin(self) -> None:
        """Let the calling thread run on every allowed CPU again."""
        with contextlib.suppress(OSError):  # the system has taken all of these CPUs from the process
            os.sched_setaffinity(0, self._allowed)
