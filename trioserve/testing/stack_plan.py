"""Who does what and when in a simulation of the runtime: drawn from a seed beforehand, so that the order in which tasks
run changes nothing of it. Times are on a coarse grid: much happens at the same moment, and then the order decides."""

from __future__ import annotations

from random import Random

import msgspec

from trioserve.contracts.errors import InvalidRequest
from trioserve.testing.script import line_of, parts_of

__all__ = ["BLOCK_SIZE", "Client", "Order", "StackPlan", "Stage", "drawn_stack_plan", "script_of", "stack_plan_of"]

GRID_SECONDS = 0.005
BLOCK_SIZE = 4


class Client(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="client"):
    """A task with a request. number: its own; id: the request's, which others may use, too.

    pause: seconds between two reads. leaves_after: so many deltas; None: reads to the end. patience: seconds until its
    scope is cancelled. timeout, queue_timeout: the request's own deadlines.
    """

    number: int
    id: str
    at: float
    prompt: tuple[int, ...]
    output: int
    choices: int = 1
    priority: int = 0
    salt: str | None = None
    temperature: float = 0.0
    pause: float = 0.0
    leaves_after: int | None = None
    patience: float | None = None
    timeout: float | None = None
    queue_timeout: float | None = None


class Order(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="order"):
    """What the operator does: abort by these ids, or drain."""

    at: float
    ids: tuple[str, ...] = ()
    drains: bool = False


class Stage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="stage"):
    """The engine. step_seconds: how long the steps take, in turn. fault_at: the step at which it breaks; None: it does
    not. schedule_seed: decides who goes first among the tasks that can run."""

    block_count: int
    running_requests_max: int
    step_tokens_max: int
    waiting_requests_max: int
    step_seconds: tuple[float, ...]
    schedule_seed: int
    fault_at: int | None = None


class StackPlan(msgspec.Struct, frozen=True):
    stage: Stage
    parts: tuple[Client | Order, ...]


def script_of(plan: StackPlan) -> str:
    """The stage, and then one line for everybody who does something."""
    return "\n".join(line_of(part) for part in (plan.stage, *plan.parts)) + "\n"


def stack_plan_of(script: str) -> StackPlan:
    """Read what script_of writes, comments apart. Raises InvalidRequest."""
    stage, *parts = parts_of(script, Stage | Client | Order) or [None]
    if not isinstance(stage, Stage) or any(isinstance(part, Stage) for part in parts):
        raise InvalidRequest("a plan begins with its stage, and has one: put 'stage block_count=8 ...' first, once")
    return StackPlan(stage, tuple(parts))


def drawn_stack_plan(rng: Random, client_count: int) -> StackPlan:
    def moment(seconds_max: float) -> float:
        return round(rng.randint(0, round(seconds_max / GRID_SECONDS)) * GRID_SECONDS, 3)

    def maybe(chance: float, seconds_max: float) -> float | None:
        return moment(seconds_max) + GRID_SECONDS if rng.random() < chance else None

    block_count = rng.randint(6, 20)
    seats = rng.randint(1, 4)
    context = block_count * BLOCK_SIZE
    span = rng.choice((0.05, 0.2, 0.5))
    family = tuple(rng.randrange(256) for _ in range(context))
    parts: list[Client | Order] = []
    for number in range(client_count):
        own = tuple(rng.randrange(256) for _ in range(rng.randint(1, 6)))
        prompt = (family[: rng.randint(0, 10)] + own)[: context - 1]
        parts.append(
            Client(
                number=number,
                id=f"r{rng.randrange(client_count)}",
                at=moment(span),
                prompt=prompt,
                output=rng.randint(1, min(8, context - len(prompt))),
                choices=rng.choice((1, 1, 1, 2)),
                priority=rng.choice((0, 0, 0, -1)),
                salt=rng.choice((None, None, None, "s")),
                temperature=rng.choice((0.0, 1.0)),
                pause=rng.choice((0.0, 0.0, 0.005, 0.05)),
                leaves_after=rng.randint(0, 4) if rng.random() < 0.2 else None,
                patience=maybe(0.25, span),
                timeout=maybe(0.15, span),
                queue_timeout=maybe(0.1, span),
            )
        )
    for _ in range(rng.randint(0, client_count // 2)):
        parts.append(Order(at=moment(span), ids=tuple(f"r{rng.randrange(client_count + 1)}" for _ in range(2))))
    if rng.random() < 0.2:
        parts.append(Order(at=moment(span), drains=True))
    stage = Stage(
        block_count=block_count,
        running_requests_max=seats,
        step_tokens_max=seats + rng.choice((0, 4, 12)),
        waiting_requests_max=rng.choice((2, 40)),
        step_seconds=tuple(rng.choice((0.0, 0.005, 0.01, 0.04)) for _ in range(5)),
        schedule_seed=rng.getrandbits(32),
        fault_at=rng.randint(0, 20) if rng.random() < 0.05 else None,
    )
    return StackPlan(stage, tuple(parts))
