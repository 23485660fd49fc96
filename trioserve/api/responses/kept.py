"""Handlers for stored and background responses: read, delete, cancel, and list the input items.

Only the owner of a response can find it.
"""

from __future__ import annotations

from typing import Any

from trioserve.api.queries import number_in, query_of
from trioserve.api.responses.response_object import FINAL, failed_object
from trioserve.api.responses.stored_responses import KIND, StoredResponse, not_found, read_stored
from trioserve.api.server_context import ServerContext
from trioserve.api.streams.event_log import split_events
from trioserve.contracts.errors import InvalidRequest
from trioserve.store.stored_objects import DeleteObject, StoredObject

__all__ = ["cancel_response", "delete_response", "list_input_items", "read_response"]

PAGE_ITEMS_MAX = 100  # as in OpenAI's API
PAGE_ITEMS = 20


async def read_response(context: ServerContext) -> None:
    """Send a response. With `stream=true`, send its events from the beginning or after the number `starting_after`.

    Args:
        context: The request.
    """
    response_id, query = _response_id(context), query_of(context.exchange)
    if query.get("stream") in ("true", "1"):
        await _stream(context, response_id, number_in(query, "starting_after", -1, low=0, high=2**53))
        return
    live = context.server.background.find(response_id, context.owner)
    if live is not None:
        await context.respond_json(live.snapshot())
        return
    await context.respond_json(_ended_response(read_stored(await _kept(context, response_id))))


async def delete_response(context: ServerContext) -> None:
    """Delete a response. A running background response is cancelled first.

    Args:
        context: The request.
    """
    response_id = _response_id(context)
    live = context.server.background.find(response_id, context.owner)
    if live is not None:
        live.scope.cancel()
        await live.done.wait()
    await _kept(context, response_id)
    assert context.store is not None
    await context.store.settle(DeleteObject(kind=KIND, id=response_id))
    await context.respond_json({"id": response_id, "object": "response", "deleted": True})


async def cancel_response(context: ServerContext) -> None:
    """Cancel a background response. A response that has ended does not change.

    A response without `background` ends when its client closes the connection, so it cannot be cancelled here.

    Args:
        context: The request.
    """
    response_id = _response_id(context)
    live = context.server.background.find(response_id, context.owner)
    if live is not None:
        live.scope.cancel()
        await live.done.wait()
        await context.respond_json(live.response)
        return
    response = _ended_response(read_stored(await _kept(context, response_id)))
    if not response["background"]:
        raise InvalidRequest(
            f"the response {response_id} was created without background=true, so it cannot be cancelled",
            param="response_id",
        )
    await context.respond_json(response)


async def list_input_items(context: ServerContext) -> None:
    """Send a page of the response's own input items, last item first unless `order=asc`.

    Args:
        context: The request.
    """
    response_id, query = _response_id(context), query_of(context.exchange)
    live = context.server.background.find(response_id, context.owner)
    if live is not None:
        items = live.run.planned.input
    else:
        items = read_stored(await _kept(context, response_id)).input
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order is {order[:40]!r}, allowed are asc and desc", param="order")
    limit = number_in(query, "limit", PAGE_ITEMS, low=1, high=PAGE_ITEMS_MAX)
    if order == "desc":
        items = items[::-1]
    after = query.get("after")
    if after is not None:
        indices = [index for index, item in enumerate(items) if item["id"] == after]
        if not indices:
            raise InvalidRequest(f"after is {after[:80]!r}, but this response's input has no such item", param="after")
        items = items[indices[0] + 1 :]
    page = items[:limit]
    await context.respond_json(
        {
            "object": "list",
            "data": page,
            "first_id": page[0]["id"] if page else None,
            "last_id": page[-1]["id"] if page else None,
            "has_more": len(items) > limit,
        }
    )


async def _stream(context: ServerContext, response_id: str, after: int) -> None:
    live = context.server.background.find(response_id, context.owner)
    if live is not None and live.log is not None:
        if after > live.log.last:
            raise InvalidRequest(
                f"starting_after is {after}, but the last event so far is {live.log.last}", param="starting_after"
            )
        await context.start_events()
        await live.log.follow(after, context.exchange.send, silent_seconds_max=context.rules.keep_alive_seconds)
        await context.finish()
        return
    kept = None if live is not None else await _kept(context, response_id)
    if kept is None or not kept.blob_bytes:
        raise InvalidRequest(
            f"the events of the response {response_id} are not stored: send background=true and stream=true when you "
            "create a response",
            param="stream",
        )
    events = await _kept_events(context, kept)
    if after >= len(events):
        raise InvalidRequest(
            f"starting_after is {after}, but the last event is {len(events) - 1}", param="starting_after"
        )
    await context.start_events()
    for begin in range(after + 1, len(events), EVENTS_OF_A_WRITE):
        await context.exchange.send(b"".join(events[begin : begin + EVENTS_OF_A_WRITE]))
    await context.finish()


EVENTS_OF_A_WRITE = 64


async def _kept_events(context: ServerContext, kept: StoredObject) -> list[bytes]:
    assert context.store is not None
    pieces: list[bytes] = []
    offset = 0
    while offset < kept.blob_bytes:
        piece = await context.store.read_blob(KIND, kept.id, owner=context.owner, offset=offset)
        if not piece:
            raise not_found(kept.id)  # deleted meanwhile
        pieces.append(piece)
        offset += len(piece)
    return split_events(b"".join(pieces))


async def _kept(context: ServerContext, response_id: str) -> StoredObject:
    """Return the stored response.

    Raises:
        Refusal: The caller has no such response (404).
    """
    kept = None if context.store is None else await context.store.get(KIND, response_id, owner=context.owner)
    if kept is None:
        raise not_found(response_id)
    return kept


def _ended_response(stored: StoredResponse) -> dict[str, Any]:
    """Return the response object to send. The caller knows that the response does not run any more."""
    return stored.response if stored.response["status"] in FINAL else failed_object(stored.response)


def _response_id(context: ServerContext) -> str:
    return context.exchange.path.split("/")[3]
