"""Detects lost requests by virtual time.

It advances only when no task can run, so a request that waits for a step at that moment, while no step runs, was
forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import trio

__all__ = ["IdleWatch", "waits_for_a_step"]


class WatchedCore(Protocol):
    @property
    def flights(self) -> Any:
        """The steps in flight. An empty value: there are none."""
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
    """An instrument of trio.run. It sees every pass of the scheduler and changes nothing.

    Attributes:
        who_waits: returns the name of a request that waits although nothing will happen for it, or None. Set it when
            there is an engine.
    """

    def __init__(self) -> None:
        self.who_waits: Callable[[], str | None] = _no_name
        self._since: tuple[str, float] | None = None
        self._violation: str | None = None

    def stop(self) -> None:
        self.who_waits = _no_name

    def before_io_wait(self, timeout: float) -> None:
        now, who = trio.current_time(), self.who_waits()
        if who is None:
            self._since = None
        elif self._since is None or self._since[0] != who:
            self._since = who, now
        elif now > self._since[1] and self._violation is None:
            self._violation = f"{who} waits from {self._since[1]:.3f} to {now:.3f}, but no step runs"

    def check(self) -> None:
        """Assert that time has never advanced while a request waited in vain.

        It is a separate call, since an instrument must not raise.
        """
        assert self._violation is None, self._violation


def waits_for_a_step(engine: WatchedEngine) -> str | None:
    """Return the id of a request that waits although no step runs, or None. The engine must have no connector.

    Args:
        engine: the engine. Without a connector, its requests wait only for steps.
    """
    if engine.fault is not None or engine.core.flights:
        return None
    first = next(iter(engine.core.live_requests()), None)
    return engine.first_unfinished_id if first is None else str(first.request.id)


def _no_name() -> None:
    return None
