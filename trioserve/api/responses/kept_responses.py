"""Responses that connections keep in memory, so that a client continues them without the store.

A kept response has its own items only, and refers to the kept response that it continues. So the items of a long
conversation exist once, however many of its responses are kept.

    KeptMemory ──► KeptResponses, one for each connection ──► KeptResponse ──► the response before it
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import msgspec

from trioserve.api.limits import ConnectionSettings

__all__ = ["KeptMemory", "KeptResponse", "KeptResponses"]

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
        """Count a table no more. It has no responses.

        Args:
            table: The table.
        """
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
        """Return a kept response, and count it as used.

        Args:
            response_id: Id of the response.
        """
        kept = self._listed.get(response_id)
        if kept is not None:
            self._listed.move_to_end(response_id)
        return kept

    def keep(self, response_id: str, items: list[Any], *, previous_id: str | None, earlier: list[Any]) -> None:
        """Keep a response. At a bound, the least recently used responses are removed, possibly this one as well.

        Args:
            response_id: Id of the response.
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
