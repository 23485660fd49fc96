"""The events of a router's simulation as data: its settings, one event after another, and both as readable text.

As in the core's history, an event that has lost its purpose does nothing, or what it would do in reality.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from trioserve.contracts.kv_transfer import EngineRole
from trioserve.router.settings import RouterSettings, SilenceSettings

__all__ = [
    "Add",
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
    "Response",
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
]


RouterFault = Literal["unreachable", "busy", "broke", "failed", "invalid", "refused", "transfer", "hung", "leaving"]
"""Names of `Fault`."""


class RouterWorld(RouterSettings, frozen=True, kw_only=True, omit_defaults=True, tag="router"):
    """The router's settings.

    Attributes:
        policy: routing policy.
        seed: seed of the policy's random choices.
        beat_seconds: interval of heartbeats, as in SilenceSettings. 0: the router does not check connections, and none
            goes silent.
        silent_seconds_max: as in SilenceSettings.
        stalled_seconds_max: as in SilenceSettings.
    """

    policy: str = "least_loaded"
    seed: int = 0
    beat_seconds: float = 0.0
    silent_seconds_max: float = 20.0
    stalled_seconds_max: float = 600.0

    @property
    def silence(self) -> SilenceSettings | None:
        """Settings for connections. None: the router does not check connections."""
        if not self.beat_seconds:
            return None
        return SilenceSettings(
            beat_seconds=self.beat_seconds,
            silent_seconds_max=self.silent_seconds_max,
            stalled_seconds_max=self.stalled_seconds_max,
        )


class Add(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="add"):
    """An endpoint is added, or added again while it drains.

    Attributes:
        id: the endpoint.
        models: its models.
        leases_max: maximum number of leases. None: the router's default.
        seats: sequences that can run there. Others wait inside of it.
        strangers: sequences there that the router did not send.
        tells_seats: True if its load reports contain the seats.
        role: stages of a disaggregated request that it is for.
        fingerprint: fingerprint of its model.
        tells_clock: True if its reports name its process, and it sends heartbeats.
    """

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
    """An endpoint reports its role."""

    id: str
    role: EngineRole | None = None


class Models(msgspec.Struct, frozen=True, kw_only=True, tag="models"):
    """An endpoint reports its models, which include its loaded adapters."""

    id: str
    models: tuple[str, ...]


class Load(msgspec.Struct, frozen=True, kw_only=True, tag="load"):
    """An endpoint has loaded an adapter and reports it. To a router, an adapter is one more model."""

    id: str
    adapter: str


class Unload(msgspec.Struct, frozen=True, kw_only=True, tag="unload"):
    """An endpoint unloads an adapter: no new requests for it go there. Running requests for it continue."""

    id: str
    adapter: str


class Remove(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="remove"):
    """An endpoint is drained. If `move_seconds` is not None, its streams are moved elsewhere within that time."""

    id: str
    move_seconds: float | None = None


class Check(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="check"):
    """A health check of an endpoint ends."""

    id: str
    is_well: bool = True


class Probe(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="probe"):
    """A probe request of the router to an endpoint ends. None: the endpoint is alive but refused the probe."""

    id: str
    is_well: bool | None = True


class Hang(msgspec.Struct, frozen=True, kw_only=True, tag="hang"):
    """An endpoint has not answered for so long that its requests leave it at once."""

    id: str


class Stopping(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="stopping"):
    """An endpoint reports that it will stop. `move_seconds` is as in Remove."""

    id: str
    move_seconds: float | None = None


class Ask(msgspec.Struct, frozen=True, kw_only=True, tag="ask"):
    """The router asks an endpoint for its load. An unanswered question is dropped."""

    id: str


class Response(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="answer"):
    """An endpoint answers a question. `lie` has false numbers of running and waiting sequences. None: the true ones."""

    id: str
    lie: tuple[int, int] | None = None


class Note(msgspec.Struct, frozen=True, kw_only=True, tag="note"):
    """The answer arrives at the router."""

    id: str


class Store(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="store"):
    """An endpoint reports that it has blocks, or no longer has them."""

    id: str
    blocks: tuple[str, ...]
    is_removed: bool = False


class Arrive(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="arrive"):
    """A client's request.

    Attributes:
        name: its name.
        model: its model.
        tenant: its tenant.
        priority: its priority.
        sequences: number of sequences.
        prompt_tokens: tokens of its prompt.
        session: its session, or None.
        pinned: the only endpoint that it may use, or None.
        blocks: names of the blocks of its prompt.
        patience: seconds until its own queue deadline. None: it has none.
        can_be_disaggregated: True if one endpoint may compute its prompt and another one its response.
    """

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
    """Many requests, each of which leaves before the next one arrives."""

    count: int
    model: str = "m"
    tenant: str = ""
    patience: float | None = None


class Send(msgspec.Struct, frozen=True, kw_only=True, tag="send"):
    """A request is sent to the endpoint of its lease."""

    name: str


class Token(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="token"):
    """An endpoint begins or continues a response.

    Attributes:
        name: the request.
        count: number of tokens.
        part: share of the next group of events that also arrives, 0 to 1.
        can_resume: reported with the first token: True if another endpoint can resume the stream.
    """

    name: str
    count: int = 1
    part: float = 0.0
    can_resume: bool = True


class Moved(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="moved"):
    """A stream has left its endpoint for that of its next lease. If `is_given` is True, the endpoint handed it over."""

    name: str
    is_given: bool = False


class Stay(msgspec.Struct, frozen=True, kw_only=True, tag="stay"):
    """A stream cannot leave its endpoint, which becomes known late."""

    name: str


class Compute(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="compute"):
    """An endpoint has computed the prompt of a disaggregated request.

    If `outcome` is not None, one endpoint must do the rest.
    """

    name: str
    outcome: Literal["not_held", "finished"] | None = None


class Lose(msgspec.Struct, frozen=True, kw_only=True, tag="lose"):
    """The endpoint that computed the prompt no longer holds its blocks."""

    name: str


class Leave(msgspec.Struct, frozen=True, kw_only=True, tag="leave"):
    """The scope of a request ends, since it is served or at any other moment, possibly again."""

    name: str


class Fail(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="fail"):
    """An endpoint fails a request, before its first token or during its stream.

    If `is_certain` is True, the endpoint reports that this request broke it.
    """

    name: str
    fault: RouterFault = "broke"
    busy_seconds: float = 1.0
    is_certain: bool = False


class Crash(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="crash"):
    """An endpoint fails all of its requests, one after another.

    If `is_over` is True, its process has ended and a new one begins.
    """

    id: str
    fault: Literal["unreachable", "broke", "hung", "leaving"] = "broke"
    is_over: bool = False


class Silence(msgspec.Struct, frozen=True, kw_only=True, tag="silence"):
    """The connection of a response goes silent, although its endpoint works. The connection is not closed."""

    name: str


class Replace(msgspec.Struct, frozen=True, kw_only=True, tag="replace"):
    """Another process takes over the address of an endpoint.

    Connections to the former process go silent but stay open.
    """

    id: str


class Wait(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="wait"):
    """Time passes. If `is_late` is True, `tick` is not called before the next wait."""

    seconds: float
    is_late: bool = False


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """The router accepts no new requests, and refuses all requests that were not sent."""


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
