"""Reads the deadlines of a request from its body or its headers. The body takes precedence."""

from __future__ import annotations

from typing import Protocol

from trioserve.contracts.deadlines import NO_DEADLINES, Deadline, Deadlines
from trioserve.contracts.errors import InvalidRequest
from trioserve.http.headers import Headers

__all__ = ["deadlines_of"]

HEADERS = {
    Deadline.QUEUE: "X-Queue-Timeout",
    Deadline.FIRST_TOKEN: "X-TTFT-Timeout",
    Deadline.TOTAL: "X-Request-Timeout",
}
_NAMES = tuple((deadline.value, header) for deadline, header in HEADERS.items())  # reading an enum's value is slow


class HasDeadlines(Protocol):
    """A body that may have deadlines, in seconds."""

    @property
    def queue_timeout(self) -> float | None: ...
    @property
    def ttft_timeout(self) -> float | None: ...
    @property
    def timeout(self) -> float | None: ...


def deadlines_of(body: HasDeadlines, headers: Headers) -> Deadlines:
    """Read the deadlines of a request.

    Args:
        body: body of the request.
        headers: header fields of the request.

    Raises:
        InvalidRequest: a value is not valid. The error names the field or the header.
    """
    values: dict[str, float | None] = {}
    for name, header in _NAMES:
        value: float | None = getattr(body, name)
        if value is None:
            value = _seconds(headers.get(header), header)
        if value is not None:
            values[name] = value
    return Deadlines(**values) if values else NO_DEADLINES


def _seconds(text: str | None, header: str) -> float | None:
    if text is None:
        return None
    try:
        return float(text)
    except ValueError:
        raise InvalidRequest(f"{header} is {text[:40]!r}, allowed is a number of seconds", param=header) from None
