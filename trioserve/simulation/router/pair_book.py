"""Decides which endpoint may do which stage of a disaggregated request."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from trioserve.contracts.endpoint import Stage
from trioserve.simulation.router.endpoint_book import EndpointBook
from trioserve.simulation.router.queue_rules import ExpectedRequest

__all__ = ["check_place", "is_next_stage_there", "is_pair_there", "may_do"]


def may_do(book: EndpointBook, entry: ExpectedRequest) -> bool:
    """Return True if an endpoint may do the next stage of a request.

    Args:
        book: the endpoint.
        entry: the request.
    """
    return book.is_meant_for(entry.stage) and not (entry.stage is Stage.DECODE and book.id == entry.prefilled_by)


def is_pair_there(serving: Iterable[EndpointBook], tried: Collection[str] = ()) -> bool:
    """Return True if one endpoint may compute a prompt and another one the response.

    Args:
        serving: endpoints with the model.
        tried: endpoints that must not be used.
    """
    available = [book for book in serving if book.is_given and book.id not in tried]
    return any(
        first is not second and first.is_meant_for(Stage.PREFILL) and second.is_meant_for(Stage.DECODE)
        for first in available
        for second in available
    )


def is_next_stage_there(entry: ExpectedRequest, serving: Iterable[EndpointBook]) -> bool:
    """Return True if a request that waits for a stage can still get it.

    Args:
        entry: the request.
        serving: endpoints with its model.
    """
    if entry.stage is Stage.PREFILL:
        return is_pair_there(serving, entry.tried)
    return entry.is_held and any(
        book.is_given and book.id not in entry.tried and may_do(book, entry) for book in serving
    )


def check_place(entry: ExpectedRequest, book: EndpointBook, taking: Iterable[EndpointBook]) -> None:
    """Check the endpoint that a request is about to get.

    Args:
        entry: the request.
        book: the endpoint.
        taking: all endpoints that must accept it.
    """
    assert may_do(book, entry), f"{entry.name} is in stage {entry.stage}, but gets {book.id}, which is for {book.role}"
    if entry.stage is not None:
        return
    nearest = [other.id for other in taking if other.id == entry.prefilled_by]
    if nearest:
        assert book.id in nearest, f"{entry.name} has its prompt at {nearest[0]}, but gets {book.id}"
    elif book.role == "prefill" and book.id != entry.prefilled_by:
        beside = [other.id for other in taking if other.role != "prefill"]
        assert not beside, f"{entry.name} gets {book.id}, which is for prompts, but {beside} could accept it"
