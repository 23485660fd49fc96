"""Which endpoint may do what of a disaggregated request, in the books of a simulated router."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from trioserve.contracts.endpoint import Stage
from trioserve.simulation.router.endpoint_book import EndpointBook
from trioserve.simulation.router.queue_rules import ExpectedRequest

__all__ = ["check_place", "is_next_stage_there", "is_pair_there", "may_do"]


def may_do(book: EndpointBook, entry: ExpectedRequest) -> bool:
    """Whether it is the endpoint's to do what is next of the request."""
    return book.is_meant_for(entry.stage) and not (entry.stage is Stage.DECODE and book.id == entry.prefilled_by)


def is_pair_there(serving: Iterable[EndpointBook], tried: Collection[str] = ()) -> bool:
    """Whether one may compute a prompt and another one make the response. serving: those that serve the model."""
    there = [book for book in serving if book.is_given and book.id not in tried]
    return any(
        first is not second and first.is_meant_for(Stage.PREFILL) and second.is_meant_for(Stage.DECODE)
        for first in there
        for second in there
    )


def is_next_stage_there(entry: ExpectedRequest, serving: Iterable[EndpointBook]) -> bool:
    """Whether a request that waits for a stage may go on so."""
    if entry.stage is Stage.PREFILL:
        return is_pair_there(serving, entry.tried)
    return entry.is_held and any(
        book.is_given and book.id not in entry.tried and may_do(book, entry) for book in serving
    )


def check_place(entry: ExpectedRequest, book: EndpointBook, taking: Iterable[EndpointBook]) -> None:
    """It is about to get the endpoint. taking: all that have to take it."""
    assert may_do(book, entry), f"{entry.name} is to be {entry.stage}, and gets {book.id}, which is for {book.role}"
    if entry.stage is not None:
        return
    nearest = [other.id for other in taking if other.id == entry.prefilled_by]
    if nearest:
        assert book.id in nearest, f"{entry.name} has its prompt at {nearest[0]}, and gets {book.id}"
    elif book.role == "prefill" and book.id != entry.prefilled_by:
        beside = [other.id for other in taking if other.role != "prefill"]
        assert not beside, f"{entry.name} gets {book.id}, which is for prompts, and {beside} could take it"
