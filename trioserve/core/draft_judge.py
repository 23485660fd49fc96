"""Choice of the number of draft tokens that a draft model proposes per request.

The judge picks the number with the most accepted tokens per second, and 0 if plain steps are faster. A step with draft
tokens has more rows and follows extra passes of the draft model. The judge measures three values: the time of a step as
a function of its row count, the time of a draft model pass, and how often draft tokens are accepted. The measured times
arrive with step results.
"""

from __future__ import annotations

from collections.abc import Sequence

from trioserve.contracts.step import DraftTimes

__all__ = ["DraftJudge"]

LEARNING_RATE = 0.2  # weight of one step in the mean, after the first few steps
# Up to this row count, each count has its own mean. Above, the counts between two powers of two share a mean.
ROWS_APART = 32
GAIN_MIN = 1.1  # a smaller gain may be a measuring error on a busy machine
TRIAL_TOKENS = 2
# Consecutive steps of a trial: the draft model catches up in the first step, and the other steps measure its time.
TRIAL_STEPS = 4
OUTLIER = 2.0  # factor above the known mean: a slower step was delayed by another cause
TRIAL_PERIOD_MIN, TRIAL_PERIOD_MAX = 32, 512  # steps without drafts before the next trial
PLAIN_PERIOD = 32  # steps with drafts before one step without drafts, so that the comparison stays up to date
OTHER_PERIOD = 16  # steps with drafts before one step with one draft token more or fewer, for the same reason


class DraftJudge:
    def __init__(self) -> None:
        self._step_seconds = _Means()  # mean time of steps that only decode, by row count
        self._pass_seconds = _Means()  # mean time of a draft model pass, by request count
        self._plain_count = self._draft_count = 0
        self._trial_period = TRIAL_PERIOD_MIN

    def note(self, row_count: int, request_count: int, times: DraftTimes, *, is_usual: bool) -> None:
        """Learn from the times of a step that only decodes.

        Args:
            row_count: rows of the step.
            request_count: requests for which the draft model proposed tokens after the step.
            times: measured times of the step.
            is_usual: True if the draft model did not also compute tokens that it had missed before.
        """
        self._step_seconds.learn(row_count, times.step_seconds)
        if is_usual and request_count > 0 and times.pass_count > 0:
            self._pass_seconds.learn(request_count, times.draft_seconds / times.pass_count)

    def token_count(self, acceptances: Sequence[float], token_count_max: int) -> int:
        """Return how many tokens to propose for each request, 0 to `token_count_max`.

        Args:
            acceptances: acceptance rate of each request that drafts, 0 to 1.
            token_count_max: most draft tokens per request that the step and the settings allow.
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
    """Mean seconds, by a count. First the plain mean of all values, later a mean that weights recent values more."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._seen: dict[int, int] = {}

    def learn(self, count: int, seconds: float) -> None:
        key = _key(count)
        seen = self._seen[key] = self._seen.get(key, 0) + 1
        known = self._seconds.get(key, seconds)
        self._seconds[key] = known + max(LEARNING_RATE, 1 / seen) * (min(seconds, OUTLIER * known) - known)

    def nearest(self, count: int) -> float | None:
        """Return the mean of the nearest known count, or None if no count is known. A smaller count is preferred.

        The mean of a smaller count is an estimate that is too low. So an unknown count looks cheap, and the judge tries
        and measures it.
        """
        if not self._seconds:
            return None
        key = _key(count)
        fewer = [other for other in self._seconds if other <= key]
        return self._seconds[max(fewer) if fewer else min(self._seconds)]


def _key(count: int) -> int:
    return count if count <= ROWS_APART else ROWS_APART + count.bit_length()
