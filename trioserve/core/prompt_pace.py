"""Limits how many prompt tokens one step computes, so that decodes in the same step stay fast.

Each step with prompt tokens delays the next token of all decoding requests. Beside decodes, prompt tokens may take at
most stretch_max - 1 times as long as the decodes alone. Three times are learned from steps: the time of a step that
only decodes, the fixed time that prompt tokens add to it, and the time of each prompt token. The fixed time does not
depend on the number of tokens, so it is not limited. It is high on a GPU, where decodes alone are a recorded graph, and
for a long context, which each chunk reads once. If it counted as time of tokens, a chunk of few tokens would look
expensive, and would never grow.

Some steps are measurements. One in PROBE_EVERY computes no prompt tokens, to measure the time of decodes again. One in
HALF_EVERY computes half of the tokens while the sizes of chunks are alike, because two sizes are necessary to tell the
fixed time from the time per token.

If no request decodes, only the token budget limits a step.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from trioserve.contracts.step import StepPlan

__all__ = ["PromptPace"]

# Every chunk reads the context of its prompt again, so small chunks of a long prompt spend most of their time on that.
CHUNK_TOKENS_MIN = 32
PROBE_EVERY = 16  # Number of steps between two measurements of decodes alone. They slow a prompt by a sixteenth.
HALF_EVERY = 4  # Number of steps between two half chunks, if the sizes of other chunks do not differ enough.
HALF_OF_MIN_EVERY = 8  # HALF_EVERY for chunks of CHUNK_TOKENS_MIN, whose time is mostly fixed.
# Weight of a prompt relative to a decode, if there are so many prompts that they get more time than stretch_max allows.
PROMPT_WEIGHT = 2
# Smallest fraction of a step's time that prompt tokens may take, so that a measuring error does not stop a prompt.
REST_SHARE_MIN = 0.01
LEARNING_RATE = 0.3  # Weight of one step in the mean time. It is small, because some steps are slow by chance.


class PromptPace:
    """Limits prompt tokens in steps with decodes. Times are arguments, in seconds of any clock that never goes back.

    Args:
        stretch_max: highest allowed ratio, above 1, of the time of a step with prompt tokens to the time of the same
            step without them, except for the fixed time of prompt tokens. Infinite: prompts are not limited. Prompts
            always get at least a fraction of time that depends on their number: one prompt beside two decodes gets half
            of the time. Otherwise prompts would queue up while few requests decode.
    """

    def __init__(self, stretch_max: float) -> None:
        self._stretch_max = stretch_max
        self._begun: deque[_Begun] = deque()  # The oldest step comes first.
        self._landed_at = float("-inf")
        self._decode_seconds: float | None = None  # Time of a step that only decodes.
        self._decode_count = 0.0  # Number of decodes in that step.
        self._prompts = _Line()  # Additional time of a step with decodes, by its number of prompt tokens.
        self._tokens_tried = 0.0  # The most prompt tokens in recent steps.
        self._steps_since_probe = 0
        self._chunks_total = 0

    def tokens_max(self, decode_count: int, prompt_count: int) -> int | None:
        """Return how many prompt tokens the next step may compute.

        Args:
            decode_count: number of decodes in the step.
            prompt_count: number of running requests that are due more than one token, at least 1.

        Returns:
            The number of tokens. None if only the step's token budget limits the prompts.
        """
        if decode_count == 0 or not self._tokens_tried or self._stretch_max == math.inf:
            return None
        self._steps_since_probe += 1
        has_changed = abs(decode_count - self._decode_count) * 4 > decode_count
        if self._steps_since_probe >= (PROBE_EVERY // 4 if has_changed else PROBE_EVERY):
            self._steps_since_probe = 0
            return 0
        if self._decode_seconds is None:
            return CHUNK_TOKENS_MIN
        stretch = max(self._stretch_max, 1 + PROMPT_WEIGHT * prompt_count / decode_count)
        seconds = (stretch - 1) * self._decode_seconds
        # At most double the last chunks, because small chunks predict large chunks badly.
        tokens = max(CHUNK_TOKENS_MIN, int(min(seconds / self._prompts.slope, 2 * self._tokens_tried)))
        self._chunks_total += 1
        half_every = HALF_EVERY if tokens > CHUNK_TOKENS_MIN else HALF_OF_MIN_EVERY
        needs_half = self._chunks_total % half_every == 0 and not self._prompts.has_spread
        return tokens // 2 if needs_half else tokens

    def begin(self, now: float, plan: StepPlan) -> None:
        """Note that a step was planned. Steps end in the order in which they began.

        Args:
            now: time in seconds.
            plan: the plan of the step.
        """
        decode_count, prompt_tokens = len(plan.chunks), 0
        if plan.token_count != decode_count:
            for chunk in plan.chunks:
                if chunk.count > 1:
                    decode_count -= 1
                    prompt_tokens += chunk.count
        self._begun.append(_Begun(now, decode_count, prompt_tokens))

    def end(self, now: float, *, is_whole: bool) -> None:
        """Learn from the oldest step in flight, which has ended.

        Args:
            now: time in seconds.
            is_whole: True if the step was computed to its end, False if it was abandoned.
        """
        at, decode_count, prompt_tokens = self._begun.popleft()
        seconds = now - max(at, self._landed_at)
        self._landed_at = now
        if not is_whole or seconds <= 0:
            return  # The duration is 0 if the clock has not advanced.
        if not prompt_tokens:
            is_alike = abs(decode_count - self._decode_count) * 4 <= decode_count
            known = self._decode_seconds if is_alike else None
            self._decode_seconds = seconds if known is None else known + LEARNING_RATE * (seconds - known)
            self._decode_count = decode_count
            self._steps_since_probe = 0
        elif self._decode_seconds is not None and decode_count:
            self._prompts.learn(prompt_tokens, max(seconds - self._decode_seconds, REST_SHARE_MIN * seconds))
            self._tokens_tried = max(prompt_tokens, 0.9 * self._tokens_tried)
        elif not self._prompts.sample_count:
            # Nothing better is known yet. The whole time of a step is more than the time of its prompt tokens.
            self._prompts.guess(prompt_tokens, seconds)
            self._tokens_tried = prompt_tokens


class _Begun(NamedTuple):
    """A step in flight, with its planning time and its content."""

    at: float
    decode_count: int
    prompt_tokens: int


class _Line:
    """Learns a line, y = floor + slope * x, from samples with x > 0 and y > 0. Recent samples weigh more.

    The slope is a least-squares fit of differences between two samples in a row. So it stays correct while the floor
    and the slope grow slowly with the context of a prompt. A sample far from the line counts only in part, because a
    step may be slow by chance. Several of them in a row start a new line. The line has no negative floor or slope.
    """

    SLOPE_RATE = 0.1  # Weight of the last difference.
    SPREAD_MIN = 0.1  # Mean difference of x, relative to x, from which on the differences define a slope.
    SLOPE_SHARE_MIN = 0.1  # Smallest slope, as a fraction of the slope without a floor.
    OFF_FACTOR = 2.0  # Ratio of a sample to the line from which on the sample is far from the line.
    OFF_COUNT_MAX = 3  # Number of such samples in a row that start a new line.

    def __init__(self) -> None:
        self.sample_count = 0  # Samples of this line.
        self._off_count = 0  # Number of the last samples that are far from the line.
        self.floor = 0.0
        self.slope = 0.0
        self._last_x = self._last_y = 0.0
        self._x = self._y = 0.0  # Mean values.
        self._xx = self._xy = 0.0  # Mean products of differences.

    @property
    def has_spread(self) -> bool:
        """True if the last values of x differ so much that the slope stays defined for some more samples."""
        return self._xx > 2 * (self.SPREAD_MIN * self._x) ** 2

    def guess(self, x: float, y: float) -> None:
        self.floor, self.slope = 0.0, y / x

    def learn(self, x: float, y: float) -> None:
        if self.sample_count:
            expected = self.floor + self.slope * x
            near = min(max(y, expected / self.OFF_FACTOR), expected * self.OFF_FACTOR)
            self._off_count = 0 if near == y else self._off_count + 1
            if self._off_count < self.OFF_COUNT_MAX:
                y = near
            else:
                self.sample_count = self._off_count = 0
        if self.sample_count == 0:
            self._x, self._y, self._xx, self._xy = x, y, 0.0, 0.0
            self.slope = y / x
        else:
            self._x += LEARNING_RATE * (x - self._x)
            self._y += LEARNING_RATE * (y - self._y)
            x_step, y_step = x - self._last_x, y - self._last_y
            self._xx += self.SLOPE_RATE * (x_step * x_step - self._xx)
            self._xy += self.SLOPE_RATE * (x_step * y_step - self._xy)
        self._last_x, self._last_y = x, y
        self.sample_count += 1
        slope_max = self._y / self._x
        slope = self._xy / self._xx if self._xx > (self.SPREAD_MIN * self._x) ** 2 else self.slope
        self.slope = min(max(slope, self.SLOPE_SHARE_MIN * slope_max), slope_max)
        self.floor = self._y - self.slope * self._x
