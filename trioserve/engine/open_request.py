"""The engine's side of a request, from generate() to the end of all that it holds: what was asked, its choices, and
what its reader has not fetched yet. What is different where its prompts are pooled stands in pooled_request.py.

A reader that is slower than the engine finds several deltas merged into one: what is kept for it is one delta per
choice, whose size is bounded by the request's own length.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import trio
from trio.lowlevel import current_task, reschedule

from trioserve.admission.prompt_encoder import PromptEncoder
from trioserve.contracts.adapter import AdapterRef, adapter_salt
from trioserve.contracts.deadlines import Deadline, Deadlines
from trioserve.contracts.errors import AlreadyEnded
from trioserve.contracts.events import FinishReason, TokenLogprob
from trioserve.contracts.given_rows import GivenRows
from trioserve.contracts.ids import RequestId
from trioserve.contracts.kv_transfer_params import KVTransferParams
from trioserve.contracts.output import Delta
from trioserve.contracts.pooling import Pooled, PooledInput
from trioserve.contracts.prompt import Cut, Prompt
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.resume import Resume, digest_of
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.tracing import NO_SPAN, Span
from trioserve.core.adapters import AdapterLease
from trioserve.core.encoder_outputs import OutputClaim
from trioserve.engine.known_output import KnownChoice
from trioserve.engine.request_trace import NO_TRACE, RequestTrace
from trioserve.text.guide_factory import PreparedGuides
from trioserve.text.output import ChoiceOutput, merge
from trioserve.text.sequence_guide import SequenceGuide
from trioserve.trio_tools.deadline_keeper import Alarm
from trioserve.trio_tools.none_outcome import NONE_OUTCOME
from trioserve.vision.image_prompt import PromptImage

__all__ = ["Choice", "OpenRequest"]


class ScopeState(enum.Enum):
    """Of the caller's `async with`."""

    NEW = "new"
    ENTERED = "entered"
    LEFT = "left"


_ENTERED = ScopeState.ENTERED  # until Python 3.12 looking up a member of an enum is slow


class Choice:
    """One of a request's n answers: its sequence in the engine, and the text it makes, or what it is pooled to."""

    __slots__ = (
        "first_token_at",
        "guide",
        "held_since",
        "index",
        "is_ended",
        "is_held",
        "is_mute",
        "last_token_at",
        "output",
        "pooled",
        "prompt_saved_count",
        "request",
        "running_at",
        "sequence_id",
    )

    def __init__(
        self, request: OpenRequest, index: int, sequence_id: RequestId, output: ChoiceOutput, *, is_mute: bool
    ) -> None:
        self.request = request
        self.index = index
        self.sequence_id = sequence_id
        self.output = output
        self.guide: SequenceGuide | None = None  # made when the prompt is tokenized
        # max_tokens is 0: the prompt is computed, the one token it gives is not shown. Or it is pooled, and gives none.
        self.is_mute = is_mute
        self.pooled: Pooled | None = None
        self.is_ended = False  # its last delta was pushed, or its request failed
        self.is_held = False  # it is over, and a connector holds its blocks for another engine
        self.held_since = 0.0
        self.running_at: float | None = None  # when it first was in a step, whether or not it lost its blocks again
        self.prompt_saved_count = 0  # tokens of its prompt that it had not to compute when it first ran
        self.first_token_at: float | None = None
        self.last_token_at = 0.0

    @property
    def has_run(self) -> bool:
        return self.running_at is not None

    @property
    def sampled_count(self) -> int:
        """Tokens that were sampled for it here, shown or not: without those of a response that began elsewhere."""
        if self.is_mute:
            return int(self.first_token_at is not None)
        resume = self.request.resume
        return self.output.token_count - (0 if resume is None else len(resume.token_ids[self.index]))


class OpenRequest:
    """The engine writes, synchronously; the reader, through its RequestStream, waits and fetches. For the meanings of
    what was asked see Engine.generate.

    on_gone: called when the core has none of it, and gets none any more. on_released: when no block of it is held any
    more. preparation: the scope around waiting for a lease, rendering and tokenizing. core_count: choices whose
    sequences the core has. is_hold_kept: what is held outlives the scope. is_given_away: it ends
    as soon as the step in flight is over, and another engine goes on. upcoming: sequences that the core gets one
    by one, each when it is done with another, so that what it has of this request at a time is bounded. begin_next:
    hands it the next of them. sequence_count: as many are with the core at a time, at most. known: what the response so
    far gave, where it goes on; there once it is entered. is_resumable: it may go on elsewhere when another's hand has
    ended it, so that what was held back of its text is not shown then. fault_count: steps that had it and failed, one
    after the other. part_of: the span of what it is made for. trace: is told what becomes of it.
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
        part_of: Span = NO_SPAN,
        adapter: str | None = None,
    ) -> None:
        self.id = request_id
        self.adapter = adapter
        self.adapter_lease: AdapterLease | None = None
        self.adapter_digest: str | None = None  # of the one that it has, or had
        self.kv_transfer = kv_transfer
        self.is_hold_kept = False
        self.is_given_away = False
        self.part_of = part_of
        self.trace: RequestTrace = NO_TRACE
        self.on_released: Callable[[], None] = lambda: None
        self.sampling = sampling
        self.priority = priority
        self.cache_salt = cache_salt
        self.add_special_tokens = add_special_tokens
        self.cut = cut
        self.resume = resume
        self.seed = seed
        self.is_resumable = is_resumable
        self.known: tuple[Delta, ...] = ()
        self.deadlines = deadlines
        self.owner = owner
        self.tenant = tenant
        self.alarms: dict[Deadline, Alarm] = {}
        self.prompt = prompt
        self.prompt_token_ids: tuple[int, ...] = ()
        self.images: tuple[PromptImage, ...] = ()
        self.output_claim: OutputClaim | None = None  # on what the model makes of them
        self.given: tuple[GivenRows, ...] = ()
        self._image_names: tuple[bytes, ...] = ()
        self.prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
        self.cached_token_count = 0
        self.entered_at = 0.0
        self.is_leased = False  # its turn has come, and it is prepared
        self.running_at: float | None = None
        self.ended_at: float | None = None
        self.choices: list[Choice] = []
        self.guides: PreparedGuides | None = None  # what restrains its tokens, once it is compiled
        # Thoughts are to end at once, also those that are still to come.
        self.is_thought_hurried = resume is not None and resume.end_thinking
        self.preparation = trio.CancelScope()
        self.core_count = 0
        self.sequence_count = sampling.n if resume is None else resume.finished.count(False)
        self.upcoming: deque[tuple[Choice, EngineRequest]] = deque()
        self.begin_next: Callable[[], None] = lambda: None
        self.on_gone: Callable[[], None] = lambda: None
        self.fault_count = 0
        self.scope = ScopeState.NEW
        self._pending: dict[int, Delta] = {}
        self._read: dict[int, list[int]] = {}  # tokens that the reader has, by choice
        self._read_ends: set[int] = set()  # choices of which it has all
        if resume is not None:
            self._read = {index: list(token_ids) for index, token_ids in enumerate(resume.token_ids)}
            self._read_ends = {index for index, is_finished in enumerate(resume.finished) if is_finished}
        self._unfinished_count = self.sequence_count
        self._run_count = 0  # choices that run, or have run
        self._first_end: Delta | None = None  # the last delta of the choice that ended first
        self._error: Exception | None = None
        self._waiting: list[trio.lowlevel.Task] = []  # most often one, the reader
        self._begun = trio.Event()
        self._released: trio.Event | None = None  # while somebody waits for it

    @property
    def choice_count(self) -> int:
        return self.sampling.n

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
    def has_run(self) -> bool:
        """Whether one of its choices was in a step."""
        return self._run_count > 0

    @property
    def completion_token_count(self) -> int:
        """Tokens of all choices so far, shown or not."""
        return sum(choice.output.token_count for choice in self.choices)

    @property
    def is_finished(self) -> bool:
        """Every choice has had its last delta, or the request failed."""
        return all(choice.is_ended for choice in self.choices)

    @property
    def end_reason(self) -> FinishReason | None:
        """Of the choice that ended first; None: none has, unless it was by its scope."""
        if self._error is not None:
            return FinishReason.ERROR
        return None if self._first_end is None else self._first_end.finish_reason

    @property
    def is_held(self) -> bool:
        """Whether a connector holds blocks of it for another engine: of a choice that is over."""
        return any(choice.is_held for choice in self.choices)

    # --- the reader's side ---

    def enter(self) -> None:
        """The scope begins. Raises AlreadyEnded if it has begun before."""
        if self.scope is not ScopeState.NEW:
            raise AlreadyEnded(f"request {self.id} was entered before: call generate() again for another one")
        self.scope = ScopeState.ENTERED
        self.entered_at = trio.current_time()

    def leave(self) -> None:
        """The scope is over: whoever still waits for something of it is told so."""
        self.scope = ScopeState.LEFT
        self._begun.set()
        self._end_wait_for_release()
        self._wake_readers()

    async def next_delta(self) -> Delta:
        """Raises StopAsyncIteration when each choice has had its last one, and what the request failed with."""
        if self.scope is not _ENTERED:  # and no call: this is done for every delta
            self._check_entered()
        await trio.lowlevel.checkpoint_if_cancelled()
        while not self._pending:
            if self._unfinished_count == 0:
                raise StopAsyncIteration
            if self._error is not None:
                raise self._error
            await self._wait()
            if self.scope is not _ENTERED:
                self._check_entered()
        index = next(iter(self._pending))
        delta = self._pending.pop(index)
        try:
            self._read[index] += delta.token_ids
        except KeyError:
            self._read[index] = list(delta.token_ids)
        if delta.finish_reason is not None:
            self._note_read_end(delta)
        return delta

    def resume_state(self) -> Resume:
        """See RequestStream."""
        indices = range(self.choice_count)
        return Resume(
            token_ids=tuple(tuple(self._read.get(index, ())) for index in indices),
            finished=tuple(index in self._read_ends for index in indices),
            prompt_digest=self.prompt_digest,
            seed=self.seed,
            end_thinking=self.is_thought_hurried,
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
        return adapter_salt(self.cache_salt, self.adapter_digest)

    def _note_read_end(self, delta: Delta) -> None:
        if delta.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._read_ends.add(delta.index)

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

    async def wait_until_begun(self) -> Delta | None:
        """See RequestStream."""
        self._check_entered()
        await self._begun.wait()
        self._check_entered()
        if self.has_run or (self._unfinished_count == 0 and self._first_end is None):
            return None
        if self._error is not None:
            raise self._error
        return self._first_end

    def _check_entered(self) -> None:
        if self.scope is not ScopeState.ENTERED:
            raise AlreadyEnded(f"request {self.id} can be read only inside its `async with`")

    async def _wait(self) -> None:
        """Until something was pushed. An event for each token would cost more than all else here."""
        task = current_task()
        self._waiting.append(task)

        def stop_waiting(_raise_cancel: object) -> trio.lowlevel.Abort:
            self._waiting.remove(task)
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(stop_waiting)

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
        """The core is gone, and what it had is still to come: these, before those that it did not have yet."""
        self.core_count = 0
        self.upcoming.extendleft(reversed([*sequences]))
        if self.prompt_logprobs is not None and len(self.prompt_logprobs) < len(self.prompt_token_ids):
            self.prompt_logprobs = None  # all of it is computed again

    def take_known(self, choices: Sequence[KnownChoice]) -> None:
        """The response so far: its choices go on from there, and those that have finished are over."""
        for choice, known in zip(self.choices, choices, strict=True):
            choice.output = known.output
            choice.guide = known.guide
            choice.is_ended = known.is_finished
        self.known = tuple(delta for known in choices for delta in known.deltas)
        if self.is_finished:
            self._begun.set()

    def note_run(self, now: float) -> None:
        """One more choice of it runs; when all do, the queue is over."""
        if self.running_at is None:
            self.running_at = now
        self._run_count += 1
        self._begun.set()
        self.trace.runs()
        if self._run_count == self.sequence_count:
            self._cancel_alarm(Deadline.QUEUE)

    def note_released(self) -> None:
        """The hold of one of its choices has ended."""
        if not self.is_held:
            self._end_wait_for_release()
            self.trace.released()
            self.on_released()

    def note_first_token(self) -> None:
        self.trace.first_token()
        self._cancel_alarm(Deadline.FIRST_TOKEN)

    def cancel_alarms(self) -> None:
        for deadline in self.alarms:
            self._cancel_alarm(deadline)

    def _cancel_alarm(self, deadline: Deadline) -> None:
        alarm = self.alarms.get(deadline)
        if alarm is not None:
            alarm.cancel()

    def push(self, delta: Delta) -> None:
        """Hand a delta to the reader, joined to the one it has not fetched yet."""
        index, pending = delta.index, self._pending
        if delta.finish_reason is not None:
            delta = self.trace.told(delta)
        pending[index] = merge(pending[index], delta) if index in pending else delta
        if delta.finish_reason is not None:
            self._unfinished_count -= 1
            self._first_end = self._first_end or delta
            if self._unfinished_count == 0:
                self.ended_at = trio.current_time()
            self._begun.set()
        self._wake_readers()

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
        """The reader gets `error` once it has fetched what came before, unless that was all."""
        self.preparation.cancel()
        for choice in self.choices:
            choice.is_ended = True
        self._error = error
        self.ended_at = trio.current_time()
        self.trace.failed(error)
        self._begun.set()
        self._end_wait_for_release()
        self._wake_readers()

    def _wake_readers(self) -> None:
        while self._waiting:
            reschedule(self._waiting.pop(), NONE_OUTCOME)
