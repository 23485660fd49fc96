"""Context of one request to a server with an engine: the HTTP exchange, the caller, and calls of the engine.

EngineContext serves every kind of engine, and RequestContext those with a language model.

RoutersHeard has the routers that ask this server for its load. Routers that share the server's limits learn about each
other from the server, even if the routers cannot reach each other.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

import msgspec
import trio

from trioserve.api.caller import AccessRules, check_model
from trioserve.api.generation import KeepAlive
from trioserve.api.heartbeat import HEARTBEAT_HEADER, Heartbeat
from trioserve.api.openai.request_types import decode_body
from trioserve.api.responder import TENANT_HEADER, Responder
from trioserve.api.session_fields import session_name
from trioserve.api.sse import KEEP_ALIVE
from trioserve.api.whole_response import PLAIN, ResponseBound, ResponseBudget, ResponseShape
from trioserve.contracts.errors import InvalidRequest, UnknownModel
from trioserve.contracts.prompt import Cut
from trioserve.contracts.request import PRIORITY_MIN
from trioserve.engine.sessions import LiveSession, SessionName
from trioserve.http.exchange import ClockAndIds

if TYPE_CHECKING:
    from trioserve.contracts.deadlines import Deadlines
    from trioserve.contracts.endpoint import EndpointLoad
    from trioserve.contracts.errors import EngineFault
    from trioserve.contracts.events import AbortOutcome
    from trioserve.contracts.pooling import PoolingInput, PoolingParams
    from trioserve.contracts.prompt import Cut, Prompt
    from trioserve.contracts.request import KVTransferParams
    from trioserve.contracts.resume import Resume
    from trioserve.contracts.sampling import SamplingParams
    from trioserve.engine.engine import Engine
    from trioserve.engine.lifecycle.load_changes import LoadChanges
    from trioserve.engine.lifecycle.step_times import StepWatch
    from trioserve.engine.request_stream import PoolingStream, RequestStream
    from trioserve.http.exchange import Exchange
    from trioserve.metrics.registry import Metrics
    from trioserve.store.store import Store
    from trioserve.trio_tools.deadline_keeper import Alarm

__all__ = [
    "EngineFields",
    "PoolingFields",
    "EngineContext",
    "EngineServices",
    "PauseMode",
    "ROUTER_HEADER",
    "RequestContext",
    "RequestServices",
    "RoutersHeard",
    "ServedEngine",
]


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
    def blocks_admission(self) -> bool: ...
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

    Attributes:
        priority_least: lower bound for the priority number of the engine requests. A lower number runs sooner.
    """

    engine: ServedEngine
    services: EngineServices
    priority_least = PRIORITY_MIN

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

    def begin_heartbeat(self, asked: str) -> Heartbeat | None:
        return Heartbeat.begin(self.exchange, self.engine, asked)

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


class EngineFields(Protocol):
    """Fields of a body, besides prompt and sampling, that any API passes to the engine."""

    @property
    def priority(self) -> int | None: ...
    @property
    def cache_salt(self) -> str | None: ...
    @property
    def kv_transfer_params(self) -> KVTransferParams | None: ...
    @property
    def session_key(self) -> str | None: ...
    @property
    def retention_seconds(self) -> float | None: ...


class PoolingFields(Protocol):
    """Fields of a pooling request's body that any API passes to the engine. See PoolingBody."""

    @property
    def priority(self) -> int | None: ...
    @property
    def cache_salt(self) -> str | None: ...
    @property
    def truncate_prompt_tokens(self) -> int | None: ...
    @property
    def truncation_side(self) -> Literal["left", "right"] | None: ...
    @property
    def queue_timeout(self) -> float | None: ...
    @property
    def ttft_timeout(self) -> float | None: ...
    @property
    def timeout(self) -> float | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestServices(EngineServices):
    """Parts of a server that a request to an engine with a language model needs.

    Attributes:
        engine: computes the response.
        trust_chat_template: True if a request may bring its own chat template. It runs in a sandbox, but may be slow.
        store: keeps responses, files and batches. None: nothing is kept.
        responses: bounds the memory of all whole responses together.
    """

    engine: Engine
    trust_chat_template: bool
    store: Store | None
    responses: ResponseBudget


class RequestContext(EngineContext):
    """Context of one request of the engine's API, which is answered once.

    Args:
        exchange: the HTTP exchange of the request.
        services: parts of the server, shared by all requests.

    Attributes:
        streams: engine requests that this request has made.
        adapter: adapter that the request names as its model. Set by `model_name`; None: no adapter.
        session: session of the connection, see `connection_session`. None: the request may name a session.
    """

    engine: Engine
    services: RequestServices

    def __init__(self, exchange: Exchange, services: RequestServices) -> None:
        super().__init__(exchange, services)
        self.engine = services.engine
        self.response_bound = ResponseBound(services.rules.response_bytes_max, services.responses)
        self.streams: list[RequestStream] = []
        self.adapter: str | None = None
        self.session: LiveSession | None = None

    def release(self) -> None:
        self.response_bound.release()

    def note_large_bytes(self, change: int) -> None:
        self.engine.metrics.large_response_bytes.inc(change)

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        await self.engine.pause_generation(mode, clear_cache=clear_cache)

    @property
    def store_trouble(self) -> str | None:
        return None if self.services.store is None else self.services.store.trouble

    def model_name(self, asked: str | None) -> str:
        """Choose the model name of the response. If the request names an adapter, remember it for `generate`.

        Args:
            asked: model name in the request. None: the first served name.

        Raises:
            UnknownModel: this server does not serve the model.
            InvalidRequest: the request must name a model, and names none.
        """
        if asked is not None and asked in self.engine.model.served_names:
            self.adapter = None
            return asked
        name = super().model_name(asked)
        self.adapter = asked
        return name

    @property
    def served_names(self) -> tuple[str, ...]:
        """Names of the model and of the loaded adapters."""
        return (*self.engine.model.served_names, *self.engine.adapters.names)

    def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        body: EngineFields,
        deadlines: Deadlines,
        *,
        add_special_tokens: bool = True,
        cut: Cut | None = None,
        resume: Resume | None = None,
        resumable: bool = False,
        keep_logprobs: bool = False,
        tool_choice: Literal["none"] | None = None,
        shape: ResponseShape = PLAIN,
    ) -> RequestStream:
        """Make an engine request in this caller's name. The caller of this method must enter the request with `async
        with`.

        Args:
            prompt: text, messages or token ids.
            sampling: sampling parameters of the request.
            body: priority, cache salt, KV transfer and session of the request.
            deadlines: deadlines of the request.
            add_special_tokens: True: tokenization adds the model's special tokens.
            cut: how to shorten a prompt that is too long. None: such a prompt is refused.
            resume: known tokens of a response that continues here. None: a new response.
            resumable: True: the response may continue at another server.
            keep_logprobs: True: a partial result includes log probabilities.
            tool_choice: "none": the tools of the prompt restrict nothing, and a call is text. None: `sampling` contains
                what the tools demand.
            shape: properties of the response that make it larger.

        Raises:
            InvalidRequest: the caller may not ask for this, or the response could be too large.
        """
        sampling = self.response_bound.bounded(
            sampling,
            shape,
            tokens_max=self.engine.model.context_tokens_max,
            default_tokens_max=self.engine.default_sampling.max_tokens,
        )
        named_tenant, owner = self.named_tenant, self.caller.owner
        if body.priority is not None:
            self.caller.check_priority(body.priority)
        tenant = self.caller.tenant(named_tenant)
        named = session_name(self.exchange.headers, body, identity=tenant, owner=owner)
        if self.session is not None and named is not None and named.retention is not None:
            self.session.retain(named.retention)
        stream = self.engine.generate(
            prompt,
            sampling,
            request_id=self.request_id,
            priority=max(body.priority or 0, self.priority_least),
            cache_salt=self.caller.cache_salt(body.cache_salt, named_tenant),
            add_special_tokens=add_special_tokens,
            deadlines=deadlines,
            owner=owner,
            tenant=tenant,
            kv_transfer=body.kv_transfer_params,
            cut=cut,
            resume=resume,
            resumable=resumable,
            keep_logprobs=keep_logprobs,
            tool_choice=tool_choice,
            adapter=self.adapter,
            session=self.session or named,
            part_of=self.span,
        )
        self.streams.append(stream)
        return stream

    @contextmanager
    def connection_session(self) -> Iterator[LiveSession]:
        """Open a session of this caller that lasts as long as its connection. Each request of the connection is a turn.

        Set `session` of a context to make its requests turns. Leaving is one synchronous call: it aborts the turns that
        run, and ends the session.

        Raises:
            Overloaded: too many sessions are open.
        """
        identity = self.caller.tenant(self.named_tenant)
        self.session = self.engine.sessions.open(SessionName(name="", identity=identity, owner=self.owner))
        try:
            yield self.session
        finally:
            self.session.end()

    def ignored_names(self) -> tuple[str, ...]:
        """List the body's ignored fields, and the schema keywords that the response may violate."""
        keywords = (name for stream in self.streams for name in stream.ignored_keywords)
        return tuple(dict.fromkeys((*super().ignored_names(), *keywords)))

    def embed(
        self,
        inputs: Sequence[PoolingInput],
        params: PoolingParams,
        body: PoolingFields,
        deadlines: Deadlines,
        *,
        name_of: Callable[[int], str],
        add_special_tokens: bool = True,
        is_base64: bool | None = None,
    ) -> PoolingStream:
        """Make an engine request for vectors or scores in this caller's name. The caller of this method must enter the
        request with `async with`.

        Args:
            inputs: all texts, all token ids, or all pairs.
            params: kind and size of the result.
            body: priority, cache salt and truncation of the request.
            deadlines: deadlines of the request.
            name_of: names the field of the input with this index, for error messages.
            add_special_tokens: True: tokenization adds the model's special tokens.
            is_base64: True: the response has vectors in base64. False: as numbers. None: it has no vectors.

        Raises:
            InvalidRequest: the caller may not ask for this, or the response could be too large.
        """
        if is_base64 is not None:
            pooled = self.engine.model.pooled
            # If the model has no pooling, the engine refuses the request.
            size = 0 if pooled is None else pooled.embedding_size
            self.response_bound.check_vectors(len(inputs), params.dimensions or size, is_base64=is_base64)
        tenant = self.named_tenant
        self.caller.check_priority(body.priority)
        cut = None
        if body.truncate_prompt_tokens is not None:
            tokens_max = self.engine.model.pooling_tokens_max(params)
            if body.truncate_prompt_tokens > 0:
                tokens_max = min(tokens_max, body.truncate_prompt_tokens)
            cut = Cut(tokens_max, body.truncation_side or "right")
        stream = self.engine.embed(
            inputs,  # type: ignore[arg-type]  # all inputs have the same kind, which no type expresses
            params,
            request_id=self.request_id,
            priority=max(body.priority or 0, self.priority_least),
            cache_salt=self.caller.cache_salt(body.cache_salt, tenant),
            add_special_tokens=add_special_tokens,
            cut=cut,
            name_of=name_of,
            deadlines=deadlines,
            owner=self.owner,
            tenant=self.caller.tenant(tenant),
            adapter=self.adapter,
            part_of=self.span,
        )
        self.streams.append(stream)
        return stream
