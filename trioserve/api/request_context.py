"""One request of the engine's API: what came in, and the engine that it asks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

import msgspec
import trio

from trioserve.api.caller import AccessRules, check_model
from trioserve.api.generation import KeepAlive
from trioserve.api.openai.request_types import decode_body
from trioserve.api.responder import Responder
from trioserve.api.sse import KEEP_ALIVE
from trioserve.contracts.errors import UnknownModel
from trioserve.contracts.prompt import Cut
from trioserve.contracts.request import PRIORITY_MIN
from trioserve.http.clock_and_ids import ClockAndIds

if TYPE_CHECKING:
    from trioserve.api.batches.batches import Batches
    from trioserve.api.operations.routers_heard import RoutersHeard
    from trioserve.api.page.page import Page
    from trioserve.api.responses.background import BackgroundResponses
    from trioserve.api.streams.detached_streams import DetachedStreams
    from trioserve.api.streams.router_streams import RouterStreams
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

__all__ = ["AsksEngine", "AsksPooling", "RequestContext"]


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


Body = TypeVar("Body", bound=msgspec.Struct)


class RequestContext(Responder):
    """Handlers get one of these, and answer it once.

    trust_chat_template: the request may bring its own chat template. It runs sandboxed, but may still take long.
    streams: those that it has made.
    store: what outlives its request is kept there; None: nothing is. background: responses that go on by themselves.
    batches: those that have not ended; batch_endpoints: what may be asked in one. uploads: of forms that are taken
    apart in threads.
    rules: what the operator has decided.
    priority_least: no request of this one runs with a better priority, whatever its body says.
    detached: streams that go on without a client. router_streams: those that go on without the router that asked.
    routers_heard: which routers ask for its load. page: the live page.
    """

    def __init__(
        self,
        exchange: Exchange,
        engine: Engine,
        clock_and_ids: ClockAndIds,
        *,
        trust_chat_template: bool,
        tenant_header: str,
        store: Store | None,
        background: BackgroundResponses,
        batches: Batches,
        batch_endpoints: tuple[str, ...],
        uploads: trio.CapacityLimiter,
        detached: DetachedStreams,
        router_streams: RouterStreams,
        routers_heard: RoutersHeard,
        rules: AccessRules,
        page: Page,
    ) -> None:
        super().__init__(exchange, clock_and_ids)
        self.page = page
        self.engine = engine
        self.rules = rules
        self.store = store
        self.background = background
        self.batches = batches
        self.batch_endpoints = batch_endpoints
        self.uploads = uploads
        self.priority_least = PRIORITY_MIN
        self.detached = detached
        self.router_streams = router_streams
        self.routers_heard = routers_heard
        self._tenant_header = tenant_header
        self.trust_chat_template = trust_chat_template
        self.streams: list[RequestStream] = []
        self.adapter: str | None = None  # that the request's model is; known when model_name was asked

    async def body(self, kind: type[Body]) -> Body:
        """The request's JSON, checked. Raises InvalidRequest, BodyTooLarge, BodyTimeout."""
        return decode_body(await self.exchange.body(), kind)

    def model_name(self, asked: str | None) -> str:
        """The name to answer with: the one asked for, or else the first that is served. An adapter's name has what the
        request asks for computed with it. Raises UnknownModel, and InvalidRequest where one has to be named."""
        served = self.served_names
        check_model(self.rules, asked, served)
        if asked is None:
            return served[0]
        self.adapter = asked if asked in self.engine.adapters.names else None
        if asked not in served:
            raise UnknownModel(
                f'the model "{asked}" is not served here; served are: {", ".join(served)}', param="model"
            )
        return asked

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
    ) -> RequestStream:
        """A request to the engine in this caller's name, to be entered with `async with`. Raises InvalidRequest for
        what the caller may not ask for."""
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
            adapter=self.adapter,
            part_of=self.span,
        )
        self.streams.append(stream)
        return stream

    def embed(
        self,
        inputs: Sequence[PooledInput],
        params: PoolingParams,
        body: AsksPooling,
        deadlines: Deadlines,
        *,
        name_of: Callable[[int], str],
        add_special_tokens: bool = True,
    ) -> PooledStream:
        """The same for what is pooled."""
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

    @property
    def named_tenant(self) -> str | None:
        """Whose this is, as the request says; what that counts for, the caller tells."""
        return self.exchange.headers.get(self._tenant_header)

    @property
    def keep_alive(self) -> KeepAlive:
        """A comment, which clients skip: proxies see that the connection lives, and a client that has vanished is
        noticed by what it does not take."""
        return KeepAlive(lambda: self.exchange.send(KEEP_ALIVE), self.engine.call_at)
