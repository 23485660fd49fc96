"""One request of the engine's API: what came in, and the engine that it asks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec

from trioserve.api.generation import KeepAlive
from trioserve.api.openai.request_types import decode_body
from trioserve.api.responder import Responder
from trioserve.api.sse import KEEP_ALIVE
from trioserve.contracts.errors import UnknownModel
from trioserve.http.clock_and_ids import ClockAndIds

if TYPE_CHECKING:
    from trioserve.api.responses.background import BackgroundResponses
    from trioserve.contracts.deadlines import Deadlines
    from trioserve.contracts.kv_transfer_params import KVTransferParams
    from trioserve.contracts.prompt import Prompt
    from trioserve.contracts.sampling import SamplingParams
    from trioserve.engine.engine import Engine
    from trioserve.engine.request_stream import RequestStream
    from trioserve.http.exchange import Exchange
    from trioserve.store.store import Store

__all__ = ["AsksEngine", "RequestContext"]


class AsksEngine(Protocol):
    """What a body, of whichever API, may ask of the engine besides a prompt and sampling."""

    @property
    def priority(self) -> int | None: ...
    @property
    def cache_salt(self) -> str | None: ...
    @property
    def kv_transfer_params(self) -> KVTransferParams | None: ...


Body = TypeVar("Body", bound=msgspec.Struct)


class RequestContext(Responder):
    """Handlers get one of these, and answer it once.

    trust_chat_template: the request may bring its own chat template. It runs sandboxed, but may still take long.
    streams: those that it has made.
    store: what outlives its request is kept there; None: nothing is. background: responses that go on by themselves.
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
    ) -> None:
        super().__init__(exchange, clock_and_ids)
        self.engine = engine
        self.store = store
        self.background = background
        self._tenant_header = tenant_header
        self.trust_chat_template = trust_chat_template
        self.streams: list[RequestStream] = []

    async def body(self, kind: type[Body]) -> Body:
        """The request's JSON, checked. Raises InvalidRequest, BodyTooLarge, BodyTimeout."""
        return decode_body(await self.exchange.body(), kind)

    def model_name(self, asked: str | None) -> str:
        """The name to answer with: the one asked for, or else the first that is served. Raises UnknownModel."""
        served = self.engine.model.served_names
        if asked is None:
            return served[0]
        if asked not in served:
            raise UnknownModel(
                f'the model "{asked}" is not served here; served are: {", ".join(served)}', param="model"
            )
        return asked

    def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        body: AsksEngine,
        deadlines: Deadlines,
        *,
        add_special_tokens: bool = True,
    ) -> RequestStream:
        """A request to the engine in this caller's name, to be entered with `async with`. Raises InvalidRequest for
        what the caller may not ask for."""
        tenant = self.exchange.headers.get(self._tenant_header)
        self.caller.check_priority(body.priority)
        stream = self.engine.generate(
            prompt,
            sampling,
            request_id=self.request_id,
            priority=body.priority or 0,
            cache_salt=self.caller.cache_salt(body.cache_salt, tenant),
            add_special_tokens=add_special_tokens,
            deadlines=deadlines,
            owner=self.owner,
            tenant=self.caller.tenant(tenant),
            kv_transfer=body.kv_transfer_params,
        )
        self.streams.append(stream)
        return stream

    @property
    def keep_alive(self) -> KeepAlive:
        """A comment, which clients skip: proxies see that the connection lives, and a client that has vanished is
        noticed by what it does not take."""
        return KeepAlive(lambda: self.exchange.send(KEEP_ALIVE), self.engine.call_at)
