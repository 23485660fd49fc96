"""What happens in a simulation, as data: the world it happens in, one event after another, and both as readable text.

A history means something whatever is missing from it: an event that has no place any more (an update without a step, an
abort of somebody who never came) does nothing, or what it would do in real life. So a failing one can be cut down.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.events import FinishReason
from trioserve.contracts.request import PRIORITY_MAX, PRIORITY_MIN
from trioserve.contracts.step import StepPlan
from trioserve.simulation.core.expected import ExpectedSequence
from trioserve.simulation.script import line_of, parts_of
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
    "history_of",
    "script_of",
]


_STEPS = ("between steps", "in a step", "in two steps")


def abort_moment(entry: ExpectedSequence | None) -> str:
    """When an abort comes, seen from its sequence; asked before the sequence takes note of it."""
    if entry is None:
        return "unknown id"
    if entry.finished is not None:
        return "too late"
    if entry.aborted_for is not None:
        return "repeated"
    return f"{_STEPS[entry.steps_in_flight]}, {entry.phase.value}"


def plan_line(plan: StepPlan | None) -> str:
    """Who lost its blocks (-r1), and who computes which tokens in which blocks; * samples, + draft tokens, ? awaits
    its token from the step before."""
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
    """The engine and the model. has_poor_hash: blocks get names that collide all the time. vocab_size: so few tokens
    that prompts share prefixes by chance. stop_period: one prefix in so many is followed by token 0.

    overlaps: steps may be planned ahead. apart: those have no request in common with the one in flight. overtakes_max:
    how often one that does not fit may be overtaken.

    draft_tokens, draft_step_tokens: draft tokens of a request in a step, and tokens of a step with drafts.
    drafts_by_model: a draft model proposes them; otherwise they come from a request's own text. drafts_by_head: that
    is a head, which has to compute along.

    has_connector: there is one; hold_seconds and load_seconds: how long it may keep blocks, and a request wait for its
    KV. fails_without_kv: a request whose KV does not come ends with an error, instead of computing it.

    window_tokens: no token sees any further back, in no layer; then a context may be longer than the pool. None: every
    one sees all.

    keeps_kv: False is an encoder: there are no blocks, and every request is pooled; block_count and block_size only say
    how long a prompt may be.

    states, snapshots: slots for the states of layers that keep one, and for copies of them; 0: there are none.
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
        """That a request of any length has at a time: of its window, and what a step computes behind that, wherever in
        a block these begin; all of the pool without a window."""
        if self.window_tokens is None:
            return self.block_count
        return 1 - (1 - self.window_tokens - self.step_tokens_max) // self.block_size

    @property
    def context_tokens_max(self) -> int:
        pool = self.block_count * self.block_size
        return pool if self.window_tokens is None or self.held_blocks_max > self.block_count else 3 * pool

    @property
    def whole_tokens_max(self) -> int:
        """Of a prompt that has to be computed in one step."""
        room = self.step_tokens_max - (self.max_num_seqs - 1 if self.keeps_kv else 0)
        return min(room, self.context_tokens_max)


class Arrive(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="arrive"):
    """A client's request. With choices above 1 it is as many sequences, named id.0, id.1 and so on.

    stops: the tokens that end it. timeout: seconds until it is aborted with reason DEADLINE; None: never. remote: so
    many tokens of the prompt could be loaded by the connector. is_sent: the connector wants its blocks when it ends.
    guide: the automaton that its tokens keep to; none: they are free.
    known: it began elsewhere, and so many tokens of the response are known; at most all but the last of it, unless they
    are more than it may have.
    pooled: the prompt becomes a vector, and comes in chunks or whole; then output counts for nothing.
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
        """Whether its engine has to take it."""
        if self.pooled is not None:
            fits = len(self.prompt) <= (world.context_tokens_max if self.pooled == "chunks" else world.whole_tokens_max)
        else:
            fits = self.output >= 1 and len(self.prompt) + self.output <= world.context_tokens_max
            fits = fits and self.known < max(1, self.output)
        return (
            len(self.prompt) >= 1 and fits and min(self.prompt) >= 0 and PRIORITY_MIN <= self.priority <= PRIORITY_MAX
        )


class Abort(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="abort"):
    """One call, with ids that may live, have ended, never have been, or stand there twice."""

    ids: tuple[str, ...]
    reason: FinishReason = FinishReason.ABORT


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """The core schedules a step; from now on the forward pass reads its blocks."""


class Ahead(msgspec.Struct, frozen=True, tag="ahead"):
    """The core plans the step behind the one that is in flight."""


class Fail(msgspec.Struct, frozen=True, kw_only=True, tag="fail"):
    """These fail in the step that runs, or is the next to run, if they are in it."""

    ids: tuple[str, ...]


class Forward(msgspec.Struct, frozen=True, tag="forward"):
    """The forward pass has its result. What comes before the update comes between the two. With two steps in flight it
    is the first that has none; so the second may have its own before the core takes that of the first."""


class Update(msgspec.Struct, frozen=True, tag="update"):
    """The core takes the result of the step, with two in flight that of the first."""


class Wait(msgspec.Struct, frozen=True, kw_only=True, tag="wait"):
    """Time passes, during a step or between two; deadlines fire."""

    seconds: float


class Drain(msgspec.Struct, frozen=True, kw_only=True, tag="drain"):
    """Nothing new is taken, who has not begun to run is refused, and after `seconds` the rest is aborted."""

    seconds: float


class Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="report"):
    """The connector tells of a load or a send, whether or not there is one. tokens: how many arrived; None: all.
    waits: it is kept until the core asks for progress."""

    id: str
    what: Literal["loaded", "failed", "released", "read"]
    tokens: int | None = None
    waits: bool = False


class Inquire(msgspec.Struct, frozen=True, tag="inquire"):
    """The core asks the connector for its progress, as it does before each step."""


class Break(msgspec.Struct, frozen=True, kw_only=True, tag="break"):
    """From now on these calls of the connector raise, and no others."""

    calls: tuple[str, ...]


class Retract(msgspec.Struct, frozen=True, tag="retract"):
    """Between two steps, whoever runs has to give its blocks back, and is computed anew."""


class Forget(msgspec.Struct, frozen=True, tag="forget"):
    """At any moment, what was computed is not to be a hit for anybody."""


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


def script_of(history: History) -> str:
    """The world, and then one line an event."""
    return "\n".join(line_of(part) for part in (history.world, *history.events)) + "\n"


def history_of(script: str) -> History:
    """Read what script_of writes, comments apart. Raises InvalidRequest."""
    world, *events = parts_of(script, World | Event) or [None]
    if not isinstance(world, World) or any(isinstance(event, World) for event in events):
        raise InvalidRequest("a history begins with its world, and has one: put 'world block_count=8 ...' first, once")
    return History(world, tuple(events))
