"""Error responses of the front end itself, in the format of OpenAI's API.

The front end sends these responses if a request does not reach a handler, or if a handler sends no response.
error_responses.py maps exceptions of the API to responses.
"""

from __future__ import annotations

import msgspec

from trioserve.http.exchange import HeaderFields

__all__ = ["JSON_FIELDS", "refusal_body"]

JSON_FIELDS: HeaderFields = (("content-type", "application/json"),)


def refusal_body(status: int, message: str) -> bytes:
    """Return the JSON body {"error": {...}} of an error response.

    Args:
        status: HTTP status, from which the error type follows.
        message: the error message for the client.
    """
    kind = "invalid_request_error" if status < 500 else "server_error"
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": None}})
