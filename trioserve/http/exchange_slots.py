"""Slots that limit the open exchanges of a server, with a share that is reserved for callers with an API key."""

from __future__ import annotations

from collections.abc import Callable

import trio

from trioserve.http.counters import StreamRefusal, Tally
from trioserve.http.headers import Headers
from trioserve.http.limits import FrontendLimits

__all__ = ["ExchangeSlots", "KnowsCaller"]

KnowsCaller = Callable[[Headers], bool]
"""A function that returns True if the header fields of a request show a valid API key. It is called once for each
request.
"""


class ExchangeSlots:
    """The exchange slots of one server. Before an exchange, a connection calls `refusal` and takes a slot. After the
    exchange, it releases the slot.

    Args:
        limits: contains the number of slots, and the share of slots for callers without an API key.
        tally: counts open exchanges.
        knows_caller: returns True for callers with an API key. None if the server requires no keys.
    """

    def __init__(self, limits: FrontendLimits, tally: Tally, knows_caller: KnowsCaller | None) -> None:
        self._tally = tally
        self._knows_caller = knows_caller
        self._open_max = limits.exchanges_max
        self._unknown_max = max(1, int(limits.exchanges_max * limits.unknown_exchanges_share_max))
        self.is_draining = False  # if True, new exchanges are late: the exit does not wait for them
        self._early_open = 0  # exchanges that began before the drain and are still open
        self._early_ended = trio.Event()

    @property
    def treats_callers_equally(self) -> bool:
        """True if the server requires no keys."""
        return self._knows_caller is None

    def knows(self, headers: Headers) -> bool:
        return self._knows_caller is None or self._knows_caller(headers)

    def refusal(self, *, is_known: bool) -> StreamRefusal | None:
        """Return the reason to refuse a new exchange now, or None if the exchange can begin.

        Args:
            is_known: True if the caller has shown an API key, or the server requires none.

        Returns:
            The reason, or None if the exchange can begin.
        """
        if self._tally.exchanges_open >= self._open_max:
            return StreamRefusal.EXCHANGES_MAX
        if not is_known and self._tally.exchanges_unknown_open >= self._unknown_max:
            return StreamRefusal.UNKNOWN_CALLERS
        return None

    def take(self, *, is_known: bool) -> None:
        self._tally.exchanges_total += 1
        self._tally.exchanges_open += 1
        self._tally.exchanges_unknown_open += not is_known

    def release(self, *, is_known: bool, is_late: bool) -> None:
        """Release the slot of an exchange that has ended.

        Args:
            is_known: the same value as in the call of `refusal`.
            is_late: True if the exchange began after `begin_drain`.
        """
        self._tally.exchanges_open -= 1
        self._tally.exchanges_unknown_open -= not is_known
        if self.is_draining and not is_late:
            self._early_open -= 1
            self._note_early_end()

    def begin_drain(self) -> None:
        """Remember which exchanges are open now. `wait_until_early_ended` ignores exchanges that begin later."""
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
