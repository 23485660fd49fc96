"""Who may begin an exchange: how many are open at a time, and a share that callers nobody knows cannot take.

What makes a caller known is not settled here: that is a predicate, handed in by whoever knows of keys.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from trioserve.http.counters import StreamRefusal, Tally
from trioserve.http.headers import Headers
from trioserve.http.limits import FrontendLimits

__all__ = ["ExchangeSlots", "KnowsCaller"]

KnowsCaller = Callable[[Headers], bool]
"""Whether the head of a request shows that its caller may use the server. Called once for each request; never waits."""


class ExchangeSlots:
    """The slots of one server. Whoever begins an exchange asks refusal, takes a slot, and gives it back when it ends.

    knows_caller: None where every caller is as good as any other.
    """

    def __init__(self, limits: FrontendLimits, tally: Tally, knows_caller: KnowsCaller | None) -> None:
        self._tally = tally
        self._knows_caller = knows_caller
        self._open_max = limits.exchanges_max
        self._unknown_max = max(1, int(limits.exchanges_max * limits.unknown_exchanges_share_max))
        self.is_draining = False  # exchanges that begin from now on are late: the exit of the server does not wait
        self._early_open = 0  # exchanges that began before the drain and are still open
        self._early_ended = trio.Event()

    @property
    def takes_all_alike(self) -> bool:
        """Whether any caller is as good as another."""
        return self._knows_caller is None

    def knows(self, headers: Headers) -> bool:
        return self._knows_caller is None or self._knows_caller(headers)

    def refusal(self, *, is_known: bool) -> StreamRefusal | None:
        """Why no exchange of such a caller can begin now, if it cannot."""
        if self._tally.exchanges_open >= self._open_max:
            return StreamRefusal.EXCHANGES_MAX
        if not is_known and self._tally.exchanges_unknown_open >= self._unknown_max:
            return StreamRefusal.UNKNOWN_CALLERS
        return None

    def take(self, *, is_known: bool) -> None:
        self._tally.exchanges_total += 1
        self._tally.exchanges_open += 1
        self._tally.exchanges_unknown_open += not is_known

    def give_back(self, *, is_known: bool, is_late: bool) -> None:
        self._tally.exchanges_open -= 1
        self._tally.exchanges_unknown_open -= not is_known
        if self.is_draining and not is_late:
            self._early_open -= 1
            self._note_early_end()

    def begin_drain(self) -> None:
        """From now on, distinguish the exchanges that are open from those that begin later."""
        if not self.is_draining:
            self.is_draining = True
            self._early_open = self._tally.exchanges_open
            self._note_early_end()

    async def wait_until_early_ended(self) -> None:
        """Return when every exchange that was open at `begin_drain` has ended."""
        await self._early_ended.wait()

    def _note_early_end(self) -> None:
        if self._early_open == 0:
            self._early_ended.set()
