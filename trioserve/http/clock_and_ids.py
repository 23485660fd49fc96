"""Sources of time and random ids for the front end.

A simulation passes its own sources, so that every byte of a response follows from a seed.
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
        wall_clock: returns seconds since 1970.
        new_request_id: returns an id that is unique and cannot be guessed.
        cpu_clock: returns CPU seconds of the current thread.
    """

    wall_clock: Callable[[], float] = time.time
    new_request_id: Callable[[], str] = _new_request_id
    cpu_clock: Callable[[], float] = time.thread_time

    def unix_seconds(self) -> int:
        return int(self.wall_clock())
