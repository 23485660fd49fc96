"""What a caller sees of a response: text that is safe to show, piece by piece."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

import msgspec

from trioserve.contracts.events import FinishReason, TokenLogprob
from trioserve.contracts.kv_transfer_params import KVTransferParams
from trioserve.contracts.weights import WeightVersions

__all__ = [
    "EVENT_ALTERNATIVES_MAX",
    "REQUEST_POISONED",
    "AnyDelta",
    "Delta",
    "hold_unread",
    "join_unread",
    "take_unread",
]


REQUEST_POISONED = "request_poisoned"
"""The stop_reason of a request that was ended since the engine broke whenever it was computed."""

EVENT_ALTERNATIVES_MAX = 4000
"""Log probabilities in one joined delta: as many are encoded in a few milliseconds."""


class AnyDelta(Protocol):
    """What is new of one of the things that a request asked for: of a text a Delta, of a picture an ImageDelta."""

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
    """One piece of one choice (index 0 .. n - 1).

    text: may be empty while a character or a possible stop string is incomplete; the pieces join to the whole response.
    token_ids: the tokens that arrived since the last delta, end token included; logprobs: None, or one per token.
    finish_reason: set on the choice's last delta, and on no other. stop_reason: the stop string or stop token id that
    ended it, the name of the deadline that passed, of one that may go on elsewhere "server_stopping", of one that
    nobody is to try once more REQUEST_POISONED; None for the model's own end token. message: says what happened when
    finish_reason is ERROR, ABORT or DEADLINE. kv_transfer: on the last delta, how another engine gets at the KV of this
    choice, if it is held for that. weight_versions: which weights sampled token_ids; empty as long as the engine has
    those that it was opened with.
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
        """What a copy of the delta costs."""
        return len(self.token_ids)

    @property
    def alternative_count(self) -> int:
        """Log probabilities in the delta."""
        return len(self.logprobs) * (1 + len(self.logprobs[0].top)) if self.logprobs else 0


DeltaT = TypeVar("DeltaT", bound=AnyDelta)


def hold_unread(held: list[DeltaT], delta: DeltaT, merge: Callable[[DeltaT, DeltaT], DeltaT]) -> None:
    """Add a delta to those of its choice that a slow reader has not fetched yet.

    Each delta is joined only to smaller or equal ones, so a token is copied as often as the logarithm of their count,
    not once for every later token. The list has about as many items as that logarithm, and one more for every
    EVENT_ALTERNATIVES_MAX log probabilities.

    Args:
        held: Earliest first. Changed in place.
        merge: Joins two deltas that follow each other.
    """
    while held and held[-1].unread_size <= delta.unread_size and _fits_one_event(held[-1], delta):
        delta = merge(held.pop(), delta)
    held.append(delta)


def take_unread(held: list[DeltaT], merge: Callable[[DeltaT, DeltaT], DeltaT]) -> DeltaT:
    """Remove the first deltas, and join as many as one event may have. `held` is not empty."""
    delta = held.pop(0)
    while held and _fits_one_event(delta, held[0]):
        delta = merge(delta, held.pop(0))
    return delta


def join_unread(held: list[DeltaT] | None, merge: Callable[[DeltaT, DeltaT], DeltaT]) -> DeltaT | None:
    """Join all deltas, and leave the list as it is. None if there are none."""
    if not held:
        return None
    delta = held[-1]
    for earlier in held[-2::-1]:
        delta = merge(earlier, delta)
    return delta


def _fits_one_event(first: AnyDelta, second: AnyDelta) -> bool:
    return first.alternative_count + second.alternative_count <= EVENT_ALTERNATIVES_MAX
