"""How header fields are looked up: by name, whatever its case, in the order in which they came."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

__all__ = ["Headers"]


class Headers:
    """The header fields of one request. Names are lower case; a name may occur more than once."""

    __slots__ = ("_fields", "_values")

    def __init__(self, fields: Iterable[tuple[str, str]]) -> None:
        self._fields = [(name.lower(), value) for name, value in fields]
        self._values: dict[str, str] = {}  # a request is asked for a dozen names
        for name, value in self._fields:
            self._values[name] = f"{self._values[name]}, {value}" if name in self._values else value

    def get(self, name: str) -> str | None:
        """The value of a field, None if it did not come. Repeated fields are joined with ", " (RFC 9110, 5.3)."""
        return self._values.get(name.lower())

    def items(self) -> Iterator[tuple[str, str]]:
        """Every field as it came, repeated ones included."""
        return iter(self._fields)

    def __contains__(self, name: str) -> bool:
        return self.get(name) is not None

    def __len__(self) -> int:
        return len(self._fields)

    def __repr__(self) -> str:
        # Values may hold an API key.
        return f"Headers({', '.join(name for name, _ in self._fields)})"
