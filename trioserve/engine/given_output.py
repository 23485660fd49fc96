"""The output of a choice that its reader has received: all that is needed to resume after it."""

from __future__ import annotations

from trioserve.contracts.events import FinishReason, TokenLogprob
from trioserve.contracts.output import Delta
from trioserve.contracts.partial import PartialChoice
from trioserve.contracts.weights import WeightVersions, add_versions

__all__ = ["GivenOutput"]


class GivenOutput:
    """Collects the deltas of a choice that were read.

    Args:
        token_ids: tokens that were received before, for a resumed response.
        logprobs: log probabilities of these tokens. None: log probabilities are not kept.
        weight_versions: versions of the weights that sampled these tokens.
        is_complete: True if the choice had already finished.

    Attributes:
        keeps: True if more than token ids must be kept of each delta.
    """

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
        # Replaying the known tokens later decides between STOP and LENGTH. Until then STOP stands for both.
        self.finish_reason = FinishReason.STOP if is_complete else None

    @property
    def weight_versions(self) -> WeightVersions:
        return tuple(self._versions)

    def take(self, delta: Delta) -> None:
        """Add the next delta that was read.

        Args:
            delta: the delta.
        """
        if delta.weight_versions or self._versions:
            self.keeps = True
            add_versions(self._versions, len(self.token_ids), delta.weight_versions, len(delta.token_ids))
        self.token_ids += delta.token_ids
        if self.logprobs is not None:
            self.logprobs += delta.logprobs or ()
        # A choice that was complete before stays complete, even if its request was stopped.
        if self.finish_reason is None:
            self.finish_reason = delta.finish_reason

    def with_next(self, delta: Delta | None) -> PartialChoice:
        """Return all received output, and optionally one unread delta.

        Args:
            delta: the delta that is not read yet. None: none.
        """
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
