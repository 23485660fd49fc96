"""Runs an image engine in virtual time. Only the model and the clock are fakes.

Clients read slowly, disconnect, or are cancelled. Operators abort by id, pause, and drain. Requests and steps fail,
and the engine restarts. The simulation checks the core whenever a task uses it: every slot is free, or belongs to a
request that has not ended. ImageBook checks the deltas that a client receives. After a client has disconnected,
at most the step in flight still computes its request.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable

import msgspec
import trio
from trio.testing import MockClock

from trioserve.contracts.deadlines import Deadlines
from trioserve.contracts.errors import Draining, EngineFault, EngineReopening, Overloaded
from trioserve.contracts.events import FinishReason, IterativePhase
from trioserve.contracts.image_generation import (
    ImageDelta,
    ImageParams,
    IterativePlan,
    IterativeRequest,
    IterativeResult,
    RGBImage,
)
from trioserve.contracts.output import REQUEST_POISONED
from trioserve.contracts.step import IsAbandoned, never_abandoned
from trioserve.engine.image_engine import ImageStream
from trioserve.engine.lifecycle.request_scope import AnyScope
from trioserve.engine.lifecycle.restarts import LONE_FAULTS_MAX
from trioserve.simulation.images.plan import Client, Fail, ImagesPlan
from trioserve.simulation.stack.pause_plan import Halt, Order
from trioserve.simulation.stack.pauses import Pauses
from trioserve.simulation.traced_run import ClientsInside, IdleWatch, TracedRun, waits_for_a_step, without_log_lines
from trioserve.testing.fake_image_engine import (
    FAKE_IMAGE_MODEL,
    FakeImageEngine,
    FakeImageExecutor,
    image_after,
    open_fake_image_engine,
)
from trioserve.testing.inline_work import seeded_schedule
from trioserve.testing.invariants import check_iterative_core

__all__ = ["ImageBook", "ImagesSimulation"]


class ImageBook:
    """Expected deltas of one image.

    Args:
        name: name of the image in error messages.
        index: index of the image in its request.
        step_count: number of requested denoising steps.
        pictures: expected partial images, by the number of steps before them.
        last: the expected finished image.

    Attributes:
        steps_done: number of steps in the latest delta. -1: no delta has come.
        end: the finish reason. None: the image has not ended.
    """

    def __init__(self, name: str, index: int, step_count: int, pictures: dict[int, RGBImage], last: RGBImage) -> None:
        self.name = name
        self.steps_done = -1
        self.end: FinishReason | None = None
        self._index = index
        self._step_count = step_count
        self._images = dict(pictures)
        self._last = last

    def take(self, delta: ImageDelta) -> None:
        """Record a delta, and assert that it is an expected one."""
        shown_delta = f"{self.name}: {_shown(delta)}"
        assert delta.index == self._index, f"{shown_delta} belongs to image {delta.index}"
        assert self.end is None, f"{shown_delta} comes after its end"
        assert delta.step_count == self._step_count, f"{shown_delta}: {self._step_count} steps were requested"
        self.end = delta.finish_reason
        if self.end is FinishReason.STOP:
            assert delta.steps_done == self._step_count, f"{shown_delta} is reported as finished"
            assert delta.image == self._last, f"{shown_delta} has another image than expected"
            return
        grows = delta.steps_done > self.steps_done or self.end is not None
        assert grows, f"{shown_delta} comes after {self.steps_done} steps were reported"
        self.steps_done = delta.steps_done
        if delta.image is not None:
            shown = [step for step, image in self._images.items() if image == delta.image]
            assert shown, f"{shown_delta} has a partial result that was not requested, or that was sent before"
            assert self.end is None, f"{shown_delta} ends without success, but has an image"
            assert shown[0] <= delta.steps_done, f"{shown_delta} has the image after {shown[0]} steps"
            self._images = {step: image for step, image in self._images.items() if step > shown[0]}
        if self.end is None:
            missed = [step for step in self._images if step <= delta.steps_done]
            assert not missed, f"{shown_delta}: the partial results after steps {missed} were not sent"


REST_SECONDS = 10.0  # After this time, the step in flight has ended, and an engine that this step broke has restarted.
# Limit in virtual seconds. A task that has not ended by then waits for an event that never comes.
SECONDS_MAX = 10_000.0
READ = "read to the end"
MODEL = msgspec.structs.replace(
    FAKE_IMAGE_MODEL, width=8, height=8, pixels_per_work=64
)  # Images are small so that they are computed fast.
BROKEN = "the simulation broke the engine"
FAILED = "the simulation made this image fail"


class ImagesSimulation(TracedRun):
    """Runs one plan.

    Args:
        trace: called with a line for each effect.
    """

    def __init__(self, plan: ImagesPlan, *, trace: Callable[[str], None] | None = None) -> None:
        super().__init__(trace)
        self.plan = plan
        self._clients = {part.number: part for part in plan.parts if isinstance(part, Client)}
        self._inside = ClientsInside[ImageStream](_progress, log_line=self.log_line, count=self.count)
        self._without_outcome: set[int] = (
            set()
        )  # clients that have entered the engine and do not know yet how their request ended
        self._failing: set[int] = set()  # clients whose requests the plan makes fail
        # For each sequence without a reader: the index of the last step that may compute the sequence.
        self._gone_at: dict[str, int] = {}
        self._owners: dict[str, Client] = {}  # the client of each sequence
        self._step_count = 0  # number of steps so far
        # For each client: the members of each failed step that computed the client's request.
        self._faults_of: dict[int, list[set[int]]] = {}
        self._step_seconds = itertools.cycle(plan.stage.step_seconds)
        self._stop_reasons: dict[int, str] = {}  # stop reasons of requests that a pause has ended
        self._pauses = Pauses(
            log_line=self.log_line,
            count=self.count,
            note_ended=self._note_ended,
            step_seconds_max=max(plan.stage.step_seconds),
        )
        self._idle_watch = IdleWatch()
        self._fake: FakeImageEngine | None = None

    def run(self) -> None:
        """Run the plan.

        Raises:
            AssertionError: a rule is broken. Exceptions of the engine pass through too.
        """
        with seeded_schedule(self.plan.stage.schedule_seed), without_log_lines("trioserve.engine"):
            clock = MockClock(autojump_threshold=0)
            trio.run(self._main, clock=clock, instruments=[self._idle_watch, self._pauses])
        self._idle_watch.check()
        self._pauses.check()

    async def _main(self) -> None:
        stage = self.plan.stage
        try:
            with trio.fail_after(SECONDS_MAX):
                async with open_fake_image_engine(
                    max_num_seqs=stage.slots,
                    kept_slots=stage.kept,
                    step_work_max=stage.work,
                    max_queued_requests=stage.waiting_max,
                    engine_restarts=stage.restarts,
                    opening_seconds=stage.opening_seconds,
                    step_seconds=next(self._step_seconds),
                    model=MODEL,
                    new_executor=functools.partial(_WatchedExecutor, self),
                ) as fake:
                    self._fake = self._pauses.engine = fake
                    self._idle_watch.who_waits = lambda: self._waits_for_ever(fake)
                    await self._live(fake)
                    self._idle_watch.stop()
                    self._pauses.engine = None
        except EngineFault as fault:
            if BROKEN not in str(fault):
                raise (fault.__cause__ or fault) from None  # A check of the simulation has failed inside a step.
            assert not self._without_outcome, (
                f"the engine broke, and clients {sorted(self._without_outcome)} were not notified"
            )
            self.count("engines broken")

    async def _live(self, fake: FakeImageEngine) -> None:
        fake.on_fault = fake.wait_until_idle  # After a fault, clients get time to finish.
        async with trio.open_nursery() as nursery:
            for part in self.plan.parts:
                if isinstance(part, Client):
                    nursery.start_soon(self._be_client, fake, part)
                elif isinstance(part, Order):
                    nursery.start_soon(self._be_operator, fake, part)
                elif isinstance(part, Fail):
                    nursery.start_soon(self._have_fail, fake, part)
            if halts := [part for part in self.plan.parts if isinstance(part, Halt)]:
                nursery.start_soon(self._pauses.operate, fake, halts)
        await fake.wait_until_idle()
        await trio.sleep(REST_SECONDS)
        fake.assert_all_free()
        self.check(fake)
        self._check_freed(fake)
        may_break = any(fault >= self._step_count for fault in self.plan.stage.faults)
        if fake.ready and not may_break:  # A new client must find all slots and the whole queue free.
            stage = self.plan.stage
            number = max(self._clients, default=0) + 1
            last = Client(number=number, id="last", pictures=min(fake.limits.n_max, stage.slots + stage.waiting_max))
            self._clients[number] = last
            outcome = await self._be_client(fake, last)
            assert outcome == READ, f"no client is left, but a new client is {outcome}"
            fake.assert_all_free()

    # --- Tasks of clients and operators ---

    async def _be_client(self, fake: FakeImageEngine, client: Client) -> str:
        await trio.sleep(client.at)
        self.count("requests")
        stream = fake.generate_image(
            f"an image for {client.number}",
            _params_of(client),
            request_id=client.id,
            priority=client.priority,
            deadlines=Deadlines(timeout=client.timeout, queue_timeout=client.queue_timeout),
        )
        outcome = "left early"
        is_new_id = self._inside.begin(client.number, stream)
        try:
            with trio.move_on_after(math.inf if client.patience is None else client.patience) as scope:
                async with stream:
                    self._without_outcome.add(client.number)
                    if await self._read(fake, client, stream):
                        outcome = READ
        except EngineReopening:
            outcome = "refused: reopening"
        except Overloaded as error:
            outcome = "refused: draining" if isinstance(error, Draining) else "refused: full"
        except EngineFault:
            outcome = "got the engine's fault"
        finally:
            is_refused = is_new_id and not stream._request.choices  # A request without choices was refused at once.
            self._inside.end(client.number, unused_id=client.id if is_refused else None)
            # From this point on, at most the step in flight computes the request, however its client has left the
            # scope.
            self._check_left(fake, client, stream)
        if scope.cancelled_caught:
            outcome = "client timeout"
        self._without_outcome.discard(client.number)
        self.log_line(f"client {client.number} {client.id}: {outcome}")
        self.count(f"clients: {outcome}")
        return outcome

    async def _read(self, fake: FakeImageEngine, client: Client, stream: ImageStream) -> bool:
        """Read the stream of a client.

        Returns:
            True if the client has read the whole stream.
        """
        books = [_book_of(client, request) for request in _asked(stream)]
        if client.leaves_after == 0:
            return False
        delta_count = 0
        async for delta in stream:
            self.log_line(f"client {client.number} {client.id}: {delta.index} {_shown(delta)}")
            books[delta.index].take(delta)
            self._count_delta(delta)
            if delta.finish_reason not in (None, FinishReason.STOP):
                self._check_end(client, delta)
            self.check(fake)
            delta_count += 1
            if delta_count == client.leaves_after:
                return False
            await trio.sleep(client.pause)
        unended = [book.name for book in books if book.end is None]
        assert not unended, f"the stream has ended, but these images have not: {unended}"
        return True

    def _check_end(self, client: Client, delta: ImageDelta) -> None:
        """Check the reason for which an image ended without being finished."""
        reason, name = delta.finish_reason, f"client {client.number}, image {delta.index}"
        if reason is FinishReason.ABORT:
            assert self._inside.was_aborted(client.number), f"{name} was aborted, but no operator aborted it"
            expected = self._stop_reasons.get(client.number, delta.stop_reason)
            assert delta.stop_reason == expected, f"{name} ended with {delta.stop_reason}, expected is {expected}"
        elif reason is FinishReason.DEADLINE:
            assert client.timeout is not None or client.queue_timeout is not None, (
                f"{name} passed a deadline, but has none"
            )
        elif delta.stop_reason == REQUEST_POISONED:
            steps = self._faults_of.get(client.number, [])
            assert len(steps) >= LONE_FAULTS_MAX, f"{name} is blamed for {len(steps)} faults"
            assert {client.number} in steps, f"{name} is blamed, but no failed step had it alone: {steps}"
        else:
            assert reason is FinishReason.ERROR, f"{name} ended with {reason}"
            assert delta.message == FAILED, f"{name} ended with an error: {delta.message}"
            assert client.number in self._failing, f"{name} failed, but no event of the plan made it fail"

    def _check_left(self, fake: FakeImageEngine, client: Client, stream: ImageStream) -> None:
        in_flight = _in_flight(fake)
        self._note_owner(client, stream)
        for choice in stream._request.choices:
            self._note_gone(choice.sequence_id, is_in_flight=choice.sequence_id in in_flight)
        self._inside.check_left(client.number, stream)
        self._stop_reasons.pop(client.number, None)
        self.check(fake)

    async def _be_operator(self, fake: FakeImageEngine, order: Order) -> None:
        await trio.sleep(order.at)
        if order.drains:
            self.log_line("drain")
            self._pauses.note_drained(fake)
            fake.drain()
            for number, stream in self._inside.streams.items():
                request = stream._request
                has_begun = request.has_run or not request.has_begun
                assert has_begun or stream.is_finished, f"client {number} had not begun to run, but was not refused"
            waiting = fake.dispatch.core.stats().waiting
            assert waiting == 0, f"{waiting} requests were in the queue, but were not refused"
        elif order.ends_all:
            self.log_line("end all")
            for number in self._inside.streams:
                self._inside.note_end(number)
            fake.abort_all("the server is shutting down")
            for number, stream in self._inside.streams.items():
                assert stream.is_finished, f"client {number} was ended with all others, but continues"
        else:
            self._inside.abort(fake.abort, order.ids)
            in_flight = _in_flight(fake)
            for stream in self._inside.streams.values():
                for choice in stream._request.choices if stream.id in order.ids else ():
                    self._note_gone(choice.sequence_id, is_in_flight=choice.sequence_id in in_flight)
        self.check(fake)

    async def _have_fail(self, fake: FakeImageEngine, fail: Fail) -> None:
        await trio.sleep(fail.at)
        numbers = [
            number
            for number, stream in self._inside.streams.items()
            if stream.id == fail.id and any(not choice.is_ended for choice in stream._request.choices)
        ]
        if numbers:
            self.log_line(f"fail {fail.id}")
            fake.fail_request(fail.id, FAILED)
            self._failing.update(numbers)

    # --- Records and rules ---

    def check(self, fake: FakeImageEngine) -> None:
        """Check the rules that must hold at any time.

        Args:
            fake: the engine.
        """
        check_iterative_core(fake.current_core)
        self._idle_watch.check()
        self._pauses.check()
        stage, now = self.plan.stage, trio.current_time()
        views = fake.live_requests()
        assert len(views) == len(self._inside.streams), "the engine has other requests than the simulation"
        waited_for = {
            choice.sequence_id
            for stream in self._inside.streams.values()
            for choice in stream._request.choices
            if not choice.is_ended
        }
        for live in fake.current_core.live_requests() if fake.fault is None else ():
            name = live.request.id
            is_last = live.steps_in_flight and live.abort_reason is not None
            assert name in waited_for or is_last, f"no client waits for {name}, but it continues"
        live_count = len(list(fake.current_core.live_requests()))
        given_count = sum(endpoint.in_flight for endpoint in fake.dispatch.core.endpoints.values())
        assert live_count <= given_count, f"the core has {live_count} images, but got {given_count}"
        unfinished_count = sum(view.state != "finished" for view in views)
        live_max = stage.slots + stage.kept + stage.waiting_max
        assert unfinished_count <= live_max, f"{unfinished_count} requests run or wait, but at most {live_max} may"
        for number, stream in self._inside.streams.items():
            client, request = self._clients[number], stream._request
            self._note_owner(client, stream)
            is_over = client.timeout is not None and now > request.entered_at + client.timeout
            assert not is_over or stream.is_finished, f"client {number} continues after its deadline"
            is_late = client.queue_timeout is not None and now > request.entered_at + client.queue_timeout
            waits = any(not choice.has_run and not choice.is_ended for choice in request.choices)
            assert not (is_late and waits), f"client {number} has waited for too long"

    def begin_step(self, plan: IterativePlan, *, is_abandoned: bool) -> None:
        """Record a step that is about to be computed, and set the duration of the next step.

        Args:
            plan: the step.
            is_abandoned: True if no request needs the result of the step any more.

        Raises:
            RuntimeError: the plan lets this step break the engine.
        """
        fake = self._fake
        assert fake is not None
        self.check(fake)
        works = " ".join(f"{work.request.id}[{work.step}]@{work.slot}" for work in plan.works)
        self.log_line(f"step {plan.step_index} to {plan.phase.value}: {works}{' abandoned' if is_abandoned else ''}")
        self.count(f"steps to {plan.phase.value}")
        self.counts["preempted"] += len(plan.preempted)
        self.counts["steps abandoned"] += is_abandoned
        costs = [_cost(self._owners[work.request.id], plan.phase) for work in plan.works]
        assert plan.work_count == sum(costs) <= self.plan.stage.work, f"{plan.work_count} is not the work of {costs}"
        for work in plan.works:
            priority = self._owners[work.request.id].priority
            assert work.request.priority == priority, f"{work.request.id} has another priority than {priority}"
            gone_at = self._gone_at.get(work.request.id, math.inf)
            assert self._step_count <= gone_at, f"{work.request.id} is computed, but no client waits for it"
        fake.step_seconds = next(self._step_seconds)
        self._step_count += 1
        if self._step_count - 1 in self.plan.stage.faults:
            members = {self._owners[work.request.id].number for work in plan.works}
            for number in members:
                self._faults_of.setdefault(number, []).append(members)
            self.count("faults")
            raise RuntimeError(BROKEN)

    def _note_owner(self, client: Client, stream: ImageStream) -> None:
        self._owners.update({choice.sequence_id: client for choice in stream._request.choices})

    def _note_gone(self, sequence_id: str, *, is_in_flight: bool) -> None:
        """Record that a sequence has no reader any more. At most the step in flight may still compute the sequence."""
        self._gone_at.setdefault(sequence_id, self._step_count - (not is_in_flight))

    def _note_ended(self, request: AnyScope, stop_reason: str) -> None:
        """Record that a pause is about to end a request."""
        for number, stream in self._inside.streams.items():
            if stream._request is request:
                self._inside.note_end(number)
                self._stop_reasons[number] = stop_reason

    def _waits_for_ever(self, fake: FakeImageEngine) -> str | None:
        """Return the id of a request that waits although a step could compute it, or None.

        During a pause or a restart, every request may wait. While a pause lets running requests end, requests that have
        not begun may wait.
        """
        if self._pauses.is_closed or fake.reopens_at is not None or fake.current_core.flights:
            return None
        if self._pauses.blocks_admission and not any(fake.current_core.live_requests()):
            return None
        return waits_for_a_step(fake)

    def _count_delta(self, delta: ImageDelta) -> None:
        if delta.finish_reason is not None:
            self.count(f"ends: {delta.finish_reason.value}")
        elif delta.image is not None:
            self.count("partial images")

    def _check_freed(self, fake: FakeImageEngine) -> None:
        """Check in the engine's metrics that each cancelled request left the core after at most one step."""
        steps = fake.metrics.cancel_to_free_steps
        for phase, child in steps._children.items():
            late = sum(child.counts()[index] for index, bound in enumerate((*steps.bounds, math.inf)) if bound > 1)
            assert not late, f"{late} cancels took more than a step: {phase}"


class _WatchedExecutor(FakeImageExecutor):
    """An executor that reports each step to the simulation before it computes the step."""

    def __init__(self, simulation: ImagesSimulation, slot_count: int) -> None:
        super().__init__(slot_count)
        self._simulation = simulation

    def execute(self, plan: IterativePlan, is_abandoned: IsAbandoned = never_abandoned) -> IterativeResult | None:
        self._simulation.begin_step(plan, is_abandoned=is_abandoned())
        return super().execute(plan, is_abandoned)


def _in_flight(fake: FakeImageEngine) -> set[str]:
    return {live.request.id for live in fake.current_core.live_requests() if live.steps_in_flight}


def _progress(stream: ImageStream) -> int:
    return sum(choice.steps_done for choice in stream._request.choices)


def _params_of(client: Client) -> ImageParams:
    """Return the image parameters of a client's request. An image of size 1 has the model's default size."""
    return ImageParams(
        width=MODEL.width,
        height=MODEL.height * client.size,
        steps=client.steps,
        guidance=3.0 if client.guided else 1.0,
        n=client.pictures,
        seed=_seed(client),
        partial_images=client.partials,
    )


def _asked(stream: ImageStream) -> list[IterativeRequest]:
    """Return the core's request for each image of a stream, as the fake model needs it."""
    request = stream._request
    return [
        request.spec.core_request(choice.sequence_id, seed=seed, priority=request.priority)
        for choice, seed in zip(request.choices, request.seeds, strict=True)
    ]


def _book_of(client: Client, asked: IterativeRequest) -> ImageBook:
    index = asked.seed - _seed(client)
    name = f"client {client.number}, image {index}"
    distance = math.ceil(client.steps / (client.partials + 1))
    shown = range(distance, client.steps, distance) if client.partials else ()
    pictures = {step: image_after(asked, step) for step in shown}
    return ImageBook(name, index, client.steps, pictures, image_after(asked, client.steps))


def _cost(client: Client, phase: IterativePhase) -> int:
    if phase is IterativePhase.ENCODE:
        return 1
    return client.size * (2 if phase is IterativePhase.DENOISE and client.guided else 1)


def _seed(client: Client) -> int:
    return 1_000 * client.number


def _shown(delta: ImageDelta) -> str:
    return f"{delta.steps_done}{'*' if delta.image else ''}{delta.finish_reason.value if delta.finish_reason else ''}"
