"""The plan of a simulation of the stack: its engine, its clients, its operators, and their times.

A plan is drawn from a seed before the run, so it does not depend on the order in which tasks run.
"""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec

from trioserve.simulation.runs import line_of
from trioserve.simulation.stack.calls import CALL_BLOCKS, drawn_family, drawn_question
from trioserve.simulation.stack.forms import (
    FORM_SHARE,
    IMAGE_BLOCKS,
    LENDING_CLIENTS_MIN,
    LENDING_SHARE,
    drawn_form,
    drawn_images,
    drawn_known_count,
    drawn_loads,
    drawn_name,
    drawn_room,
    drawn_shelf,
    drawn_stops,
    drawn_unloads,
)
from trioserve.simulation.stack.http_connection import (
    Ask,
    Connection,
    Delete,
    Front,
    drawn_asks,
    drawn_connection,
    drawn_front,
)
from trioserve.simulation.stack.pause_plan import (
    Halt,
    Moments,
    Order,
    Sleep,
    Wake,
    drawn_halts,
    drawn_swaps,
    with_retraction,
)
from trioserve.testing.byte_tokenizer import BYTE_VOCAB_SIZE
from trioserve.vision.image_file import why_no_images

__all__ = [
    "BLOCK_SIZE",
    "Client",
    "Load",
    "Part",
    "StackPlan",
    "Stage",
    "Unload",
    "drawn_stack_plan",
]

BLOCK_SIZE = 4


class Client(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="client"):
    """A task that sends a request directly to the engine.

    Attributes:
        number: number of the client.
        id: id of the request. Several clients may use the same id.
        at: start time.
        prompt: token ids of the prompt.
        output: maximum number of tokens.
        choices: number of choices.
        priority: priority of the request.
        salt: cache salt.
        temperature: sampling temperature.
        pause: seconds between two reads.
        leaves_after: number of deltas after which the client disconnects. None: it reads to the end.
        patience: seconds until the client's scope is cancelled. None: never.
        timeout: the request's own deadline in seconds, or None.
        queue_timeout: the request's own queue deadline in seconds, or None.
        form: allowed texts, as in Ask.
        adapter: name of the request's adapter. "": no adapter.
        images: numbers of the images before the prompt. A prompt with images is sent as text.
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
    form: tuple[str, ...] = ()
    adapter: str = ""
    images: tuple[int, ...] = ()


class Load(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="load"):
    """The operator loads an adapter.

    Attributes:
        at: time.
        name: name of the adapter.
        content: name of the adapter's weights.
        replaces: True if the load may replace another adapter with the same name.
    """

    at: float
    name: str
    content: str
    replaces: bool = False


class Unload(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="unload"):
    """The operator unloads an adapter. After `seconds`, requests that still use the adapter are ended. None: never."""

    at: float
    name: str
    seconds: float | None = None


class Stage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="stage"):
    """Settings of the engine, and the order of its tasks.

    Attributes:
        block_count: number of KV blocks.
        max_num_seqs: maximum number of running sequences.
        step_tokens_max: maximum number of tokens of a step.
        waiting_requests_max: maximum number of waiting requests.
        step_seconds: durations of the steps, which are used in turn.
        schedule_seed: seed of the order in which ready tasks run.
        fault_at: number of the step at which the engine breaks. None: it does not break.
        overlaps: True if steps are planned ahead.
        draft_tokens: maximum number of draft tokens of a request in a step.
        vocab_size: number of different tokens that the model writes. With few tokens, its text repeats itself.
        front: settings of the front end.
        family: format of tool calls. "": no request has tools.
        adapters_max: maximum number of loaded adapters.
        load_seconds: seconds to read an adapter.
        room_tiles: number of image tiles whose rows fit into memory. 0: the model reads text only.
        tile_seconds: seconds to encode a tile.
        opening_seconds: seconds to wake up.
    """

    block_count: int
    max_num_seqs: int
    step_tokens_max: int
    waiting_requests_max: int
    step_seconds: tuple[float, ...]
    schedule_seed: int
    fault_at: int | None = None
    overlaps: bool = False
    draft_tokens: int = 0
    vocab_size: int = BYTE_VOCAB_SIZE - 1
    front: Front = Front()
    family: str = ""
    adapters_max: int = 1
    load_seconds: float = 0.0
    room_tiles: int = 0
    tile_seconds: float = 0.0
    opening_seconds: float = 0.0


Part = Client | Order | Load | Unload | Connection | Ask | Delete | Halt


class StackPlan(msgspec.Struct, frozen=True):
    stage: Stage
    parts: tuple[Part, ...]


def drawn_stack_plan(rng: Random, client_count: int) -> StackPlan:
    """Draw a plan.

    Args:
        rng: source of randomness.
        client_count: number of clients. A drawn part of the clients uses HTTP.
    """
    block_count = rng.randint(6, 20)
    max_num_seqs = rng.randint(1, 4)
    context = block_count * BLOCK_SIZE
    draws = _Draws(rng, client_count, context, span=rng.choice((0.05, 0.2, 0.5)))
    http_count = round(client_count * rng.choice((0.0, 0.5, 0.8, 1.0)))
    parts: list[Part] = [draws.client(number) for number in range(client_count - http_count)]
    parts += draws.connections(http_count)
    parts += draws.orders(http_count)
    draft_tokens = rng.choice((0, 0, 2, 5))
    stage = Stage(
        block_count=block_count,
        max_num_seqs=max_num_seqs,
        step_tokens_max=max_num_seqs + rng.choice((0, 4, 12)),
        waiting_requests_max=rng.choice((2, 40)),
        step_seconds=tuple(rng.choice((0.0, 0.005, 0.01, 0.04)) for _ in range(5)),
        schedule_seed=rng.getrandbits(32),
        fault_at=rng.randint(0, 20) if rng.random() < 0.08 else None,
        overlaps=draft_tokens == 0 and rng.random() < 0.5,
        draft_tokens=draft_tokens,
        vocab_size=rng.choice((1, 2)) if draft_tokens else BYTE_VOCAB_SIZE - 1,
        front=drawn_front(rng),
    )
    plan = _with_seams(_with_calls(StackPlan(stage, _with_forms(stage, parts))))
    return _with_swaps(_with_halts(_with_lending(plan, draws), draws), draws)


def _with_forms(stage: Stage, parts: list[Part]) -> tuple[Part, ...]:
    """Draw grammars from a separate source, so that the draws of all other fields do not depend on grammars."""
    rng = Random(line_of(stage))
    formed = []
    for part in parts:
        if isinstance(part, Client | Ask):
            part = msgspec.structs.replace(part, form=drawn_form(rng, stage.vocab_size))
        formed.append(part)
    return tuple(formed)


def _with_calls(plan: StackPlan) -> StackPlan:
    """Draw tool calls from a separate source, so that each seed of a plan without calls gives the same plan."""
    rng = Random(f"calls {line_of(plan.stage)}")
    family = drawn_family(rng)
    if not family or not any(isinstance(part, Ask) for part in plan.parts):
        return plan
    parts: list[Part] = []
    for part in plan.parts:
        if isinstance(part, Ask) and (question := drawn_question(rng)):
            prompt, output = question
            part = msgspec.structs.replace(part, has_tools=True, prompts=(prompt,), output=output, form=())
        parts.append(part)
    block_count = plan.stage.block_count + CALL_BLOCKS
    return StackPlan(msgspec.structs.replace(plan.stage, family=family, block_count=block_count), tuple(parts))


def _with_seams(plan: StackPlan) -> StackPlan:
    """Draw stop strings and known tokens from a separate source.

    Responses with tool calls get neither, because their expected deltas are not known token by token.
    """
    rng = Random(f"seams {line_of(plan.stage)}")
    parts: list[Part] = []
    for part in plan.parts:
        if isinstance(part, Ask) and not part.has_tools:
            if rng.random() < FORM_SHARE and (form := drawn_form(rng, plan.stage.vocab_size, share=1.0)):
                tokens_left = plan.stage.block_count * BLOCK_SIZE - max(map(len, part.prompts))
                part = msgspec.structs.replace(part, form=form, output=min(12, tokens_left))
            stops = drawn_stops(rng, part.form)
            known_count = drawn_known_count(rng, part.output, part.form)
            part = msgspec.structs.replace(part, stops=stops, known_count=known_count)
        parts.append(part)
    return StackPlan(plan.stage, tuple(parts))


def _with_lending(plan: StackPlan, draws: _Draws) -> StackPlan:
    """Draw adapters and images from a separate source. Plans with few direct clients of the engine get none."""
    rng = Random(f"lending {line_of(plan.stage)}")
    clients = [part for part in plan.parts if isinstance(part, Client)]
    if plan.stage.family or len(clients) < LENDING_CLIENTS_MIN or rng.random() >= LENDING_SHARE:
        return plan
    stage, parts = plan.stage, plan.parts
    kind = rng.choice(("adapters", "images", "both"))
    kind = kind if why_no_images() is None else "adapters"
    if kind != "images":
        stage = msgspec.structs.replace(stage, **drawn_shelf(rng))
        parts = tuple(_asking_for(part, adapter=drawn_name(rng)) for part in parts)
        parts += tuple(Load(**order) for order in drawn_loads(rng, draws.moment, draws.span))
        parts += tuple(Unload(**order) for order in drawn_unloads(rng, draws.moment, draws.span))
    if kind != "adapters":
        stage = msgspec.structs.replace(stage, block_count=stage.block_count + IMAGE_BLOCKS, **drawn_room(rng))
        parts = tuple(_asking_for(part, images=drawn_images(rng)) for part in parts)
    return StackPlan(stage, parts)


def _with_halts(plan: StackPlan, draws: _Draws) -> StackPlan:
    """Draw pauses and sleeps from a separate source."""
    rng = Random(f"halts {line_of(plan.stage)}")
    halts = [with_retraction(halt) for halt in drawn_halts(rng, draws.moment, draws.span)]
    if not halts:
        return plan
    stage = msgspec.structs.replace(plan.stage, opening_seconds=rng.choice((0.0, 0.005, 0.05)))
    return StackPlan(stage, (*plan.parts, *halts))


def _with_swaps(plan: StackPlan, draws: _Draws) -> StackPlan:
    """Draw replacements of weights for a plan without clients over HTTP.

    Only direct clients of the engine know the weight version of each token.

    Such a plan has no grammars and no sleeps.
    """
    rng = Random(f"swaps {line_of(plan.stage)}")
    if plan.stage.room_tiles or any(isinstance(part, Ask) for part in plan.parts):
        return plan
    swaps = drawn_swaps(rng, draws.moment, draws.span)
    if not swaps:
        return plan
    kept = (part for part in plan.parts if not isinstance(part, Sleep | Wake))
    return StackPlan(plan.stage, (*(_asking_for(part, form=()) for part in kept), *swaps))


def _asking_for(part: Part, **what: Any) -> Part:
    return msgspec.structs.replace(part, **what) if isinstance(part, Client) else part


class _Draws(Moments):
    """Draws of the parts of one plan."""

    def __init__(self, rng: Random, client_count: int, context: int, *, span: float) -> None:
        super().__init__(rng, span=span)
        self._client_count = client_count
        self._context = context
        self._family = tuple(rng.randrange(256) for _ in range(context))

    def prompt(self) -> tuple[int, ...]:
        rng = self._rng
        own = tuple(rng.randrange(256) for _ in range(rng.randint(1, 6)))
        return (self._family[: rng.randint(0, 10)] + own)[: self._context - 1]

    def client(self, number: int) -> Client:
        rng, prompt = self._rng, self.prompt()
        return Client(
            number=number,
            id=f"r{rng.randrange(self._client_count)}",
            at=self.moment(self.span),
            prompt=prompt,
            output=rng.randint(1, min(8, self._context - len(prompt))),
            choices=rng.choice((1, 1, 1, 2)),
            priority=rng.choice((0, 0, 0, -1)),
            salt=rng.choice((None, None, None, "s")),
            temperature=rng.choice((0.0, 1.0)),
            pause=rng.choice((0.0, 0.0, 0.005, 0.05)),
            leaves_after=rng.randint(0, 4) if rng.random() < 0.2 else None,
            patience=self.maybe(0.25),
            timeout=self.maybe(0.15),
            queue_timeout=self.maybe(0.1),
        )

    def connections(self, ask_count: int) -> list[Part]:
        """Draw connections, each with one or several requests."""
        parts: list[Part] = []
        begun = number = 0
        while begun < ask_count:
            end = min(ask_count, begun + self._rng.randint(1, 4))
            connection = drawn_connection(self._rng, number, span=self.span, moment=self.moment)
            parts.append(connection)
            parts += drawn_asks(
                self._rng,
                connection,
                range(begun, end),
                span=self.span,
                moment=self.moment,
                prompt=self.prompt,
                context=self._context,
            )
            begun, number = end, number + 1
        return parts

    def orders(self, ask_count: int) -> list[Part]:
        """Draw calls of operators, both to the engine directly and over HTTP."""
        rng, count = self._rng, self._client_count
        parts: list[Part] = []
        for _ in range(rng.randint(0, count // 2)):
            if rng.random() < ask_count / count:
                name = rng.choice(("h", "h", "h", "h", "r"))
                parts.append(Delete(at=self.moment(1.5 * self.span), id=f"{name}{rng.randrange(ask_count + 1)}"))
            else:
                ids = tuple(f"r{rng.randrange(count + 1)}" for _ in range(2))
                parts.append(Order(at=self.moment(self.span), ids=ids))
        parts += self.drains(0.2)
        return parts
