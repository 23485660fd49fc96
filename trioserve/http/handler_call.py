"""What becomes of an exchange when its handler returns or raises. The same on every protocol."""

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
    """Run the handler; give a 500 (413, 408, 400 for a body that cannot be read) in its stead if it started no
    response.

    Returns whether all went well. If `response.finished` is false afterwards the response has to be broken off.
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
        logger.error("handler left no whole response method=%s path=%s", exchange.method, printable(exchange.path))
    except* Exception:  # of a group, cancellation goes on
        logger.exception("handler failed method=%s path=%s", exchange.method, printable(exchange.path))
    if not response.started:
        await exchange.respond(500, JSON_FIELDS, refusal_body(500, "the server failed to answer this request"))
    return False
