"""Resumes one streamed request at another endpoint after its endpoint has stopped.

This module makes the request for the next endpoint, and checks the response of that endpoint. The router core decides
which requests may resume, where and how often. The file continued_stream.py parses the stream.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import quote

import msgspec
import trio

from trioserve.admission.admission_scope import Withdrawn
from trioserve.api.streams.cursors import FINGERPRINT_HEADER, RESUME_HEADER
from trioserve.contracts.endpoint import EndpointId
from trioserve.contracts.errors import EndpointLost, RequestPoisoned
from trioserve.proxy.remote_endpoint import EndpointSilent, Unreachable
from trioserve.proxy.response_shape import InvalidAnswer
from trioserve.proxy.routed_body import TRANSFER_PARAMS
from trioserve.proxy.streams.continued_stream import ContinuedStream, WhyNot
from trioserve.proxy.streams.foreign_stream import TOKEN_IDS, ForeignStream, foreign_body
from trioserve.router.endpoint_state import Fault

if TYPE_CHECKING:
    from trioserve.admission.admission_scope import AdmissionScope
    from trioserve.metrics.registry import Metrics
    from trioserve.proxy.fleet import Fleet
    from trioserve.proxy.remote_endpoint import RemoteResponse

__all__ = [
    "CONTINUED_PATHS",
    "DEATH_CODES",
    "CannotResume",
    "Continuation",
    "HandedOver",
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
END_REASONING = "end_thinking"

EXACT = "+exact"  # A fingerprint with this suffix means that endpoints with equal fingerprints compute equal tokens.
CONTINUED = "x-trioserve-continued"

# An endpoint that leaves or failed ends a stream with one of these error codes. The request itself did not cause the
# error. All other errors end the request on purpose, or are the client's fault.
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


# DEATH_CODES are the codes of BROKEN_CODES that end all requests of the endpoint, not only one request.
DEATH_CODES = frozenset({"endpoint_lost", "engine_fault", "step_overdue"})


class StreamFailed(EndpointLost):
    """The endpoint ended its stream with an error that is its own fault.

    Args:
        id: Endpoint that failed.
        code: Error code.
        event: Error event as it arrived.
    """

    def __init__(self, id: EndpointId, code: str, event: bytes) -> None:
        super().__init__(f'the endpoint "{id}" ended its response with an error: {code}')
        self.code = code
        self.event = event


class HandedOver(EndpointLost):
    """The endpoint has handed over the request, so that another endpoint can resume it.

    Args:
        id: Endpoint that hands over.
        said: JSON for the next endpoint.
    """

    def __init__(self, id: EndpointId, said: bytes) -> None:
        super().__init__(f'the endpoint "{id}" handed over the request')
        self.said = said


class NotResumed(EndpointLost):
    """The endpoint cannot resume a response of another endpoint. The endpoint would restart or refuse the request."""


class CannotResume(EndpointLost):
    """A response cannot resume at any endpoint.

    Args:
        message: Text for logs and clients.
        reason: Kind of the hindrance in one word, for metrics.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


def ends_on_purpose(code: str) -> bool:
    """Return True if a stream that ended with an error must not resume elsewhere.

    Args:
        code: Error code of the stream.
    """
    return code not in LEAVING_CODES and code not in BROKEN_CODES


class LiveStreams:
    """Running streams of one router that can resume at another endpoint."""

    def __init__(self) -> None:
        self._live: set[Continuation] = set()

    @contextmanager
    def kept(self, continuation: Continuation | None) -> Iterator[Continuation | None]:
        """Scope of a running response.

        Args:
            continuation: State of the response. None: it cannot resume.
        """
        if continuation is None:
            yield None
            return
        self._live.add(continuation)
        try:
            yield continuation
        finally:
            self._live.discard(continuation)

    @property
    def kept_bytes(self) -> int:
        """Bytes that the router keeps to resume these streams."""
        return sum(continuation.stream.kept_bytes for continuation in self._live)


class Continuation:
    """State of one request whose response can resume at another endpoint.

    Args:
        fleet: Endpoints of the router.
        metrics: Metrics of the router.
        request_id: Id of the request, for logs.
        path: Path of the request.
        known: Field `resume` of the request body, as JSON. None: the request does not resume a response.
        choice_count: Number of choices, over all prompts.
        shows_ids: Whether the client gets the token ids that the router asks the endpoint for.
        bytes_max: Limit of the state that is kept to resume the stream, in bytes.

    Attributes:
        stream: Parser of the stream. It knows how much the client has received.
        object_id: Id of a stored object that the request creates. None until it is known.
    """

    def __init__(
        self,
        fleet: Fleet,
        metrics: Metrics,
        *,
        request_id: str,
        path: str,
        known: bytes | None,
        choice_count: int,
        shows_ids: bool,
        bytes_max: int,
    ) -> None:
        stream = ContinuedStream(choice_count=choice_count, bytes_max=bytes_max, shows_ids=shows_ids, known=known)
        self.stream: ContinuedStream | ForeignStream = stream
        self.shows_ids = shows_ids
        self._fleet = fleet
        self._request_id = request_id
        self._path = path
        self._bytes_max = bytes_max
        self.object_id: str | None = None
        self._choice_count = choice_count
        self._own_stream = stream
        # The body fields of a request that could resume as a completion. None for other requests.
        self._foreign_fields: dict[str, msgspec.Raw] | None = None
        self._metrics = metrics
        self._fingerprint: str | None = None
        self._resume: dict[str, object] | None = None
        self._params: bytes | None = None
        self._broke_at: float | None = None
        self._reason = ""
        self._is_reasoning_ended = False

    # --- methods for the request to the next endpoint ---

    def fields(self, id: EndpointId, raw: bytes) -> dict[str, object]:
        """Make the fields that replace fields of the request body for an endpoint.

        Args:
            id: Endpoint that gets the request.
            raw: Body as the client sent it.
        """
        if self._resume is None:
            self._foreign_fields = None
            if self._fleet.reports_token_ids(id):
                self._foreign_fields = foreign_body(self._path, raw, choice_count=self._choice_count)
            return {} if self._foreign_fields is None else {TOKEN_IDS: True}
        ended = {END_REASONING: True} if self._is_reasoning_ended else {}
        # Only the first endpoint gets the parameters. A later endpoint computes the prompt.
        params, self._params = self._params, None
        given = {} if params is None else {TRANSFER_PARAMS: msgspec.Raw(params)}
        return {RESUME: {**self._resume, **ended}, **given}

    def note_reasoning_ended(self) -> None:
        """Record that an operator ended the reasoning, for the next endpoint."""
        self._is_reasoning_ended = True

    def set_known(self, resume: bytes) -> None:
        """Set the part of the response that the client received from another router.

        Args:
            resume: Field `resume` of a request body, as JSON.
        """
        self._own_stream.set_known(resume)

    def completion(self) -> dict[str, object] | None:
        """Return the whole body for /v1/completions if the response resumes in this way, or None."""
        return self._resume if isinstance(self.stream, ForeignStream) else None

    def check_endpoint(self, id: EndpointId) -> None:
        """Check before sending that the endpoint can resume the response.

        Args:
            id: Endpoint that would get the request.

        Raises:
            NotResumed: The endpoint does not support resuming.
        """
        if self.completion() is not None and not self._fleet.reports_token_ids(id):
            raise NotResumed(f'the endpoint "{id}" cannot resume from token ids')

    # --- methods for the response ---

    def begin(self, id: EndpointId, response: RemoteResponse) -> bytes:
        """Prepare for the response of an endpoint.

        Args:
            id: Endpoint that responds.
            response: Response with its head.

        Returns:
            Comment event that warns the client that the new endpoint may sample different tokens. Empty if the tokens
                are the same.

        Raises:
            NotResumed: The endpoint does not resume where the last endpoint stopped.
        """
        resume_values, fingerprint = response.header(RESUME_HEADER), response.header(FINGERPRINT_HEADER)
        if self._resume is None:
            self._fingerprint, self.stream = fingerprint, self._own_stream
            if resume_values is None and self._foreign_fields is not None:
                self.stream = ForeignStream(self._path, self._foreign_fields, bytes_max=self._bytes_max)
        elif resume_values is None and not isinstance(self.stream, ForeignStream):
            raise NotResumed(f'the endpoint "{id}" does not resume where another endpoint stopped')
        if isinstance(self.stream, ForeignStream):
            self.stream.begin()
        else:
            self.stream.begin(resume_values)
        if self._resume is None:
            return b""
        if fingerprint is None or fingerprint != self._fingerprint or not fingerprint.endswith(EXACT):
            return f": {CONTINUED} endpoint={quote(id, safe='/:[]')} tokens=not-promised\n\n".encode()
        return b""

    def check_refusal(self, id: EndpointId, response: RemoteResponse, code: str | None) -> None:
        """Handle an error status in response to an attempt to resume.

        Args:
            id: Endpoint that responded.
            response: Response with its head.
            code: Error code. None if there is none.

        Raises:
            NotResumed: Another endpoint may resume the response.
            CannotResume: No endpoint can resume the response.
        """
        if self._resume is None:
            return
        said = f'the endpoint "{id}" does not resume this response: status {response.status}, {code}'
        if response.status == 404:
            raise NotResumed(said)
        raise CannotResume(said, "mismatch" if response.status == 409 else "refused")

    def note_groups(self, id: EndpointId) -> None:
        """Record that an endpoint's first events have arrived, so the broken stream has resumed.

        Args:
            id: Endpoint that responds.
        """
        if self._broke_at is not None:
            self._metrics.stream_pause_seconds.observe(trio.current_time() - self._broke_at)
            self._metrics.streams_continued_total.labels(self._reason).inc()
            logger.info("resumed request=%s endpoint=%s reason=%s", self._request_id, id, self._reason)
            self._broke_at = None

    # --- methods for failures ---

    def can_resume(self) -> bool:
        """Return True if another endpoint could resume the stream.

        The check does not parse the ids, because it is made for hundreds of streams at once when an endpoint hangs.
        """
        return not self.stream.is_over and self.stream.why_not is None

    def resumes(
        self,
        id: EndpointId,
        admission: AdmissionScope,
        fault: Fault,
        failure: EndpointLost,
        *,
        is_certain: bool,
    ) -> bool:
        """Try to resume after the endpoint has failed.

        Args:
            id: Endpoint that failed.
            admission: Admission of the request.
            fault: Kind of the failure.
            failure: How the endpoint failed.
            is_certain: Whether the endpoint itself reported the failure.

        Returns:
            True if the admission waits for a lease at another endpoint. False if the request has ended.
        """
        resume = self.stream.resume_field()
        if resume is None or isinstance(failure, CannotResume):
            why_not = failure.reason if isinstance(failure, CannotResume) else self.stream.why_not or WhyNot.MALFORMED
            self._metrics.streams_not_resumable_total.labels(why_not).inc()
        elif admission.failed(
            fault, token_count=self.stream.token_count(), is_certain=is_certain, reason=reason_of(failure)
        ):
            self._resume = resume
            self._params = _transfer_params(failure.said) if isinstance(failure, HandedOver) else None
            if self._broke_at is None:
                self._broke_at, self._reason = trio.current_time(), fault.value
            return True
        else:
            why_not = "poisoned" if isinstance(admission.refusal, RequestPoisoned) else "no_endpoint"
        self.note_not_continued(id, why_not, failure)
        return False

    def note_not_continued(self, id: EndpointId | None, why_not: str, failure: Exception) -> None:
        """Log that a broken stream ends with an error.

        Args:
            id: Endpoint that failed.
            why_not: Reason in one word why the stream does not resume.
            failure: Failure of the endpoint.
        """
        logger.warning(
            "not resumed request=%s endpoint=%s reason=%s after=%s",
            self._request_id,
            id,
            why_not,
            msgspec.json.encode(str(failure)).decode(),
        )


def reason_of(failure: Exception) -> str | None:
    """Return the fault of an invalid response in one word, for metrics. None if the failure is not an invalid response.

    Args:
        failure: Failure of an attempt.
    """
    return failure.reason if isinstance(failure, InvalidAnswer) else None


def fault_of(failure: EndpointLost) -> Fault:
    """Return the fault that explains why an endpoint no longer computes a request.

    Args:
        failure: Failure of an attempt.
    """
    if isinstance(failure, Withdrawn):
        return failure.fault
    if isinstance(failure, HandedOver) or (isinstance(failure, StreamFailed) and failure.code in LEAVING_CODES):
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


class _HandedOver(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw()


def _transfer_params(said: bytes) -> bytes | None:
    try:
        params = bytes(msgspec.json.decode(said, type=_HandedOver).kv_transfer_params)
    except msgspec.DecodeError:
        return None
    return params if params.startswith(b"{") else None
