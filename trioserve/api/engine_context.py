"""Context of one request to a server with an engine of any kind, for the routes of operators and routers.

RoutersHeard has the routers that ask this server for its load. Routers that share the server's limits learn about each
other from the server, even if the routers cannot reach each other.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

import msgspec
import trio

from trioserve.api.caller import AccessRules, check_model
from trioserve.api.generation import KeepAlive
from trioserve.api.heartbeat import HEARTBEAT_HEADER, Heartbeat
from trioserve.api.openai.request_types import decode_body
from trioserve.api.responder import TENANT_HEADER, Responder
from trioserve.api.sse import KEEP_ALIVE
from trioserve.contracts.errors import InvalidRequest, UnknownModel
from trioserve.contracts.request import PRIORITY_MIN
from trioserve.http.clock_and_ids import ClockAndIds

if TYPE_CHECKING:
    from trioserve.contracts.endpoint import EndpointLoad
    from trioserve.contracts.errors import EngineFault
    from trioserve.contracts.events import AbortOutcome
    from trioserve.engine.lifecycle.load_changes import LoadChanges
    from trioserve.engine.lifecycle.step_times import StepWatch
    from trioserve.http.exchange import Exchange
    from trioserve.metrics.registry import Metrics
    from trioserve.trio_tools.deadline_keeper import Alarm

__all__ = ["EngineContext", "EngineServices", "PauseMode", "ROUTER_HEADER", "RoutersHeard", "ServedEngine"]


ROUTER_HEADER = "x-trioserve-router"
"""Request header with the name of the router."""
ROUTERS_MAX = 64  # If there are more routers, the router that was silent the longest is forgotten.
NAME_CHARACTERS_MAX = 128
FORGOTTEN_SECONDS = 60.0


class RoutersHeard:
    """Remembers when each router last asked.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._heard_at: OrderedDict[str, float] = OrderedDict()

    def note(self, name: str) -> None:
        """Remember that a router asks now.

        Args:
            name: name of the router. An empty or too long name is ignored.
        """
        if not 0 < len(name) <= NAME_CHARACTERS_MAX:
            return
        self._heard_at[name] = self._clock()
        self._heard_at.move_to_end(name)
        if len(self._heard_at) > ROUTERS_MAX:
            self._heard_at.popitem(last=False)

    def seconds_since(self) -> dict[str, float]:
        """Return the routers that have asked recently, each with the seconds since then."""
        now = self._clock()
        while self._heard_at and now - next(iter(self._heard_at.values())) > FORGOTTEN_SECONDS:
            self._heard_at.popitem(last=False)
        return {name: round(now - heard_at, 3) for name, heard_at in self._heard_at.items()}


Body = TypeVar("Body", bound=msgspec.Struct)

PauseMode = Literal["abort", "wait", "keep", "retract"]


class ServedEngine(Protocol):
    """Methods and properties that every kind of engine has."""

    @property
    def metrics(self) -> Metrics: ...
    @property
    def step_watch(self) -> StepWatch: ...
    @property
    def instance(self) -> str: ...
    @property
    def load_changes(self) -> LoadChanges: ...
    @property
    def fault(self) -> EngineFault | None: ...
    @property
    def draining(self) -> bool: ...
    @property
    def is_sleeping(self) -> bool: ...
    @property
    def reopens_at(self) -> float | None: ...
    @property
    def has_half_weights(self) -> bool: ...
    @property
    def holds_up(self) -> bool: ...
    @property
    def ready(self) -> bool: ...
    @property
    def is_paused(self) -> bool: ...
    async def pause_generation(self, mode: Literal["abort", "wait", "keep"] = "abort") -> None: ...
    def resume_generation(self) -> None: ...
    async def sleep(self, level: int = 1, mode: Literal["abort", "wait", "keep"] = "abort") -> None: ...
    async def wake_up(self) -> None: ...
    def load(self) -> EndpointLoad: ...
    def abort(
        self, request_ids: Iterable[str], /, *, owner: str | None, min_age_seconds: float = 0.0
    ) -> dict[str, AbortOutcome]: ...
    def call_at(self, at: float, function: Callable[[], None], /) -> Alarm: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineServices:
    """Parts of a server that a request to an engine of any kind needs.

    Attributes:
        clock_and_ids: the time of day, and new ids.
        rules: access rules of the operator.
        routers_heard: routers that ask for the engine's load.
        tenant_header: name of the header that names the tenant, in lower case.
    """

    clock_and_ids: ClockAndIds
    rules: AccessRules
    routers_heard: RoutersHeard
    tenant_header: str = TENANT_HEADER


class EngineContext(Responder):
    """Context of one request to a server with an engine of any kind.

    Args:
        exchange: the HTTP exchange of the request.
        services: parts of the server, shared by all requests.

    Attributes:
        priority_least: lower bound for the priority number of the engine requests. A lower number runs sooner.
    """

    engine: ServedEngine

    services: EngineServices

    def __init__(self, exchange: Exchange, services: EngineServices) -> None:
        super().__init__(exchange, services.clock_and_ids)
        self.services = services
        self.priority_least = PRIORITY_MIN

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Pause the engine.

        Args:
            mode: how to treat running requests.
            clear_cache: True: empty the prefix cache too. Ignored by engines without KV cache.

        Raises:
            InvalidRequest: the engine has no KV cache, and the mode is "retract".
        """
        if mode == "retract":
            raise InvalidRequest("mode is retract, but this engine has no KV cache to free: send in_place")
        await self.engine.pause_generation(mode)

    async def body(self, kind: type[Body]) -> Body:
        """Read and decode the request's JSON body.

        Args:
            kind: type of the body.

        Raises:
            InvalidRequest: the body is not JSON of this type.
            BodyTooLarge: the body is too large.
            BodyTimeout: the body arrives too slowly.
        """
        ignored: list[str] = []
        body = decode_body(await self.exchange.body(), kind, ignored=ignored)
        if ignored:
            self.ignored_fields = tuple(ignored)
            self.engine.metrics.ignored_request_fields_total.inc(len(ignored))
        # The bodies of Ollama's API have the property is_streamed.
        is_streamed = getattr(body, "is_streamed", getattr(body, "stream", None))
        if not is_streamed:
            self.exchange.fill_silence()
        return body

    @property
    def served_names(self) -> tuple[str, ...]:
        """Names under which a request may ask for the model."""
        raise NotImplementedError

    def model_name(self, asked: str | None) -> str:
        """Choose the model name of the response.

        Args:
            asked: model name in the request. None: the first served name.

        Raises:
            UnknownModel: this server does not serve the model.
            InvalidRequest: the request must name a model, and names none.
        """
        served = self.served_names
        check_model(self.services.rules, asked, served)
        if asked is None:
            return served[0]
        if asked not in served:
            raise UnknownModel(
                f'the model "{asked}" is not served here; served are: {", ".join(served)}', param="model"
            )
        return asked

    @property
    def store_trouble(self) -> str | None:
        """Reason why the store's disk refuses writes. None if the disk works, or if there is no store."""
        return None

    @property
    def named_tenant(self) -> str | None:
        """Tenant that the request's header names. The caller decides whether the name counts."""
        return self.exchange.headers.get(self.services.tenant_header)

    def begin_heartbeat(self) -> Heartbeat | None:
        return Heartbeat.of(self.exchange, self.engine)

    @property
    def keep_alive(self) -> KeepAlive:
        """Keep-alive comments for an event stream, which clients skip.

        A comment shows proxies that the connection is alive. If a client has vanished, sending a comment fails.
        """
        return self.keep_alive_with(KEEP_ALIVE)

    def keep_alive_with(self, comment: bytes) -> KeepAlive:
        return KeepAlive(
            lambda: self.exchange.send(comment), self.engine.call_at, self.services.rules.keep_alive_seconds
        )

    async def begin_events(
        self,
        wait: Callable[[], Awaitable[None]],
        start: Callable[[], Awaitable[None]],
        *,
        comment: bytes = KEEP_ALIVE,
    ) -> None:
        """Send the head of a streamed response when the request leaves the queue, or earlier if that takes long.

        The head contains the status, which cannot change later. So the head is sent when the request leaves the queue,
        or after a silence of `keep_alive_seconds`. In the second case, comments follow the head. A router that asks for
        heartbeats gets heartbeats instead, because the router may still retry the request at another endpoint.

        Args:
            wait: returns when the request runs. May be called again after it was cancelled.
            start: sends the head. Called once.
            comment: bytes that the reader skips.

        Raises:
            TrioserveError: raised by `wait`.
        """
        while True:
            with trio.move_on_after(self.services.rules.keep_alive_seconds):
                await wait()
                break
            if HEARTBEAT_HEADER in self.exchange.headers:
                continue
            if not self.exchange.started:
                await start()
            await self.exchange.send(comment)
        if not self.exchange.started:
            await start()
