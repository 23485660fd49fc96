"""What the front end takes from outside of the program: the time of day, CPU time, and ids that nobody gave.

A simulation hands in its own, so that every byte of a response follows from a seed.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable

__all__ = ["ClockAndIds"]


def _new_request_id() -> str:
    return os.urandom(16).hex()


@dataclasses.dataclass(frozen=True, slots=True)
class ClockAndIds:
    """Sources of time and ids.

    Args:
        wall_clock: seconds since 1970.
        new_request_id: an id that nobody has and nobody can guess.
        cpu_clock: seconds that this thread has computed.
    """

    wall_clock: Callable[[], float] = time.time
    new_request_id: Callable[[], str] = _new_request_id
    cpu_clock: Callable[[], float] = time.thread_time

    def unix_seconds(self) -> int:
        return int(self.wall_clock())
