"""One request to a server with an engine, whatever that makes: what operators and routers ask is the same of all."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
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
    from trioserve.api.operations.routers_heard import RoutersHeard
    from trioserve.contracts.endpoint import EndpointLoad
    from trioserve.contracts.errors import EngineFault
    from trioserve.contracts.events import AbortOutcome
    from trioserve.engine.shell.load_changes import LoadChanges
    from trioserve.engine.shell.step_watch import StepWatch
    from trioserve.http.exchange import Exchange
    from trioserve.metrics.registry import Metrics
    from trioserve.trio_tools.deadline_keeper import Alarm

__all__ = ["EngineContext", "PauseMode", "ServedEngine"]

Body = TypeVar("Body", bound=msgspec.Struct)

PauseMode = Literal["abort", "wait", "keep", "retract"]


class ServedEngine(Protocol):
    """What is asked of every engine, as Engine has it."""

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


class EngineContext(Responder):
    """rules: what the operator has decided. routers_heard: which routers ask for its load. tenant_header: whose values
    tell tenants apart. priority_least: no request of this one runs with a better priority, whatever its body says."""

    engine: ServedEngine

    def __init__(
        self,
        exchange: Exchange,
        clock_and_ids: ClockAndIds,
        *,
        rules: AccessRules,
        routers_heard: RoutersHeard,
        tenant_header: str = TENANT_HEADER,
    ) -> None:
        super().__init__(exchange, clock_and_ids)
        self.rules = rules
        self.routers_heard = routers_heard
        self.priority_least = PRIORITY_MIN
        self._tenant_header = tenant_header

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Have the engine pause. clear_cache: nothing to do where there is no KV."""
        if mode == "retract":
            raise InvalidRequest("mode is retract, and there is no KV that could be given back: it pauses in_place")
        await self.engine.pause_generation(mode)

    async def body(self, kind: type[Body]) -> Body:
        """The request's JSON, checked. Raises InvalidRequest, BodyTooLarge, BodyTimeout."""
        ignored: list[str] = []
        body = decode_body(await self.exchange.body(), kind, ignored=ignored)
        if ignored:
            self.ignored_fields = tuple(ignored)
            self.engine.metrics.ignored_request_fields_total.inc(len(ignored))
        is_streamed = getattr(body, "is_streamed", getattr(body, "stream", None))  # Ollama's bodies have the first
        if not is_streamed:
            self.exchange.fill_silence()
        return body

    @property
    def served_names(self) -> tuple[str, ...]:
        """What a request may call the model."""
        raise NotImplementedError

    def model_name(self, asked: str | None) -> str:
        """The name to answer with: the one asked for, or else the first that is served. Raises UnknownModel, and
        InvalidRequest where one has to be named."""
        served = self.served_names
        check_model(self.rules, asked, served)
        if asked is None:
            return served[0]
        if asked not in served:
            raise UnknownModel(
                f'the model "{asked}" is not served here; served are: {", ".join(served)}', param="model"
            )
        return asked

    @property
    def store_trouble(self) -> str | None:
        """Why the store's disk takes nothing; None: it takes all, or there is no store."""
        return None

    @property
    def named_tenant(self) -> str | None:
        """Whose this is, as the request says; what that counts for, the caller tells."""
        return self.exchange.headers.get(self._tenant_header)

    def begin_heartbeat(self) -> Heartbeat | None:
        return Heartbeat.of(self.exchange, self.engine)

    @property
    def keep_alive(self) -> KeepAlive:
        """A comment, which clients skip: proxies see that the connection lives, and a client that has vanished is
        noticed by what it does not take."""
        return self.keep_alive_with(KEEP_ALIVE)

    def keep_alive_with(self, comment: bytes) -> KeepAlive:
        return KeepAlive(lambda: self.exchange.send(comment), self.engine.call_at, self.rules.keep_alive_seconds)

    async def begin_events(
        self,
        wait: Callable[[], Awaitable[None]],
        start: Callable[[], Awaitable[None]],
        *,
        comment: bytes = KEEP_ALIVE,
    ) -> None:
        """Send the head of a streamed response when the request leaves the queue, or earlier if that takes long.

        The head fixes the status. So it waits for the queue as long as silence is allowed, and comments follow it. A
        router that asks for heartbeats gets those instead: it may still send the request elsewhere.

        Args:
            wait: returns when the request runs. May be called again after it was cancelled.
            start: sends the head. Called once.
            comment: what its reader skips.

        Raises:
            TrioserveError: what `wait` raises.
        """
        while True:
            with trio.move_on_after(self.rules.keep_alive_seconds):
                await wait()
                break
            if HEARTBEAT_HEADER in self.exchange.headers:
                continue
            if not self.exchange.started:
                await start()
            await self.exchange.send(comment)
        if not self.exchange.started:
            await start()
