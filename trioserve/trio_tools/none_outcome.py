"""The outcome None, to wake a waiting task with."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from typing import Any, NoReturn

import outcome

__all__ = ["NONE_OUTCOME"]


class _NoneOutcome(outcome.Outcome[None]):
    """None, any number of times. Trio would make a Value for each wake-up, which may be opened once: to make it and to
    open it is a tenth of what a token costs the event loop."""

    __slots__ = ()

    def unwrap(self) -> None:
        return None

    def send(self, gen: Generator[Any, None, Any]) -> NoReturn:
        raise AssertionError("only wait_task_rescheduled is ended with this")

    def asend(self, agen: AsyncGenerator[Any, None]) -> NoReturn:
        raise AssertionError("only wait_task_rescheduled is ended with this")


NONE_OUTCOME = _NoneOutcome()
"""For trio.lowlevel.reschedule(task, NONE_OUTCOME)."""
