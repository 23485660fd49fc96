"""The engine's state of a request for text: its options, its choices, and the output that its reader has received.

lifecycle/request_scope.py contains the state that all requests have. pooling_request.py contains pooling requests. The
memory for unread output is limited by the length of the response.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import trio

from trioserve.admission.local_endpoint import local_request
from trioserve.admission.prompt_encoder import EncodedPrompt, PromptEncoder
from trioserve.contracts.deadlines import Deadlines
from trioserve.contracts.endpoint import RoutedRequest
from trioserve.contracts.events import FinishReason, Phase, TokenLogprob
from trioserve.contracts.ids import RequestId
from trioserve.contracts.media import AudioPrompt, GivenRows
from trioserve.contracts.output import Delta, join_unread
from trioserve.contracts.page import LiveRequestView
from trioserve.contracts.pooling import PoolingInput, PoolingResult
from trioserve.contracts.prompt import Cut, EncoderInput, Prompt
from trioserve.contracts.request import EngineRequest, KVTransferParams
from trioserve.contracts.resume import Partial, PartialChoice, Resume, digest_of
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.tracing import NO_SPAN, Span
from trioserve.contracts.weights import AdapterRef, WeightVersions, adapter_salt, weights_salt
from trioserve.core.adapters import AdapterLease
from trioserve.core.encoder_outputs import OutputClaim
from trioserve.core.request_state import LiveRequest, RequestStatus
from trioserve.engine.lifecycle.request_scope import RequestPart, RequestScope
from trioserve.engine.resumed_output import DeliveredOutput, ResumedChoice
from trioserve.engine.sessions import LiveSession, SessionName
from trioserve.text.guide_factory import PreparedGuides
from trioserve.text.output import ChoiceOutput, merge
from trioserve.text.sequence_guide import SequenceGuide
from trioserve.vision.image_prompt import PromptImage

__all__ = ["Choice", "OpenRequest", "view_of"]


class Choice(RequestPart["OpenRequest"]):
    """One of a request's n choices: its sequence in the core, and its text or its pooled result.

    Args:
        index: index of the choice.
        sequence_id: id of its sequence in the core.
        output: turns the choice's tokens into text.
        is_mute: True if no token is delivered, because `max_tokens` is 0 or the request is pooled.

    Attributes:
        guide: state of the grammar. It is set when the prompt is tokenized. None: no grammar.
        pooled: the pooled result. None until it is computed.
        is_held: True if the choice has ended, and a connector holds its blocks for another engine.
        held_since: time at which the hold began.
        prompt_saved_count: prompt tokens that needed no computation when the choice first ran.
        first_token_at: time at which the first token was delivered. None: no token was delivered yet.
        last_token_at: time at which the latest token was delivered.
    """

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
        self.guide: SequenceGuide | None = None
        self.is_mute = is_mute
        self.pooled: PoolingResult | None = None
        self.is_held = False
        self.held_since = 0.0
        self.prompt_saved_count = 0
        self.first_token_at: float | None = None
        self.last_token_at = 0.0

    @property
    def progress(self) -> int:
        return self.output.token_count

    @property
    def sampled_count(self) -> int:
        """Number of tokens that this engine sampled for the choice, including tokens that the reader does not get.
        Known tokens of a resumed response do not count.
        """
        if self.is_mute:
            return int(self.first_token_at is not None)
        resume = self.request.resume
        return self.output.token_count - (0 if resume is None else len(resume.token_ids[self.index]))


class OpenRequest(RequestScope[Choice, Delta, EngineRequest]):
    """A request for text. `Engine.generate` documents the options.

    Args:
        prompt: see `Engine.generate`, which also documents all arguments that are not listed in this docstring.
        seed: seed of the first choice.
        is_resumable: True if the caller will resume the request after an abort. Then held-back text is not sent.
        keep_logprobs: True to keep log probabilities that were delivered.
        adapter: name of the adapter. None: no adapter.
        calls_max: number of tool calls that a session reads from the response. 0: a call is text. None: no limit.

    Attributes:
        generates: True if the request generates tokens. False if its inputs are pooled.
        asked_session: the session that the request is a turn of, or its name.
        session: the session, from entering until the core has no sequence of the request.
        turn_of: the session, from entering on.
        adapter_lease: lease on the adapter, from entering until the core has no sequence of the request.
        adapter_digest: digest of the adapter that the request uses or has used. None: no adapter.
        weight_version: version of the weights that compute the next token. None: the engine's first weights.
        is_hold_kept: True if held blocks stay held after the scope has ended.
        is_handed_over: True if the request ends with the step in flight, because another engine resumes it.
        known: deltas of the earlier part of a resumed response. They are set after entering.
        output_claim: claim on the memory of image embeddings.
        guides: compiled grammars. None: the request has no grammar, or the compilation has not finished.
        is_reasoning_ended_early: True if reasoning must end at once, even in choices that begin later.
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
        session: LiveSession | SessionName | None = None,
        calls_max: int | None = None,
    ) -> None:
        super().__init__(
            request_id=request_id,
            priority=priority,
            deadlines=deadlines,
            owner=owner,
            tenant=tenant,
            sequence_count=sampling.n if resume is None else resume.finished.count(False),
            merge=merge,
            part_of=part_of,
        )
        self.asked_session = session
        self.calls_max = calls_max
        self.session: LiveSession | None = None
        self.turn_of: LiveSession | None = None
        self.adapter = adapter
        self.adapter_lease: AdapterLease | None = None
        self.adapter_digest: str | None = None
        self.weight_version: str | None = None
        self.kv_transfer = kv_transfer
        self.is_hold_kept = False
        self.is_handed_over = False
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
        self.encoder_input: EncoderInput | None = None
        self._encoder_positions = self._encoder_padding = 0
        self.output_claim: OutputClaim | None = None
        self.given: tuple[GivenRows, ...] = ()
        self._media_names: tuple[bytes, ...] = ()
        self.prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
        self.guides: PreparedGuides | None = None
        self.is_reasoning_ended_early = resume is not None and resume.end_thinking
        # If the log probabilities of the first tokens are unknown, none are stored for the later tokens.
        has_logprobs = keep_logprobs and sampling.logprobs is not None
        self._keeps_logprobs = has_logprobs and (resume is None or resume.logprobs is not None)
        self._given: dict[int, DeliveredOutput] = {}  # Output that the reader has received, by choice.
        if resume is not None:
            self._given = {index: self._delivered_before(resume, index) for index in range(len(resume.token_ids))}
        self._released: trio.Event | None = None  # Set while a task waits for the release of held blocks.

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

    @property
    def prompts(self) -> tuple[PoolingInput, ...]:
        """The inputs to be tokenized."""
        return (self.prompt,)

    async def tokenize(self, encoder: PromptEncoder) -> None:
        """Tokenize the prompt. Raises the errors of the encoder.

        Args:
            encoder: the tokenizer.
        """
        self.take_encoded(
            await encoder.encode_prompt(self.prompt, add_special_tokens=self.add_special_tokens, cut=self.cut)
        )

    def take_encoded(self, encoded: EncodedPrompt) -> None:
        """Store the tokens, the images and the encoder's input of the prompt.

        Args:
            encoded: the prompt.
        """
        self.prompt_token_ids = tuple(encoded.token_ids)
        self.images = encoded.images
        self._media_names = tuple(one.image.digest for one in encoded.images)
        self.encoder_input = read = encoded.encoder_input
        if read is not None:
            self._media_names = (read.digest,)
            self._encoder_positions, self._encoder_padding = read.positions, read.positions - read.row_count

    def forget_files(self) -> None:
        """Drop the image files, and the encoder's sound or text, to save memory, because they are already encoded."""
        self.images = ()
        self.encoder_input = None
        if isinstance(self.prompt, AudioPrompt):
            self.prompt = msgspec.structs.replace(self.prompt, features=b"")

    @property
    def prompt_token_count(self) -> int:
        """Number of prompt tokens, counted once for all choices. Each row of an encoder counts."""
        return len(self.prompt_token_ids) - self._encoder_padding

    @property
    def decoder_token_count(self) -> int:
        """Number of prompt tokens after the rows of the encoder."""
        return len(self.prompt_token_ids) - self._encoder_positions

    def prompt_token_count_of(self, choice: Choice) -> int:
        """Return the number of prompt tokens in the sequence of one choice."""
        return len(self.prompt_token_ids)

    def note_cached(self, choice: Choice, token_count: int) -> None:
        """Note how many prompt tokens of an ended choice were found in the prefix cache.

        Args:
            token_count: number of tokens.
        """
        if choice.index == 0:
            self.cached_token_count = max(0, token_count - self._encoder_padding)

    @property
    def completion_token_count(self) -> int:
        """Number of tokens sampled so far in all choices, including tokens that the client does not receive."""
        return sum(choice.output.token_count for choice in self.choices)

    @property
    def is_held(self) -> bool:
        """True while a connector holds blocks of a finished choice for another engine."""
        return any(choice.is_held for choice in self.choices)

    # --- called by the reader ---

    def leave(self) -> None:
        super().leave()
        if self._released is not None:
            self._end_wait_for_release()

    def note_read(self, delta: Delta) -> None:
        given = self._given.get(delta.index)
        if given is None or given.keeps or delta.weight_versions or delta.finish_reason is not None:
            self._delivered_to(delta.index).take(delta)
        else:  # Same effect without a function call, for nearly all deltas.
            given.token_ids += delta.token_ids

    def resume_state(self) -> Resume:
        """See `RequestStream.resume_state`."""
        return self._resume_after([self._delivered_to(index).with_next(None) for index in range(self.choice_count)])

    def weight_versions_of(self, index: int) -> WeightVersions:
        """See `RequestStream.weight_versions`.

        Args:
            index: index of the choice.
        """
        given = self._given.get(index)
        return () if given is None else given.weight_versions

    def partial(self) -> Partial:
        """Return the output that the reader has received or can still read, and the state for resuming after this
        output.
        """
        choices = [
            self._delivered_to(index).with_next(join_unread(self._pending.get(index), merge))
            for index in range(self.choice_count)
        ]
        return Partial(choices=tuple(choices), resume=self._resume_after(choices))

    def _resume_after(self, choices: Sequence[PartialChoice]) -> Resume:
        has_versions = any(choice.weight_versions for choice in choices)
        return Resume(
            token_ids=tuple(choice.token_ids for choice in choices),
            finished=tuple(choice.finish_reason in (FinishReason.STOP, FinishReason.LENGTH) for choice in choices),
            prompt_digest=self.prompt_digest,
            seed=self.seed,
            end_thinking=self.is_reasoning_ended_early,
            logprobs=tuple(choice.logprobs or () for choice in choices) if self._keeps_logprobs else None,
            weight_versions=tuple(choice.weight_versions for choice in choices) if has_versions else None,
        )

    def _delivered_to(self, index: int) -> DeliveredOutput:
        given = self._given.get(index)
        if given is None:
            given = self._given[index] = DeliveredOutput(logprobs=() if self._keeps_logprobs else None)
        return given

    def _delivered_before(self, resume: Resume, index: int) -> DeliveredOutput:
        return DeliveredOutput(
            resume.token_ids[index],
            logprobs=resume.logprobs[index] if self._keeps_logprobs and resume.logprobs is not None else None,
            weight_versions=() if resume.weight_versions is None else resume.weight_versions[index],
            is_complete=resume.finished[index],
        )

    @property
    def prompt_digest(self) -> str | None:
        """Digest of the prompt's tokens and of the adapter. None until the prompt is tokenized.

        The digest includes the adapter's content, because another server may have a different adapter with the same
        name, which generates different text.
        """
        if not self.prompt_token_ids:
            return None
        digest = digest_of(self.prompt_token_ids, self._media_names)
        return digest if self.adapter_digest is None else f"{digest}.{self.adapter_digest}"

    @property
    def adapter_ref(self) -> AdapterRef | None:
        return None if self.adapter_lease is None else self.adapter_lease.ref

    @property
    def block_salt(self) -> str | None:
        """Salt for the prefix cache names of the request's blocks."""
        return weights_salt(adapter_salt(self.cache_salt, self.adapter_digest), self.weight_version)

    def use_weights(self, version: str | None) -> None:
        """Use a weight version for all sequences that are added to the core from now on.

        Args:
            version: the version. None: the weights with which the engine was opened.
        """
        if version == self.weight_version:
            return
        self.weight_version = version
        salt = self.block_salt
        sequences = [(choice, msgspec.structs.replace(sequence, cache_salt=salt)) for choice, sequence in self.upcoming]
        self.upcoming.clear()
        self.upcoming.extend(sequences)

    async def wait_until_released(self) -> None:
        """See `RequestStream.wait_until_released`."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while self.is_held:
            self._check_entered()
            if self._error is not None:
                raise self._error
            if self._released is None:
                self._released = trio.Event()
            await self._released.wait()

    # --- called by the engine while it delivers, synchronous ---

    def end_reasoning(self) -> bool:
        """End the reasoning of each choice now. Return False if there is no reasoning to end."""
        if self.is_finished or self.sampling.thinking is None:
            return False
        self.is_reasoning_ended_early = True
        guides = [choice.guide for choice in self.choices if not choice.is_ended]
        if None in guides:
            return True  # The grammar is not prepared yet. The preparation will see `is_reasoning_ended_early`.
        answers = [guide.end_reasoning() for guide in guides if guide is not None]
        return any(answers)

    def carry(self, sequences: Iterable[tuple[Choice, EngineRequest]]) -> None:
        super().carry(sequences)
        if self.prompt_logprobs is not None and len(self.prompt_logprobs) < len(self.prompt_token_ids):
            self.prompt_logprobs = None  # The next core computes all of these log probabilities again.

    def take_known(self, choices: Sequence[ResumedChoice]) -> None:
        """Continue after the known output of a resumed response. End the choices that were already finished.

        Args:
            choices: replayed state, one entry per choice.
        """
        for choice, known in zip(self.choices, choices, strict=True):
            choice.output = known.output
            choice.guide = known.guide
            choice.is_ended = known.is_finished
            if known.is_finished:
                self._delivered_to(choice.index).finish_reason = known.deltas[-1].finish_reason
        self.known = tuple(delta for known in choices for delta in known.deltas)
        if self.is_finished:
            self._begun.set()

    def note_released(self) -> None:
        """Note that the hold of one choice has ended."""
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
        """Push the last delta of a choice that was ended from outside.

        Args:
            reason: the finish reason.
            message: message for the reader.
            stop_reason: more specific reason that programs can compare.
            held_back: text that was not sent yet. None: no such text is sent.
            kv_transfer: how another engine can read the KV.
        """
        choice.is_ended = True
        if self.resume is not None and self.resume.finished[choice.index]:
            # The choice had finished in the earlier stream, and its known output was not replayed yet.
            # Push a delta only if all choices had finished, because then no other delta reports the end.
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
        """End a choice without a delta, because the delta of another choice reports the end of the request."""
        choice.is_ended = True
        self._unfinished_count -= 1

    def _end_wait_for_release(self) -> None:
        if self._released is not None:
            self._released.set()
            self._released = None

    def fail(self, error: Exception) -> None:
        if not self.is_finished and self._unfinished_count == 0:
            # The client resumes a response that was already complete, and the known output was not replayed yet.
            self._unfinished_count = 1
        super().fail(error)
        self._end_wait_for_release()


def view_of(
    request: OpenRequest, sequences: Sequence[LiveRequest | None], now: float, *, held_block_count: int = 0
) -> LiveRequestView:
    """Describe a request for status pages, from the state in the engine and in the core.

    Args:
        sequences: the core's state per choice. None: the choice has ended, or has not reached the core.
        now: seconds of Trio's clock.
        held_block_count: number of the request's blocks that are held for another engine.
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
