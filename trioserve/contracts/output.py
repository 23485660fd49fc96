"""What a caller sees of a response: text that is safe to show, piece by piece."""

from __future__ import annotations

from typing import Protocol

import msgspec

from trioserve.contracts.events import FinishReason, TokenLogprob
from trioserve.contracts.kv_transfer_params import KVTransferParams
from trioserve.contracts.weights import WeightVersions

__all__ = ["AnyDelta", "REQUEST_POISONED", "Delta"]


REQUEST_POISONED = "request_poisoned"
"""The stop_reason of a request that was ended since the engine broke whenever it was computed."""


class AnyDelta(Protocol):
    """What is new of one of the things that a request asked for: of a text a Delta, of a picture an ImageDelta."""

    @property
    def index(self) -> int: ...

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
