"""One request of the engine's API: what came in, and the engine that it asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from trioserve.api.caller import AccessRules
from trioserve.api.engine_context import EngineContext, PauseMode
from trioserve.api.whole_response import PLAIN, ResponseBound, ResponseBudget, ResponseShape
from trioserve.contracts.prompt import Cut
from trioserve.http.clock_and_ids import ClockAndIds

if TYPE_CHECKING:
    from trioserve.api.operations.routers_heard import RoutersHeard
    from trioserve.contracts.deadlines import Deadlines
    from trioserve.contracts.kv_transfer_params import KVTransferParams
    from trioserve.contracts.pooling import PooledInput, PoolingParams
    from trioserve.contracts.prompt import Cut, Prompt
    from trioserve.contracts.resume import Resume
    from trioserve.contracts.sampling import SamplingParams
    from trioserve.engine.engine import Engine
    from trioserve.engine.pooled_stream import PooledStream
    from trioserve.engine.request_stream import RequestStream
    from trioserve.http.exchange import Exchange
    from trioserve.store.store import Store

__all__ = ["AsksEngine", "AsksPooling", "RequestContext", "RequestServices"]


class AsksEngine(Protocol):
    """What a body, of whichever API, may ask of the engine besides a prompt and sampling."""

    @property
    def priority(self) -> int | None: ...
    @property
    def cache_salt(self) -> str | None: ...
    @property
    def kv_transfer_params(self) -> KVTransferParams | None: ...


class AsksPooling(Protocol):
    """The same of what is pooled, with what becomes of an input that is too long (see PooledBody)."""

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
class RequestServices:
    """Parts of the server that a request for the engine needs.

    Attributes:
        engine: computes the response.
        clock_and_ids: time of day, and ids that nobody gave.
        rules: decisions of the operator.
        routers_heard: routers that ask for the engine's load.
        tenant_header: name of the header that names the tenant.
        trust_chat_template: True if a request may bring its own chat template. It runs in a sandbox, but may be slow.
        store: keeps responses, files and batches. None: nothing is kept.
        responses: bounds the memory of all whole responses together.
    """

    engine: Engine
    clock_and_ids: ClockAndIds
    rules: AccessRules
    routers_heard: RoutersHeard
    tenant_header: str
    trust_chat_template: bool
    store: Store | None
    responses: ResponseBudget


class RequestContext(EngineContext):
    """One request of the engine's API. It is answered once.

    Args:
        exchange: the request, and the way to its client.
        services: the same for all requests of a server.

    Attributes:
        streams: requests to the engine that were made for this one.
        adapter: the adapter that the request names as its model. It is known after `model_name`.
    """

    engine: Engine

    def __init__(self, exchange: Exchange, services: RequestServices) -> None:
        super().__init__(
            exchange,
            services.clock_and_ids,
            rules=services.rules,
            routers_heard=services.routers_heard,
            tenant_header=services.tenant_header,
        )
        self.engine = services.engine
        self.store = services.store
        self.trust_chat_template = services.trust_chat_template
        self.response_bound = ResponseBound(services.rules.response_bytes_max, services.responses)
        self.streams: list[RequestStream] = []
        self.adapter: str | None = None

    def release(self) -> None:
        self.response_bound.release()

    def note_large_bytes(self, change: int) -> None:
        self.engine.metrics.large_response_bytes.inc(change)

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        await self.engine.pause_generation(mode, clear_cache=clear_cache)

    @property
    def store_trouble(self) -> str | None:
        return None if self.store is None else self.store.trouble

    def model_name(self, asked: str | None) -> str:
        """As everywhere; an adapter's name has what the request asks for computed with it."""
        name = super().model_name(asked)
        self.adapter = asked if asked in self.engine.adapters.names else None
        return name

    @property
    def served_names(self) -> tuple[str, ...]:
        """Of the model, and of the adapters that are loaded."""
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
        """A request to the engine in this caller's name, to be entered with `async with`. shape: what makes its
        response larger. Raises InvalidRequest for what the caller may not ask for, also for too large a response."""
        sampling = self.response_bound.bounded(
            sampling,
            shape,
            tokens_max=self.engine.model.context_tokens_max,
            default_tokens_max=self.engine.default_sampling.max_tokens,
        )
        tenant = self.named_tenant
        self.caller.check_priority(body.priority)
        stream = self.engine.generate(
            prompt,
            sampling,
            request_id=self.request_id,
            priority=max(body.priority or 0, self.priority_least),
            cache_salt=self.caller.cache_salt(body.cache_salt, tenant),
            add_special_tokens=add_special_tokens,
            deadlines=deadlines,
            owner=self.owner,
            tenant=self.caller.tenant(tenant),
            kv_transfer=body.kv_transfer_params,
            cut=cut,
            resume=resume,
            resumable=resumable,
            keep_logprobs=keep_logprobs,
            adapter=self.adapter,
            part_of=self.span,
        )
        self.streams.append(stream)
        return stream

    def ignored_names(self) -> tuple[str, ...]:
        """Return the fields that no handler reads, and the schema keywords that the response need not keep to."""
        keywords = (name for stream in self.streams for name in stream.ignored_keywords)
        return tuple(dict.fromkeys((*super().ignored_names(), *keywords)))

    def embed(
        self,
        inputs: Sequence[PooledInput],
        params: PoolingParams,
        body: AsksPooling,
        deadlines: Deadlines,
        *,
        name_of: Callable[[int], str],
        add_special_tokens: bool = True,
        is_base64: bool | None = None,
    ) -> PooledStream:
        """The same for what is pooled. is_base64: how vectors are written; None: none are in the response."""
        if is_base64 is not None:
            pooled = self.engine.model.pooled
            size = 0 if pooled is None else pooled.embedding_size  # without it the engine refuses the request
            self.response_bound.check_vectors(len(inputs), params.dimensions or size, is_base64=is_base64)
        tenant = self.named_tenant
        self.caller.check_priority(body.priority)
        cut = None
        if body.truncate_prompt_tokens is not None:
            tokens_max = self.engine.model.pooled_tokens_max(params)
            if body.truncate_prompt_tokens > 0:
                tokens_max = min(tokens_max, body.truncate_prompt_tokens)
            cut = Cut(tokens_max, body.truncation_side or "right")
        stream = self.engine.embed(
            inputs,  # type: ignore[arg-type]  # of one kind, which no type says
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
