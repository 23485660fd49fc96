"""How one streamed request goes on at another endpoint when its own stops: what that is told, and what the client is.

Which requests may, where and how often, is for the router core to say; the stream itself is in continued_stream.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import quote

import msgspec
import trio

from trioserve.admission.dispatch import Fault, Withdrawn
from trioserve.contracts.endpoint import EndpointId, RoutedRequest
from trioserve.contracts.errors import EndpointLost, RequestPoisoned
from trioserve.proxy.continued_stream import ContinuedStream, WhyNot
from trioserve.proxy.foreign_stream import TOKEN_IDS, ForeignStream, foreign_body
from trioserve.proxy.remote_endpoint import EndpointSilent, Unreachable
from trioserve.proxy.response_shape import InvalidAnswer
from trioserve.proxy.routed_body import TRANSFER_PARAMS

if TYPE_CHECKING:
    from trioserve.admission.dispatch import AdmissionScope
    from trioserve.metrics.registry import Metrics
    from trioserve.proxy.remote_endpoint import RemoteResponse
    from trioserve.proxy.routed_body import RoutedBody
    from trioserve.proxy.router_context import RouterContext

__all__ = [
    "RESUMABLE_HEADER",
    "DEATH_CODES",
    "RESUME_HEADER",
    "CannotGoOn",
    "Continuation",
    "GivenAway",
    "LiveStreams",
    "NotResumed",
    "StreamFailed",
    "ends_on_purpose",
]

logger = logging.getLogger(__name__)

CONTINUED_PATHS = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/api/chat", "/api/generate"}
)
RESUME = "resume"
END_THINKING = "end_thinking"

RESUMABLE_HEADER = "x-trioserve-resumable"
RESUME_HEADER = "x-trioserve-resume"
FINGERPRINT_HEADER = "x-trioserve-fingerprint"
EXACT = "+exact"  # behind a fingerprint: where it is the same, so are the tokens
CONTINUED = "x-trioserve-continued"

# Of errors in a stream, those that say nothing of the request: the server leaves, or broke. Whatever else a stream ends
# with, somebody has ended it on purpose, or it was the client's fault.
LEAVING_CODES = frozenset({"draining", "server_stopping", "service_unavailable_error"})
BROKEN_CODES = frozenset(
    {
        "api_error",
        "endpoint_lost",
        "engine_fault",
        "internal_error",
        "internal_server_error",
        "no_endpoint",
        "request_failed",
        "server_error",
        "step_overdue",
    }
)


# Of these, those that end all requests of the endpoint, and not one for its own sake.
DEATH_CODES = frozenset({"endpoint_lost", "engine_fault", "step_overdue"})


class StreamFailed(EndpointLost):
    """The endpoint ended its stream with an error that is its own fault. event: as it came."""

    def __init__(self, id: EndpointId, code: str, event: bytes) -> None:
        super().__init__(f'the endpoint "{id}" ended its response with an error: {code}')
        self.code = code
        self.event = event


class GivenAway(EndpointLost):
    """The endpoint was asked to let another one go on. said: what that one is to be told."""

    def __init__(self, id: EndpointId, said: bytes) -> None:
        super().__init__(f'the endpoint "{id}" gave the request away')
        self.said = said


class NotResumed(EndpointLost):
    """The endpoint does not go on where another one stopped. It would have begun anew, or refused."""


class CannotGoOn(EndpointLost):
    """What was begun cannot be gone on with, whoever is asked. reason: in a word."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


def ends_on_purpose(code: str) -> bool:
    """Whether a stream that ends with this error is not to go on elsewhere."""
    return code not in LEAVING_CODES and code not in BROKEN_CODES


class LiveStreams:
    """Of one router, those that may be continued; what of them is kept."""

    def __init__(self) -> None:
        self._live: set[Continuation] = set()

    @contextmanager
    def kept(self, continuation: Continuation) -> Iterator[None]:
        self._live.add(continuation)
        try:
            yield
        finally:
            self._live.discard(continuation)

    @property
    def kept_bytes(self) -> int:
        return sum(continuation.stream.kept_bytes for continuation in self._live)


class Continuation:
    """Of one request whose response may go on elsewhere. stream: what its client has. shows_ids: the client has asked
    for what the router asks for, and gets it.

    made_id: of what endpoints keep, once it is known.
    """

    def __init__(self, stream: ContinuedStream, metrics: Metrics, *, choice_count: int, shows_ids: bool) -> None:
        self.stream: ContinuedStream | ForeignStream = stream
        self.shows_ids = shows_ids
        self.made_id: str | None = None
        self._choice_count = choice_count
        self._own_stream = stream
        self._foreign_fields: dict[str, msgspec.Raw] | None = None  # of a request that could go on as a completion
        self._metrics = metrics
        self._fingerprint: str | None = None
        self._resume: dict[str, object] | None = None
        self._params: bytes | None = None
        self._broke_at: float | None = None
        self._reason = ""
        self._is_thought_ended = False

    @classmethod
    def of(cls, context: RouterContext, body: RoutedBody, request: RoutedRequest) -> Continuation | None:
        """None: its response is not a stream, or may be at one endpoint only."""
        bytes_max = context.rules.continuation_bytes_max
        if not body.stream or not bytes_max or request.pinned is not None:
            return None
        if context.exchange.path not in CONTINUED_PATHS:
            return None
        shows_ids = context.exchange.headers.get(RESUMABLE_HEADER) == "1" or context.client_events.shows_ids
        stream = ContinuedStream(
            choice_count=request.sequences,
            bytes_max=bytes_max,
            shows_ids=shows_ids,
            known=bytes(body.resume) or None,
        )
        return cls(stream, context.metrics, choice_count=request.sequences, shows_ids=shows_ids)

    # --- what the next endpoint is told ---

    def fields(self, context: RouterContext, raw: bytes) -> dict[str, object]:
        """Of the body for the endpoint of its lease, in place of its own. raw: as the client sent it."""
        if self._resume is None:
            is_foreign = context.endpoint is not None and context.fleet.tells_token_ids(context.endpoint)
            self._foreign_fields = None
            if is_foreign:
                self._foreign_fields = foreign_body(context.exchange.path, raw, choice_count=self._choice_count)
            return {} if self._foreign_fields is None else {TOKEN_IDS: True}
        ended = {END_THINKING: True} if self._is_thought_ended else {}
        params, self._params = self._params, None  # for the first that is asked; another one computes
        given = {} if params is None else {TRANSFER_PARAMS: msgspec.Raw(params)}
        return {RESUME: {**self._resume, **ended}, **given}

    def note_reasoning_ended(self) -> None:
        """By hand."""
        self._is_thought_ended = True

    def know(self, resume: bytes) -> None:
        """Its client has that already: the field `resume`, as JSON."""
        self._own_stream.know(resume)

    def completion(self) -> dict[str, object] | None:
        """The whole body for /v1/completions, where that is how another endpoint goes on."""
        return self._resume if isinstance(self.stream, ForeignStream) else None

    def check_endpoint(self, context: RouterContext, id: EndpointId) -> None:
        """To be asked before a request is sent. Raises NotResumed where the endpoint could not go on."""
        if self.completion() is not None and not context.fleet.tells_token_ids(id):
            raise NotResumed(f'the endpoint "{id}" does not go on by token ids')

    # --- what comes back ---

    def begin(self, context: RouterContext, id: EndpointId, response: RemoteResponse) -> bytes:
        """An endpoint begins to answer; what the client is to be told of that. Raises NotResumed if it does not go on
        where the last one stopped."""
        told, fingerprint = response.header(RESUME_HEADER), response.header(FINGERPRINT_HEADER)
        if self._resume is None:
            self._fingerprint, self.stream = fingerprint, self._own_stream
            if told is None and self._foreign_fields is not None:
                path, bytes_max = context.exchange.path, context.rules.continuation_bytes_max
                self.stream = ForeignStream(path, self._foreign_fields, bytes_max=bytes_max)
        elif told is None and not isinstance(self.stream, ForeignStream):
            raise NotResumed(f'the endpoint "{id}" does not go on where another one stopped')
        if isinstance(self.stream, ForeignStream):
            self.stream.begin()
        else:
            self.stream.begin(told)
        if self._resume is None:
            return b""
        if fingerprint is None or fingerprint != self._fingerprint or not fingerprint.endswith(EXACT):
            return f": {CONTINUED} endpoint={quote(id, safe='/:[]')} tokens=not-promised\n\n".encode()
        return b""

    def check_refusal(self, id: EndpointId, response: RemoteResponse, code: str | None) -> None:
        """An endpoint that was to go on has answered with an error that nobody is to blame for. Raises CannotGoOn, or
        NotResumed if another one may."""
        if self._resume is None:
            return
        said = f'the endpoint "{id}" does not go on with this response: status {response.status}, {code}'
        if response.status == 404:
            raise NotResumed(said)
        raise CannotGoOn(said, "mismatch" if response.status == 409 else "refused")

    def note_groups(self, context: RouterContext) -> None:
        """The first of an endpoint is here."""
        if self._broke_at is not None:
            self._metrics.stream_pause_seconds.observe(trio.current_time() - self._broke_at)
            self._metrics.streams_continued_total.labels(self._reason).inc()
            logger.info(
                "continued request=%s endpoint=%s reason=%s", context.request_id, context.endpoint, self._reason
            )
            self._broke_at = None

    # --- when it breaks off ---

    def can_go_on(self) -> bool:
        """Whether another endpoint could go on, so far as the stream tells without reading all of its ids: it is asked
        of hundreds of streams at once when an endpoint hangs."""
        return not self.stream.is_over and self.stream.why_not is None

    def goes_on(
        self,
        context: RouterContext,
        admission: AdmissionScope,
        fault: Fault,
        failure: EndpointLost,
        *,
        is_certain: bool,
    ) -> bool:
        """Its endpoint has failed it. is_certain: and has said so itself. Whether the admission waits for another
        lease; otherwise it has ended."""
        resume = self.stream.resume_field()
        if resume is None or isinstance(failure, CannotGoOn):
            why_not = failure.reason if isinstance(failure, CannotGoOn) else self.stream.why_not or WhyNot.MALFORMED
            self._metrics.streams_not_resumable_total.labels(why_not).inc()
        elif admission.failed(
            fault, token_count=self.stream.token_count(), is_certain=is_certain, reason=reason_of(failure)
        ):
            self._resume = resume
            self._params = _transfer_params(failure.said) if isinstance(failure, GivenAway) else None
            if self._broke_at is None:
                self._broke_at, self._reason = trio.current_time(), fault.value
            return True
        else:
            why_not = "poisoned" if isinstance(admission.refusal, RequestPoisoned) else "no_endpoint"
        self.note_not_continued(context, why_not, failure)
        return False

    def note_not_continued(self, context: RouterContext, why_not: str, failure: Exception) -> None:
        """It ends with an error."""
        logger.warning(
            "not continued request=%s endpoint=%s reason=%s after=%s",
            context.request_id,
            context.endpoint,
            why_not,
            msgspec.json.encode(str(failure)).decode(),
        )


def reason_of(failure: Exception) -> str | None:
    """For counts: what an endpoint sent that no inference server sends. None: the fault says enough."""
    return failure.reason if isinstance(failure, InvalidAnswer) else None


def fault_of(failure: EndpointLost) -> Fault:
    """Whose fault it is that an endpoint does not go on."""
    if isinstance(failure, Withdrawn):
        return failure.fault
    if isinstance(failure, GivenAway) or (isinstance(failure, StreamFailed) and failure.code in LEAVING_CODES):
        return Fault.LEAVING
    if isinstance(failure, StreamFailed) and failure.code not in DEATH_CODES:
        return Fault.FAILED
    if isinstance(failure, InvalidAnswer):
        return Fault.INVALID
    if isinstance(failure, NotResumed):
        return Fault.TRANSFER
    if isinstance(failure, EndpointSilent):
        return Fault.HUNG
    return Fault.UNREACHABLE if isinstance(failure, Unreachable) else Fault.BROKE


class _GivenAway(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw()


def _transfer_params(said: bytes) -> bytes | None:
    try:
        params = bytes(msgspec.json.decode(said, type=_GivenAway).kv_transfer_params)
    except msgspec.DecodeError:
        return None
    return params if params.startswith(b"{") else None
