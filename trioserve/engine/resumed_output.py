"""The output that the reader of a request has: delivered output, and the known output of a resumed request.

`DeliveredOutput` contains everything that is needed to resume a choice after its delivered output. To resume, the known
tokens are replayed one by one, as if each had just been sampled. The deltas of the replay are not sent to the reader.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from trioserve.contracts.errors import ContextTooLong, InvalidRequest
from trioserve.contracts.events import FinishReason, Phase, RequestFinished, TokenLogprob
from trioserve.contracts.ids import RequestId
from trioserve.contracts.output import Delta
from trioserve.contracts.resume import PartialChoice, Resume
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.weights import WeightVersions, add_versions
from trioserve.text.guide_factory import PreparedGuides
from trioserve.text.output import ChoiceOutput
from trioserve.text.sequence_guide import SequenceGuide
from trioserve.text.tokenizer import Tokenizer

__all__ = [
    "DeliveredOutput",
    "RESUMED_TOKENS_MAX",
    "REPLAY_CHARACTERS",
    "ResumedChoice",
    "ResumedOutput",
    "checked_resume",
]


class DeliveredOutput:
    """Collects the deltas of a choice that the reader has received.

    Args:
        token_ids: tokens that the reader received from an earlier stream, for a resumed response.
        logprobs: log probabilities of these tokens. None: log probabilities are not kept.
        weight_versions: versions of the weights that sampled these tokens.
        is_complete: True if the choice had finished in an earlier stream.

    Attributes:
        keeps: True if log probabilities or weight versions must be kept of each delta, and not only token ids.
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
        # A later replay of the known tokens decides between STOP and LENGTH. Until then, STOP represents both.
        self.finish_reason = FinishReason.STOP if is_complete else None

    @property
    def weight_versions(self) -> WeightVersions:
        return tuple(self._versions)

    def take(self, delta: Delta) -> None:
        """Add the next delta that the reader has received."""
        if delta.weight_versions or self._versions:
            self.keeps = True
            add_versions(self._versions, len(self.token_ids), delta.weight_versions, len(delta.token_ids))
        self.token_ids += delta.token_ids
        if self.logprobs is not None:
            self.logprobs += delta.logprobs or ()
        # A choice that was complete in the earlier stream stays complete, even if the request was stopped later.
        if self.finish_reason is None:
            self.finish_reason = delta.finish_reason

    def with_next(self, delta: Delta | None) -> PartialChoice:
        """Return all received output, plus optionally one unread delta.

        Args:
            delta: the unread delta. None: no unread delta is added.
        """
        given = self
        if delta is not None:
            given = DeliveredOutput(
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


# This limit for all choices together is about two seconds of CPU time. One choice may always fill the model's context.
RESUMED_TOKENS_MAX = 524_288
# Cost of replaying one token, expressed as characters of text to tokenize. It is several microseconds.
REPLAY_CHARACTERS = 8

PARAM = "resume.token_ids"


class ResumedChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The state of one choice after its known tokens.

    Attributes:
        output: turns the tokens after the known tokens into text.
        deltas: the deltas of the replay. Together, they contain all known tokens.
        is_finished: True if the choice had ended with its known tokens.
        guide: grammar state. None: no grammar, or the choice has finished.
    """

    output: ChoiceOutput
    deltas: tuple[Delta, ...]
    is_finished: bool
    guide: SequenceGuide | None = None


class ResumedOutput(msgspec.Struct, frozen=True, kw_only=True):
    """The known tokens of a request, ready to be replayed. A long replay should run in a worker thread.

    Attributes:
        tokenizer: turns tokens into text.
        sampling: sampling options of the request.
        cache_salt: separates prefix caches of different users. None: shared.
        resume: the known tokens.
        stop_token_ids: token ids that end a choice.
        tokens_max: highest number of output tokens of each choice.
        prompt_token_ids: tokens of the prompt.
        guides: compiled grammars. None: no grammar.
    """

    tokenizer: Tokenizer
    sampling: SamplingParams
    cache_salt: str | None = None
    resume: Resume
    stop_token_ids: Collection[int]
    tokens_max: int
    prompt_token_ids: Sequence[int]
    guides: PreparedGuides | None

    @property
    def size(self) -> int:
        """Cost of the replay, in the unit of `PromptEncoder.run`."""
        return REPLAY_CHARACTERS * sum(map(len, self.resume.token_ids))

    def choices(self) -> list[ResumedChoice]:
        """Replay the known tokens of each choice.

        Returns:
            One entry per choice.

        Raises:
            InvalidRequest: the output cannot be the beginning of a response to this request.
        """
        return [self._choice(index) for index in range(len(self.resume.token_ids))]

    def _choice(self, index: int) -> ResumedChoice:
        token_ids = self.resume.token_ids[index]
        output = ChoiceOutput(self.tokenizer, self.sampling, index=index, cache_salt=self.cache_salt)
        if self.resume.finished[index]:
            deltas = self._taken(output, index, self._end(index))
            return ResumedChoice(output=output, deltas=tuple(deltas), is_finished=True)
        if len(token_ids) >= self.tokens_max:
            raise _over(index, f"they are {len(token_ids)}, and it may have {self.tokens_max}")
        if self._stops(token_ids):
            raise _over(index, f"token {token_ids[-1]} ends it")
        deltas = self._taken(output, index, None)
        if output.ended:
            raise _over(index, f"the stop string {deltas[-1].stop_reason!r} ends it")
        return ResumedChoice(output=output, deltas=tuple(deltas), is_finished=False, guide=self._guide(index))

    def _taken(self, output: ChoiceOutput, index: int, end: RequestFinished | None) -> list[Delta]:
        resume = self.resume
        return output.take_known(
            resume.token_ids[index],
            end,
            logprobs=None if resume.logprobs is None else resume.logprobs[index],
            weight_versions=() if resume.weight_versions is None else resume.weight_versions[index],
        )

    def _guide(self, index: int) -> SequenceGuide | None:
        if self.guides is None:
            return None
        guide = self.guides.new_guide(self.stop_token_ids, self.prompt_token_ids)
        for place, token_id in enumerate(self.resume.token_ids[index]):
            if guide.is_over:
                raise _over(index, f"its grammar is complete with token {place}")
            if not guide.accept(token_id):
                raise InvalidRequest(
                    f"resume.token_ids[{index}][{place}] is {token_id}, which is not allowed there: {guide.fault}",
                    param=PARAM,
                )
        if guide.is_over:
            raise _over(index, "its grammar is complete")
        return guide

    def _is_grammar_complete(self, token_ids: Sequence[int]) -> bool:
        if self.guides is None:
            return False
        guide = self.guides.new_guide(self.stop_token_ids, self.prompt_token_ids)
        return all(guide.accept(token_id) for token_id in token_ids) and guide.is_over

    def _stops(self, token_ids: Sequence[int]) -> bool:
        is_stop = bool(token_ids) and token_ids[-1] in self.stop_token_ids
        return is_stop and len(token_ids) > self.sampling.min_tokens

    def _end(self, index: int) -> RequestFinished:
        """Return how a finished choice ended, as far as its tokens show. The replay itself finds a stop string."""
        token_ids = self.resume.token_ids[index]
        is_stopped = self._stops(token_ids)
        is_full = len(token_ids) >= self.tokens_max and not is_stopped and not self._is_grammar_complete(token_ids)
        return RequestFinished(
            request_id=RequestId(""),
            reason=FinishReason.LENGTH if is_full or self.sampling.max_tokens == 0 else FinishReason.STOP,
            phase=Phase.DECODE,
            stop_token_id=token_ids[-1] if is_stopped else None,
        )


def checked_resume(resume: Resume, sampling: SamplingParams, *, vocab_size: int, context_tokens_max: int) -> None:
    """Check whether known output can belong to a request. This check does not need the prompt.

    Args:
        resume: the known output.
        sampling: sampling options of the request.
        vocab_size: number of token ids.
        context_tokens_max: highest number of tokens in prompt and output together.

    Raises:
        InvalidRequest: the output cannot be the beginning of a response to this request.
    """
    if len(resume.token_ids) != sampling.n:
        raise InvalidRequest(
            f"resume.token_ids has {len(resume.token_ids)} lists and the request {sampling.n} choices: there is one "
            "for each choice",
            param=PARAM,
        )
    for index, token_ids in enumerate(resume.token_ids):
        if len(token_ids) > context_tokens_max:
            raise ContextTooLong(
                f"This model's maximum context length is {context_tokens_max} tokens, and resume.token_ids[{index}] "
                f"has {len(token_ids)}",
                param=PARAM,
            )
        if token_ids and max(token_ids) >= vocab_size:
            raise InvalidRequest(
                f"resume.token_ids[{index}] has token id {max(token_ids)}, this model's are 0 to {vocab_size - 1}",
                param=PARAM,
            )
    token_count, allowed = sum(map(len, resume.token_ids)), max(RESUMED_TOKENS_MAX, context_tokens_max)
    if token_count > allowed:
        raise InvalidRequest(
            f"resume.token_ids has {token_count} tokens in {len(resume.token_ids)} lists, at most {allowed} may be: "
            "resume fewer choices in one request",
            param=PARAM,
        )
    for index, entries in enumerate(resume.logprobs or ()):
        _check_logprobs(index, resume.token_ids[index], entries, vocab_size)


def _check_logprobs(index: int, token_ids: Sequence[int], entries: Sequence[TokenLogprob], vocab_size: int) -> None:
    """Check that each entry belongs to its token, and that all its token ids exist. Raises InvalidRequest."""
    param = "resume.logprobs"
    for place, (token_id, entry) in enumerate(zip(token_ids, entries, strict=True)):
        if entry.token_id != token_id:
            raise InvalidRequest(
                f"resume.logprobs[{index}][{place}] is of token {entry.token_id}, and the token there is {token_id}",
                param=param,
            )
        for top_id, _ in entry.top:
            if not 0 <= top_id < vocab_size:
                raise InvalidRequest(
                    f"resume.logprobs[{index}][{place}] has token id {top_id}, this model's are 0 to {vocab_size - 1}",
                    param=param,
                )


def _over(index: int, why: str) -> InvalidRequest:
    return InvalidRequest(
        f"choice {index} has ended with the known tokens ({why}): resume.finished[{index}] must be true", param=PARAM
    )
