"""What is kept within a number of bytes, and what has to go first. Knows keys and sizes; holds nothing itself."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Container, Hashable, Iterable, Sequence
from typing import Generic, TypeVar

__all__ = ["Shelf"]

Key = TypeVar("Key", bound=Hashable)


class Shelf(Generic[Key]):
    """Least recently used goes first. What is pinned stays. bytes_used counts what is kept and what is reserved, and is
    never more than bytes_max."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes_used = 0
        self._sizes: OrderedDict[Key, int] = OrderedDict()  # the first one to go comes first
        self._pins: Counter[Key] = Counter()

    def __contains__(self, key: object) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def touch(self, keys: Sequence[Key]) -> None:
        """They are used now. The first of them goes last: without its beginning, a prefix is worth nothing."""
        for key in reversed(keys):
            if key in self._sizes:
                self._sizes.move_to_end(key)

    def reserve(self, byte_count: int, keep: Container[Key] = ()) -> list[Key] | None:
        """Make room for so many bytes, which count from now on: put or release them. Returns what had to go for it, and
        is kept no longer; None: it cannot be, and nothing has changed. keep: what must not go."""
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
        """They were reserved, and nothing came of it."""
        self.bytes_used -= byte_count

    def put(self, key: Key, byte_count: int) -> None:
        """Bytes that were reserved are this from now on; it is the last one to go."""
        assert key not in self._sizes, f"{key!r} is kept already"
        self._sizes[key] = byte_count

    def drop(self, key: Key) -> None:
        self.bytes_used -= self._sizes.pop(key)

    def pin(self, keys: Iterable[Key]) -> None:
        """They do not go to make room until they are unpinned as often; drop() takes them all the same."""
        self._pins.update(keys)

    def unpin(self, key: Key) -> None:
        self._pins[key] -= 1
        if self._pins[key] == 0:
            del self._pins[key]

    def sizes(self) -> dict[Key, int]:
        """Bytes of each key that is kept. A copy."""
        return dict(self._sizes)

    @property
    def pinned(self) -> set[Key]:
        return set(self._pins)

    def check(self, reserved_bytes: int) -> None:
        """Assert that the books agree. O(keys): for tests."""
        assert self.bytes_used == sum(self._sizes.values()) + reserved_bytes <= self.bytes_max
        assert all(count > 0 for count in self._pins.values())
