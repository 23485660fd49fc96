"""Responses in the store: what is kept of one, and how the items of those before it are found.

Of each response its object and its own input are kept, and not what came before: that is found by going back from one
to the one before, for a bounded way.
"""

from __future__ import annotations

from typing import Any

import msgspec

from trioserve.api.error_responses import Refusal, refusal
from trioserve.api.responses.items import Item, item_place
from trioserve.contracts.errors import InvalidRequest
from trioserve.store.store import Store
from trioserve.store.stored_objects import StoredObject

__all__ = ["KIND", "StoredResponse", "items_before", "not_found", "read_stored", "resolve_references", "stored_bytes"]

KIND = "response"
CHAIN_MAX = 512  # responses that one may go on from, each by the one before it
LOADED_BYTES_MAX = 16 * 2**20  # of what is read for one request; far more than any context holds


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True):
    """response: the object, as it is told. input: its items, with ids."""

    response: dict[str, Any]
    input: list[Item]

    @property
    def items(self) -> list[Item]:
        return [*self.input, *self.response["output"]]


class Loaded:
    """What was read for one request, by id; up to LOADED_BYTES_MAX of it."""

    def __init__(self) -> None:
        self._responses: dict[str, StoredResponse] = {}
        self._bytes_left = LOADED_BYTES_MAX

    def get(self, response_id: str) -> StoredResponse | None:
        return self._responses.get(response_id)

    def add(self, kept: StoredObject, param: str) -> StoredResponse:
        """Raises InvalidRequest."""
        self.count(len(kept.body), param)
        stored = self._responses[kept.id] = read_stored(kept)
        return stored

    def count(self, byte_count: int, param: str) -> None:
        """Raises InvalidRequest when there is no room for so many more bytes."""
        self._bytes_left -= byte_count
        if self._bytes_left < 0:
            raise InvalidRequest(
                f"{param} leads to more than {LOADED_BYTES_MAX} bytes of stored responses: begin anew, with what "
                "counts of them in input",
                param=param,
            )


def stored_bytes(stored: StoredResponse) -> bytes:
    return msgspec.json.encode(stored)


def read_stored(kept: StoredObject) -> StoredResponse:
    return msgspec.json.decode(kept.body, type=StoredResponse)


def not_found(response_id: str, *, code: str = "response_not_found", param: str | None = None) -> Refusal:
    return refusal(
        code,
        f"there is no response {response_id[:80]!r}: it was not stored, was deleted, or its time is over",
        param=param,
    )


async def items_before(store: Store | None, owner: str | None, previous_id: str, loaded: Loaded) -> list[Item]:
    """The items of the response with this id, and of all that it goes on from, the first one first. loaded: gets what
    was read. Raises Refusal (404) if one of them is not there, InvalidRequest if they are too many, or one has not
    ended well."""
    chain: list[StoredResponse] = []
    wanted: str | None = previous_id
    while wanted is not None:
        kept = None if store is None else await store.get(KIND, wanted, owner=owner)
        if kept is None:
            raise not_found(wanted, code="previous_response_not_found", param="previous_response_id")
        if len(chain) == CHAIN_MAX:
            raise InvalidRequest(
                f"previous_response_id leads to more than {CHAIN_MAX} responses: begin anew, with what counts of them "
                "in input",
                param="previous_response_id",
            )
        stored = loaded.add(kept, "previous_response_id")
        status = stored.response["status"]
        if status not in ("completed", "incomplete"):
            raise InvalidRequest(
                f"the response {wanted} is {status}, and only a completed or incomplete one can be gone on from",
                param="previous_response_id",
            )
        chain.append(stored)
        wanted = stored.response["previous_response_id"]
    return [item for stored in reversed(chain) for item in stored.items]


async def resolve_references(store: Store | None, owner: str | None, items: list[Item], loaded: Loaded) -> list[Item]:
    """The items, with what they refer to in place of the references. Raises Refusal (404), and InvalidRequest if that
    is too much: a short reference may stand for a long item, and as often as one likes."""
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
        f"there is no item {item_id[:80]!r}: its response was not stored, was deleted, or its time is over",
        param="input",
    )
