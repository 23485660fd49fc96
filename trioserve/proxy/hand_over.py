"""How a stream leaves an endpoint that is emptied: the endpoint gives it away, with its KV where that can be fetched.

It does so between two steps, behind a last whole group. One that has no way to do it, or does not answer in time, is
left by closing the connection; where the stream goes on, its prompt is then computed again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

import trio

from trioserve.contracts.errors import EndpointLost, InvalidRequest

if TYPE_CHECKING:
    from trioserve.admission.dispatch import AdmissionScope
    from trioserve.proxy.remote_endpoint import RemoteEndpoint

__all__ = ["hand_over"]

HAND_OVER_SECONDS_MAX = 5.0  # a step, and what it takes to be told; meanwhile the stream goes on where it is
RESPONSE_BYTES_MAX = 64 * 1024


async def hand_over(remote: RemoteEndpoint, admission: AdmissionScope) -> None:
    """Ask the endpoint to give the request away. It ends the stream then, and so the attempt; where it does not, the
    router ends it. Returns when one of both has come to pass, or the request is over."""
    assert admission.id is not None
    attempt = admission.attempts
    with trio.move_on_after(HAND_OVER_SECONDS_MAX):
        path = f"/v1/requests/{quote(admission.id, safe='')}/hand-over"
        if await _is_given_away(remote, path, admission.headers()):
            await admission.wait_for_end(attempt)
    if admission.attempts == attempt:
        admission.withdraw()


async def _is_given_away(remote: RemoteEndpoint, path: str, headers: list[tuple[str, str]]) -> bool:
    try:
        async with remote.request("POST", path, headers, b"") as response:
            await response.whole(RESPONSE_BYTES_MAX)
            return response.status < 300
    except (EndpointLost, InvalidRequest):
        return False
