"""Requests with which the router ends a request at its endpoint early: aborts and hand-overs.

A stream is handed over when its endpoint is being drained. The endpoint ends the stream between two steps, after a
complete group of tokens, and keeps the KV for the next endpoint if it can. Otherwise the next endpoint computes the
prompt again.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING
from urllib.parse import quote

import msgspec
import trio

from trioserve.contracts.errors import EndpointLost, InvalidRequest
from trioserve.contracts.events import AbortOutcome
from trioserve.proxy.remote_endpoint import KEY_HEADERS

if TYPE_CHECKING:
    from trioserve.admission.admission_scope import AdmissionScope
    from trioserve.proxy.remote_endpoint import RemoteEndpoint

__all__ = ["AbortReport", "abort_left", "abort_reports", "end_at_endpoint", "hand_over"]

ABORTS_PATH = "/v1/requests/abort"
# An endpoint must answer an abort within this time. It does not wait for its step. Other processes of the router may
# wait for this process.
ANSWER_SECONDS_MAX = 1.0
ANSWER_BYTES_MAX = 32 * 1024 * 1024
# A hand-over takes a step and its report. Meanwhile, the stream continues at the old endpoint.
HAND_OVER_SECONDS_MAX = 5.0
RESPONSE_BYTES_MAX = 64 * 1024


class AbortReport(msgspec.Struct):
    """Result of the abort of one id.

    Attributes:
        id: Id of the request.
        result: Outcome of the abort.
        partials: Partial results of the requests with this id.
    """

    id: str
    result: AbortOutcome
    partials: list[msgspec.Raw] = []


class _Aborts(msgspec.Struct):
    data: list[AbortReport]


async def end_at_endpoint(remote: RemoteEndpoint, admissions: list[AdmissionScope]) -> list[AbortReport]:
    """Ask an endpoint to end requests and return partial results, once for each owner of the requests.

    Args:
        remote: Client of the endpoint.
        admissions: Requests that run at the endpoint.

    Returns:
        Results of the endpoint. Empty if the endpoint does not answer like a trioserve server.
    """
    rows: list[AbortReport] = []
    owners = {admission.owner: admission for admission in admissions}
    with trio.move_on_after(ANSWER_SECONDS_MAX):
        for owner, first in owners.items():
            ids = list(dict.fromkeys(one.id for one in admissions if one.owner == owner))
            body = msgspec.json.encode({"ids": ids, "return_partial": True})
            headers = [*first.headers(), ("content-type", "application/json")]
            try:
                async with remote.request("POST", ABORTS_PATH, headers, body) as response:
                    rows += abort_reports(response.status, await response.whole(ANSWER_BYTES_MAX) or b"")
            except (EndpointLost, InvalidRequest):
                continue
    return rows


def abort_reports(status: int, body: bytes) -> list[AbortReport]:
    """Parse the response to an abort. Errors and other texts have no results.

    Args:
        status: HTTP status.
        body: Bytes of the body.
    """
    if status != 200:
        return []
    try:
        return msgspec.json.decode(body, type=_Aborts).data
    except msgspec.DecodeError:
        return []


async def abort_left(remote: RemoteEndpoint, headers: list[tuple[str, str]], silent_seconds: float) -> None:
    """Abort a request at an endpoint after its silent connection was closed.

    The endpoint may not receive the close, and would continue to compute the request. A newer request with the same id,
    such as the resumed request, began after the silence and continues.

    Args:
        remote: Client of the endpoint.
        headers: Headers of the request.
        silent_seconds: Time since the last byte from the endpoint.
    """
    id = next((value for name, value in headers if name == "x-request-id"), None)
    if id is None:
        return
    asked = [(name, value) for name, value in headers if name in KEY_HEADERS]
    body = msgspec.json.encode({"ids": [id], "min_age_seconds": silent_seconds / 2})
    with trio.move_on_after(ANSWER_SECONDS_MAX), suppress(EndpointLost, InvalidRequest):
        async with remote.request(
            "POST", ABORTS_PATH, [*asked, ("content-type", "application/json")], body
        ) as response:
            await response.whole(ANSWER_BYTES_MAX)


async def hand_over(remote: RemoteEndpoint, admission: AdmissionScope) -> None:
    """Ask an endpoint to hand over a request, and end the attempt there.

    The endpoint normally ends the stream, and the attempt ends with the stream. Otherwise, the router withdraws the
    request from the endpoint. The function returns when the attempt or the request has ended.

    Args:
        remote: Endpoint that runs the request.
        admission: Admission of the request. Its id is not None.
    """
    assert admission.id is not None
    attempt = admission.attempts
    with trio.move_on_after(HAND_OVER_SECONDS_MAX):
        path = f"/v1/requests/{quote(admission.id, safe='')}/hand-over"
        if await _is_handed_over(remote, path, admission.headers()):
            await admission.wait_for_end(attempt)
    if admission.attempts == attempt:
        admission.withdraw()


async def _is_handed_over(remote: RemoteEndpoint, path: str, headers: list[tuple[str, str]]) -> bool:
    try:
        async with remote.request("POST", path, headers, b"") as response:
            await response.whole(RESPONSE_BYTES_MAX)
            return response.status < 300
    except (EndpointLost, InvalidRequest):
        return False
