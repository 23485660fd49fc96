"""State of one request from its admission to the end of its response, and the bodies that endpoints get.

Error responses of endpoints are judged here: whose fault each error is, and whether another endpoint may serve the
request.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from trioserve.admission.text_threads import TEXT_QUEUE_FULL
from trioserve.api.error_responses import REASON_HEADER, ErrorResponse, Refusal, deadline_refusal
from trioserve.api.streams.cursors import RESUMABLE_HEADER, RESUME_HEADER
from trioserve.contracts.deadlines import NO_DEADLINES, Deadline, Deadlines, passed_message
from trioserve.contracts.endpoint import EndpointId, Stage
from trioserve.contracts.errors import (
    Draining,
    EndpointLost,
    Overloaded,
    QueueWaitOver,
    RequestPoisoned,
    TrioserveError,
)
from trioserve.proxy.model_routes import loading_comment
from trioserve.proxy.response_shape import InvalidAnswer, is_error
from trioserve.proxy.routed_body import TRANSFER_PARAMS, RoutedBody, RoutedForm, rewritten
from trioserve.proxy.router_context import request_headers, response_headers
from trioserve.proxy.streams.continuation import CONTINUED_PATHS, DEATH_CODES
from trioserve.proxy.streams.foreign_stream import COMPLETIONS_PATH
from trioserve.router.endpoint_state import Fault
from trioserve.trio_tools.fair_slots import STAGE_FULL

if TYPE_CHECKING:
    from trioserve.admission.admission_scope import AdmissionScope
    from trioserve.proxy.peers.kept_stream import EndpointRequest, Stream
    from trioserve.proxy.remote_endpoint import RemoteResponse
    from trioserve.proxy.router_context import RouterContext
    from trioserve.proxy.streams.client_events import NumberedEvents
    from trioserve.proxy.streams.continuation import Continuation

__all__ = [
    "CheckedRequest",
    "ENDED_ON_PURPOSE",
    "ERROR_BYTES_MAX",
    "ProxiedRequest",
    "Refused",
    "RequestClock",
    "check_error",
    "check_status",
    "error_code",
]


logger = logging.getLogger(__name__)

ERROR_BYTES_MAX = 64 * 1024
NOT_ENDPOINTS_FAULT = frozenset({429, 503, 529})  # Anthropic's API uses status 529 instead of 503.
BROKEN = frozenset({500, 502, 504})
# A server gives these reasons if it refuses because it stops, not because it is busy.
STOPPING = frozenset({"draining", "server_stopping"})
CLIENTS_FAULT = frozenset({400, 413, 422})
# A gateway in front of an inference server also sends these statuses, with an error text of its own.
TOO_LARGE = frozenset({408, 413, 414, 431})
KEY_REFUSED = frozenset({401, 403})
# A server of another kind sends these statuses for every request. An inference server may have a reason for them. In
# the second case, other endpoints send the same status.
DOUBTFUL = KEY_REFUSED | {404, 405, 410, 421}
# One API key has too many requests. Requests with other keys are served.
KEYS_OWN_REFUSALS = frozenset({TEXT_QUEUE_FULL, STAGE_FULL})
BUSY_SECONDS_MAX = 5.0
# A stream with one of these error codes was ended on purpose. No other endpoint resumes the stream.
ENDED_ON_PURPOSE = frozenset({"request_aborted", "queue_timeout", "ttft_timeout", "timeout", "deadline_exceeded"})


class Refused(TrioserveError):
    """The endpoint answered with an error before its response began.

    The client gets this error, unless another endpoint takes over the request.

    Args:
        response: Response of the endpoint.
        body: Body of the response.
        fault: Kind of the failure. None: the endpoint is not at fault, and no other endpoint is asked.

    Attributes:
        is_shown: Whether the body has the format of an API error, so that the client may see it.
    """

    def __init__(self, response: RemoteResponse, body: bytes, fault: Fault | None) -> None:
        super().__init__(f"status {response.status}")
        self.is_shown = is_error(response.header("content-type"), body)
        self.response = response
        self.body = body
        self.fault = fault

    @property
    def busy_seconds(self) -> float:
        """Seconds for which the endpoint gets no requests, if it is busy."""
        text = self.response.header("retry-after") or ""
        return min(BUSY_SECONDS_MAX, float(text)) if text.isdecimal() else 1.0

    def for_client(self) -> Refusal:
        """Make an error of the router with the same text."""
        try:
            error = msgspec.json.decode(self.body, type=_ErrorBody).error or {}
        except msgspec.DecodeError:
            error = {}
        return Refusal(
            ErrorResponse(
                status=self.response.status,
                type=str(error.get("type") or "invalid_request_error"),
                code=None if error.get("code") is None else str(error["code"]),
                message=str(error.get("message") or f"the endpoint answered with status {self.response.status}"),
                param=None if error.get("param") is None else str(error["param"]),
            )
        )


async def check_error(context: RouterContext, id: EndpointId, response: RemoteResponse, stage: Stage | None) -> None:
    """Decide who is at fault for an error response.

    Args:
        context: Request of the router's API.
        id: Endpoint that responded.
        response: Response with its head.
        stage: Stage of a disaggregated request. None for other requests.

    Raises:
        Refused: The endpoint refuses the request, or failed.
        InvalidAnswer: No inference server sends this error.
    """
    await check_status(response, stage)
    status, kind = response.status, response.header("content-type")
    said = await response.whole(ERROR_BYTES_MAX) or b""
    if not is_error(kind, said) and status not in TOO_LARGE:
        raise InvalidAnswer(id, "html" if _is_page(kind) else f"status_{status}", f"status {status}, {said[:80]!r}")
    if status in KEY_REFUSED and context.services.fleet.uses_own_key(
        id, passes_clients=context.services.rules.passes_authorization
    ):
        logger.warning("endpoint refuses the router's key endpoint=%s status=%s: check --endpoint-api-key", id, status)
        raise InvalidAnswer(id, "key_refused", f"status {status} to the router's own key: see --endpoint-api-key")
    raise Refused(response, said, Fault.REFUSED if status in DOUBTFUL else None)


def _is_page(content_type: str | None) -> bool:
    return (content_type or "").lower().startswith(("text/html", "application/xhtml"))


async def check_status(response: RemoteResponse, stage: Stage | None) -> None:
    """Raise an error for a status that is not simply forwarded to the client. Other statuses pass.

    Args:
        response: Response with its head.
        stage: Stage of a disaggregated request. None for other requests.

    Raises:
        Refused: The endpoint refuses the request, or failed.
        InvalidAnswer: The error is a web page.
    """
    status = response.status
    if status not in NOT_ENDPOINTS_FAULT and status not in BROKEN and (status < 400 or stage is not Stage.DECODE):
        return
    said = await response.whole(ERROR_BYTES_MAX) or b""
    if _is_page(response.header("content-type")):
        raise InvalidAnswer(response.endpoint, "html", f"status {status} with a web page")
    code = response.header(REASON_HEADER) or error_code(said)  # The errors of other APIs have no code.
    fault: Fault | None = Fault.BUSY if status in NOT_ENDPOINTS_FAULT else Fault.FAILED
    if fault is Fault.FAILED and code in DEATH_CODES:
        fault = Fault.BROKE  # The error ends all requests of the endpoint.
    if fault is Fault.BUSY and code in STOPPING:
        fault = Fault.LEAVING
    if code in ENDED_ON_PURPOSE or response.header(REASON_HEADER) in KEYS_OWN_REFUSALS:
        fault = None  # A refusal for one API key says nothing about the endpoint's load.
    elif status < 500 and status not in NOT_ENDPOINTS_FAULT:
        # The prefill endpoint got a shorter request, so it could not report this client error.
        is_clients = status in CLIENTS_FAULT and TRANSFER_PARAMS.encode() not in said
        fault = None if is_clients else Fault.TRANSFER
    elif stage is Stage.DECODE and code == "request_failed":
        fault = Fault.TRANSFER
    raise Refused(response, said, fault)


def error_code(said: bytes) -> str | None:
    """Return the code of an error in OpenAI's format. None for other texts.

    Args:
        said: Body of a response, or the data of an event.
    """
    try:
        error = msgspec.json.decode(said, type=_ErrorBody).error
    except msgspec.DecodeError:
        return None
    return None if error is None else str(error.get("code"))


class _ErrorBody(msgspec.Struct):
    error: dict[str, Any] | None = None


LOADING_SECONDS = 5.0  # A stream begins after this wait for its model. Until then, an error has its own status.
LOADING_COMMENT_SECONDS = 1.0


class CheckedRequest(msgspec.Struct, frozen=True):
    """A request that was read and checked.

    Attributes:
        said: Bytes of the body as the client sent it.
        raw: Bytes of the body for endpoints, with the caller's cache salt and without fields that only routers set.
        body: Fields of `raw`.
        form: Body, if it is a form. Otherwise None.
        model: Model name that endpoints use.
        clock: Deadlines of the request.
        before: Endpoint that stores the response which this request continues. None: the request does not continue a
            response.
    """

    said: bytes
    raw: bytes
    body: RoutedBody
    form: RoutedForm | None
    model: str
    clock: RequestClock
    before: EndpointId | None


class ProxiedRequest:
    """One request with a queue position or a lease.

    Args:
        context: Request of the router's API.
        admission: Admission of the request.
        asked: Request as it was read.
        stream: Stream of the response. Another router may resume it after the end of this router.
        continuation: State to resume this response at another endpoint. None: it cannot resume.

    Attributes:
        clock: Deadlines of the request.
        refused: Refusal of an endpoint. It is kept while another endpoint may accept the request.
    """

    def __init__(
        self,
        context: RouterContext,
        admission: AdmissionScope,
        asked: CheckedRequest,
        *,
        stream: Stream,
        continuation: Continuation | None,
    ) -> None:
        self.context = context
        self.admission = admission
        self.asked = asked
        self.clock = asked.clock
        self.continuation = continuation
        self.refused: Refused | None = None
        self._stream = stream
        stream.note_admitted(admission, on_recomputed=self._note_recomputed)
        admission.gives_partial = bool(asked.body.return_partial)
        admission.headers = partial(request_headers, context, None, with_body=False)
        if continuation is not None:
            admission.can_resume = continuation.can_resume
            admission.note_reasoning_ended = continuation.note_reasoning_ended
        models = context.services.models
        # Another router needs the status of an error, to ask another endpoint. So its streams do not begin early.
        self._may_begin_early = (
            models is not None
            and admission.model in models
            and bool(asked.body.stream)
            and context.exchange.path in CONTINUED_PATHS
            and not admission.is_pinned
            and not context.client_events.is_behind
            and RESUMABLE_HEADER not in context.exchange.headers
        )

    def _note_recomputed(self, events: NumberedEvents, resume: bytes) -> None:
        self.context.client_events = events
        if self.continuation is not None:
            self.continuation.set_known(resume)

    async def lease(self) -> EndpointId:
        """Wait for a lease, and return its endpoint.

        A client whose stream has begun gets comments meanwhile, which keep the connection alive. A stream begins early
        if it waits for its model, and its comments have the progress of the load.

        Raises:
            Refusal: The queue deadline has passed, or an endpoint had refused the request and no other endpoint is
                available.
            Overloaded: The queue refuses the request.
            EndpointLost: The stream has begun, and no endpoint is available to resume it.
            RequestPoisoned: The request has crashed several endpoints.
        """
        context = self.context
        while context.exchange.started or self._may_begin_early:
            seconds = context.services.access.keep_alive_seconds
            if self._waits_for_model:
                seconds = LOADING_COMMENT_SECONDS if context.exchange.started else LOADING_SECONDS
            with trio.move_on_after(seconds):
                return await self._lease()
            await self._send_comment()
        return await self._lease()

    @property
    def _waits_for_model(self) -> bool:
        models = self.context.services.models
        return self._may_begin_early and models is not None and not models.is_loaded(self.admission.model)

    async def _send_comment(self) -> None:
        context, comment = self.context, self.context.client_events.keep_alive
        if self._waits_for_model:
            if not context.exchange.started:
                await context.start_early()
            if context.client_events.takes_all:
                comment = loading_comment(context, self.admission)
        if context.exchange.started:
            await context.exchange.send(comment)

    async def _lease(self) -> EndpointId:
        context, admission = self.context, self.admission
        queue = context.span.child("queue")
        try:
            id = context.endpoint = await admission.lease()
            return id
        except QueueWaitOver as over:
            raise deadline_refusal(self.clock.first()[0], str(over)) from None
        except Overloaded as refusal:
            if self.refused is not None and not admission.has_token:
                raise self.refused.for_client() from None  # No other endpoint is available for the request.
            if not admission.has_token or self.continuation is None or isinstance(refusal, Draining):
                raise
            self.continuation.note_not_continued(context.endpoint, "no_endpoint", refusal)
            raise EndpointLost(
                f"the endpoint failed in the middle, and no other endpoint resumes the response: {refusal}"
            ) from refusal
        except RequestPoisoned as refusal:
            if self.continuation is not None:
                self.continuation.note_not_continued(context.endpoint, "poisoned", refusal)
            raise
        finally:
            queue.end()

    def model_field(self, id: EndpointId) -> dict[str, object]:
        """Return the body field `model` with the endpoint's own name if the client uses another name. Otherwise, return
        no field.

        Args:
            id: Endpoint that gets the request.
        """
        there = self.context.services.fleet.model_at(id, self.admission.model)
        return {} if self.asked.body.model == there else {"model": there}

    def body_for(self, id: EndpointId, more: dict[str, object] | None = None) -> bytes:
        """Make the body for an endpoint. It has the remaining times, and the known part of a response that resumes.

        Args:
            id: Endpoint that gets the request.
            more: Further new values by field name. None: there are none.
        """
        fields = {**self.model_field(id), **(more or {}), **self.clock.left()}
        completion = None if self.continuation is None else self.continuation.completion()
        if completion is not None:
            self.context.endpoint_path = COMPLETIONS_PATH
            return msgspec.json.encode({**completion, **fields})
        if self.asked.form is not None:
            return self.asked.form.rewritten(fields, without=self.clock.passed)
        resume = {} if self.continuation is None else self.continuation.fields(id, self.asked.raw)
        return rewritten(self.asked.raw, {**fields, **resume}, without=self.clock.passed)

    def request_to(self, id: EndpointId, body: bytes) -> EndpointRequest:
        """Make the request to an endpoint.

        Args:
            id: Endpoint that gets the request.
            body: Bytes of the body.

        Raises:
            NotResumed: The endpoint cannot resume the response.
        """
        context = self.context
        headers = request_headers(context, self.admission.stage)
        if self.continuation is not None:
            self.continuation.check_endpoint(id)
            if not self.continuation.shows_ids:
                headers.append((RESUMABLE_HEADER, "1"))
        remote = context.services.fleet.remote(id)
        return self._stream.request(remote, context.exchange.method, context.target, headers, body)

    def response_headers(self, response: RemoteResponse) -> list[tuple[str, str]]:
        """Make the headers for the client.

        Args:
            response: Response of the endpoint.
        """
        headers = response_headers(self.context, response)
        if self.continuation is None or self.continuation.shows_ids:
            return headers
        return [(name, value) for name, value in headers if name != RESUME_HEADER]


class RequestClock:
    """Deadlines of one request, counted from its arrival at the router.

    Args:
        deadlines: Time limits of the request.
        now: Arrival of the request, in seconds of Trio's clock.
        grace_seconds: Extra time before the router ends a running request. The endpoint has the same deadlines and can
            report the end in this time.
        limits: Server limits that have shortened the deadlines, for the error message.
    """

    def __init__(
        self, deadlines: Deadlines, now: float, *, grace_seconds: float = 0.0, limits: Deadlines = NO_DEADLINES
    ) -> None:
        self._limits = limits
        self._grace_seconds = grace_seconds
        self._deadlines = deadlines
        self._moments: dict[Deadline, float] = {}
        if deadlines is not NO_DEADLINES:
            for deadline in Deadline:
                seconds = deadlines.seconds(deadline)
                if seconds is not None:
                    self._moments[deadline] = now + seconds
        self._scope = trio.CancelScope()
        self._first_token_is_due = deadlines.ttft_timeout is not None
        self._has_token = False

    def at(self, deadline: Deadline) -> float:
        return self._moments.get(deadline, math.inf)

    def first(self) -> tuple[Deadline, float]:
        """Return the deadline that passes first for a queued request, and its time."""
        return min(self._moments.items(), key=lambda entry: entry[1], default=(Deadline.QUEUE, math.inf))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Apply the deadlines to the block.

        Raises:
            Refusal: The deadline for the first token or for the whole request has passed.
        """
        if not self._moments:  # Most requests have no deadlines and need no cancel scope.
            yield
            return
        self._scope.deadline = min(self.at(Deadline.FIRST_TOKEN), self.at(Deadline.TOTAL)) + self._grace_seconds
        with self._scope:
            yield
        if self._scope.cancelled_caught:
            passed = Deadline.TOTAL
            if self._first_token_is_due and self.at(Deadline.FIRST_TOKEN) <= self.at(Deadline.TOTAL):
                passed = Deadline.FIRST_TOKEN
            seconds = self._deadlines.seconds(passed)
            raise deadline_refusal(passed, passed_message(passed, seconds or 0.0, self._limits))

    def stop_first_token(self) -> None:
        self._has_token = True
        if self._first_token_is_due:
            self._first_token_is_due = False
            self._scope.deadline = self.at(Deadline.TOTAL) + self._grace_seconds

    def note_served(self, seconds: float) -> None:
        """Extend the queue deadline of a request that is queued again, by the time that an endpoint served it.

        Args:
            seconds: Time at the endpoint.
        """
        if Deadline.QUEUE in self._moments:
            self._moments[Deadline.QUEUE] += seconds

    def left(self) -> dict[str, object]:
        """Return the remaining times as deadline fields of a request body."""
        if not self._moments:
            return {}
        now = trio.current_time()
        return {
            deadline.value: max(0.001, moment - now)
            for deadline, moment in self._moments.items()
            if deadline is Deadline.TOTAL or not self._has_token
        }

    @property
    def passed(self) -> tuple[str, ...]:
        """Names of the deadline fields that no longer apply, because the first token has arrived."""
        return (Deadline.QUEUE.value, Deadline.FIRST_TOKEN.value) if self._has_token else ()
