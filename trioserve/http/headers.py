"""Header fields of a request, with case-insensitive lookup."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

__all__ = ["Headers"]


class Headers:
    """The header fields of one request.

    Args:
        fields: names and values in the order of the message. A name may occur more than once, in upper or lower case.
    """

    __slots__ = ("_fields", "_values")

    def __init__(self, fields: Iterable[tuple[str, str]]) -> None:
        self._fields = [(name.lower(), value) for name, value in fields]
        self._values: dict[str, str] = {}  # an index, because about a dozen names are looked up for each request
        for name, value in self._fields:
            self._values[name] = f"{self._values[name]}, {value}" if name in self._values else value

    def get(self, name: str) -> str | None:
        """Return the value of a field.

        Args:
            name: name of the field, in upper or lower case.

        Returns:
            The value, or None if the request has no such field. The values of repeated fields are joined with ", " (RFC
            9110, 5.3).
        """
        return self._values.get(name.lower())

    def items(self) -> Iterator[tuple[str, str]]:
        """Return each field in the order of the message, with its name in lower case. Repeated fields stay separate."""
        return iter(self._fields)

    def __contains__(self, name: str) -> bool:
        return self.get(name) is not None

    def __len__(self) -> int:
        return len(self._fields)

    def __repr__(self) -> str:
        # Show only names, because a value may be an API key.
        return f"Headers({', '.join(name for name, _ in self._fields)})"
