"""Stored responses: their operations, their stored parts, and the search for items of earlier responses.

Only the owner of a response can find it. A stored response has the response object and its own input only. The items of
earlier responses are found by following `previous_response_id` backward, up to a limit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from trioserve.api.error_responses import Refusal, refusal
from trioserve.api.query import Query
from trioserve.api.responses.response_object import FINAL, Item, failed_object, item_place
from trioserve.api.streams.event_log import split_events
from trioserve.contracts.errors import InvalidRequest
from trioserve.store.store import Store
from trioserve.store.stored_objects import DeleteObject, StoredObject

if TYPE_CHECKING:
    from trioserve.api.server_context import ServerContext

__all__ = [
    "KIND",
    "StoredResponse",
    "cancel_response",
    "delete_response",
    "items_before",
    "list_input_items",
    "not_found",
    "read_response",
    "read_stored",
    "resolve_references",
    "stored_bytes",
]

KIND = "response"
CHAIN_MAX = 512  # earlier responses in one chain of previous_response_id
LOADED_BYTES_MAX = 16 * 2**20  # limit for the stored bytes read for one request; more than any context takes


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A response as it is stored.

    Attributes:
        response: The response object, as clients get it.
        input: The items of the response's own input, with ids.
    """

    response: dict[str, Any]
    input: list[Item]

    @property
    def items(self) -> list[Item]:
        return [*self.input, *self.response["output"]]


class Loaded:
    """The stored responses that were read for one request, by id. Their size is at most LOADED_BYTES_MAX."""

    def __init__(self) -> None:
        self._responses: dict[str, StoredResponse] = {}
        self._bytes_left = LOADED_BYTES_MAX

    def get(self, response_id: str) -> StoredResponse | None:
        return self._responses.get(response_id)

    def add(self, kept: StoredObject, param: str) -> StoredResponse:
        """Decode a stored response and count its size.

        Args:
            kept: Object from the store.
            param: Field that refers to the response, for the error.

        Raises:
            InvalidRequest: The size limit is exceeded.
        """
        self.count(len(kept.body), param)
        stored = self._responses[kept.id] = read_stored(kept)
        return stored

    def count(self, byte_count: int, param: str) -> None:
        """Count bytes.

        Args:
            byte_count: Number of bytes.
            param: Field that refers to the bytes, for the error.

        Raises:
            InvalidRequest: The size limit is exceeded.
        """
        self._bytes_left -= byte_count
        if self._bytes_left < 0:
            raise InvalidRequest(
                f"{param} leads to more than {LOADED_BYTES_MAX} bytes of stored responses: leave it out, and send the "
                "items that matter in input",
                param=param,
            )


def stored_bytes(stored: StoredResponse) -> bytes:
    return msgspec.json.encode(stored)


def read_stored(kept: StoredObject) -> StoredResponse:
    return msgspec.json.decode(kept.body, type=StoredResponse)


def not_found(response_id: str, *, code: str = "response_not_found", param: str | None = None) -> Refusal:
    return refusal(
        code,
        f"there is no response {response_id[:80]!r}: it was not stored, was deleted, or has expired",
        param=param,
    )


async def items_before(store: Store | None, owner: str | None, previous_id: str, loaded: Loaded) -> list[Item]:
    """Return the items of a response and of all earlier responses in its chain, oldest first.

    Args:
        store: The store. None if the server has none.
        owner: Caller that asks.
        previous_id: Id of the last response in the chain.
        loaded: Collects the responses that are read.

    Raises:
        Refusal: A response of the chain does not exist (404).
        InvalidRequest: The chain is too long, or one of its responses has failed, was cancelled or still runs.
    """
    chain: list[StoredResponse] = []
    wanted: str | None = previous_id
    while wanted is not None:
        kept = None if store is None else await store.get(KIND, wanted, owner=owner)
        if kept is None:
            raise not_found(wanted, code="previous_response_not_found", param="previous_response_id")
        if len(chain) == CHAIN_MAX:
            raise InvalidRequest(
                f"previous_response_id leads to more than {CHAIN_MAX} responses: leave it out, and send the items "
                "that matter in input",
                param="previous_response_id",
            )
        stored = loaded.add(kept, "previous_response_id")
        status = stored.response["status"]
        if status not in ("completed", "incomplete"):
            raise InvalidRequest(
                f"the response {wanted} is {status}, but only a completed or incomplete response can be continued",
                param="previous_response_id",
            )
        chain.append(stored)
        wanted = stored.response["previous_response_id"]
    return [item for stored in reversed(chain) for item in stored.items]


async def resolve_references(store: Store | None, owner: str | None, items: list[Item], loaded: Loaded) -> list[Item]:
    """Return the items with each reference replaced by the item that it names.

    The size of the replaced items is limited: short references could name a long item many times.

    Args:
        store: The store. None if the server has none.
        owner: Caller that asks.
        items: Checked input items.
        loaded: Collects the responses that are read.

    Raises:
        Refusal: A referenced item does not exist (404).
        InvalidRequest: The size limit is exceeded.
    """
    resolved: list[Item] = []
    for item in items:
        if item["type"] == "item_reference":
            item = await _referred(store, owner, item["id"], loaded)
            loaded.count(len(msgspec.json.encode(item)), "input")
        resolved.append(item)
    return resolved


async def _referred(store: Store | None, owner: str | None, item_id: str, loaded: Loaded) -> Item:
    place = item_place(item_id)
    if place is not None:
        stored = loaded.get(place.response_id)
        if stored is None and store is not None:
            kept = await store.get(KIND, place.response_id, owner=owner)
            if kept is not None:
                stored = loaded.add(kept, "input")
        if stored is not None:
            for item in stored.items:
                if item["id"] == item_id:
                    return item
    raise refusal(
        "item_not_found",
        f"there is no item {item_id[:80]!r}: its response was not stored, was deleted, or has expired",
        param="input",
    )


PAGE_ITEMS_MAX = 100  # as in OpenAI's API
PAGE_ITEMS = 20


async def read_response(context: ServerContext) -> None:
    """Send a response. With `stream=true`, send its events from the beginning or after the number `starting_after`.

    Args:
        context: The request.
    """
    response_id, query = _response_id(context), Query(context.exchange.query)
    if query.text("stream") in ("true", "1"):
        await _stream(context, response_id, query.number("starting_after", -1, low=0, high=2**53))
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
    assert context.services.store is not None
    await context.services.store.settle(DeleteObject(kind=KIND, id=response_id))
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
    response_id, query = _response_id(context), Query(context.exchange.query)
    live = context.server.background.find(response_id, context.owner)
    if live is not None:
        items = live.run.planned.input
    else:
        items = read_stored(await _kept(context, response_id)).input
    order = query.choice("order", ("asc", "desc"), "desc")
    limit = query.number("limit", PAGE_ITEMS, low=1, high=PAGE_ITEMS_MAX)
    if order == "desc":
        items = items[::-1]
    after = query.text("after")
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
        await live.log.follow(
            after, context.exchange.send, silent_seconds_max=context.services.rules.keep_alive_seconds
        )
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
    assert context.services.store is not None
    pieces: list[bytes] = []
    offset = 0
    while offset < kept.blob_bytes:
        piece = await context.services.store.read_blob(KIND, kept.id, owner=context.owner, offset=offset)
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
    kept = (
        None
        if context.services.store is None
        else await context.services.store.get(KIND, response_id, owner=context.owner)
    )
    if kept is None:
        raise not_found(response_id)
    return kept


def _ended_response(stored: StoredResponse) -> dict[str, Any]:
    """Return the response object to send. The caller knows that the response does not run any more."""
    return stored.response if stored.response["status"] in FINAL else failed_object(stored.response)


def _response_id(context: ServerContext) -> str:
    return context.exchange.path.split("/")[3]
