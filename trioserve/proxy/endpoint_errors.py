"""Error responses of endpoints: whose fault each error is, and whether another endpoint may serve the request."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgspec

from trioserve.admission.dispatch import Fault
from trioserve.admission.text_threads import TEXT_QUEUE_FULL
from trioserve.api.error_responses import REASON_HEADER, ErrorResponse, Refusal
from trioserve.contracts.endpoint import EndpointId, Stage
from trioserve.contracts.errors import TrioserveError
from trioserve.proxy.response_shape import InvalidAnswer, is_error
from trioserve.proxy.routed_body import TRANSFER_PARAMS
from trioserve.proxy.streams.continuation import DEATH_CODES
from trioserve.trio_tools.fair_slots import STAGE_FULL

if TYPE_CHECKING:
    from trioserve.proxy.remote_endpoint import RemoteResponse
    from trioserve.proxy.router_context import RouterContext

__all__ = ["ENDED_ON_PURPOSE", "ERROR_BYTES_MAX", "Refused", "check_error", "check_status", "error_code"]

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
