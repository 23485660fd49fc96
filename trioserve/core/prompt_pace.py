"""Limits how many tokens of long prompts one step computes, so that decodes in the same step stay fast.

In this package, a long ("wide") prompt is a prompt that needs several steps. Each of these steps delays the next token
of all decoding requests. So the time for chunks of long prompts is limited: a step with such a chunk may take at most
stretch_max times as long as the same step without it. Both times are measured: the time of steps that only decode, and
the additional time of steps with a chunk. Every PROBE_EVERY steps, a step has no chunk, to measure the time of a step
that only decodes again.

A prompt that fits into one step is computed at once, because it delays only one step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from trioserve.contracts.step import StepPlan
from trioserve.core.live_request import LiveRequest

__all__ = ["PromptPace"]

CHUNK_TOKENS_MIN = 16  # Number of rows in one matrix tile. Fewer rows cost the same time.
PROBE_EVERY = 16  # Number of steps between two probes. The probes slow a prompt by a sixteenth.
# Smallest fraction of a step's time that a chunk may take, so that a measuring error does not stop a prompt.
REST_SHARE_MIN = 0.01
LEARNING_RATE = 0.3  # Weight of one step in the mean time. It is small, because some steps are slow by chance.


class PromptPace:
    """Limits the chunks of long prompts (prompts that need several steps). Times are arguments, in seconds of any
    clock that never goes back.

    Args:
        stretch_max: highest allowed ratio, above 1, of the time of a step with long prompts to the time of the same
            step without them. Long prompts always get at least a fraction of time that depends on their number: one
            long prompt beside one decode gets half of the time.
    """

    def __init__(self, stretch_max: float) -> None:
        self._stretch_max = stretch_max
        self._begun: deque[_Begun] = deque()  # The oldest step comes first.
        self._landed_at = float("-inf")
        self._decode_seconds: float | None = None  # Time of a step that only decodes.
        self._decode_count = 0  # Number of decodes in that step.
        self._token_seconds: float | None = None  # Time of one token of a long prompt, in a step with decodes.
        self._chunk_tokens = 0  # Number of tokens of long prompts in the last step that had such tokens.
        self._steps_since_probe = 0

    def tokens_max(self, decode_count: int, wide_count: int) -> int | None:
        """Return how many tokens of all long prompts the next step may compute.

        Args:
            decode_count: number of decodes in the step.
            wide_count: number of long prompts with tokens due, at least 1.

        Returns:
            The number of tokens. None if only the step's token budget limits the long prompts.
        """
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
        # Use whole tiles of rows. At most double the last chunk, because small chunks predict large chunks badly.
        tiles = min(tokens, 2.0 * self._chunk_tokens) // CHUNK_TOKENS_MIN
        return max(1, int(tiles)) * CHUNK_TOKENS_MIN

    def begin(self, now: float, plan: StepPlan, lives: Sequence[LiveRequest]) -> None:
        """Note that a step was planned. Steps end in the order in which they began.

        Args:
            now: time in seconds.
            plan: the plan of the step.
            lives: the request of each chunk.
        """
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
        """Learn from the oldest step in flight, which has ended.

        Args:
            now: time in seconds.
            is_whole: True if the step was computed to its end, False if it was abandoned.
        """
        begun = self._begun.popleft()
        seconds = now - max(begun.at, self._landed_at)
        self._landed_at = now
        if not is_whole or begun.other_tokens or not begun.decode_count or seconds <= 0:
            return  # The duration is 0 if the clock has not advanced.
        if begun.wide_tokens == 0:
            is_alike = begun.decode_count == self._decode_count
            self._decode_seconds = _learned(self._decode_seconds if is_alike else None, seconds)
            self._decode_count = begun.decode_count
        elif self._decode_seconds is not None:
            rest = max(seconds - self._decode_seconds, REST_SHARE_MIN * seconds)
            self._token_seconds = _learned(self._token_seconds, rest / begun.wide_tokens)


class _Begun(NamedTuple):
    """A step in flight, with its planning time and its content."""

    at: float
    decode_count: int
    wide_tokens: int
    other_tokens: int


def _learned(before: float | None, now: float) -> float:
    return now if before is None else before + LEARNING_RATE * (now - before)
