"""Requests by the ids that their callers chose. Several requests may share an id."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

from trioserve.engine.lifecycle.request_scope import AnyScope

__all__ = ["RequestsById"]


ScopeT = TypeVar("ScopeT", bound=AnyScope)


class RequestsById(Generic[ScopeT]):
    """Entered requests. Requests of equal id stay in the order in which they entered."""

    def __init__(self) -> None:
        self._requests: dict[str, list[ScopeT]] = {}

    def __bool__(self) -> bool:
        return bool(self._requests)

    def __len__(self) -> int:
        return sum(len(requests) for requests in self._requests.values())

    def __iter__(self) -> Iterator[ScopeT]:
        """Iterate over a copy, so that requests may be removed meanwhile."""
        return iter([request for requests in self._requests.values() for request in requests])

    def of(self, request_id: str) -> list[ScopeT]:
        return list(self._requests.get(request_id, ()))

    def add(self, request: ScopeT) -> None:
        self._requests.setdefault(request.id, []).append(request)

    def clear(self) -> None:
        self._requests.clear()

    def remove(self, request: ScopeT) -> None:
        requests = self._requests[request.id]
        requests.remove(request)
        if not requests:
            del self._requests[request.id]
