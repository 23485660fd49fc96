"""The events of a simulation as data: the world, one event after another, and both as readable text.

A history stays valid if any event is removed. An event that has lost its purpose (an update without a step, an abort of
an unknown request) does nothing, or what it would do in reality. So a failing history can be reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import msgspec

from trioserve.contracts.events import FinishReason
from trioserve.contracts.request import PRIORITY_MAX, PRIORITY_MIN
from trioserve.contracts.step import StepPlan
from trioserve.simulation.core.expected import ExpectedSequence
from trioserve.testing.automaton_guide import Automaton

__all__ = [
    "Abort",
    "Ahead",
    "Arrive",
    "Begin",
    "Break",
    "Drain",
    "Event",
    "Fail",
    "Forget",
    "Forward",
    "History",
    "Inquire",
    "Report",
    "Retract",
    "Update",
    "Wait",
    "World",
    "plainer_history",
]


_STEPS = ("between steps", "in a step", "in two steps")


def abort_moment(entry: ExpectedSequence | None) -> str:
    """Return a name for the moment of an abort. Call it before the sequence is aborted.

    Args:
        entry: the sequence. None: its id is unknown.
    """
    if entry is None:
        return "unknown id"
    if entry.finished is not None:
        return "too late"
    if entry.aborted_for is not None:
        return "repeated"
    return f"{_STEPS[entry.steps_in_flight]}, {entry.phase.value}"


def plan_line(plan: StepPlan | None) -> str:
    """Return a line for a plan: preempted requests (-r1), then each request's tokens and blocks.

    * means that the chunk samples, + precedes draft tokens, and ? means that it awaits its token from the step before.

    Args:
        plan: the plan. None: there was nothing to compute.
    """
    if plan is None:
        return "  nothing to compute"
    lost = [f"-{name}" for name in plan.preempted]
    chunks = [
        f"{chunk.request.id}[{chunk.start}:{chunk.start + chunk.count}]{'?' if chunk.awaits_token else ''}"
        f"{'*' if chunk.samples else ''}"
        f"{'+' + ','.join(map(str, chunk.draft)) if chunk.draft else ''}"
        f"@{','.join(map(str, chunk.block_table))}"
        for chunk in plan.chunks
    ]
    return f"  step {plan.step_index}{' ahead' if plan.is_ahead else ''}: {' '.join(lost + chunks)}"


class World(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="world"):
    """The engine and the model.

    Attributes:
        block_count: KV blocks. Without KV, it only decides how long a prompt may be.
        block_size: tokens of a block.
        max_num_seqs: maximum number of running sequences.
        step_tokens_max: maximum number of tokens of a step.
        vocab_size: number of token ids, so small that prompts share prefixes by chance.
        stop_period: on average, token 0 follows one prefix in this many.
        enable_prefix_caching: True if there is a prefix cache.
        overlaps: True if steps may be planned ahead.
        apart: True if a step that is planned ahead has no request of the step in flight.
        overtakes_max: how often a request that does not fit may be overtaken.
        draft_tokens: maximum number of draft tokens of a request in a step.
        draft_step_tokens: maximum number of tokens of a step with draft tokens.
        drafts_by_model: True: a draft model proposes draft tokens. False: they come from a request's own text.
        drafts_by_head: True if the draft model is a head, which computes along with the model.
        has_poor_hash: True if hashes of blocks collide all the time.
        has_connector: True if there is a connector.
        hold_seconds: how long a connector may hold blocks.
        load_seconds: how long a request may wait for its KV.
        fails_without_kv: True: a request whose KV does not arrive fails. False: it is computed.
        keeps_kv: False: the model is an encoder without blocks, and every request is pooled.
        states: slots for states of layers. 0: the model has no states.
        snapshots: slots for copies of states.
        window_tokens: sliding window of all layers. A context may then be longer than the pool. None: no window.
    """

    block_count: int
    block_size: int
    max_num_seqs: int
    step_tokens_max: int
    vocab_size: int = 4
    stop_period: int = 4
    enable_prefix_caching: bool = True
    overlaps: bool = False
    apart: bool = False
    overtakes_max: int = 64
    draft_tokens: int = 0
    draft_step_tokens: int = 16
    drafts_by_model: bool = False
    drafts_by_head: bool = False
    has_poor_hash: bool = False
    has_connector: bool = False
    hold_seconds: float = 1.0
    load_seconds: float = 1.0
    fails_without_kv: bool = False
    keeps_kv: bool = True
    states: int = 0
    snapshots: int = 0
    window_tokens: int | None = None

    @property
    def held_blocks_max(self) -> int:
        """Maximum number of blocks that a request of any length has at a time.

        With a window, these are the blocks of the window and of a step's tokens after it, at any position within a
        block. Without a window, it is the whole pool.
        """
        if self.window_tokens is None:
            return self.block_count
        return 1 - (1 - self.window_tokens - self.step_tokens_max) // self.block_size

    @property
    def context_tokens_max(self) -> int:
        pool = self.block_count * self.block_size
        return pool if self.window_tokens is None or self.held_blocks_max > self.block_count else 3 * pool

    @property
    def whole_tokens_max(self) -> int:
        """Maximum length of a prompt that must be computed in one step."""
        tokens_left = self.step_tokens_max - (self.max_num_seqs - 1 if self.keeps_kv else 0)
        return min(tokens_left, self.context_tokens_max)


class Arrive(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="arrive"):
    """A client's request. With several choices it has several sequences, with ids id.0, id.1 and so on.

    Attributes:
        id: id of the request.
        prompt: token ids of the prompt.
        output: maximum number of tokens of the response. Ignored if the request is pooled.
        choices: number of sequences.
        priority: priority of the request.
        salt: cache salt.
        stops: stop tokens.
        min_tokens: tokens before a stop token ends the response.
        logprobs: number of top log probabilities. None: not requested.
        prompt_logprobs: the same for the prompt.
        temperature: sampling temperature.
        seed: seed of the first choice.
        timeout: seconds until it is aborted with reason DEADLINE. None: never.
        remote: number of prompt tokens that the connector could load.
        is_sent: True if the connector wants to hold its blocks when it ends.
        guide: automaton that its tokens follow. Empty: no grammar.
        known: number of known tokens of a response that began elsewhere. It is at most the length of the response minus
            one, unless the request allows fewer.
        pooled: the prompt becomes a vector, computed in chunks or whole. None: the request generates text.
    """

    id: str
    prompt: tuple[int, ...]
    output: int
    choices: int = 1
    priority: int = 0
    salt: str | None = None
    stops: tuple[int, ...] = ()
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    temperature: float = 0.0
    seed: int = 0
    timeout: float | None = None
    remote: int = 0
    is_sent: bool = False
    guide: Automaton = ()
    known: int = 0
    pooled: Literal["chunks", "whole"] | None = None

    @property
    def sequence_ids(self) -> list[str]:
        return [self.id] if self.choices == 1 else [f"{self.id}.{index}" for index in range(self.choices)]

    def can_run(self, world: World) -> bool:
        """Return True if the engine must accept the request.

        Args:
            world: the engine.
        """
        if self.pooled is not None:
            fits = len(self.prompt) <= (world.context_tokens_max if self.pooled == "chunks" else world.whole_tokens_max)
        else:
            fits = self.output >= 1 and len(self.prompt) + self.output <= world.context_tokens_max
            fits = fits and self.known < max(1, self.output)
        return (
            len(self.prompt) >= 1 and fits and min(self.prompt) >= 0 and PRIORITY_MIN <= self.priority <= PRIORITY_MAX
        )


class Abort(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="abort"):
    """One call of abort. Its ids may be live, ended, unknown or repeated."""

    ids: tuple[str, ...]
    reason: FinishReason = FinishReason.ABORT


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """The core schedules a step. From now on, the forward pass reads its blocks."""


class Ahead(msgspec.Struct, frozen=True, tag="ahead"):
    """The core plans the step after the one in flight."""


class Fail(msgspec.Struct, frozen=True, kw_only=True, tag="fail"):
    """Requests fail in the step that runs or is the next to run, if they are in it."""

    ids: tuple[str, ...]


class Forward(msgspec.Struct, frozen=True, tag="forward"):
    """The forward pass ends with a result. Later events come between it and the update.

    With two steps in flight, it is the first one without a result. So the second step may have its result before the
    core processes that of the first one.
    """


class Update(msgspec.Struct, frozen=True, tag="update"):
    """The core processes the result of a step. With two steps in flight, it is the first one."""


class Wait(msgspec.Struct, frozen=True, kw_only=True, tag="wait"):
    """Time passes, during a step or between two steps. Deadlines expire."""

    seconds: float


class Drain(msgspec.Struct, frozen=True, kw_only=True, tag="drain"):
    """The core accepts no new requests, refuses requests that have not begun to run, and aborts the rest after
    `seconds`.
    """

    seconds: float


class Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="report"):
    """The connector reports about a load or a send, which need not exist.

    Attributes:
        id: the request.
        what: the report.
        tokens: number of loaded tokens. None: all.
        waits: True if the report waits until the core asks for progress.
    """

    id: str
    what: Literal["loaded", "failed", "released", "read"]
    tokens: int | None = None
    waits: bool = False


class Inquire(msgspec.Struct, frozen=True, tag="inquire"):
    """The core asks the connector for its progress, as it does before each step."""


class Break(msgspec.Struct, frozen=True, kw_only=True, tag="break"):
    """From now on, exactly these calls of the connector raise."""

    calls: tuple[str, ...]


class Retract(msgspec.Struct, frozen=True, tag="retract"):
    """Between two steps, all running requests are preempted, and are computed again later."""


class Forget(msgspec.Struct, frozen=True, tag="forget"):
    """The prefix cache forgets all blocks. It may happen at any time."""


Event = (
    Arrive
    | Abort
    | Begin
    | Ahead
    | Fail
    | Forward
    | Update
    | Wait
    | Drain
    | Report
    | Inquire
    | Break
    | Retract
    | Forget
)


class History(msgspec.Struct, frozen=True):
    world: World
    events: tuple[Event, ...]


# --- the same history, plainer ---

PLAIN_ARRIVAL = Arrive(id="", prompt=(0,), output=1)
PLAIN_FIELDS = (
    "choices",
    "priority",
    "salt",
    "stops",
    "min_tokens",
    "logprobs",
    "prompt_logprobs",
    "temperature",
    "seed",
    "timeout",
    "remote",
    "is_sent",
    "guide",
)


def plainer_history(history: History, fails: Callable[[History], bool]) -> History:
    """Return the same history with each event as simple as possible, as long as it fails.

    Args:
        history: the failing history.
        fails: returns True if a history fails.
    """
    for world in _plainer_worlds(history.world):
        candidate = History(world, history.events)
        if fails(candidate):
            history = candidate
    index = 0
    while index < len(history.events):
        events = history.events
        for event in _plainer(events[index]):
            candidate = History(history.world, (*events[:index], event, *events[index + 1 :]))
            if fails(candidate):
                history = candidate
                break
        else:
            index += 1
    return history


def _plainer_worlds(world: World) -> Iterator[World]:
    if world.has_poor_hash:
        yield msgspec.structs.replace(world, has_poor_hash=False)
    if world.overlaps:
        yield msgspec.structs.replace(world, overlaps=False, apart=False)
    if world.apart:
        yield msgspec.structs.replace(world, apart=False)
    if world.draft_tokens:
        yield msgspec.structs.replace(world, draft_tokens=0, drafts_by_model=False, drafts_by_head=False)
    if world.drafts_by_model:
        yield msgspec.structs.replace(world, drafts_by_model=False, drafts_by_head=False)
    if world.enable_prefix_caching:
        yield msgspec.structs.replace(world, enable_prefix_caching=False)


def _plainer(event: Event) -> Iterator[Event]:
    if isinstance(event, Arrive):
        for name in PLAIN_FIELDS:
            if getattr(event, name) != getattr(PLAIN_ARRIVAL, name):
                yield msgspec.structs.replace(event, **{name: getattr(PLAIN_ARRIVAL, name)})
        for output in dict.fromkeys((1, event.output // 2, event.output - 1)):
            if 1 <= output < event.output:
                yield msgspec.structs.replace(event, output=output)
        for prompt in _shorter(event.prompt):
            yield msgspec.structs.replace(event, prompt=prompt)
    elif isinstance(event, Abort | Fail):
        for index in range(len(event.ids) if len(event.ids) > 1 else 0):
            yield msgspec.structs.replace(event, ids=(*event.ids[:index], *event.ids[index + 1 :]))


def _shorter(prompt: Sequence[int]) -> Iterator[tuple[int, ...]]:
    if len(prompt) > 1:
        yield tuple(prompt[: len(prompt) // 2])
        yield tuple(prompt[:-1])
    if any(prompt):
        yield (0,) * len(prompt)
