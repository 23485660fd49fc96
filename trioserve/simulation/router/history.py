"""The history of a router's simulation as data: its settings and its events, with a text format for both.

A history stays valid if any event is removed. An event that does not apply does nothing, or does what it would do in
reality.
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
        seed: seed of the routing policy's random choices.
        beat_seconds: interval of heartbeats, as in SilenceSettings. 0: the router does not check connections, and no
            connection goes silent.
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
        """Limits for silent connections. None: the router does not check connections."""
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
        seats: number of sequences that can run at the endpoint. Further sequences wait inside the endpoint.
        strangers: number of sequences at the endpoint that this router did not send.
        tells_seats: True if the endpoint's load reports contain `seats`.
        role: stages of a disaggregated request that the endpoint accepts.
        fingerprint: fingerprint of the endpoint's model.
        tells_clock: True if the endpoint's reports name its process, and the endpoint sends heartbeats.
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
    """An endpoint reports a new role."""

    id: str
    role: EngineRole | None = None


class Models(msgspec.Struct, frozen=True, kw_only=True, tag="models"):
    """An endpoint reports its models, including its loaded adapters."""

    id: str
    models: tuple[str, ...]


class Load(msgspec.Struct, frozen=True, kw_only=True, tag="load"):
    """An endpoint reports that it has loaded an adapter. A router treats an adapter as one more model."""

    id: str
    adapter: str


class Unload(msgspec.Struct, frozen=True, kw_only=True, tag="unload"):
    """An endpoint unloads an adapter. It gets no new requests for the adapter, but running requests continue."""

    id: str
    adapter: str


class Remove(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="remove"):
    """An endpoint is drained. If `move_seconds` is not None, its streams move to other endpoints within that time."""

    id: str
    move_seconds: float | None = None


class Check(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="check"):
    """A health check of an endpoint ends."""

    id: str
    is_well: bool = True


class Probe(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="probe"):
    """The router's probe request to an endpoint ends. None: the endpoint is alive but has refused the probe."""

    id: str
    is_well: bool | None = True


class Hang(msgspec.Struct, frozen=True, kw_only=True, tag="hang"):
    """An endpoint has not answered for so long that the router gives up all of its requests."""

    id: str


class Stopping(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="stopping"):
    """An endpoint reports that it will stop. If `move_seconds` is not None, its streams move within that time."""

    id: str
    move_seconds: float | None = None


class Ask(msgspec.Struct, frozen=True, kw_only=True, tag="ask"):
    """The router asks an endpoint for its load. An earlier question without an answer is dropped."""

    id: str


class Response(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="answer"):
    """An endpoint answers the router's question for its load.

    The answer has the numbers of running and waiting sequences from `lie`, or the true numbers if `lie` is None.
    """

    id: str
    lie: tuple[int, int] | None = None


class Note(msgspec.Struct, frozen=True, kw_only=True, tag="note"):
    """An endpoint's load report arrives at the router."""

    id: str


class Store(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="store"):
    """An endpoint reports that it has stored or evicted blocks."""

    id: str
    blocks: tuple[str, ...]
    is_removed: bool = False


class Arrive(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="arrive"):
    """A request of a client.

    Attributes:
        name: name of the request.
        model: model name.
        tenant: tenant of the request.
        priority: priority of the request.
        sequences: number of sequences.
        prompt_tokens: number of prompt tokens.
        session: session of the request, or None.
        pinned: the only endpoint that the request may use, or None.
        blocks: names of the blocks of the prompt.
        patience: seconds until the request's own queue deadline. None: no deadline.
        can_be_disaggregated: True if one endpoint may prefill and another endpoint may decode.
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
    """Many requests arrive one after another. Each client disconnects before the next request arrives."""

    count: int
    model: str = "m"
    tenant: str = ""
    patience: float | None = None


class Send(msgspec.Struct, frozen=True, kw_only=True, tag="send"):
    """The router sends a request to the endpoint of its lease."""

    name: str


class Token(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="token"):
    """An endpoint begins or continues a response.

    Attributes:
        name: the request.
        count: number of new tokens.
        part: fraction of the bytes of the next group of events that also arrives, 0 to 1.
        can_resume: True if another endpoint can resume the stream. Only the value of the first token is used.
    """

    name: str
    count: int = 1
    part: float = 0.0
    can_resume: bool = True


class Moved(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="moved"):
    """A stream moves to the endpoint of its second lease. If `is_given` is True, its endpoint hands it over."""

    name: str
    is_given: bool = False


class Stay(msgspec.Struct, frozen=True, kw_only=True, tag="stay"):
    """The router learns that a stream cannot be moved, possibly after it got a second lease for the stream."""

    name: str


class Compute(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="compute"):
    """An endpoint has computed the prompt of a disaggregated request.

    If `outcome` is not None, one endpoint must compute the whole request.
    """

    name: str
    outcome: Literal["not_held", "finished"] | None = None


class Lose(msgspec.Struct, frozen=True, kw_only=True, tag="lose"):
    """The endpoint that computed a prompt no longer holds the prompt's blocks."""

    name: str


class Leave(msgspec.Struct, frozen=True, kw_only=True, tag="leave"):
    """The scope of a request ends, after its response or at any other time. This event may be repeated."""

    name: str


class Fail(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="fail"):
    """An endpoint fails a request before its first token or during its stream.

    If `is_certain` is True, the endpoint reports that this request caused the fault.
    """

    name: str
    fault: RouterFault = "broke"
    busy_seconds: float = 1.0
    is_certain: bool = False


class Crash(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="crash"):
    """An endpoint fails all of its requests, one after another.

    If `is_over` is True, the endpoint's process has ended, and a new process begins.
    """

    id: str
    fault: Literal["unreachable", "broke", "hung", "leaving"] = "broke"
    is_over: bool = False


class Silence(msgspec.Struct, frozen=True, kw_only=True, tag="silence"):
    """The connection of a response goes silent without being closed, although the endpoint works."""

    name: str


class Replace(msgspec.Struct, frozen=True, kw_only=True, tag="replace"):
    """A new process takes over the address of an endpoint.

    Connections to the former process go silent but stay open.
    """

    id: str


class Wait(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="wait"):
    """Time passes. If `is_late` is True, the router's `tick` is not called before the next Wait."""

    seconds: float
    is_late: bool = False


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """The router begins to drain: it accepts no new requests, and refuses all requests that it has not sent."""


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
