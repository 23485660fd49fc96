"""Moving a stream away from an endpoint that is being drained.

The router asks the endpoint to end the stream between two steps, after a complete group of tokens. The endpoint keeps
the KV for the next endpoint if it can. If the endpoint cannot hand over or does not answer in time, the router closes
the connection. The next endpoint then computes the prompt again.
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

HAND_OVER_SECONDS_MAX = 5.0  # time for a step and its report; the stream continues at the old endpoint meanwhile
RESPONSE_BYTES_MAX = 64 * 1024


async def hand_over(remote: RemoteEndpoint, admission: AdmissionScope) -> None:
    """Ask an endpoint to hand over a request, and end the attempt there.

    The endpoint normally ends the stream, which ends the attempt. Otherwise, the router withdraws the request from the
    endpoint. The function returns after either, or when the request has ended.

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
