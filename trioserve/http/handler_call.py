"""Calls a handler, and sends an error response if the handler fails. All protocols use this module."""

from __future__ import annotations

import logging

from trioserve.contracts.errors import InvalidRequest
from trioserve.http.exchange import BodyTimeout, BodyTooLarge, Exchange, Handler
from trioserve.http.message_head import printable
from trioserve.http.refusals import JSON_FIELDS, refusal_body
from trioserve.http.response_state import ResponseState

__all__ = ["call_handler"]

logger = logging.getLogger(__name__)


async def call_handler(handler: Handler, exchange: Exchange, response: ResponseState) -> bool:
    """Run the handler, and send an error response if the handler fails before it starts a response.

    The status is 400, 408 or 413 if the handler raised InvalidRequest, for example because of a bad body. Otherwise it
    is 500.

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
        if response.finished:
            return True
        logger.error(
            "handler returned without a complete response method=%s path=%s", exchange.method, printable(exchange.path)
        )
    except* Exception:  # in an exception group, Cancelled propagates
        logger.exception("handler failed method=%s path=%s", exchange.method, printable(exchange.path))
    if not response.started:
        await exchange.respond(500, JSON_FIELDS, refusal_body(500, "the server failed to answer this request"))
    return False
