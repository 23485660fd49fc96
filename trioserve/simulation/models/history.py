"""A history of a server with several models, as data: its limits, then its events.

    models memory=3 bytes=[2,2] turn=5
    arrive id="a" model=0
    loaded model=0
    advance seconds=1.5
    leave id="a"

A history stays valid when events are removed from it. For example, a report about a load without a load does nothing.
"""

from __future__ import annotations

import msgspec

__all__ = [
    "Advance",
    "Arrive",
    "Crash",
    "Leave",
    "LoadFails",
    "LoadNow",
    "Loaded",
    "ModelsEvent",
    "ModelsHistory",
    "ModelsWorld",
    "UnloadNow",
    "Unloaded",
]


class ModelsWorld(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="models"):
    """Limits of the server.

    Attributes:
        memory: memory of all models together.
        bytes: memory of each model.
        pinned: numbers of the pinned models.
        turn: minimum time in seconds for which a busy model stays, and a model waits before a busy one gives way.
        keep_alive: seconds after which an idle model is unloaded. None: never.
        loads: number of models that load at the same time.
    """

    memory: int = 2
    bytes: tuple[int, ...] = (1,)
    pinned: tuple[int, ...] = ()
    turn: float = 1.0
    keep_alive: float | None = None
    loads: int = 1


class Arrive(msgspec.Struct, frozen=True, kw_only=True, tag="arrive"):
    """A request for a model arrives. A second request with the same id is ignored."""

    id: str
    model: int


class Leave(msgspec.Struct, frozen=True, kw_only=True, tag="leave"):
    """A request ends: it is complete, or its client leaves while it waits or runs."""

    id: str


class Advance(msgspec.Struct, frozen=True, kw_only=True, tag="advance"):
    """Time passes."""

    seconds: float


class Loaded(msgspec.Struct, frozen=True, kw_only=True, tag="loaded"):
    """The load of a model ends, also if it was cancelled too late."""

    model: int


class LoadFails(msgspec.Struct, frozen=True, kw_only=True, tag="fails"):
    """The load of a model fails."""

    model: int


class Unloaded(msgspec.Struct, frozen=True, kw_only=True, tag="unloaded"):
    """The memory of a model that is being unloaded becomes free."""

    model: int


class Crash(msgspec.Struct, frozen=True, kw_only=True, tag="crash"):
    """The process of a loaded model ends."""

    model: int


class LoadNow(msgspec.Struct, frozen=True, kw_only=True, tag="load"):
    """An operator requests a load."""

    model: int


class UnloadNow(msgspec.Struct, frozen=True, kw_only=True, tag="unload"):
    """An operator requests to unload a model."""

    model: int


ModelsEvent = Arrive | Leave | Advance | Loaded | LoadFails | Unloaded | Crash | LoadNow | UnloadNow


class ModelsHistory(msgspec.Struct, frozen=True):
    world: ModelsWorld
    events: tuple[ModelsEvent, ...]
