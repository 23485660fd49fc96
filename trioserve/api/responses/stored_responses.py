"""Stored responses: their stored parts, and the search for items of earlier responses.

Only the owner of a response can find it. A stored response has the response object and its own input only. The items of
earlier responses are found by following `previous_response_id` backward, up to a limit.
"""

from __future__ import annotations

from typing import Any

import msgspec

from trioserve.api.error_responses import Refusal, refusal
from trioserve.api.responses.response_object import Item, item_place
from trioserve.contracts.errors import InvalidRequest
from trioserve.store.store import Store
from trioserve.store.stored_objects import StoredObject

__all__ = [
    "KIND",
    "StoredResponse",
    "items_before",
    "not_found",
    "read_stored",
    "resolve_references",
    "stored_bytes",
]

KIND = "response"
CHAIN_MAX = 512  # A chain of previous_response_id has at most this number of earlier responses.
# One request reads at most this number of stored bytes, which is more than fits into any context.
LOADED_BYTES_MAX = 16 * 2**20


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
