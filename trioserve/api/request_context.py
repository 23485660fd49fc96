"""Context of one request of the engine's API: the HTTP exchange, the caller, and calls of the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from trioserve.api.engine_context import EngineContext, EngineServices, PauseMode
from trioserve.api.session_fields import session_name
from trioserve.api.whole_response import PLAIN, ResponseBound, ResponseBudget, ResponseShape
from trioserve.contracts.prompt import Cut
from trioserve.engine.sessions import LiveSession, SessionName

if TYPE_CHECKING:
    from trioserve.contracts.deadlines import Deadlines
    from trioserve.contracts.pooling import PoolingInput, PoolingParams
    from trioserve.contracts.prompt import Cut, Prompt
    from trioserve.contracts.request import KVTransferParams
    from trioserve.contracts.resume import Resume
    from trioserve.contracts.sampling import SamplingParams
    from trioserve.engine.engine import Engine
    from trioserve.engine.request_stream import PoolingStream, RequestStream
    from trioserve.http.exchange import Exchange
    from trioserve.store.store import Store

__all__ = ["AsksEngine", "AsksPooling", "RequestContext", "RequestServices"]


class AsksEngine(Protocol):
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


class AsksPooling(Protocol):
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
        body: AsksEngine,
        deadlines: Deadlines,
        *,
        add_special_tokens: bool = True,
        cut: Cut | None = None,
        resume: Resume | None = None,
        resumable: bool = False,
        keep_logprobs: bool = False,
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
        named_tenant = self.named_tenant
        self.caller.check_priority(body.priority)
        tenant, owner = self.caller.tenant(named_tenant), self.owner
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
        body: AsksPooling,
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
