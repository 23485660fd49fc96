"""A history of several routers as data: its settings, then the events from outside.

    routers endpoints=2 leases_max=4 shares=true
    come number=1 at=3.0 router=0 seconds=1.5
    die at=3.5 router=0

Times are seconds since the routers began. A history stays valid when events are removed or moved: an event with an
earlier time than the one before happens at once, and an event that does not apply does nothing.
"""

from __future__ import annotations

import msgspec

from trioserve.contracts.errors import InvalidRequest
from trioserve.simulation.routers.world import RoutersWorld
from trioserve.simulation.script import line_of, parts_of

__all__ = ["Back", "Come", "Die", "Meet", "Part", "RoutersEvent", "RoutersHistory", "history_of", "script_of"]


class Come(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="come"):
    """A request arrives at a router, or at another one if that is gone.

    Attributes:
        number: the request's number. A second request with the same number is ignored.
        seconds: how long it has a seat at its endpoint.
        patience: seconds until its client leaves, or None if it stays to the end.
    """

    number: int
    at: float = 0.0
    router: int = 0
    seconds: float = 1.0
    tenant: str = "much"
    patience: float | None = None


class Die(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="die"):
    """A router dies: its requests at endpoints end, and its clients ask another router."""

    at: float = 0.0
    router: int = 0


class Back(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="back"):
    """A dead router begins again."""

    at: float = 0.0
    router: int = 0


class Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="part"):
    """Two routers cannot see each other any more."""

    at: float = 0.0
    router: int = 0
    peer: int = 0


class Meet(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="meet"):
    """Two routers can see each other again."""

    at: float = 0.0
    router: int = 0
    peer: int = 0


RoutersEvent = Come | Die | Back | Part | Meet


class RoutersHistory(msgspec.Struct, frozen=True):
    world: RoutersWorld
    events: tuple[RoutersEvent, ...]


def script_of(history: RoutersHistory) -> str:
    """Write a history: its settings, then one line per event.

    Args:
        history: the history.
    """
    return "\n".join(line_of(part) for part in (history.world, *history.events)) + "\n"


def history_of(script: str) -> RoutersHistory:
    """Read a history that script_of has written. Comments are skipped.

    Args:
        script: the text.

    Raises:
        InvalidRequest: the text is not such a history.
    """
    world, *events = parts_of(script, RoutersWorld | RoutersEvent) or [None]
    if not isinstance(world, RoutersWorld) or any(isinstance(event, RoutersWorld) for event in events):
        raise InvalidRequest("a history of several routers begins with 'routers', and has that once: put it first")
    return RoutersHistory(world, tuple(events))
