"""Whether time passes while somebody waits for nothing: virtual time moves on only when no task can go on, so whoever
waits for a step at that moment, while none runs, has been forgotten."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import trio

__all__ = ["IdleWatch", "waits_for_a_step"]


class WatchedCore(Protocol):
    @property
    def flights(self) -> Any:
        """Of steps; false where there are none."""
        ...

    def live_requests(self) -> Iterable[Any]: ...


class WatchedEngine(Protocol):
    @property
    def fault(self) -> object: ...
    @property
    def core(self) -> WatchedCore: ...
    @property
    def first_unfinished_id(self) -> str | None: ...


class IdleWatch(trio.abc.Instrument):
    """An instrument of trio.run; it sees every turn of the scheduler and changes nothing. who_waits: the name of one
    that waits for what nobody is about to do; to be set when there is an engine."""

    def __init__(self) -> None:
        self.who_waits: Callable[[], str | None] = _nobody
        self._since: tuple[str, float] | None = None
        self._violation: str | None = None

    def stop(self) -> None:
        self.who_waits = _nobody

    def before_io_wait(self, timeout: float) -> None:
        now, who = trio.current_time(), self.who_waits()
        if who is None:
            self._since = None
        elif self._since is None or self._since[0] != who:
            self._since = who, now
        elif now > self._since[1] and self._violation is None:
            self._violation = f"{who} waits from {self._since[1]:.3f} to {now:.3f}, and nothing is computed"

    def check(self) -> None:
        """Assert that time has never passed so. (An instrument must not raise.)"""
        assert self._violation is None, self._violation


def waits_for_a_step(engine: WatchedEngine) -> str | None:
    """One that waits, of an engine without a connector: nobody there waits for anything but a step. None: nobody, or a
    step runs."""
    if engine.fault is not None or engine.core.flights:
        return None
    first = next(iter(engine.core.live_requests()), None)
    return engine.first_unfinished_id if first is None else str(first.request.id)


def _nobody() -> None:
    return None
