"""The engine's side of a request for text: what was asked, its choices, and what its reader has of them. What it has in
common with all others stands in shell/request_scope.py, what is different where its prompts are pooled in
pooled_request.py. A delta that is kept for a slow reader is bounded by the request's own length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec
import trio

from trioserve.admission.local_endpoint import local_request
from trioserve.admission.prompt_encoder import PromptEncoder
from trioserve.contracts.adapter import AdapterRef, adapter_salt
from trioserve.contracts.deadlines import Deadlines
from trioserve.contracts.endpoint import RoutedRequest
from trioserve.contracts.events import FinishReason, Phase, TokenLogprob
from trioserve.contracts.given_rows import GivenRows
from trioserve.contracts.ids import RequestId
from trioserve.contracts.kv_transfer_params import KVTransferParams
from trioserve.contracts.live import LiveRequestView
from trioserve.contracts.output import Delta, join_unread
from trioserve.contracts.partial import Partial, PartialChoice
from trioserve.contracts.pooling import Pooled, PooledInput
from trioserve.contracts.prompt import Cut, Prompt
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.resume import Resume, digest_of
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.tracing import NO_SPAN, Span
from trioserve.contracts.weights import WeightVersions, weights_salt
from trioserve.core.adapters import AdapterLease
from trioserve.core.encoder_outputs import OutputClaim
from trioserve.core.live_request import LiveRequest
from trioserve.core.request_state import RequestStatus
from trioserve.engine.given_output import GivenOutput
from trioserve.engine.known_output import KnownChoice
from trioserve.engine.shell.request_scope import RequestPart, RequestScope
from trioserve.text.guide_factory import PreparedGuides
from trioserve.text.output import ChoiceOutput, merge
from trioserve.text.sequence_guide import SequenceGuide
from trioserve.vision.image_prompt import PromptImage

__all__ = ["Choice", "OpenRequest", "view_of"]


class Choice(RequestPart["OpenRequest"]):
    """One of a request's n answers: its sequence in the engine, and the text it makes, or what it is pooled to."""

    __slots__ = (
        "first_token_at",
        "guide",
        "held_since",
        "is_held",
        "is_mute",
        "last_token_at",
        "output",
        "pooled",
        "prompt_saved_count",
    )

    def __init__(
        self, request: OpenRequest, index: int, sequence_id: RequestId, output: ChoiceOutput, *, is_mute: bool
    ) -> None:
        super().__init__(request, index, sequence_id)
        self.output = output
        self.guide: SequenceGuide | None = None  # made when the prompt is tokenized
        # max_tokens is 0: the prompt is computed, the one token it gives is not shown. Or it is pooled, and gives none.
        self.is_mute = is_mute
        self.pooled: Pooled | None = None
        self.is_held = False  # it is over, and a connector holds its blocks for another engine
        self.held_since = 0.0
        self.prompt_saved_count = 0  # tokens of its prompt that it had not to compute when it first ran
        self.first_token_at: float | None = None
        self.last_token_at = 0.0

    @property
    def progress(self) -> int:
        return self.output.token_count

    @property
    def sampled_count(self) -> int:
        """Tokens that were sampled for it here, shown or not: without those of a response that began elsewhere."""
        if self.is_mute:
            return int(self.first_token_at is not None)
        resume = self.request.resume
        return self.output.token_count - (0 if resume is None else len(resume.token_ids[self.index]))


class OpenRequest(RequestScope[Choice, Delta, EngineRequest]):
    """For the meanings of what was asked see Engine.generate.

    on_released: called when no block of it is held any more. is_hold_kept: what is held outlives the scope.
    is_given_away: it ends as soon as the step in flight is over, and another engine goes on. known: what the response
    so far gave, where it goes on; there once it is entered. is_resumable: it may go on elsewhere when another's hand
    has ended it, so that what was held back of its text is not shown then. keep_logprobs: those that its reader was
    given are kept, for whoever goes on with it.
    generates: its sequences are continued, and not pooled. adapter: the name of the one that it is computed with, or
    None; adapter_lease: on it, from entering until the core has nothing of the request any more.
    """

    generates = True

    def __init__(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        request_id: str,
        priority: int,
        cache_salt: str | None,
        add_special_tokens: bool,
        deadlines: Deadlines,
        owner: str | None,
        tenant: str,
        kv_transfer: KVTransferParams | None = None,
        cut: Cut | None = None,
        resume: Resume | None = None,
        seed: int = 0,
        is_resumable: bool = False,
        keep_logprobs: bool = False,
        part_of: Span = NO_SPAN,
        adapter: str | None = None,
    ) -> None:
        super().__init__(
            request_id=request_id,
            priority=priority,
            deadlines=deadlines,
            owner=owner,
            tenant=tenant,
            sequence_count=sampling.n if resume is None else resume.finished.count(False),
            part_of=part_of,
        )
        self.adapter = adapter
        self.adapter_lease: AdapterLease | None = None
        self.adapter_digest: str | None = None  # of the one that it has, or had
        self.weight_version: str | None = None  # of what computes its next token; None: the engine's first weights
        self.kv_transfer = kv_transfer
        self.is_hold_kept = False
        self.is_given_away = False
        self.on_released: Callable[[], None] = lambda: None
        self.sampling = sampling
        self.cache_salt = cache_salt
        self.add_special_tokens = add_special_tokens
        self.cut = cut
        self.resume = resume
        self.seed = seed
        self.is_resumable = is_resumable
        self.known: tuple[Delta, ...] = ()
        self.prompt = prompt
        self.prompt_token_ids: tuple[int, ...] = ()
        self.images: tuple[PromptImage, ...] = ()
        self.output_claim: OutputClaim | None = None  # on what the model makes of them
        self.given: tuple[GivenRows, ...] = ()
        self._image_names: tuple[bytes, ...] = ()
        self.prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
        self.cached_token_count = 0
        self.guides: PreparedGuides | None = None  # what restrains its tokens, once it is compiled
        # Thoughts are to end at once, also those that are still to come.
        self.is_thought_hurried = resume is not None and resume.end_thinking
        # Unknown log probabilities of the first tokens cannot be part of those of all.
        has_logprobs = keep_logprobs and sampling.logprobs is not None
        self._keeps_logprobs = has_logprobs and (resume is None or resume.logprobs is not None)
        self._given: dict[int, GivenOutput] = {}  # to the reader, by choice
        if resume is not None:
            self._given = {index: self._given_before(resume, index) for index in range(len(resume.token_ids))}
        self._released: trio.Event | None = None  # while somebody waits for it

    @property
    def choice_count(self) -> int:
        return self.sampling.n

    def routed(self) -> RoutedRequest:
        return local_request(
            self.prompts,
            tenant=self.tenant,
            priority=self.priority,
            sequences=max(1, self.sequence_count),
            known_tokens=0 if self.resume is None else sum(map(len, self.resume.token_ids)),
        )

    def merged(self, pending: Delta, delta: Delta) -> Delta:
        return merge(pending, delta)

    @property
    def prompts(self) -> tuple[PooledInput, ...]:
        """What there is to be tokenized."""
        return (self.prompt,)

    async def tokenize(self, encoder: PromptEncoder) -> None:
        """Raises what the encoder does."""
        encoded = await encoder.encode_prompt(self.prompt, add_special_tokens=self.add_special_tokens, cut=self.cut)
        self.prompt_token_ids = tuple(encoded.token_ids)
        self.images = encoded.images
        self._image_names = tuple(one.image.digest for one in encoded.images)

    def forget_files(self) -> None:
        """Its images are encoded, and their files need not be kept as long as the rest takes."""
        self.images = ()

    @property
    def prompt_token_count(self) -> int:
        """A prompt counts once, however many choices it has."""
        return len(self.prompt_token_ids)

    def prompt_token_count_of(self, choice: Choice) -> int:
        """Of the sequence of one choice."""
        return len(self.prompt_token_ids)

    def note_cached(self, choice: Choice, token_count: int) -> None:
        """A choice has ended, and so many tokens of its prompt were found in the prefix cache."""
        if choice.index == 0:
            self.cached_token_count = token_count

    @property
    def completion_token_count(self) -> int:
        """Tokens of all choices so far, shown or not."""
        return sum(choice.output.token_count for choice in self.choices)

    @property
    def is_held(self) -> bool:
        """Whether a connector holds blocks of it for another engine: of a choice that is over."""
        return any(choice.is_held for choice in self.choices)

    # --- the reader's side ---

    def leave(self) -> None:
        super().leave()
        self._end_wait_for_release()

    def note_read(self, delta: Delta) -> None:
        given = self._given.get(delta.index)
        if given is None or given.keeps or delta.weight_versions or delta.finish_reason is not None:
            self._given_to(delta.index).take(delta)
        else:  # the same for nearly all deltas, without a call
            given.token_ids += delta.token_ids

    def resume_state(self) -> Resume:
        """See RequestStream."""
        return self._resume_behind([self._given_to(index).with_next(None) for index in range(self.choice_count)])

    def weight_versions_of(self, index: int) -> WeightVersions:
        """See RequestStream."""
        given = self._given.get(index)
        return () if given is None else given.weight_versions

    def partial(self) -> Partial:
        """What the reader has, and what is still to be read."""
        choices = [
            self._given_to(index).with_next(join_unread(self._pending.get(index), merge))
            for index in range(self.choice_count)
        ]
        return Partial(choices=tuple(choices), resume=self._resume_behind(choices))

    def _resume_behind(self, choices: Sequence[PartialChoice]) -> Resume:
        has_versions = any(choice.weight_versions for choice in choices)
        return Resume(
            token_ids=tuple(choice.token_ids for choice in choices),
            finished=tuple(choice.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) for choice in choices),
            prompt_digest=self.prompt_digest,
            seed=self.seed,
            end_thinking=self.is_thought_hurried,
            logprobs=tuple(choice.logprobs or () for choice in choices) if self._keeps_logprobs else None,
            weight_versions=tuple(choice.weight_versions for choice in choices) if has_versions else None,
        )

    def _given_to(self, index: int) -> GivenOutput:
        given = self._given.get(index)
        if given is None:
            given = self._given[index] = GivenOutput(logprobs=() if self._keeps_logprobs else None)
        return given

    def _given_before(self, resume: Resume, index: int) -> GivenOutput:
        return GivenOutput(
            resume.token_ids[index],
            logprobs=resume.logprobs[index] if self._keeps_logprobs and resume.logprobs is not None else None,
            weight_versions=() if resume.weight_versions is None else resume.weight_versions[index],
            is_complete=resume.finished[index],
        )

    @property
    def prompt_digest(self) -> str | None:
        """None until its prompt is tokenized. With an adapter, its content is in it: elsewhere another one may have the
        same name, and would go on with another text."""
        if not self.prompt_token_ids:
            return None
        digest = digest_of(self.prompt_token_ids, self._image_names)
        return digest if self.adapter_digest is None else f"{digest}.{self.adapter_digest}"

    @property
    def adapter_ref(self) -> AdapterRef | None:
        return None if self.adapter_lease is None else self.adapter_lease.ref

    @property
    def block_salt(self) -> str | None:
        """Of its blocks' names."""
        return weights_salt(adapter_salt(self.cache_salt, self.adapter_digest), self.weight_version)

    def use_weights(self, version: str | None) -> None:
        """What the core gets of it from here on, these weights compute."""
        self.weight_version = version
        salt = self.block_salt
        sequences = [(choice, msgspec.structs.replace(sequence, cache_salt=salt)) for choice, sequence in self.upcoming]
        self.upcoming.clear()
        self.upcoming.extend(sequences)

    async def wait_until_released(self) -> None:
        """See RequestStream."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while self.is_held:
            self._check_entered()
            if self._error is not None:
                raise self._error
            if self._released is None:
                self._released = trio.Event()
            await self._released.wait()

    # --- the engine's side: synchronous, called while delivering ---

    def end_thoughts(self) -> bool:
        """Thoughts are to end now, in each choice. False: there are none."""
        if self.is_finished or self.sampling.thinking is None:
            return False
        self.is_thought_hurried = True
        guides = [choice.guide for choice in self.choices if not choice.is_ended]
        if None in guides:
            return True  # it is being prepared
        answers = [guide.end_thought() for guide in guides if guide is not None]
        return any(answers)

    def carry(self, sequences: Iterable[tuple[Choice, EngineRequest]]) -> None:
        super().carry(sequences)
        if self.prompt_logprobs is not None and len(self.prompt_logprobs) < len(self.prompt_token_ids):
            self.prompt_logprobs = None  # all of it is computed again

    def take_known(self, choices: Sequence[KnownChoice]) -> None:
        """The response so far: its choices go on from there, and those that have finished are over."""
        for choice, known in zip(self.choices, choices, strict=True):
            choice.output = known.output
            choice.guide = known.guide
            choice.is_ended = known.is_finished
            if known.is_finished:
                self._given_to(choice.index).finish_reason = known.deltas[-1].finish_reason
        self.known = tuple(delta for known in choices for delta in known.deltas)
        if self.is_finished:
            self._begun.set()

    def note_released(self) -> None:
        """The hold of one of its choices has ended."""
        if not self.is_held:
            self._end_wait_for_release()
            self.trace.released()
            self.on_released()

    def push_end(
        self,
        choice: Choice,
        reason: FinishReason,
        message: str | None = None,
        *,
        stop_reason: str | None = None,
        held_back: Delta | None = None,
        kv_transfer: KVTransferParams | None = None,
    ) -> None:
        """The last delta of a choice that ended by another's hand. held_back: the text that had not been shown yet."""
        choice.is_ended = True
        if self.resume is not None and self.resume.finished[choice.index]:
            # It had ended before it came here, and is not gone through yet. Where all had, nobody else says that.
            if self.sequence_count or self._first_end is not None:
                self._begun.set()
                return
            self._unfinished_count = 1
        self.push(
            Delta(
                index=choice.index,
                text=held_back.text if held_back else "",
                token_ids=held_back.token_ids if held_back else (),
                logprobs=held_back.logprobs if held_back else None,
                finish_reason=reason,
                stop_reason=stop_reason,
                message=message,
                kv_transfer=kv_transfer,
                weight_versions=held_back.weight_versions if held_back else (),
            )
        )

    def end_silently(self, choice: Choice) -> None:
        """Nothing more is said of a choice, since another one says it for all."""
        choice.is_ended = True
        self._unfinished_count -= 1

    def _end_wait_for_release(self) -> None:
        if self._released is not None:
            self._released.set()
            self._released = None

    def fail(self, error: Exception) -> None:
        if not self.is_finished and self._unfinished_count == 0:
            self._unfinished_count = 1  # the client resumes behind the end, and the known output was not replayed
        super().fail(error)
        self._end_wait_for_release()


def view_of(
    request: OpenRequest, sequences: Sequence[LiveRequest | None], now: float, *, held_block_count: int = 0
) -> LiveRequestView:
    """Describe a request for status pages, from the engine's and the core's state.

    Args:
        sequences: the core's state per choice. None: the choice has ended, or has not reached the core.
        now: seconds of Trio's clock.
        held_block_count: its blocks that are held for another engine.
    """
    living = [live for live in sequences if live is not None]
    if request.is_finished:
        state = "held" if request.is_held else "finished"
    elif not living:
        state = "preparing"
    else:
        state = "running" if any(live.status is RequestStatus.RUNNING for live in living) else "waiting"
    if any(choice.first_token_at is not None for choice in request.choices):
        phase = Phase.DECODE
    else:
        phase = Phase.PREFILL if any(choice.has_run for choice in request.choices) else Phase.QUEUED
    return LiveRequestView(
        id=request.id,
        state=state,
        phase=phase,
        priority=request.priority,
        age_seconds=now - request.entered_at,
        prompt_token_count=request.prompt_token_count,
        completion_token_count=request.completion_token_count,
        block_count=sum(live.own_block_count for live in living) + held_block_count,
    )
