"""What the reader of a choice was given: all that another engine, or the same one later, needs to go on behind it."""

from __future__ import annotations

from trioserve.contracts.events import FinishReason, TokenLogprob
from trioserve.contracts.output import Delta
from trioserve.contracts.partial import PartialChoice
from trioserve.contracts.weights import WeightVersions, add_versions

__all__ = ["GivenOutput"]


class GivenOutput:
    """logprobs: None where they are not kept. keeps: there is more than token ids to be kept of each delta."""

    __slots__ = ("_versions", "finish_reason", "keeps", "logprobs", "token_ids")

    def __init__(
        self,
        token_ids: tuple[int, ...] = (),
        *,
        logprobs: tuple[TokenLogprob, ...] | None = None,
        weight_versions: WeightVersions = (),
        is_complete: bool = False,
    ) -> None:
        self.token_ids = list(token_ids)
        self.logprobs = None if logprobs is None else list(logprobs)
        self._versions = [*weight_versions]
        self.keeps = logprobs is not None or bool(weight_versions)
        # Until what is known of it is gone through, STOP stands for LENGTH, too.
        self.finish_reason = FinishReason.STOP if is_complete else None

    @property
    def weight_versions(self) -> WeightVersions:
        return tuple(self._versions)

    def take(self, delta: Delta) -> None:
        """The next one."""
        if delta.weight_versions or self._versions:
            self.keeps = True
            add_versions(self._versions, len(self.token_ids), delta.weight_versions, len(delta.token_ids))
        self.token_ids += delta.token_ids
        if self.logprobs is not None:
            self.logprobs += delta.logprobs or ()
        if self.finish_reason is None:  # one that was complete before stays so, though its request was cut off
            self.finish_reason = delta.finish_reason

    def with_next(self, delta: Delta | None) -> PartialChoice:
        """All of it, and of a delta that is not read yet."""
        given = self
        if delta is not None:
            given = GivenOutput(
                tuple(self.token_ids),
                logprobs=None if self.logprobs is None else tuple(self.logprobs),
                weight_versions=self.weight_versions,
            )
            given.finish_reason = self.finish_reason
            given.take(delta)
        return PartialChoice(
            token_ids=tuple(given.token_ids),
            logprobs=None if given.logprobs is None else tuple(given.logprobs),
            weight_versions=given.weight_versions,
            finish_reason=given.finish_reason,
        )
