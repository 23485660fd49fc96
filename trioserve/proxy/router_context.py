"""One request of the router's API: what came in, and the router that it goes through."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, quote, urlencode

from trioserve.api.caller import AccessRules
from trioserve.api.request_end import outcome_of_error
from trioserve.api.responder import TENANT_HEADER, Responder
from trioserve.contracts.deadlines import Deadlines
from trioserve.contracts.endpoint import CONTINUATION_BYTES_MAX, DISAGGREGATED_PROMPT_TOKENS_MIN, EndpointId, Stage
from trioserve.contracts.tracing import NO_SPAN, Span
from trioserve.http.clock_and_ids import ClockAndIds
from trioserve.proxy.continuation import Continuation, LiveStreams
from trioserve.proxy.kept_objects import KeptObjects
from trioserve.proxy.peers.client_events import ClientEvents, NotTheSame
from trioserve.proxy.peers.kept_stream import Stream
from trioserve.proxy.peers.not_the_same import not_the_same
from trioserve.proxy.peers.processes import OneProcess
from trioserve.proxy.peers.retries import NoPeers
from trioserve.trio_tools.fair_places import FairPlaces

if TYPE_CHECKING:
    from trioserve.admission.dispatch import AdmissionScope
    from trioserve.api.page.page import Page
    from trioserve.http.exchange import Exchange, HeaderFields
    from trioserve.metrics.registry import Metrics
    from trioserve.proxy.fleet import Fleet
    from trioserve.proxy.prompt_blocks import PromptBlocks
    from trioserve.proxy.relay import Refused
    from trioserve.proxy.routed_form import RoutedForm

__all__ = ["ENDPOINT_PARAMETER", "RouterContext", "RoutingRules"]

PATH_CHARACTERS = "/:@!$&'()*+,;=~"  # that stand for themselves in a path (RFC 3986, 3.3)
ENDPOINT_PARAMETER = "id"
"""In the query of a request: the one endpoint it may go to."""


class RoutingRules:
    """How requests are read. deadlines: of those that bring none; deadlines_max: what any may have. tenant_header,
    session_header: whose values tell tenants and sessions apart; which callers' tenants, see Caller.
    passes_authorization: endpoints get the client's Authorization header, since no key of the router stands in it.
    disaggregated_prompt_tokens_min: a prompt with fewer tokens, as estimated from its length, is computed where its
    response is. continuation_bytes_max: of what is kept of a stream, so that it can go on elsewhere; 0: none does.
    """

    def __init__(
        self,
        *,
        deadlines: Deadlines | None = None,
        deadlines_max: Deadlines | None = None,
        tenant_header: str = TENANT_HEADER,
        session_header: str = "x-session-id",
        passes_authorization: bool = True,
        disaggregated_prompt_tokens_min: int = DISAGGREGATED_PROMPT_TOKENS_MIN,
        continuation_bytes_max: int = CONTINUATION_BYTES_MAX,
    ) -> None:
        self.deadlines = deadlines or Deadlines()
        self.deadlines_max = deadlines_max or Deadlines()
        self.tenant_header = tenant_header.lower()
        self.session_header = session_header
        self.passes_authorization = passes_authorization
        self.disaggregated_prompt_tokens_min = disaggregated_prompt_tokens_min
        self.continuation_bytes_max = continuation_bytes_max


class RouterContext(Responder):
    """Handlers get one of these, and answer it once.

    peers: what they mean for streams. naming: names the blocks of prompts; None where no policy asks for it. kept:
    where what endpoints keep is.
    path_told: what endpoints see instead of the path; None: the path.
    streams: those that may be continued. continuation: of this one, if it may.
    admission: its place or lease, once it has one. endpoint: where it went last. prefill_endpoint: which other one has
    computed its prompt.
    page: the live page. processes: the other ones of this router.
    refused: how an endpoint refused it, as long as another one may see that otherwise.
    leg: the span of what is asked of an endpoint now, where the request is traced.
    forms: how many large forms are read at a time. form: the body, if it is one.
    stream: of a streamed response, what becomes of it when this router dies. client_events: what its client gets of it.
    """

    def __init__(
        self,
        exchange: Exchange,
        fleet: Fleet,
        rules: RoutingRules,
        metrics: Metrics,
        clock_and_ids: ClockAndIds,
        *,
        more_metrics: Callable[[], bytes] = bytes,
        naming: PromptBlocks | None = None,
        kept: KeptObjects | None = None,
        streams: LiveStreams | None = None,
        access: AccessRules | None = None,
        peers: NoPeers | None = None,
        page: Page | None = None,
        processes: OneProcess | None = None,
        forms: FairPlaces,
    ) -> None:
        super().__init__(exchange, clock_and_ids)
        self.processes = processes or OneProcess()
        self.forms = forms
        self.form: RoutedForm | None = None
        self.page = page
        self.fleet = fleet
        self.rules = rules
        self.metrics = metrics
        self.more_metrics = more_metrics
        self.naming = naming
        self.kept = kept or KeptObjects()
        self.streams = streams or LiveStreams()
        self.access = access or AccessRules()
        self.continuation: Continuation | None = None
        self.peers = peers or NoPeers()
        self.path_told: str | None = None
        self.admission: AdmissionScope | None = None
        self.endpoint: EndpointId | None = None
        self.prefill_endpoint: EndpointId | None = None
        self.refused: Refused | None = None
        self.leg: Span = NO_SPAN
        self.stream = Stream()
        self.client_events = ClientEvents()
        self._held_head: tuple[int, HeaderFields] | None = None

    def query(self, name: str) -> str | None:
        return next((value for key, value in parse_qsl(self.exchange.query) if key == name), None)

    @property
    def named_tenant(self) -> str | None:
        """Whose the request is, as it says itself; what that counts for is the caller's to say."""
        return self.exchange.headers.get(self.rules.tenant_header)

    @property
    def target(self) -> str:
        """Path and query as an endpoint is to see them."""
        rest = [(key, value) for key, value in parse_qsl(self.exchange.query) if key != ENDPOINT_PARAMETER]
        return quote(self.path_told or self.exchange.path, safe=PATH_CHARACTERS) + (
            "?" + urlencode(rest) if rest else ""
        )

    @contextmanager
    def asking(self, id: EndpointId, stage: Stage | None) -> Iterator[None]:
        """The endpoint is asked inside: a part of the trace, and whose part its own work is."""
        if self.span is NO_SPAN:
            yield
            return
        address = self.fleet.remote(id).address
        attributes = {
            "http.request.method": self.exchange.method,
            "server.address": address.host,
            "server.port": address.port,
            "trioserve.endpoint": id,
            **({} if stage is None else {"trioserve.stage": stage.value}),
        }
        name = self.exchange.method if stage is None else f"{self.exchange.method} {stage.value}"
        self.leg = self.span.child(name, kind="client", attributes=attributes)
        error: str | None = None
        try:
            yield
        except Exception as failure:
            error = type(failure).__name__
            raise
        finally:
            self.leg.end(error)
            self.leg = NO_SPAN

    @contextmanager
    def continued(self, continuation: Continuation | None) -> Iterator[Continuation | None]:
        """What is kept of its response is kept inside."""
        self.continuation = continuation
        if continuation is None:
            yield None
            return
        with self.streams.kept(continuation):
            yield continuation

    async def start(self, status: int, headers: HeaderFields, *, is_events: bool) -> None:
        """Begin a response that comes from elsewhere, with its headers."""
        self._streaming = is_events
        if is_events:
            headers = self.client_events.head(headers)
        if is_events and self.client_events.is_behind:
            self._held_head = status, headers  # it may turn out to be another response
            return
        self.status = status
        await self.exchange.start(status, headers)

    async def send_events(self, events: bytes) -> None:
        """Of these events, which are whole, those that the client has not got yet. Raises Refusal (409) if it has got
        another response so far."""
        try:
            told = self.client_events.of(events)
        except NotTheSame as difference:
            raise not_the_same(difference) from None
        if not self.client_events.is_behind:
            await self._release_head()
        if told:
            await self.exchange.send(told)

    async def finish(self, last: bytes = b"") -> None:
        """last: an error that the stream ends with; it is the client's, wherever that is. Raises Refusal as send_events
        does, for a stream that ends before it comes to where the client is."""
        last = last or self.client_events.error
        if self.client_events.is_behind and not last:
            raise not_the_same("it ends before it comes to where the client is")
        await self._release_head()
        await super().finish(self.client_events.last(last))

    async def _release_head(self) -> None:
        held, self._held_head = self._held_head, None
        if held is not None:
            self.status = held[0]
            await self.exchange.start(*held)

    def note_error(self, status: int, reason: str | None) -> None:
        """Note that the response is an endpoint's error, passed on as it came, or ends with one."""
        self.reason = reason or f"status_{status}"
        self.outcome = outcome_of_error(status, reason, has_begun=self.exchange.started)

    async def respond(self, status: int, headers: HeaderFields, body: bytes) -> None:
        """The same, whole."""
        self.status = status
        await self.exchange.respond(status, headers, body)
