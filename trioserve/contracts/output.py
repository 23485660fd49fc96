"""Deltas: the pieces of a response that a caller receives, with text that is safe to show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import msgspec

from trioserve.contracts.events import FinishReason, TokenLogprob
from trioserve.contracts.request import KVTransferParams
from trioserve.contracts.weights import WeightVersions

__all__ = [
    "EVENT_ALTERNATIVES_MAX",
    "REQUEST_POISONED",
    "AnyDelta",
    "Delta",
    "hold_unread",
    "join_unread",
    "pop_unread",
]


REQUEST_POISONED = "request_poisoned"
"""stop_reason of a request that was ended because the engine broke each time it computed the request."""

EVENT_ALTERNATIVES_MAX = 4000
"""Most log probabilities in a joined delta. Encoding this number takes a few milliseconds."""


class AnyDelta(Protocol):
    """New output of one choice of a request: a Delta for text, an ImageDelta for an image."""

    @property
    def index(self) -> int: ...

    @property
    def unread_size(self) -> int: ...

    @property
    def alternative_count(self) -> int: ...

    @property
    def finish_reason(self) -> FinishReason | None: ...

    @property
    def message(self) -> str | None: ...


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """New output of one choice.

    Attributes:
        index: Choice 0 .. n - 1.
        text: New text. The concatenated texts of all deltas are the whole response. Empty while a character is
            incomplete, or while the text may be the start of a stop string.
        token_ids: Tokens sampled since the previous delta, including the end token.
        logprobs: One entry for each token. None if not requested.
        finish_reason: Set only on the last delta of the choice.
        stop_reason: Details about the end: the stop string, the stop token id, or the name of the deadline that passed.
            "server_stopping" if another server may resume the choice. REQUEST_POISONED if the request must not be
            retried. None for the model's own end token.
        message: Explanation for the client if finish_reason is ERROR, ABORT or DEADLINE.
        kv_transfer: Parameters with which another engine reads the held KV. Set on the last delta, if KV is held.
        weight_versions: Versions of the weights that sampled token_ids. Empty while the engine has its initial weights.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    message: str | None = None
    kv_transfer: KVTransferParams | None = None
    weight_versions: WeightVersions = ()

    @property
    def unread_size(self) -> int:
        """Return the cost of copying the delta, in tokens."""
        return len(self.token_ids)

    @property
    def alternative_count(self) -> int:
        """Return the number of log probabilities in the delta."""
        return len(self.logprobs) * (1 + len(self.logprobs[0].top)) if self.logprobs else 0


DeltaT = TypeVar("DeltaT", bound=AnyDelta)


def hold_unread(held: list[DeltaT], delta: DeltaT, merge: Callable[[DeltaT, DeltaT], DeltaT]) -> None:
    """Add a delta to the unread deltas of its choice, for a reader that is slower than the model.

    A new delta is joined with the delta before it only if that delta is not larger. So each token is copied only about
    log(token count) times. The list has about log(token count) items, plus one item for every EVENT_ALTERNATIVES_MAX
    log probabilities.

    Args:
        held: Unread deltas, earliest first. Changed in place.
        delta: The new delta.
        merge: Joins two consecutive deltas.
    """
    while held and held[-1].unread_size <= delta.unread_size and _fits_one_event(held[-1], delta):
        delta = merge(held.pop(), delta)
    held.append(delta)


def pop_unread(held: list[DeltaT], merge: Callable[[DeltaT, DeltaT], DeltaT]) -> DeltaT:
    """Remove as many of the first deltas as fit into one event, and return them joined.

    Args:
        held: Unread deltas, earliest first, not empty. Changed in place.
        merge: Joins two consecutive deltas.
    """
    delta = held.pop(0)
    while held and _fits_one_event(delta, held[0]):
        delta = merge(delta, held.pop(0))
    return delta


def join_unread(held: list[DeltaT] | None, merge: Callable[[DeltaT, DeltaT], DeltaT]) -> DeltaT | None:
    """Join all deltas without changing the list.

    Args:
        held: Unread deltas, earliest first.
        merge: Joins two consecutive deltas.

    Returns:
        The joined delta, or None if there are no deltas.
    """
    if not held:
        return None
    delta = held[-1]
    for earlier in held[-2::-1]:
        delta = merge(earlier, delta)
    return delta


def _fits_one_event(first: AnyDelta, second: AnyDelta) -> bool:
    return first.alternative_count + second.alternative_count <= EVENT_ALTERNATIVES_MAX
