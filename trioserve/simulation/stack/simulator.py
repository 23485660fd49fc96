"""Simulates the whole stack around the core in virtual time. Only the model, the network and the clock are fakes.

Clients use HTTP (http_clients.py) or the engine directly. They read slowly, disconnect or are cancelled. Operators
abort by id and drain. The engine may break.

The core is checked whenever a task uses it. Each client checks what it receives: the reference tokens in order, at most
one end per choice, and nothing after an abort. After a client has left, no further step may compute its sequences.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import trio
from trio.testing import MockClock

from trioserve.contracts.deadlines import Deadlines
from trioserve.contracts.errors import Draining, EngineFault, Overloaded, UnknownModel
from trioserve.contracts.events import AbortOutcome, FinishReason
from trioserve.contracts.ids import RequestId
from trioserve.contracts.output import Delta
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.resume import Partial
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.step import IsAbandoned, StepPlan, StepResult, never_abandoned
from trioserve.contracts.structured_output import StructuredOutput
from trioserve.contracts.weights import AdapterRef
from trioserve.engine.lifecycle.request_scope import AnyScope
from trioserve.engine.request_preparation import SEED_STRIDE
from trioserve.engine.request_stream import RequestStream
from trioserve.simulation.reference_engine import ReferenceEngine, Swaps, stamped
from trioserve.simulation.stack.calls import CALL_TEMPLATE, CallingModel
from trioserve.simulation.stack.forms import compile_forms, guide_of
from trioserve.simulation.stack.http_clients import HttpClients
from trioserve.simulation.stack.http_connection import Ask, Connection, Delete
from trioserve.simulation.stack.http_server import MADE_UP, HttpServer
from trioserve.simulation.stack.lending import Lending, encoded_prompt, prompt_of
from trioserve.simulation.stack.pause_plan import Halt, Order, Swap
from trioserve.simulation.stack.pauses import SwapPauses
from trioserve.simulation.stack.plan import BLOCK_SIZE, Client, Load, StackPlan, Stage, Unload
from trioserve.simulation.traced_run import ClientsInside, IdleWatch, TracedRun, waits_for_a_step
from trioserve.testing.byte_tokenizer import byte_tokenizer
from trioserve.testing.fake_engine import FakeEngine, open_fake_engine
from trioserve.testing.fake_executor import FakeExecutor, FakeModel
from trioserve.testing.inline_work import seeded_schedule
from trioserve.testing.invariants import check_core

__all__ = ["StackSimulation"]

# Limit in virtual seconds. A client that has not ended by then waits for an event that never comes.
SECONDS_MAX = 10_000.0
READ = "read to the end"
BROKEN = "the simulation broke the engine"


class StackSimulation(TracedRun):
    """Runs one plan.

    Args:
        trace: receives each line of the trace. None: no trace.
    """

    def __init__(self, plan: StackPlan, *, trace: Callable[[str], None] | None = None) -> None:
        super().__init__(trace)
        self.plan = plan
        self._inside = ClientsInside[RequestStream](
            lambda stream: stream.completion_token_count, log_line=self.log_line, count=self.count
        )
        self._clients = {part.number: part for part in plan.parts if isinstance(part, Client)}
        self._without_outcome: set[int] = set()  # numbers of clients that entered and do not know their outcome yet
        self._http: HttpServer | None = None
        self._stop_reasons: dict[int, str] = {}  # stop reasons of requests that a pause has ended
        self._partials: dict[int, Partial] = {}  # partial results that the engine reported for aborted requests
        self._swaps = Swaps(_model_of(plan.stage), is_on=any(isinstance(part, Swap) for part in plan.parts))
        self._pauses = SwapPauses(
            log_line=self.log_line,
            count=self.count,
            note_ended=self._note_ended,
            step_seconds_max=max(plan.stage.step_seconds),
            swaps=self._swaps,
        )
        self._idle_watch = IdleWatch()
        self._step_seconds = itertools.cycle(plan.stage.step_seconds)
        self._fake: FakeEngine | None = None
        self._lending = Lending(plan.stage, log_line=self.log_line, count=self.count)

    def run(self) -> None:
        """Run the plan. Raise AssertionError if a rule is broken. Errors of the engine pass through."""
        with seeded_schedule(self.plan.stage.schedule_seed):
            clock = MockClock(autojump_threshold=0)
            trio.run(self._main, clock=clock, instruments=[self._idle_watch, self._pauses])
        self._idle_watch.check()
        self._pauses.check()

    async def _main(self) -> None:
        stage = self.plan.stage
        compile_forms(part.form for part in self.plan.parts if isinstance(part, Client | Ask))
        try:
            with trio.fail_after(SECONDS_MAX):
                async with open_fake_engine(
                    block_count=stage.block_count,
                    block_size=BLOCK_SIZE,
                    max_model_len=stage.block_count * BLOCK_SIZE,
                    max_num_seqs=stage.max_num_seqs,
                    max_num_batched_tokens=stage.step_tokens_max,
                    max_queued_requests=stage.waiting_requests_max,
                    speculative_ngram=stage.draft_tokens,
                    overlap_steps=stage.overlaps,
                    model=_model_of(stage),
                    tool_call_parser=stage.family or "auto",
                    new_executor=functools.partial(_WatchedExecutor, self),
                    step_seconds=next(self._step_seconds),
                    opening_seconds=stage.opening_seconds,
                    **{"tokenizer": byte_tokenizer(CALL_TEMPLATE), **self._lending.engine_options()},
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
                f"the engine broke, but clients {sorted(self._without_outcome)} got no error"
            )
            assert self._http is not None
            self._http.check_faults_reported()
            self._http.check_over()
            self.count("engines broken")

    async def _live(self, fake: FakeEngine) -> None:
        parts = self.plan.parts
        asks = [part for part in parts if isinstance(part, Ask)]
        async with trio.open_nursery() as serving:
            http = self._http = HttpServer(
                fake,
                self.plan.stage.front,
                asks,
                serving,
                log_line=self.log_line,
                count=self.count,
                check=lambda: self.check(fake),
                before_abort=self._before_abort,
            )
            connections = (part for part in parts if isinstance(part, Connection))
            clients = HttpClients(http, asks, connections, family=self.plan.stage.family)
            fake.on_fault = functools.partial(self._pass_on_fault, fake)
            async with trio.open_nursery() as nursery:
                for number, part in enumerate(parts):
                    if isinstance(part, Client):
                        nursery.start_soon(self._be_client, fake, part)
                    elif isinstance(part, Order):
                        nursery.start_soon(self._be_operator, fake, part)
                    elif isinstance(part, Load):
                        nursery.start_soon(self._lending.load, fake, part)
                    elif isinstance(part, Unload):
                        nursery.start_soon(self._lending.unload, fake, part)
                    elif isinstance(part, Delete):
                        nursery.start_soon(clients.run_operator, part, number)
                clients.start(nursery)
                if halts := [part for part in parts if isinstance(part, Halt)]:
                    nursery.start_soon(self._pauses.operate, fake, halts)
            await fake.wait_until_idle()
            await trio.sleep(2)  # In this time, the step in flight ends, and connections send GOAWAY.
            fake.assert_all_free()
            self.check(fake)
            self._lending.check_end(fake)
            http.check_over()
        # A new client must find all slots and the whole queue free.
        if not fake.draining and self.plan.stage.fault_at is None:
            all_places = self.plan.stage.max_num_seqs + self.plan.stage.waiting_requests_max
            number = len(self._clients)
            last = Client(number=number, id="last", at=0.0, prompt=(1,), output=1, choices=all_places)
            self._clients[number] = last
            outcome = await self._be_client(fake, last)
            assert outcome == READ, (
                f"no request is left, but a client that needs all {all_places} slots ended as: {outcome}"
            )
            fake.assert_all_free()

    async def _pass_on_fault(self, fake: FakeEngine) -> None:
        """Handle a fault of the engine as the server does. Direct clients of the engine also get time to end."""
        assert self._http is not None
        self._http.drain()
        await self._http.wait_until_closed()
        await fake.wait_until_idle()

    # --- Tasks of clients and operators ---

    async def _be_client(self, fake: FakeEngine, client: Client) -> str:
        await trio.sleep(client.at)
        self.count("requests")
        if client.form:
            self.count("requests with structured output")
        sampling = SamplingParams(
            n=client.choices,
            temperature=client.temperature,
            max_tokens=client.output,
            seed=client.number,
            structured=StructuredOutput.choice(client.form) if client.form else None,
        )
        stream = fake.generate(
            prompt_of(client),
            sampling,
            request_id=client.id,
            priority=client.priority,
            cache_salt=client.salt,
            deadlines=Deadlines(timeout=client.timeout, queue_timeout=client.queue_timeout),
            adapter=client.adapter or None,
        )
        outcome = "left early"
        # From this point on, the request counts as inside the engine, although it may still wait in the queue.
        is_new_id = self._inside.begin(client.number, stream)
        self._lending.begin(client, stream)
        try:
            with trio.move_on_after(math.inf if client.patience is None else client.patience) as scope:
                async with stream:
                    self._without_outcome.add(client.number)
                    if await self._read(fake, client, stream):
                        outcome = READ
        except Overloaded as error:
            outcome = "refused: draining" if isinstance(error, Draining) else "refused: full"
        except EngineFault:
            outcome = "got the engine's fault"
        except UnknownModel:
            self._lending.check_refused(client)
            is_new_id = False  # The request had a place in the queue for a moment, so its id counts as used.
            outcome = "refused: no such adapter"
        finally:
            is_refused = is_new_id and not stream._request.choices  # A request without choices was refused at once.
            # However the client's scope ended, only the step in flight may still compute its sequences.
            self._inside.end(client.number, unused_id=client.id if is_refused else None)
            self._lending.end(client)
            self._check_left(fake, client, stream)
        if scope.cancelled_caught:
            outcome = "client timeout"
        self._without_outcome.discard(client.number)
        self.log_line(f"client {client.number} {client.id}: {outcome}")
        self.count(f"clients: {outcome}")
        return outcome

    async def _read(self, fake: FakeEngine, client: Client, stream: RequestStream) -> bool:
        """Read a stream. Return True if it was read to its end."""
        adapter, reference = self._lending.adapter_of(client), ReferenceEngine(fake.executor.model)
        responses = [reference.response(_sequence(client, index, adapter)) for index in range(client.choices)]
        counts, ends = [0] * client.choices, [0] * client.choices
        given: list[tuple[int, ...]] = [()] * client.choices
        if client.leaves_after == 0:
            return False
        delta_count = 0
        async for delta in stream:
            self.log_line(f"client {client.number} {client.id}: {_shown(delta)}")
            index, begin = delta.index, counts[delta.index]
            name = f"client {client.number}, choice {index}"
            counts[index] += len(delta.token_ids)
            given[index] += delta.token_ids
            expected = responses[index].token_ids
            assert ends[index] == 0, f"{name}: {delta} after its end"
            if self._swaps.is_on:
                sampled = self._swaps.sampled(stream._request.choices[index].sequence_id, begin, counts[index])
                assert stamped(delta) == sampled, f"{name}: {delta} at {begin}, but {sampled} was sampled"
            else:
                assert delta.token_ids == expected[begin : counts[index]], f"{name}: {delta} at {begin} of {expected}"
            if delta.finish_reason is not None:
                ends[index] = 1
                is_complete = counts[index] == len(expected)
                self._check_end(client, delta, is_complete=is_complete, whole_reason=responses[index].reason)
            self.check(fake)
            delta_count += 1
            if delta_count == client.leaves_after:
                return False
            await trio.sleep(client.pause)
        assert all(ends), f"client {client.number}: the stream has ended, but choices have not: {ends}"
        self._check_partial(client, stream, given)
        return True

    def _check_end(self, client: Client, delta: Delta, *, is_complete: bool, whole_reason: FinishReason) -> None:
        reason = delta.finish_reason
        assert reason is not None
        self.count(f"ends: {reason.value}")
        name = f"client {client.number}, choice {delta.index}"
        if reason in (FinishReason.LENGTH, FinishReason.STOP):
            assert reason is whole_reason, f"{name} ended with {reason}, but the reference with {whole_reason}"
            assert is_complete, f"{name} ended as complete, but tokens are missing"
        elif reason is FinishReason.ABORT:
            is_meant = self._inside.was_aborted(client.number) or self._lending.may_be_ended(client)
            assert is_meant, f"{name} ended as aborted, but was not aborted"
            expected_value = self._stop_reasons.get(client.number, delta.stop_reason)
            assert delta.stop_reason == expected_value, (
                f"{name} ended with {delta.stop_reason}, expected {expected_value}"
            )
        else:
            assert reason is FinishReason.DEADLINE, f"{name} ended with {reason}"
            assert client.timeout is not None or client.queue_timeout is not None, (
                f"{name} passed a deadline, but has none"
            )

    def _check_left(self, fake: FakeEngine, client: Client, stream: RequestStream) -> None:
        sequences = {live.request.id: live for live in fake.current_core.live_requests()}
        for choice in stream._request.choices:
            live = sequences.get(choice.sequence_id)
            assert live is None or (live.steps_in_flight and live.abort_reason is not None), (
                f"client {client.number} has left, but {choice.sequence_id} is still computed"
            )
        self._inside.check_left(client.number, stream)
        self._stop_reasons.pop(client.number, None)
        self.check(fake)

    async def _be_operator(self, fake: FakeEngine, order: Order) -> None:
        await trio.sleep(order.at)
        if order.drains:
            self.log_line("drain")
            self._pauses.note_drained(fake)
            fake.drain()
            assert self._http is not None
            self._http.drain()
            for number, stream in self._inside.streams.items():
                request = stream._request
                has_begun = any(choice.has_run for choice in request.choices) or not request.core_count
                assert has_begun or stream.is_finished, f"client {number} had not begun to run, but was not refused"
            waiting = fake.dispatch.core.stats().waiting
            assert waiting == 0, f"{waiting} requests were in the queue, but were not refused"
            self.check(fake)
            return
        if order.ends_all:
            self._end_all(fake)
            return
        self._inside.abort(lambda ids: self._cut_off(fake, ids), order.ids)
        self.check(fake)

    def _cut_off(self, fake: FakeEngine, ids: Iterable[str]) -> dict[str, AbortOutcome]:
        """Abort requests by their ids, and record the partial result of each request whose client is inside."""
        cut = fake.abort_with_partial(ids)
        numbers = {stream._request: number for number, stream in self._inside.streams.items()}
        for name, one in cut.items():
            requests = [request for request in fake.open_requests if request.id == name]
            for request, partial in zip(requests, one.partials, strict=True):
                if request in numbers:
                    self._partials[numbers[request]] = partial
        return {name: one.outcome for name, one in cut.items()}

    def _check_partial(self, client: Client, stream: RequestStream, token_ids: list[tuple[int, ...]]) -> None:
        """Compare the partial result of a stream that was read to its end with the received tokens."""
        partial = self._partials.get(client.number)
        if partial is None:
            return
        self.count("partials")
        name = f"client {client.number}"
        partial_tokens = [choice.token_ids for choice in partial.choices]
        assert partial_tokens == token_ids, f"{name} received {token_ids}, but its partial result has {partial_tokens}"
        # If the prompt was still being tokenized, its digest became known only after the abort.
        state = msgspec.structs.replace(stream.resume_state(), prompt_digest=partial.resume.prompt_digest)
        assert partial.resume == state, (
            f"the partial result of {name} resumes after {partial.resume}, but must after {state}"
        )

    def _end_all(self, fake: FakeEngine) -> None:
        assert self._http is not None
        self.log_line("end all")
        for view in fake.live_requests():
            self._before_abort(view.id)
            if view.state != "finished":
                self._http.aborted_ids.add(view.id)
        fake.abort_all("the server is shutting down")
        for view in fake.live_requests():
            assert view.state == "finished", f"{view.id} was ended with all others, but has not finished"
        self.check(fake)

    def _before_abort(self, request_id: str) -> bool:
        """Record that an id is about to be aborted. Return True if a direct client of the engine has used the id."""
        self._inside.note_abort(request_id)
        return self._inside.is_used(request_id)

    def _note_ended(self, request: AnyScope, stop_reason: str) -> None:
        """Record that a pause is about to end a request."""
        for number, stream in self._inside.streams.items():
            if stream._request is request:
                self._inside.note_end(number)
                self._stop_reasons[number] = stop_reason
                return
        assert self._http is not None
        self._http.ended_ids[stop_reason].add(request.id)

    # --- Rules ---

    def check(self, fake: FakeEngine) -> None:
        """Check the rules that must hold at any time.

        Args:
            fake: the engine.
        """
        check_core(fake.current_core)
        self._idle_watch.check()
        self._pauses.check()
        self._lending.check(fake)
        stage, engine, now = self.plan.stage, fake, trio.current_time()
        # requests of the engine's direct clients, without requests over HTTP
        own = [view for view in engine.live_requests() if not view.id.startswith(("h", MADE_UP))]
        assert len(own) == len(self._inside.streams), "the engine's requests differ from the clients inside"
        if self._http is not None:
            self._http.check()
        live_count = len(list(fake.current_core.live_requests()))
        given_count = sum(endpoint.in_flight for endpoint in fake.dispatch.core.endpoints.values())
        assert live_count <= given_count, (
            f"the core has {live_count} sequences, but leases were granted for {given_count}"
        )
        unfinished_count = sum(view.state != "finished" for view in engine.live_requests())
        live_max = stage.max_num_seqs + stage.waiting_requests_max
        assert unfinished_count <= live_max, f"{unfinished_count} requests run or wait, allowed are {live_max}"
        for number, stream in self._inside.streams.items():
            timeout = self._clients[number].timeout
            is_over = timeout is not None and now > stream._request.entered_at + timeout
            assert not is_over or stream.is_finished, f"client {number} has outlived its deadline"

    def _waits_for_ever(self, fake: FakeEngine) -> str | None:
        """Return the id of a request that waits although no event will ever continue it, or None.

        Requests may wait during a pause, unless the server drains. They may also wait for an image that is being
        encoded, and while a pause lets running requests end.
        """
        is_encoding = fake.image_encoder is not None and fake.image_encoder.encoding_count > 0
        if is_encoding or fake.fault is not None or fake.current_core.flights:
            return None
        if self._pauses.is_closed:
            return fake.first_unfinished_id if fake.draining and not self._pauses.is_replacing else None
        if self._pauses.blocks_admission and not any(fake.current_core.live_requests()):
            return None
        return waits_for_a_step(fake)

    def begin_step(self, plan: StepPlan, *, is_abandoned: bool) -> None:
        """Check a step that is about to be computed, set the duration of the next one, and break the engine if planned.

        Args:
            plan: the step.
            is_abandoned: True if no request needs its result.
        """
        fake, http = self._fake, self._http
        assert fake is not None
        assert http is not None
        self.check(fake)
        # A client may have left after this step was planned ahead. This step is then the last one that computes its
        # sequences.
        http.check_step((chunk.request.id for chunk in plan.chunks), fake.steps.handed_over_at)
        self.count("steps planned ahead" if plan.is_ahead else "steps")
        if any(chunk.draft for chunk in plan.chunks):
            self.count("steps with draft tokens")
        chunks = " ".join(f"{chunk.request.id}[{chunk.start}:{chunk.start + chunk.count}]" for chunk in plan.chunks)
        self.log_line(f"step {plan.step_index}: {chunks}{' abandoned' if is_abandoned else ''}")
        if plan.step_index == self.plan.stage.fault_at:
            raise RuntimeError(BROKEN)
        fake.step_seconds = next(self._step_seconds)
        self._lending.check_step(fake, (chunk.request.adapter for chunk in plan.chunks))
        if any(chunk.request.given for chunk in plan.chunks):
            self.count("steps with images")

    def end_step(self, plan: StepPlan, result: StepResult | None) -> None:
        self._swaps.note_step(plan, result)


class _WatchedExecutor(FakeExecutor):
    """A FakeExecutor that checks the stack before each step."""

    def __init__(self, simulation: StackSimulation, **options: Any) -> None:
        super().__init__(**options)
        self._simulation = simulation

    def execute(self, plan: StepPlan, is_abandoned: IsAbandoned = never_abandoned) -> StepResult | None:
        self._simulation.begin_step(plan, is_abandoned=is_abandoned())
        result = super().execute(plan, is_abandoned)
        self._simulation.end_step(plan, result)
        return result


def _model_of(stage: Stage) -> FakeModel:
    if stage.family:
        return CallingModel(stage.family, vocab_size=stage.vocab_size)
    return FakeModel(vocab_size=stage.vocab_size)


def _sequence(client: Client, index: int, adapter: AdapterRef | None) -> EngineRequest:
    """Return the engine's request for a choice, with the fields that affect the response."""
    token_ids, given = encoded_prompt(client)
    return EngineRequest(
        id=RequestId(f"{client.number}/{index}"),
        prompt_token_ids=token_ids,
        sampling=SamplingParams(temperature=client.temperature),
        output_tokens_max=client.output,
        stop_token_ids=frozenset(),
        seed=(client.number + index * SEED_STRIDE) % 2**64,
        guide=guide_of(client.form),
        adapter=adapter,
        given=given,
    )


def _shown(delta: Delta) -> str:
    end = "" if delta.finish_reason is None else f" {delta.finish_reason.value}"
    return f"{delta.index}: {','.join(map(str, delta.token_ids))}{end}"
