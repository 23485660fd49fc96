"""Responses that the front end gives by itself, in the error shape of OpenAI's API: what never reached a handler, or
what a handler left without a response. The table from our errors to status and body is error_responses.py."""

from __future__ import annotations

import msgspec

from trioserve.http.exchange import HeaderFields

__all__ = ["JSON_FIELDS", "refusal_body"]

JSON_FIELDS: HeaderFields = (("content-type", "application/json"),)


def refusal_body(status: int, message: str) -> bytes:
    """{"error": {...}} as JSON, with the type that clients of OpenAI's API expect for such a status."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": None}})
