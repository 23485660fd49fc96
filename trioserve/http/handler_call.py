"""Calls a handler, and sends an error response if the handler fails. All protocols use this module.

The front end sends these error responses, in the format of OpenAI's API, if a request does not reach a handler, or if a
handler sends no response. error_responses.py maps exceptions of the API to responses.
"""

from __future__ import annotations

import logging

import msgspec

from trioserve.contracts.errors import InvalidRequest, StartupError
from trioserve.http.exchange import BodyTimeout, BodyTooLarge, Exchange, Handler, HeaderFields, ResponseState, printable

__all__ = ["JSON_FIELDS", "RootPath", "call_handler", "checked_root_path", "refusal_body"]

JSON_FIELDS: HeaderFields = (("content-type", "application/json"),)


def refusal_body(status: int, message: str) -> bytes:
    """Return the JSON body {"error": {...}} of an error response.

    Args:
        status: HTTP status, from which the error type follows.
        message: the error message for the client.
    """
    kind = "invalid_request_error" if status < 500 else "server_error"
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": None}})


logger = logging.getLogger(__name__)


async def call_handler(handler: Handler, exchange: Exchange, response: ResponseState) -> bool:
    """Run the handler, and send an error response if the handler fails before it starts a response.

    After a handler has accepted a websocket, its return closes the websocket with 1000, and its failure with 1011.
    Otherwise the status is 400, 408 or 413 if the handler raised InvalidRequest, for example because of a bad body. For
    other failures it is 500.

    Args:
        handler: the function that answers requests.
        exchange: the request and its response.
        response: progress of the response of `exchange`.

    Returns:
        False if the handler failed. If `response.finished` is False afterwards, the caller must break off the response.
    """
    try:
        try:
            await handler(exchange)
        except InvalidRequest as error:
            if response.started:
                raise
            status = 413 if isinstance(error, BodyTooLarge) else 408 if isinstance(error, BodyTimeout) else 400
            await exchange.respond(status, JSON_FIELDS, refusal_body(status, str(error)))
        if response.websocket is not None:
            await response.websocket.close()
            response.finished = True
        if response.finished:
            return True
        logger.error(
            "handler returned without a complete response method=%s path=%s", exchange.method, printable(exchange.path)
        )
    except* Exception:  # If Cancelled is in an exception group with errors, this statement still raises Cancelled.
        logger.exception("handler failed method=%s path=%s", exchange.method, printable(exchange.path))
    if response.websocket is not None:
        await response.websocket.close(1011, "the server failed")
        response.finished = True
    elif not response.started:
        await exchange.respond(500, JSON_FIELDS, refusal_body(500, "the server failed to answer this request"))
    return False


def checked_root_path(path: str) -> str:
    """Check a path prefix, and remove its last slash.

    Args:
        path: the value of --root-path. It is empty if there is no prefix.

    Returns:
        The prefix without a slash at its end.

    Raises:
        StartupError: the prefix cannot be the start of a path.
    """
    if path and (not path.startswith("/") or any(mark in path for mark in "?# ")):
        raise StartupError(
            f"--root-path is {path!r}: it must begin with / and contain no question mark, # or blank, such as /llm"
        )
    return path.rstrip("/")


class RootPath:
    """A handler that removes a prefix from the path and calls another handler.

    A path without the prefix is not changed, because the proxy has already removed the prefix.

    Args:
        handler: called for each request.
        prefix: the prefix that checked_root_path returned.
    """

    def __init__(self, handler: Handler, prefix: str) -> None:
        self._handler = handler
        self._prefix = prefix

    async def __call__(self, exchange: Exchange) -> None:
        if exchange.path == self._prefix:
            exchange.path = "/"
        elif exchange.path.startswith(self._prefix + "/"):
            exchange.path = exchange.path[len(self._prefix) :]
        await self._handler(exchange)
