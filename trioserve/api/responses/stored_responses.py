"""Stored responses: their stored parts, and the search for items of earlier responses.

Only the owner of a response can find it. A stored response has the response object and its own input only. The items of
earlier responses are found by following `previous_response_id` backward, up to a limit.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from trioserve.api.error_responses import Refusal, refusal
from trioserve.api.responses.input_items import ItemReference
from trioserve.api.responses.kept_responses import KeptResponses
from trioserve.api.responses.response_object import item_place
from trioserve.api.responses.response_types import InputItem, ResponseObject
from trioserve.contracts.errors import InvalidRequest
from trioserve.store.store import Store
from trioserve.store.stored_objects import StoredObject

__all__ = [
    "CONTINUABLE",
    "KIND",
    "EarlierResponses",
    "StoredResponse",
    "not_found",
    "read_stored",
    "stored_bytes",
]

KIND = "response"
CONTINUABLE = frozenset({"completed", "incomplete"})
"""Statuses of responses that a later response may continue."""
CHAIN_MAX = 512  # A chain of previous_response_id has at most this number of earlier responses.
# One request reads at most this number of stored bytes, which is more than fits into any context.
LOADED_BYTES_MAX = 16 * 2**20


class StoredResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A response as it is stored.

    Attributes:
        response: The response object, as clients get it.
        input: The items of the response's own input, with ids.
    """

    response: ResponseObject
    input: list[InputItem]

    @property
    def items(self) -> list[InputItem]:
        return [*self.input, *self.response.output]


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


class EarlierResponses:
    """The earlier responses that one request continues or refers to. Their size is at most LOADED_BYTES_MAX.

    Args:
        store: The store. None if the server has none.
        owner: Caller that asks.
        kept: Responses that the caller's connection keeps. They are found before those of the store.
    """

    def __init__(self, store: Store | None, owner: str | None, kept: KeptResponses | None = None) -> None:
        self._store = store
        self._owner = owner
        self._kept = kept
        self._loaded: dict[str, StoredResponse] = {}
        self._bytes_left = LOADED_BYTES_MAX

    async def items_before(self, previous_id: str) -> list[InputItem]:
        """Return the items of a response and of all earlier responses in its chain, oldest first.

        Args:
            previous_id: Id of the last response in the chain.

        Raises:
            Refusal: A response of the chain does not exist (404).
            InvalidRequest: The chain is too long, or one of its responses has failed, was cancelled or still runs.
        """
        chain: list[list[InputItem]] = []
        wanted: str | None = previous_id
        while wanted is not None:
            kept = None if self._kept is None else self._kept.find(wanted)
            if kept is not None:
                self._count(kept.conversation_bytes, "previous_response_id")
                chain.append(kept.conversation)
                break
            stored = await self._load(wanted, "previous_response_id")
            if stored is None:
                raise not_found(wanted, code="previous_response_not_found", param="previous_response_id")
            if len(chain) == CHAIN_MAX:
                raise InvalidRequest(
                    f"previous_response_id leads to more than {CHAIN_MAX} responses: leave it out, and send the items "
                    "that matter in input",
                    param="previous_response_id",
                )
            status = stored.response.status
            if status not in CONTINUABLE:
                raise InvalidRequest(
                    f"the response {wanted} is {status}, but only a completed or incomplete response can be continued",
                    param="previous_response_id",
                )
            chain.append(stored.items)
            wanted = stored.response.previous_response_id
        return [item for items in reversed(chain) for item in items]

    async def resolved(self, items: Iterable[InputItem | ItemReference]) -> list[InputItem]:
        """Return the items with each reference replaced by the item that it names.

        The size of the replaced items is limited: short references could name a long item many times.

        Args:
            items: Checked input items.

        Raises:
            Refusal: A referenced item does not exist (404).
            InvalidRequest: The size limit is exceeded.
        """
        resolved: list[InputItem] = []
        for item in items:
            if isinstance(item, ItemReference):
                item = await self._referred(item.id)
                self._count(len(msgspec.json.encode(item)), "input")
            resolved.append(item)
        return resolved

    async def _referred(self, item_id: str) -> InputItem:
        place = item_place(item_id)
        if place is not None:
            kept = None if self._kept is None else self._kept.find(place.response_id)
            if kept is not None:
                items: list[InputItem] = kept.items
            else:
                stored = self._loaded.get(place.response_id) or await self._load(place.response_id, "input")
                items = [] if stored is None else stored.items
            for item in items:
                if item.id == item_id:
                    return item
        raise refusal(
            "item_not_found",
            f"there is no item {item_id[:80]!r}: its response was not stored, was deleted, or has expired",
            param="input",
        )

    async def _load(self, response_id: str, param: str) -> StoredResponse | None:
        """Read a response from the store and count its size. Return None if the caller has no such response."""
        found = None if self._store is None else await self._store.get(KIND, response_id, owner=self._owner)
        if found is None:
            return None
        self._count(len(found.body), param)
        stored = self._loaded[response_id] = read_stored(found)
        return stored

    def _count(self, byte_count: int, param: str) -> None:
        self._bytes_left -= byte_count
        if self._bytes_left < 0:
            raise InvalidRequest(
                f"{param} leads to more than {LOADED_BYTES_MAX} bytes of earlier responses: leave it out, and send the "
                "items that matter in input",
                param=param,
            )
