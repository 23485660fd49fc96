"""The history of a simulation as data: its world and its events, with a text format for both.

A history stays valid if any event is removed, so a failing history can be reduced. An update without a step does
nothing. An abort of an unknown request does what it would do in reality.
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
    "EndSession",
    "Event",
    "Fail",
    "Forget",
    "LimitBlocks",
    "Forward",
    "HintSession",
    "History",
    "Inquire",
    "OpenSession",
    "Report",
    "Retract",
    "Update",
    "Wait",
    "World",
    "plainer_history",
]


_STEPS = ("between steps", "in a step", "in two steps")


def abort_moment(entry: ExpectedSequence | None) -> str:
    """Return a name for the moment of an abort. Call this function before the sequence is aborted.

    Args:
        entry: the sequence. None: the engine has no sequence with this id.
    """
    if entry is None:
        return "unknown id"
    if entry.finished is not None:
        return "too late"
    if entry.aborted_for is not None:
        return "repeated"
    return f"{_STEPS[entry.steps_in_flight]}, {entry.phase.value}"


def plan_line(plan: StepPlan | None) -> str:
    """Return a line of text for a plan: preempted requests (-r1), then each request's tokens and blocks.

    In that line, * means that the chunk samples, + precedes draft tokens, and ? means that the chunk awaits its token
    from the step before.

    Args:
        plan: the plan. None: the core had nothing to compute.
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
    """Settings of the simulated engine and of its model.

    Attributes:
        block_count: number of KV blocks. If the model keeps no KV, it only limits the length of a prompt.
        block_size: tokens of a block.
        max_num_seqs: maximum number of running sequences.
        step_tokens_max: maximum number of tokens of a step.
        vocab_size: number of token ids. It is so small that prompts share prefixes by chance.
        stop_period: on average, the model writes token 0 after one of this many prefixes.
        enable_prefix_caching: True if there is a prefix cache.
        overlaps: True if steps may be planned ahead.
        apart: True if a step that is planned ahead contains no request of the step in flight.
        overtakes_max: how often a request that does not fit may be overtaken.
        draft_tokens: maximum number of draft tokens of a request in a step.
        draft_step_tokens: maximum number of tokens of a step with draft tokens.
        drafts_by_model: True: a draft model proposes draft tokens. False: they are copied from a request's own text.
        drafts_by_head: True if the draft model is a head, which runs in the same forward pass as the model.
        has_poor_hash: True if the hashes of different blocks often collide.
        has_connector: True if there is a connector.
        hold_seconds: how long a connector may hold blocks.
        load_seconds: how long a request may wait for its KV.
        fails_without_kv: True: a request whose KV does not arrive fails. False: the engine computes the KV itself.
        keeps_kv: False: the model is an encoder without blocks, and every request is pooled.
        states: number of slots for the states of stateful layers. 0: the model has no such layers.
        snapshots: number of slots for copies of states.
        window_tokens: sliding window of all layers, with which a context may be longer than the pool. None: no window.
        sessions: number of different ids of sessions. 0: no request has a session.
        session_share: fraction of the pool that one tenant's sessions may retain.
        cold_turn_seconds: how long a cold turn may be deferred. 0: no turn is deferred.
        prefetches: True if evicted blocks of waiting sessions are loaded before the next turn.
        limits_blocks: True if the number of blocks in use is limited while the core runs. Then a full context needs
            half of the pool.
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
    sessions: int = 0
    session_share: float = 0.75
    cold_turn_seconds: float = 0.0
    prefetches: bool = False
    limits_blocks: bool = False

    @property
    def held_blocks_max(self) -> int:
        """Maximum number of blocks that a request has at the same time, whatever its length.

        With a window, the result counts the blocks of the window and of one step's tokens, which may begin inside of a
        block. Without a window, the result is the whole pool, or half of it if the blocks are limited.
        """
        if self.window_tokens is None:
            return max(1, self.block_count // 2) if self.limits_blocks else self.block_count
        return 1 - (1 - self.window_tokens - self.step_tokens_max) // self.block_size

    @property
    def context_tokens_max(self) -> int:
        pool = self.block_count * self.block_size
        if self.limits_blocks and self.window_tokens is None:
            return self.held_blocks_max * self.block_size
        return pool if self.window_tokens is None or self.held_blocks_max > self.block_count else 3 * pool

    @property
    def whole_tokens_max(self) -> int:
        """Maximum length of a prompt that must be computed in one step."""
        tokens_left = self.step_tokens_max - (self.max_num_seqs - 1 if self.keeps_kv else 0)
        return min(tokens_left, self.context_tokens_max)


class Arrive(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="arrive"):
    """A request of a client. A request with several choices has several sequences, with the ids id.0, id.1 and so on.

    Attributes:
        id: id of the request.
        prompt: token ids of the prompt.
        output: maximum number of tokens of the response. Ignored if the request is pooled.
        choices: number of sequences.
        priority: priority of the request.
        salt: cache salt.
        stops: stop tokens.
        min_tokens: number of tokens before which no stop token ends the response.
        logprobs: number of top log probabilities of each output token. None: they are not requested.
        prompt_logprobs: number of top log probabilities of each prompt token. None: they are not requested.
        temperature: sampling temperature.
        seed: seed of the first choice.
        timeout: seconds until the request is aborted with reason DEADLINE. None: no deadline.
        remote: number of prompt tokens that the connector could load.
        is_sent: True if the connector holds the request's blocks after its end.
        guide: automaton that defines the allowed tokens. Empty: no grammar.
        known: number of known tokens of a response that began at another engine. The simulation uses at most all tokens
            of the response except the last one.
        pooled: how the prompt is computed for a pooled vector: in chunks or whole. None: the request generates text.
        session: id of the session whose turn this is. None: no session.
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
    session: str | None = None

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
    """One call of abort. Its ids may belong to live, ended or unknown requests, and may be repeated."""

    ids: tuple[str, ...]
    reason: FinishReason = FinishReason.ABORT


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """The core schedules a step. From now on, the forward pass reads its blocks."""


class Ahead(msgspec.Struct, frozen=True, tag="ahead"):
    """The core plans the step after the one in flight."""


class Fail(msgspec.Struct, frozen=True, kw_only=True, tag="fail"):
    """Requests fail in the step in flight or, if no step is in flight, in the next step, if that step computes them."""

    ids: tuple[str, ...]


class Forward(msgspec.Struct, frozen=True, tag="forward"):
    """The forward pass of a step ends with a result. Other events may follow before the core processes that result.

    With two steps in flight, the event belongs to the first step without a result. So the second step may have its
    result before the core processes the result of the first step.
    """


class Update(msgspec.Struct, frozen=True, tag="update"):
    """The core processes the result of a step. With two steps in flight, it processes the first one."""


class Wait(msgspec.Struct, frozen=True, kw_only=True, tag="wait"):
    """Time passes, during a step or between two steps. Deadlines expire."""

    seconds: float


class Drain(msgspec.Struct, frozen=True, kw_only=True, tag="drain"):
    """The core begins to drain.

    It accepts no new requests, refuses requests that have not begun to run, and aborts the rest after `seconds`.
    """

    seconds: float


class Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="report"):
    """The connector reports an event of a load, or of a hold on blocks (HoldKind.SEND). Neither need exist.

    Attributes:
        id: id of the request.
        what: kind of the report.
        tokens: number of loaded tokens. None: all tokens of the load.
        waits: True if the connector keeps the report until the core asks for progress.
    """

    id: str
    what: Literal["loaded", "failed", "released", "read"]
    tokens: int | None = None
    waits: bool = False


class Inquire(msgspec.Struct, frozen=True, tag="inquire"):
    """The core asks the connector for waiting reports, as it does before each step."""


class Break(msgspec.Struct, frozen=True, kw_only=True, tag="break"):
    """From this event on, exactly these calls of the connector raise an exception."""

    calls: tuple[str, ...]


class Retract(msgspec.Struct, frozen=True, tag="retract"):
    """The core preempts all running requests between two steps, and computes them again later."""


class Forget(msgspec.Struct, frozen=True, tag="forget"):
    """The prefix cache forgets all blocks. This event may come at any time."""


class LimitBlocks(msgspec.Struct, frozen=True, kw_only=True, tag="limit_blocks"):
    """The core uses only the first `count` blocks from now on. This event may come at any time."""

    count: int


class OpenSession(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="open_session"):
    """A caller opens a session, or changes the retention of an open session."""

    id: str
    weight: float = 1.0
    idle: float = 1.0
    tenant: str | None = None


class EndSession(msgspec.Struct, frozen=True, kw_only=True, tag="end_session"):
    """A caller ends a session. The session need not be open, and may have live requests."""

    id: str


class HintSession(msgspec.Struct, frozen=True, kw_only=True, tag="hint_session"):
    """A caller expects the next turn of a session in some seconds. The session need not be open."""

    id: str
    seconds: float


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
    | LimitBlocks
    | OpenSession
    | EndSession
    | HintSession
)


class History(msgspec.Struct, frozen=True):
    world: World
    events: tuple[Event, ...]


# --- Simplification of a failing history ---

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
    "session",
)


def plainer_history(history: History, fails: Callable[[History], bool]) -> History:
    """Simplify each event of a failing history as far as the history still fails.

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
    if world.prefetches:
        yield msgspec.structs.replace(world, prefetches=False)
    if world.cold_turn_seconds:
        yield msgspec.structs.replace(world, cold_turn_seconds=0.0)
    if world.sessions:
        yield msgspec.structs.replace(world, sessions=0)
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
