"""How many tokens a draft model should propose: as many as bring the most tokens a second, and none where that is none.

A step with draft tokens has more rows and follows passes of the draft model; it brings as many tokens more as are
likely to be right. All three are measured: what steps with so many rows take, what a pass takes, and how often the
requests' draft tokens were right. Time comes in as a value, with the result of a step.
"""

from __future__ import annotations

from collections.abc import Sequence

from trioserve.contracts.step import DraftTimes

__all__ = ["DraftJudge"]

LEARNING_RATE = 0.2  # of one step, when several have been seen
ROWS_APART = (
    32  # up to here steps of so many rows and of one more are told apart; a row costs least where there are few
)
GAIN_MIN = 1.1  # below that, what is measured on a busy machine says nothing
TRIAL_TOKENS = 2
TRIAL_STEPS = 4  # one behind the other: with the first the draft model catches up, and the others tell what it takes
OUTLIER = 2.0  # times what is known: a step that takes longer was held up by something else
TRIAL_PERIOD_MIN, TRIAL_PERIOD_MAX = 32, 512  # steps without drafts until they are tried again; texts change
PLAIN_PERIOD = 32  # steps with drafts until one without, so that what is compared is no older
OTHER_PERIOD = 16  # steps with drafts until one with a token more, or fewer, for the same reason


class DraftJudge:
    def __init__(self) -> None:
        self._step_seconds = _Means()  # of steps of decodes alone, by their rows
        self._pass_seconds = _Means()  # by the requests
        self._plain_count = self._draft_count = 0
        self._trial_period = TRIAL_PERIOD_MIN

    def note(self, row_count: int, request_count: int, times: DraftTimes, *, is_usual: bool) -> None:
        """A step of decodes with so many rows, behind which so many requests got proposals. is_usual: the draft model
        computed no more than it does from step to step."""
        self._step_seconds.learn(row_count, times.step_seconds)
        if is_usual and request_count > 0 and times.pass_count > 0:
            self._pass_seconds.learn(request_count, times.draft_seconds / times.pass_count)

    def token_count(self, acceptances: Sequence[float], token_count_max: int) -> int:
        """To propose for each of these requests, 0 to token_count_max."""
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
            assert step_seconds is not None, "one is known"
            speed = tokens / (max(step_seconds, plain_seconds) + count * pass_seconds)
            if speed > best_speed:
                best, best_speed = count, speed
        return best


class _Means:
    """Seconds by a count: the mean of the first ones, then mostly the latest."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._seen: dict[int, int] = {}

    def learn(self, count: int, seconds: float) -> None:
        key = _key(count)
        seen = self._seen[key] = self._seen.get(key, 0) + 1
        known = self._seconds.get(key, seconds)
        self._seconds[key] = known + max(LEARNING_RATE, 1 / seen) * (min(seconds, OUTLIER * known) - known)

    def nearest(self, count: int) -> float | None:
        """What is known of fewer, rather than of more: what is not known is tried."""
        if not self._seconds:
            return None
        key = _key(count)
        fewer = [other for other in self._seconds if other <= key]
        return self._seconds[max(fewer) if fewer else min(self._seconds)]


def _key(count: int) -> int:
    return count if count <= ROWS_APART else ROWS_APART + count.bit_length()
