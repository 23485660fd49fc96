"""Least recently used order and byte limit of a cache. It knows keys and sizes, and does not store the values."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Container, Hashable, Iterable, Sequence
from typing import Generic, TypeVar

__all__ = ["Shelf"]

Key = TypeVar("Key", bound=Hashable)


class Shelf(Generic[Key]):
    """Keys with sizes, from which the least recently used keys are evicted. Pinned keys are never evicted.

    Args:
        bytes_max: Limit for kept and reserved bytes.

    Attributes:
        bytes_used: Kept and reserved bytes. Never more than `bytes_max`.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes_used = 0
        self._sizes: OrderedDict[Key, int] = OrderedDict()  # in order of eviction
        self._pins: Counter[Key] = Counter()

    def __contains__(self, key: object) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def touch(self, keys: Sequence[Key]) -> None:
        """Mark keys as used now.

        Args:
            keys: Blocks of a prefix, in order. The first block is evicted last. A prefix without its first block is
                useless.
        """
        for key in reversed(keys):
            if key in self._sizes:
                self._sizes.move_to_end(key)

    def reserve(self, byte_count: int, keep: Container[Key] = ()) -> list[Key] | None:
        """Reserve bytes, and evict keys if necessary. The caller must pass the bytes to `put` or `release`.

        Args:
            byte_count: Bytes to reserve.
            keep: Keys that must not be evicted.

        Returns:
            Evicted keys. None if too few bytes can be freed. Nothing changes then.
        """
        missing = self.bytes_used + byte_count - self.bytes_max
        leaving = []
        if missing > 0:
            for key, size in self._sizes.items():
                if key not in self._pins and key not in keep:
                    leaving.append(key)
                    missing -= size
                    if missing <= 0:
                        break
            else:
                return None
        for key in leaving:
            self.drop(key)
        self.bytes_used += byte_count
        return leaving

    def release(self, byte_count: int) -> None:
        """Return reserved bytes that are not needed.

        Args:
            byte_count: Bytes that were reserved.
        """
        self.bytes_used -= byte_count

    def put(self, key: Key, byte_count: int) -> None:
        """Add a key that uses reserved bytes, as the most recently used key.

        Args:
            key: Key to add.
            byte_count: Bytes that were reserved for it.
        """
        assert key not in self._sizes, f"{key!r} is kept already"
        self._sizes[key] = byte_count

    def drop(self, key: Key) -> None:
        self.bytes_used -= self._sizes.pop(key)

    def pin(self, keys: Iterable[Key]) -> None:
        """Protect keys from eviction until `unpin` is called as often as `pin`. `drop` still removes them.

        Args:
            keys: Keys to protect.
        """
        self._pins.update(keys)

    def unpin(self, key: Key) -> None:
        self._pins[key] -= 1
        if self._pins[key] == 0:
            del self._pins[key]

    def sizes(self) -> dict[Key, int]:
        """Return a copy of the sizes of all keys, in bytes."""
        return dict(self._sizes)

    @property
    def pinned(self) -> set[Key]:
        return set(self._pins)

    def check(self, reserved_bytes: int) -> None:
        """Assert that the byte counts are consistent. For tests.

        Args:
            reserved_bytes: Bytes that are reserved now.

        Cost: O(keys).
        """
        assert self.bytes_used == sum(self._sizes.values()) + reserved_bytes <= self.bytes_max
        assert all(count > 0 for count in self._pins.values())
