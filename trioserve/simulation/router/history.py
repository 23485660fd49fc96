"""What happens to a router in a simulation, as data: its settings, one event after another, and both as readable text.

As in history.py, an event that has no place any more does nothing, or what it would do in real life.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.kv_transfer import EngineRole
from trioserve.router.settings import RouterSettings, SilenceSettings
from trioserve.simulation.script import line_of, parts_of

__all__ = [
    "Add",
    "Response",
    "Arrive",
    "Ask",
    "Check",
    "Compute",
    "Crash",
    "Crowd",
    "Drain",
    "Fail",
    "Hang",
    "Leave",
    "Load",
    "Lose",
    "Models",
    "Moved",
    "Note",
    "Probe",
    "Remove",
    "Replace",
    "Role",
    "RouterEvent",
    "RouterHistory",
    "RouterWorld",
    "Send",
    "Silence",
    "Stay",
    "Stopping",
    "Store",
    "Token",
    "Unload",
    "Wait",
    "history_of",
    "script_of",
]


RouterFault = Literal["unreachable", "busy", "broke", "failed", "invalid", "refused", "transfer", "hung", "leaving"]
"""By the names of Fault."""


class RouterWorld(RouterSettings, frozen=True, kw_only=True, omit_defaults=True, tag="router"):
    """The router's settings, its policy, and where that takes chance from. beat_seconds, silent_seconds_max,
    stalled_seconds_max: as of SilenceSettings; 0 beat_seconds: nobody looks at connections, and none goes silent."""

    policy: str = "least_loaded"
    seed: int = 0
    beat_seconds: float = 0.0
    silent_seconds_max: float = 20.0
    stalled_seconds_max: float = 600.0

    @property
    def silence(self) -> SilenceSettings | None:
        """None: nobody looks at connections."""
        if not self.beat_seconds:
            return None
        return SilenceSettings(
            beat_seconds=self.beat_seconds,
            silent_seconds_max=self.silent_seconds_max,
            stalled_seconds_max=self.stalled_seconds_max,
        )


class Add(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="add"):
    """An endpoint comes, or comes back while it is drained. seats: sequences that can run there; the others wait inside
    it. strangers: sequences there that the router did not send. tells_seats: whether its reports have the seats. role:
    which stages of a disaggregated request it is meant for. fingerprint: of what computes there. tells_clock: its
    reports name its process, and it sends beats."""

    id: str
    models: tuple[str, ...] = ("m",)
    leases_max: int | None = None
    seats: int = 4
    strangers: int = 0
    tells_seats: bool = True
    role: EngineRole | None = None
    fingerprint: str | None = None
    tells_clock: bool = False


class Role(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="role"):
    """It says what it is meant for."""

    id: str
    role: EngineRole | None = None


class Models(msgspec.Struct, frozen=True, kw_only=True, tag="models"):
    """It says what it serves. Of adapters it has then only those that are named here."""

    id: str
    models: tuple[str, ...]


class Load(msgspec.Struct, frozen=True, kw_only=True, tag="load"):
    """It has loaded an adapter, and says so. To a router that is one more model."""

    id: str
    adapter: str


class Unload(msgspec.Struct, frozen=True, kw_only=True, tag="unload"):
    """It is to unload one: nobody new is sent there for it. Those that have it there go on."""

    id: str
    adapter: str


class Remove(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="remove"):
    """It is drained. move_seconds: and emptied, within this time."""

    id: str
    move_seconds: float | None = None


class Check(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="check"):
    """A health check of it ends."""

    id: str
    is_well: bool = True


class Probe(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="probe"):
    """A probe request of the router to an endpoint ends. None: the endpoint is alive but refused the probe."""

    id: str
    is_well: bool | None = True


class Hang(msgspec.Struct, frozen=True, kw_only=True, tag="hang"):
    """It has not answered for so long that it is left at once."""

    id: str


class Stopping(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="stopping"):
    """It says that it will stop. move_seconds: as of Remove."""

    id: str
    move_seconds: float | None = None


class Ask(msgspec.Struct, frozen=True, kw_only=True, tag="ask"):
    """It is asked for its load. A question that is out is given up."""

    id: str


class Response(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="answer"):
    """It looks at itself and answers a question that is out. lie: running and waiting, instead of what is true."""

    id: str
    lie: tuple[int, int] | None = None


class Note(msgspec.Struct, frozen=True, kw_only=True, tag="note"):
    """The response arrives at the router."""

    id: str


class Store(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="store"):
    """It says that it holds these blocks, or holds them no longer."""

    id: str
    blocks: tuple[str, ...]
    is_removed: bool = False


class Arrive(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="arrive"):
    """A client's request. patience: seconds until its own wait in the queue is over; None: never. can_be_disaggregated:
    its prompt may be computed at one endpoint and its response at another."""

    name: str
    model: str = "m"
    tenant: str = ""
    priority: int = 0
    sequences: int = 1
    prompt_tokens: int = 0
    session: str | None = None
    pinned: str | None = None
    blocks: tuple[str, ...] = ()
    patience: float | None = None
    can_be_disaggregated: bool = False


class Crowd(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="crowd"):
    """So many requests, each of which leaves before the next one comes."""

    count: int
    model: str = "m"
    tenant: str = ""
    patience: float | None = None


class Send(msgspec.Struct, frozen=True, kw_only=True, tag="send"):
    """It goes to the endpoint of its lease, and is there."""

    name: str


class Token(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="token"):
    """Its endpoint begins to answer, or goes on. count: of tokens. part: of what comes behind them, cut off anywhere.
    can_go_on: what is told with the first one."""

    name: str
    count: int = 1
    part: float = 0.0
    can_go_on: bool = True


class Moved(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="moved"):
    """It has left its endpoint for the one of its next lease. is_given: the endpoint has given it away."""

    name: str
    is_given: bool = False


class Stay(msgspec.Struct, frozen=True, kw_only=True, tag="stay"):
    """It cannot leave its endpoint, as is found out late."""

    name: str


class Compute(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="compute"):
    """Its endpoint has computed its prompt, which was all that it should do. outcome: why the rest is one endpoint's,
    if it is."""

    name: str
    outcome: Literal["not_held", "finished"] | None = None


class Lose(msgspec.Struct, frozen=True, kw_only=True, tag="lose"):
    """Where its prompt was computed, its blocks are kept no longer."""

    name: str


class Leave(msgspec.Struct, frozen=True, kw_only=True, tag="leave"):
    """Its scope ends, because it is served or at any other moment, once or again."""

    name: str


class Fail(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="fail"):
    """Its endpoint fails it, before the first token or in the middle of its stream. is_certain: and says so itself."""

    name: str
    fault: RouterFault = "broke"
    busy_seconds: float = 1.0
    is_certain: bool = False


class Crash(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="crash"):
    """An endpoint fails all that it has, one after the other. is_over: its process has ended, and another one comes."""

    id: str
    fault: Literal["unreachable", "broke", "hung", "leaving"] = "broke"
    is_over: bool = False


class Silence(msgspec.Struct, frozen=True, kw_only=True, tag="silence"):
    """The connection of its response goes silent while its endpoint is well. Nothing is closed."""

    name: str


class Replace(msgspec.Struct, frozen=True, kw_only=True, tag="replace"):
    """Another process takes the endpoint's address. The connections to the former one go silent and stay open."""

    id: str


class Wait(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="wait"):
    """Time passes. is_late: nobody calls `tick` on the way, nor at the end; the next wait does."""

    seconds: float
    is_late: bool = False


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """The router takes nothing new and refuses whatever was not sent."""


RouterEvent = (
    Add
    | Models
    | Load
    | Unload
    | Role
    | Remove
    | Check
    | Hang
    | Probe
    | Stopping
    | Ask
    | Response
    | Note
    | Store
    | Arrive
    | Crowd
    | Send
    | Token
    | Compute
    | Lose
    | Leave
    | Fail
    | Crash
    | Silence
    | Replace
    | Moved
    | Stay
    | Wait
    | Drain
)


class RouterHistory(msgspec.Struct, frozen=True):
    world: RouterWorld
    events: tuple[RouterEvent, ...]


def script_of(history: RouterHistory) -> str:
    """The settings, and then one line an event."""
    return "\n".join(line_of(part) for part in (history.world, *history.events)) + "\n"


def history_of(script: str) -> RouterHistory:
    """Read what script_of writes, comments apart. Raises InvalidRequest."""
    world, *events = parts_of(script, RouterWorld | RouterEvent) or [None]
    if not isinstance(world, RouterWorld) or any(isinstance(event, RouterWorld) for event in events):
        raise InvalidRequest("a history of a router begins with its settings, and has them once: put 'router' first")
    return RouterHistory(world, tuple(events))
