"""Measures the cost of a step in Python, from its plan until readers have the text, and of a call to a worker thread.

The engine is the real one, with one reader task per request and with steps that compute nothing. The CPU time of the
event loop's thread is counted separately for schedule, update, deliver (text, metrics, waking readers), and the
readers. A chat reader is the whole handler of a streamed chat completion, including its bytes.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Sequence
from contextlib import asynccontextmanager
from itertools import product
from statistics import median, quantiles
from time import perf_counter_ns, thread_time_ns
from typing import TYPE_CHECKING, Literal, get_args

import msgspec
import trio

from trioserve.admission.text_threads import TextThreads
from trioserve.api.routes import App
from trioserve.bench.inside.command import print_figures
from trioserve.bench.settings import at_least_one
from trioserve.contracts.deadlines import Deadlines
from trioserve.contracts.events import EngineEvent
from trioserve.contracts.ids import RequestId
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.step import IsAbandoned, StepPlan, StepResult
from trioserve.core.engine import EngineCore
from trioserve.core.settings import CoreSettings
from trioserve.engine.delivery import Delivery
from trioserve.engine.engine import Engine, ModelDescription
from trioserve.engine.lifecycle.engine_loop import EngineLoop
from trioserve.engine.settings import EngineSettings
from trioserve.http.exchange import Exchange, HeaderFields, Headers
from trioserve.metrics.registry import Metrics
from trioserve.testing.byte_tokenizer import BYTE_VOCAB_SIZE, END_TOKEN_ID, byte_tokenizer
from trioserve.trio_tools.interpreter import prepare_interpreter
from trioserve.trio_tools.worker_thread import WorkerThread

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

__all__ = ["DeliveryCost", "HandOffCost", "Readers", "add_arguments", "delivery_cost", "hand_off_costs", "run"]

Readers = Literal["plain", "chat"]
"""Kind of reader: a plain `async for`, or the handler of a streamed chat completion."""

SHAPES = tuple(product((0, 100_000), (16, 256, 1_024)))  # numbers of waiting and of running requests
ROUNDS = 30
STEPS_PER_ROUND = 8
HAND_OFFS_PER_ROUND = 100
# The first steps are not counted, since they compute prompts and create objects that later steps reuse.
STEPS_BEFORE = 20
BLOCK_SIZE = 16
PROMPT = "what a step costs"
LETTER = ord("a")
BODY = {
    "messages": [{"role": "user", "content": PROMPT}],
    "stream": True,
    "ignore_eos": True,
    "temperature": 0,
}


class DeliveryCost(msgspec.Struct, frozen=True, kw_only=True):
    """Microseconds of CPU time per step, as the median of step_count steps."""

    readers: Readers
    running_count: int
    queued_count: int
    schedule_us: float
    update_us: float
    deliver_us: float
    readers_us: float
    step_count: int

    @property
    def engine_us(self) -> float:
        """CPU time of all parts except the readers."""
        return self.schedule_us + self.update_us + self.deliver_us


class HandOffCost(msgspec.Struct, frozen=True, kw_only=True):
    """Microseconds from one thread's call to the other thread's first instruction."""

    what: str
    median_us: float
    p99_us: float
    sample_count: int


def delivery_cost(readers: Readers, running_count: int, queued_count: int, *, steps: int) -> DeliveryCost:
    """Measure a step that decodes some requests while others wait to run.

    Args:
        readers: kind of readers.
        running_count: requests that decode.
        queued_count: requests that wait.
        steps: number of counted steps.
    """
    taken = trio.run(_taken, readers, running_count, queued_count, steps)
    us = {part: median(samples[-steps:]) / 1e3 for part, samples in taken.items()}
    return DeliveryCost(
        readers=readers,
        running_count=running_count,
        queued_count=queued_count,
        schedule_us=us["schedule"],
        update_us=us["update"],
        deliver_us=us["deliver"],
        readers_us=us["readers"],
        step_count=steps,
    )


def hand_off_costs(*, samples: int) -> list[HandOffCost]:
    """Measure a call to the worker thread and its return, while both threads are idle.

    Args:
        samples: number of calls.
    """
    there, back = trio.run(_hand_offs, samples)
    return [_hand_off("hand-off, there", there), _hand_off("hand-off, back", back)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rounds",
        type=at_least_one,
        default=ROUNDS,
        metavar="N",
        help=f"rounds of {STEPS_PER_ROUND} steps and {HAND_OFFS_PER_ROUND} jobs each",
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure, print a table row by row, and then all figures as one line of JSON. Return the exit code.

    Args:
        arguments: the parsed command line.
    """
    prepare_interpreter()
    head = ("readers", "running", "queued", "schedule", "update", "deliver", "us a token", "readers us")
    print(("{:<14}{:>8}{:>9}" + "{:>11}" * 5).format(*head))
    steps = []
    for readers in get_args(Readers):
        for queued_count, running_count in SHAPES:
            cost = delivery_cost(readers, running_count, queued_count, steps=arguments.rounds * STEPS_PER_ROUND)
            steps.append(cost)
            print(
                f"{readers:<14}{running_count:>8}{queued_count:>9,}{cost.schedule_us:>11.1f}{cost.update_us:>11.1f}"
                f"{cost.deliver_us:>11.1f}{cost.engine_us / running_count:>11.2f}{cost.readers_us:>11.1f}",
                flush=True,
            )
    hand_offs = hand_off_costs(samples=arguments.rounds * HAND_OFFS_PER_ROUND)
    for hand_off in hand_offs:
        print(f"{hand_off.what:<22}median {hand_off.median_us:>6.1f} us, 99 % {hand_off.p99_us:>6.1f} us")
    print_figures(steps=steps, hand_offs=hand_offs)
    return 0


def _hand_off(what: str, taken_ns: Sequence[int]) -> HandOffCost:
    return HandOffCost(
        what=what,
        median_us=median(taken_ns) / 1e3,
        p99_us=quantiles(taken_ns, n=100)[-1] / 1e3,
        sample_count=len(taken_ns),
    )


async def _hand_offs(samples: int) -> tuple[list[int], list[int]]:
    there, back = [], []
    async with WorkerThread("measured") as thread:
        for _ in range(samples):
            asked = perf_counter_ns()
            begun = await thread.run(perf_counter_ns)
            back.append(perf_counter_ns() - begun)
            there.append(begun - asked)
    return there, back


class _Watch:
    """Records the nanoseconds of each part of each step."""

    def __init__(self) -> None:
        self.taken: dict[str, list[int]] = {"schedule": [], "update": [], "deliver": [], "readers": []}

    def note(self, part: str, began_ns: int) -> None:
        self.taken[part].append(thread_time_ns() - began_ns)


class _WatchedCore(EngineCore):
    def __init__(self, settings: CoreSettings, watch: _Watch) -> None:
        super().__init__(settings)
        self._watch = watch

    def schedule(self, now: float) -> StepPlan | None:
        began_ns = thread_time_ns()
        plan = super().schedule(now)
        self._watch.note("schedule", began_ns)
        return plan

    def update_from_output(self, plan: StepPlan, result: StepResult, now: float) -> list[EngineEvent]:
        began_ns = thread_time_ns()
        events = super().update_from_output(plan, result, now)
        self._watch.note("update", began_ns)
        return events


class _WatchedDelivery(Delivery):
    def __init__(self, core: EngineCore, metrics: Metrics, watch: _Watch) -> None:
        super().__init__(core, metrics, wake=lambda: None)
        self._watch = watch

    def on_events(self, events: list[EngineEvent], step_seconds: float) -> None:
        began_ns = thread_time_ns()
        super().on_events(events, step_seconds)
        self._watch.note("deliver", began_ns)


class _Steps:
    """Steps in which every token is the letter a. The readers' time is measured while a real step would be computed."""

    def __init__(self, watch: _Watch) -> None:
        self._watch = watch
        self.steps_left = 0
        self.done = trio.Event()

    async def run_step(self, plan: StepPlan, is_abandoned: IsAbandoned) -> StepResult | None:
        began_ns = thread_time_ns()
        # In the first scheduler pass, all readers run. In the second pass, this task runs after the readers.
        for _ in range(2):
            await trio.lowlevel.checkpoint()
        self._watch.note("readers", began_ns)
        self.steps_left -= 1
        if self.steps_left == 0:
            self.done.set()
        return StepResult(tuple(LETTER if chunk.samples else None for chunk in plan.chunks))


class _WatchedEngine(Engine):
    def __init__(self, core: EngineCore, text_threads: TextThreads, steps: _Steps, watch: _Watch) -> None:
        self.core = core
        super().__init__(
            model=ModelDescription(
                served_names=("measured",),
                source="measured",
                context_tokens_max=core.settings.context_tokens_max,
                vocab_size=BYTE_VOCAB_SIZE,
                eos_token_ids=(END_TOKEN_ID,),
                created_at=0,
            ),
            core=core,
            steps=steps,
            tokenizer=byte_tokenizer(),
            text_threads=text_threads,
            metrics=Metrics("measured"),
            settings=EngineSettings(
                waiting_requests_max=core.settings.max_num_seqs,
                deadlines=Deadlines(),
                deadlines_max=Deadlines(),
            ),
        )
        self._delivery = _WatchedDelivery(core, self.metrics, watch)
        self._loop = EngineLoop(core, steps, self._delivery)


@asynccontextmanager
async def _open_engine(watch: _Watch, running_count: int, steps: int) -> AsyncIterator[tuple[_WatchedEngine, _Steps]]:
    tokens_max = (len(PROMPT) + steps + STEPS_BEFORE) * 2
    core = _WatchedCore(
        CoreSettings(
            block_count=running_count * (tokens_max // BLOCK_SIZE + 1),
            block_size=BLOCK_SIZE,
            context_tokens_max=tokens_max,
            max_num_seqs=running_count,
            step_tokens_max=running_count * tokens_max,
        ),
        watch,
    )
    async with TextThreads() as text_threads:
        running = _Steps(watch)
        engine = _WatchedEngine(core, text_threads, running, watch)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.keep_deadlines)
            await nursery.start(engine.run)
            yield engine, running
            nursery.cancel_scope.cancel()


async def _taken(readers: Readers, running_count: int, queued_count: int, steps: int) -> dict[str, list[int]]:
    watch = _Watch()
    async with _open_engine(watch, running_count, steps) as (engine, running), trio.open_nursery() as nursery:
        app = App(engine)
        for _ in range(running_count):
            if readers == "plain":
                nursery.start_soon(_read, engine)
            else:
                nursery.start_soon(app, _Unsent())
        await _until_all_run(engine, running_count)
        queued = [_queued(number) for number in range(queued_count)]
        for request in queued:
            engine.core.add(request)
        gc.collect()
        gc.freeze()
        try:
            running.steps_left = steps + STEPS_BEFORE
            await running.done.wait()
        finally:
            gc.unfreeze()
            engine.core.abort([request.id for request in queued], now=0.0)
        nursery.cancel_scope.cancel()
    return watch.taken


async def _until_all_run(engine: Engine, running_count: int) -> None:
    while engine.stats().running_count < running_count:
        await trio.lowlevel.checkpoint()


async def _read(engine: Engine) -> None:
    async with engine.generate(PROMPT, SamplingParams(ignore_eos=True, temperature=0)) as stream:
        async for _delta in stream:
            pass


def _queued(number: int) -> EngineRequest:
    return EngineRequest(
        id=RequestId(f"queued {number}"),
        prompt_token_ids=(number, LETTER),
        sampling=SamplingParams(temperature=0.0),
        output_tokens_max=1,
        stop_token_ids=frozenset(),
        seed=0,
    )


class _Unsent(Exchange):
    """A streamed chat completion whose client accepts all data at once."""

    method, path, query = "POST", "/v1/chat/completions", ""
    http_version, peer = "2", "unknown"

    def __init__(self) -> None:
        self.headers = Headers(())
        self._is_started = False

    @property
    def started(self) -> bool:
        return self._is_started

    async def body(self) -> bytes:
        return msgspec.json.encode(BODY)

    async def respond(self, status: int, headers: HeaderFields, body: bytes) -> None:
        raise AssertionError(body)

    async def start(self, status: int, headers: HeaderFields) -> None:
        self._is_started = True

    async def send(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()

    async def finish(self, last: bytes = b"") -> None:
        await trio.lowlevel.checkpoint()
