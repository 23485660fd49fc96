"""How many tokens of wide prompts a step takes, so that those that decode beside them go on nearly as before.

A prompt that is wider than a step is computed in many. Each of these makes whoever decodes wait for its next token
while thousands of tokens are computed that nobody sees. So its chunks are measured in time: a step with such a chunk
is to last at most stretch_max times as long as the same step without it. What either takes is learned from the steps:
a step of decodes alone gives the one, a step with a chunk, less that, the other. Every PROBE_EVERY steps the chunk is
left out, so that the measure of decodes alone does not grow stale.

A prompt that fits into one step is computed at once: its step comes once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from trioserve.contracts.step import StepPlan
from trioserve.core.live_request import LiveRequest

__all__ = ["PromptPace"]

CHUNK_TOKENS_MIN = 16  # the rows of one matrix tile: fewer cost the same, and a prompt has to come to its end
PROBE_EVERY = 16  # steps: costs a prompt a sixteenth of its pace
REST_SHARE_MIN = 0.01  # of a step's time: a chunk takes some, whatever the measured ones say
LEARNING_RATE = 0.3  # one step that was slow by chance moves the chunk by less than a third


class PromptPace:
    """stretch_max: how much longer a step may last for the chunks of wide prompts, as a factor above 1. Where wide
    prompts would so have less than their share, counted by heads, they get that: one beside one decode half the time.

    Times come in as arguments, in seconds of any clock that never goes back.
    """

    def __init__(self, stretch_max: float) -> None:
        self._stretch_max = stretch_max
        self._begun: deque[_Begun] = deque()  # the oldest first
        self._landed_at = float("-inf")
        self._decode_seconds: float | None = None  # of a step of decodes alone
        self._decode_count = 0  # in that step
        self._token_seconds: float | None = None  # of one token of a wide prompt, beside decodes
        self._chunk_tokens = 0  # in the last step that had some
        self._steps_since_probe = 0

    def tokens_max(self, decode_count: int, wide_count: int) -> int | None:
        """How many tokens of all wide prompts together the next step may take beside so many decodes; None: as many as
        it has room for. wide_count: wide prompts that have tokens due, at least 1."""
        if decode_count == 0:
            return None
        self._steps_since_probe += 1
        known = self._decode_seconds is not None
        has_changed = known and abs(decode_count - self._decode_count) * 4 > decode_count
        if self._steps_since_probe >= (PROBE_EVERY // 4 if has_changed else PROBE_EVERY):
            self._steps_since_probe = 0
            return 0
        if self._decode_seconds is None or self._token_seconds is None:
            return CHUNK_TOKENS_MIN
        stretch = max(self._stretch_max, 1 + wide_count / decode_count)
        tokens = (stretch - 1) * self._decode_seconds / self._token_seconds
        # A product's rows come in tiles. What was measured with few tokens says little of what many would take.
        tiles = min(tokens, 2.0 * self._chunk_tokens) // CHUNK_TOKENS_MIN
        return max(1, int(tiles)) * CHUNK_TOKENS_MIN

    def begin(self, now: float, plan: StepPlan, lives: Sequence[LiveRequest]) -> None:
        """A step was planned. Steps come back in the order in which they began. lives: whose its chunks are."""
        decode_count = len(plan.chunks)
        wide_tokens = other_tokens = 0
        if plan.token_count != decode_count:
            for chunk, live in zip(plan.chunks, lives, strict=True):
                if chunk.count > 1:
                    decode_count -= 1
                    wide_tokens += chunk.count if live.is_wide else 0
                    other_tokens += 0 if live.is_wide else chunk.count
        if wide_tokens:
            self._chunk_tokens = wide_tokens
        self._begun.append(_Begun(now, decode_count, wide_tokens, other_tokens))

    def end(self, now: float, *, is_whole: bool) -> None:
        """The oldest step in flight has come back. is_whole: it was computed to its end."""
        begun = self._begun.popleft()
        seconds = now - max(begun.at, self._landed_at)
        self._landed_at = now
        if not is_whole or begun.other_tokens or not begun.decode_count or seconds <= 0:
            return  # a clock may stand still
        if begun.wide_tokens == 0:
            is_alike = begun.decode_count == self._decode_count
            self._decode_seconds = _learned(self._decode_seconds if is_alike else None, seconds)
            self._decode_count = begun.decode_count
        elif self._decode_seconds is not None:
            rest = max(seconds - self._decode_seconds, REST_SHARE_MIN * seconds)
            self._token_seconds = _learned(self._token_seconds, rest / begun.wide_tokens)


class _Begun(NamedTuple):
    """A step in flight: when it was planned, and of what."""

    at: float
    decode_count: int
    wide_tokens: int
    other_tokens: int


def _learned(before: float | None, now: float) -> float:
    return now if before is None else before + LEARNING_RATE * (now - before)
