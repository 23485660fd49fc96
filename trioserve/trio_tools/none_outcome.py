"""The outcome None, for waking a waiting task."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from typing import Any, NoReturn

import outcome

__all__ = ["NONE_OUTCOME"]


class _NoneOutcome(outcome.Outcome[None]):
    """An outcome with the value None that can be used any number of times.

    Trio would create a new Value for each wake-up, because a Value can be unwrapped only once. Creating and unwrapping
    a Value takes a tenth of the event loop's time for a token.
    """

    __slots__ = ()

    def unwrap(self) -> None:
        return None

    def send(self, gen: Generator[Any, None, Any]) -> NoReturn:
        raise AssertionError("this outcome is only for wait_task_rescheduled")

    def asend(self, agen: AsyncGenerator[Any, None]) -> NoReturn:
        raise AssertionError("this outcome is only for wait_task_rescheduled")


NONE_OUTCOME = _NoneOutcome()
"""The only instance. Use it as trio.lowlevel.reschedule(task, NONE_OUTCOME)."""
