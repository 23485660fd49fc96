"""Choice of the number of draft tokens that a draft model proposes per request.

The judge picks the number with the most accepted tokens per second, and 0 if plain steps are faster. A step with draft
tokens has more rows and follows extra passes of the draft model. The judge measures the time of a step by its rows, the
time of a pass, and how often draft tokens were accepted. Times arrive with the results of steps.
"""

from __future__ import annotations

from collections.abc import Sequence

from trioserve.contracts.step import DraftTimes

__all__ = ["DraftJudge"]

LEARNING_RATE = 0.2  # weight of one step, after the first few
ROWS_APART = 32  # up to here each row count is measured on its own; above, powers of two share a mean
GAIN_MIN = 1.1  # a smaller gain is within the measuring error of a busy machine
TRIAL_TOKENS = 2
TRIAL_STEPS = 4  # in a row: the draft model catches up in the first one, and the others measure its time
OUTLIER = 2.0  # times the known mean: a slower step was delayed by something else
TRIAL_PERIOD_MIN, TRIAL_PERIOD_MAX = 32, 512  # steps without drafts before the next trial
PLAIN_PERIOD = 32  # steps with drafts before one without: keeps the comparison fresh
OTHER_PERIOD = 16  # steps with drafts before one with a token more or fewer, for the same reason


class DraftJudge:
    def __init__(self) -> None:
        self._step_seconds = _Means()  # of steps with decodes only, by row count
        self._pass_seconds = _Means()  # of a draft model pass, by request count
        self._plain_count = self._draft_count = 0
        self._trial_period = TRIAL_PERIOD_MIN

    def note(self, row_count: int, request_count: int, times: DraftTimes, *, is_usual: bool) -> None:
        """Learn from the times of a step that only decodes.

        Args:
            row_count: rows of the step.
            request_count: requests that got proposals behind the step.
            times: measured times.
            is_usual: True if the draft model had no extra tokens to catch up with.
        """
        self._step_seconds.learn(row_count, times.step_seconds)
        if is_usual and request_count > 0 and times.pass_count > 0:
            self._pass_seconds.learn(request_count, times.draft_seconds / times.pass_count)

    def token_count(self, acceptances: Sequence[float], token_count_max: int) -> int:
        """Return how many tokens to propose for each request, 0 to `token_count_max`.

        Args:
            acceptances: acceptance rate of each request that drafts, 0 to 1.
            token_count_max: the most tokens that the step and the settings allow.
        """
        if not acceptances or token_count_max <= 0:
            return 0
        count = self._best_count(acceptances, token_count_max)
        if count > 0:
            self._plain_count, self._trial_period = 0, TRIAL_PERIOD_MIN
            self._draft_count += 1
            if self._draft_count % PLAIN_PERIOD == 0:
                return 0
            if self._draft_count % OTHER_PERIOD == 0:
                return count + 1 if count < token_count_max else max(1, count - 1)
            return count
        self._plain_count += 1
        if self._plain_count < self._trial_period:
            return 0
        if self._plain_count == self._trial_period + TRIAL_STEPS - 1:
            self._plain_count, self._trial_period = 0, min(2 * self._trial_period, TRIAL_PERIOD_MAX)
        return min(TRIAL_TOKENS, token_count_max)

    def _best_count(self, acceptances: Sequence[float], token_count_max: int) -> int:
        requests = len(acceptances)
        plain_seconds = self._step_seconds.nearest(requests)
        pass_seconds = self._pass_seconds.nearest(requests)
        if plain_seconds is None or pass_seconds is None:
            return token_count_max
        best, best_speed = 0, GAIN_MIN * requests / plain_seconds
        tokens, likely = float(requests), list(acceptances)
        for count in range(1, token_count_max + 1):
            tokens += sum(likely)
            likely = [chance * one for chance, one in zip(likely, acceptances, strict=True)]
            step_seconds = self._step_seconds.nearest(requests * (1 + count))
            assert step_seconds is not None, "a mean is known"
            speed = tokens / (max(step_seconds, plain_seconds) + count * pass_seconds)
            if speed > best_speed:
                best, best_speed = count, speed
        return best


class _Means:
    """Mean seconds by a count: the mean of the first values, then weighted to the latest ones."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._seen: dict[int, int] = {}

    def learn(self, count: int, seconds: float) -> None:
        key = _key(count)
        seen = self._seen[key] = self._seen.get(key, 0) + 1
        known = self._seconds.get(key, seconds)
        self._seconds[key] = known + max(LEARNING_RATE, 1 / seen) * (min(seconds, OUTLIER * known) - known)

    def nearest(self, count: int) -> float | None:
        """Return the mean of the nearest known count, a smaller one if possible.

        A smaller count gives an estimate that is too low. So an unknown count looks cheap, and is tried and measured.
        """
        if not self._seconds:
            return None
        key = _key(count)
        fewer = [other for other in self._seconds if other <= key]
        return self._seconds[max(fewer) if fewer else min(self._seconds)]


def _key(count: int) -> int:
    return count if count <= ROWS_APART else ROWS_APART + count.bit_length()
