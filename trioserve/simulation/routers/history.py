"""A history of several routers as data: what they stand before, and what comes to pass from outside.

    routers endpoints=2 leases_max=4 shares=true
    come number=1 at=3.0 router=0 seconds=1.5
    die at=3.5 router=0

Times are seconds since the routers began. Whatever is missing of a history or stands elsewhere in it, the rest means
something: what should have happened before happens now, and what is about nobody does nothing.
"""

from __future__ import annotations

import msgspec

from trioserve.contracts.errors import InvalidRequest
from trioserve.simulation.routers.world import RoutersWorld
from trioserve.simulation.script import line_of, parts_of

__all__ = ["Back", "Come", "Die", "Meet", "Part", "RoutersEvent", "RoutersHistory", "history_of", "script_of"]


class Come(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="come"):
    """A request comes to a router, or to another one if that is gone. number: its own; of two with one, the second is
    not there. seconds: for which it has a seat at its endpoint. patience: seconds until its client leaves; None: it
    stays to the end."""

    number: int
    at: float = 0.0
    router: int = 0
    seconds: float = 1.0
    tenant: str = "much"
    patience: float | None = None


class Die(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="die"):
    """A router is gone: what it has at endpoints ends there, and its clients ask another one."""

    at: float = 0.0
    router: int = 0


class Back(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="back"):
    """A router that is gone begins anew."""

    at: float = 0.0
    router: int = 0


class Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="part"):
    """Two routers cannot see each other from now on."""

    at: float = 0.0
    router: int = 0
    peer: int = 0


class Meet(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="meet"):
    """They can again."""

    at: float = 0.0
    router: int = 0
    peer: int = 0


RoutersEvent = Come | Die | Back | Part | Meet


class RoutersHistory(msgspec.Struct, frozen=True):
    world: RoutersWorld
    events: tuple[RoutersEvent, ...]


def script_of(history: RoutersHistory) -> str:
    """What the routers stand before, and then one line an event."""
    return "\n".join(line_of(part) for part in (history.world, *history.events)) + "\n"


def history_of(script: str) -> RoutersHistory:
    """Read what script_of writes, comments apart. Raises InvalidRequest."""
    world, *events = parts_of(script, RoutersWorld | RoutersEvent) or [None]
    if not isinstance(world, RoutersWorld) or any(isinstance(event, RoutersWorld) for event in events):
        raise InvalidRequest("a history of several routers begins with 'routers', and has that once: put it first")
    return RoutersHistory(world, tuple(events))
