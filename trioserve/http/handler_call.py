"""What becomes of an exchange when its handler returns or raises. The same on every protocol."""

from __future__ import annotations

import logging

from trioserve.contracts.errors import InvalidRequest
from trioserve.http.exchange import BodyTimeout, BodyTooLarge, Exchange, Handler
from trioserve.http.message_head import printable
from trioserve.http.refusals import JSON_FIELDS, refusal_body
from trioserve.http.response_state import AnswerState

__all__ = ["call_handler"]

logger = logging.getLogger(__name__)


async def call_handler(handler: Handler, exchange: Exchange, answer: AnswerState) -> bool:
    """Run the handler; give a 500 (413, 408, 400 for a body that cannot be read) in its stead if it started no answer.

    Returns whether all went well. If `answer.finished` is false afterwards the answer has to be broken off.
    """
    try:
        try:
            await handler(exchange)
        except InvalidRequest as error:
            if answer.started:
                raise
            status = 413 if isinstance(error, BodyTooLarge) else 408 if isinstance(error, BodyTimeout) else 400
            await exchange.respond(status, JSON_FIELDS, refusal_body(status, str(error)))
        if answer.finished:
            return True
        logger.error("handler left no whole answer method=%s path=%s", exchange.method, printable(exchange.path))
    except* Exception:  # of a group, cancellation goes on
        logger.exception("handler failed method=%s path=%s", exchange.method, printable(exchange.path))
    if not answer.started:
        await exchange.respond(500, JSON_FIELDS, refusal_body(500, "the server failed to answer this request"))
    return False
