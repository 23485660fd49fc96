"""Earlier responses that a request continues: those in the store, and those that connections keep in memory.

Only the owner of a response can find it. A stored response has the response object and its own input only. The items of
earlier responses are found by following `previous_response_id` backward, up to a limit.

A client continues a kept response without the store. A kept response has its own items only, and refers to the kept
response that it continues. So the items of a long conversation exist once, however many of its responses are kept.

    KeptMemory ──► KeptResponses, one for each connection ──► KeptResponse ──► the response before it
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import msgspec

from trioserve.api.error_responses import Refusal, refusal
from trioserve.api.limits import ConnectionSettings
from trioserve.api.responses.input_items import ItemReference
from trioserve.api.responses.response_object import item_place
from trioserve.api.responses.response_types import InputItem, ResponseObject
from trioserve.contracts.errors import InvalidRequest
from trioserve.store.store import Store
from trioserve.store.stored_objects import StoredObject

__all__ = [
    "CONTINUABLE",
    "EarlierResponses",
    "KIND",
    "KeptMemory",
    "KeptResponse",
    "KeptResponses",
    "StoredResponse",
    "not_found",
    "read_stored",
    "stored_bytes",
]

RESPONSE_BYTES = 512  # Counted for each response besides its items, so that empty responses are bounded, too.


class KeptResponse:
    """One response in memory.

    Args:
        items: Its own items: the input, then the output. A response without `before` also has the items of all earlier
            responses. In a server they are structs. In a router they are dicts, because endpoints check them.
        before: Response that this response continues. None: `items` has the whole conversation.

    Attributes:
        byte_count: Size of the items as JSON.
    """

    __slots__ = ("_holder_count", "before", "byte_count", "items")

    def __init__(self, items: list[Any], before: KeptResponse | None) -> None:
        self.items = items
        self.before = before
        self.byte_count = len(msgspec.json.encode(items)) + RESPONSE_BYTES
        self._holder_count = 1
        if before is not None:
            before._holder_count += 1

    @property
    def conversation(self) -> list[Any]:
        """Items of this response and of all earlier responses, oldest first."""
        return [item for kept in reversed(self._chain()) for item in kept.items]

    @property
    def conversation_bytes(self) -> int:
        return sum(kept.byte_count for kept in self._chain())

    def _chain(self) -> list[KeptResponse]:
        chain: list[KeptResponse] = []
        kept: KeptResponse | None = self
        while kept is not None:
            chain.append(kept)
            kept = kept.before
        return chain

    def release(self) -> int:
        """Give up one hold of this response. Without holds, its items are freed, and it gives up its hold of `before`.

        Returns:
            The number of bytes that are freed.
        """
        freed = 0
        kept: KeptResponse | None = self
        while kept is not None:
            kept._holder_count -= 1
            if kept._holder_count:
                break
            freed += kept.byte_count
            before, kept.before = kept.before, None
            kept = before
        return freed


class KeptMemory:
    """Counts the bytes of the responses that all connections keep, and bounds them.

    Args:
        bytes_max: Bound. Above it, the connection with the most bytes loses its least recently used response.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._tables: set[KeptResponses] = set()
        self.byte_count = 0

    def open(self, settings: ConnectionSettings) -> KeptResponses:
        """Return the table for a new connection, which must call `close`.

        Args:
            settings: Bounds of the connection.
        """
        table = KeptResponses(self, settings)
        self._tables.add(table)
        return table

    def change(self, byte_count: int) -> None:
        """Count bytes that a table added or removed. At the bound, remove responses of any table.

        Args:
            byte_count: Number of bytes. Negative: they were removed.
        """
        self.byte_count += byte_count
        while self.byte_count > self._bytes_max:
            max(self._tables, key=lambda table: table.byte_count).evict()

    def forget(self, table: KeptResponses) -> None:
        """Count a table no more. It has no responses."""
        self._tables.discard(table)


class KeptResponses:
    """The responses that one connection keeps, by id.

    Args:
        memory: Counts the bytes of all connections.
        settings: Bounds of the connection.

    Attributes:
        byte_count: Size of the kept responses.
    """

    def __init__(self, memory: KeptMemory, settings: ConnectionSettings) -> None:
        self._memory = memory
        self._settings = settings
        self._listed: OrderedDict[str, KeptResponse] = OrderedDict()  # The least recently used response is the first.
        self.byte_count = 0

    def __len__(self) -> int:
        return len(self._listed)

    def find(self, response_id: str) -> KeptResponse | None:
        """Return a kept response, and count it as used."""
        kept = self._listed.get(response_id)
        if kept is not None:
            self._listed.move_to_end(response_id)
        return kept

    def keep(self, response_id: str, items: list[Any], *, previous_id: str | None, earlier: list[Any]) -> None:
        """Keep a response. At a bound, the least recently used responses are removed, possibly this one as well.

        Args:
            items: Its own items.
            previous_id: Id of the response that it continues.
            earlier: Items of all earlier responses. They are kept, too, if the connection does not have `previous_id`.
        """
        before = None if previous_id is None else self._listed.get(previous_id)
        kept = KeptResponse(items if before is not None else [*earlier, *items], before)
        self._listed[response_id] = kept
        self._change(kept.byte_count)
        settings = self._settings
        while len(self._listed) > settings.kept_max or self.byte_count > settings.kept_bytes_max:
            self.evict()

    def evict(self) -> None:
        """Remove the least recently used response. Its bytes are freed when no later response continues it."""
        _, kept = self._listed.popitem(last=False)
        self._change(-kept.release())

    def close(self) -> None:
        """Remove all responses. Further calls change nothing."""
        while self._listed:
            self.evict()
        self._memory.forget(self)

    def _change(self, byte_count: int) -> None:
        self.byte_count += byte_count
        self._memory.change(byte_count)


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
