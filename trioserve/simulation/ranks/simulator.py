"""Runs an engine with ranks in virtual time. The engine, the RankGroup and its links are real. The ranks are simulated.

The ranks compute from the messages that they receive, and can fail at any time. The simulation records the harm to each
rank, the reference response of each client, and the restarts of the engine. From these records follows which rank the
engine must blame, and by when. At the end, the engine must have no request left.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

import trio
from trio.testing import MockClock

from trioserve.admission.text_threads import TextThreads
from trioserve.contracts.deadlines import Deadlines
from trioserve.contracts.errors import (
    AdapterRefused,
    EngineFault,
    EngineReopening,
    InvalidRequest,
    ModelLoadError,
    Overloaded,
    RankLost,
    StepOverdue,
    UnknownModel,
    WeightsLost,
)
from trioserve.contracts.events import FinishReason
from trioserve.contracts.ids import RequestId
from trioserve.contracts.output import Delta
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.structured_output import StructuredOutput
from trioserve.contracts.weights import AdapterId, AdapterRef
from trioserve.core.engine import EngineCore
from trioserve.engine.adapters import Adapters
from trioserve.engine.engine import Engine
from trioserve.engine.lifecycle.supervisor import supervise
from trioserve.engine.model_description import ModelDescription
from trioserve.engine.request_preparation import SEED_STRIDE
from trioserve.engine.request_stream import RequestStream
from trioserve.engine.settings import EngineSettings
from trioserve.engine.text_work import EngineParts
from trioserve.engine.weight_updates import WEIGHTS_REPLACED
from trioserve.metrics.registry import Metrics
from trioserve.model.trainer_groups import TrainerGroups
from trioserve.ranks.group import RankGroup, open_ranks
from trioserve.ranks.ranked_runner import RankedWeights
from trioserve.simulation.ranks.plan import (
    Abort,
    Client,
    Harm,
    Load,
    RanksPlan,
    Swap,
    Unload,
    core_settings,
    rank_setups,
)
from trioserve.simulation.ranks.played_opening import CheckedSteps, LateMasks, PlayedOpening, read_adapter
from trioserve.simulation.ranks.played_rank import LookingModel
from trioserve.simulation.reference_engine import ReferenceEngine, ReferenceResponse, source_of, version_of
from trioserve.simulation.stack.forms import compile_forms, guide_of
from trioserve.simulation.traced_run import TracedRun
from trioserve.testing.accounting import assert_all_free
from trioserve.testing.byte_tokenizer import BYTE_VOCAB_SIZE, END_TOKEN_ID, byte_tokenizer
from trioserve.testing.fake_engine import byte_form_compiler, fake_adapter_digest
from trioserve.testing.inline_work import InlineTexts, seeded_schedule
from trioserve.testing.invariants import check_core, check_idle
from trioserve.text.guide_factory import GuideFactory
from trioserve.trio_tools.errors_unwrapped import errors_unwrapped

__all__ = ["RanksSimulation"]

# Limit in virtual seconds. A task that has not ended by then waits for an event that never comes.
SECONDS_MAX = 1_000.0
LOOK_SECONDS = 0.1  # seconds between two periodic checks
BACKOFF_SECONDS_MAX = 4.0  # maximum number of seconds before a broken engine restarts
FRUITLESS_MAX = 3  # number of consecutive openings without a step after which the engine ends
WAITING_MAX = 40
ADAPTERS_MAX = 8
READ = "read to the end"


# number of clock jumps without progress. Results from other threads always arrive earlier.
IDLE_JUMPS_MAX = 1_000


def bounded_clock(seconds_max: float, is_bounded: Callable[[], bool]) -> MockClock:
    """Create a clock that jumps to the next deadline as soon as no task can run.

    While is_bounded returns True, no task may wait for a real thread. If there is then no deadline to jump to, or too
    much virtual time has passed, the clock raises AssertionError. It leaves trio.run as the cause of a
    TrioInternalError.

    Args:
        seconds_max: limit of the virtual time, in seconds.
        is_bounded: returns whether the clock checks its limits now.
    """
    clock = MockClock(autojump_threshold=0)
    jump, fruitless = clock._autojump, 0

    def bounded_jump() -> None:
        nonlocal fruitless
        before = clock.current_time()
        jump()
        now = clock.current_time()
        fruitless = fruitless + 1 if now == before else 0
        if not is_bounded():
            return
        assert fruitless < IDLE_JUMPS_MAX, f"at {now:.3f} all tasks wait for events that will never happen"
        assert now < seconds_max, f"a task waits for an event that does not happen within {now:.0f} s"

    clock._autojump = bounded_jump  # type: ignore[method-assign]  # Trio has no other place for it
    return clock


class RanksSimulation(TracedRun):
    """Runs one plan.

    Args:
        trace: called with a line for each effect.
    """

    def __init__(self, plan: RanksPlan, *, trace: Callable[[str], None] | None = None) -> None:
        super().__init__(trace)
        self.plan = plan
        self._openings: list[PlayedOpening] = []
        self._streams: dict[int, RequestStream] = {}  # streams of the clients inside, by number of the client
        self._aborted: set[int] = set()  # numbers of aborted clients
        self._named: dict[str, AdapterId] = {}  # loaded adapters, by name
        self._core: EngineCore | None = None
        self._engine: Engine | None = None
        self._is_live = self._was_open = False
        self._violations: list[AssertionError] = []
        self._expected = ReferenceEngine(LookingModel(vocab_size=plan.stage.vocab_size))

    def run(self) -> None:
        """Run the plan.

        Raises:
            AssertionError: a rule is broken. Exceptions of the engine pass through too.
        """
        with seeded_schedule(self.plan.stage.schedule_seed):
            try:
                trio.run(self._main, clock=bounded_clock(2 * SECONDS_MAX, lambda: self._is_live))
            except trio.TrioInternalError as error:
                # The first failed check may be the reason why no task could run, so it is reported first.
                raise next(iter(self._violations), error.__cause__ or error) from None

    async def _main(self) -> None:
        compile_forms(part.form for part in self.plan.parts if isinstance(part, Client))
        async with InlineTexts() as texts, trio.open_nursery() as world:
            self._is_live = True
            await self._be_server(texts, world)
            self._is_live = False
            world.cancel_scope.cancel()

    async def _be_server(self, texts: TextThreads, world: trio.Nursery) -> None:
        """Run the server.

        Args:
            world: nursery of the ranks. No scope of the engine cancels this nursery.
        """
        stage = self.plan.stage
        leaves_at = math.inf if stage.leaves_at is None else stage.leaves_at
        try:
            begun_at = trio.current_time()
            with errors_unwrapped(), trio.fail_after(SECONDS_MAX), trio.move_on_at(begun_at + leaves_at) as scope:
                async with self._open_engine(texts, world) as engine:
                    await self._live(engine)
            if scope.cancelled_caught:
                self._check_left_in_time(trio.current_time() - begun_at - leaves_at)
        except (EngineFault, RankLost, ModelLoadError) as error:
            self._check_over(error)
        self._check_reported()
        for opening in self._openings:
            assert opening.closed_at < math.inf, f"opening {opening.index} of the engine never ends"
        assert not self._streams, f"clients {sorted(self._streams)} have not left"

    def _check_left_in_time(self, seconds: float) -> None:
        """Check that a cancelled engine has waited only for its steps in flight."""
        stage = self.plan.stage
        harm = max((part.seconds for part in self.plan.parts if isinstance(part, Harm)), default=0.0)
        is_harmed = any(opening.harmed for opening in self._openings)
        steps = 2 * (max(stage.step_seconds) + stage.mask_seconds + harm) + 0.01
        seconds_max = max(steps, stage.answer_seconds_max + 1.1 if is_harmed else 0.0)
        assert seconds <= seconds_max, f"the disconnect took {seconds:.3f} s, more than {seconds_max:.3f} s"
        self.count("left while it ran")

    def _check_over(self, error: Exception) -> None:
        """Check that an engine that ended by itself had a reason to end."""
        self._check_reported()
        last = self._openings[-1]
        failures = [opening for opening in self._openings if opening.failure is not None]
        if last.failure is None:
            raise error  # No harm was done to the ranks, so another error has ended the engine.
        assert str(last.failure) in str(error), f"the engine ended with {error}, but broke with {last.failure}"
        restarts_max = self.plan.stage.restarts_max
        if isinstance(error, EngineFault):
            is_over = len(failures) > restarts_max or len(failures) >= FRUITLESS_MAX
            assert is_over, f"the engine broke {len(failures)} times, but could have restarted: {error}"
            self.count("engines that did not restart")
        else:
            assert not self._was_open, f"an engine that once ran ended with {error!r}"
            self.count("engines that never opened")

    # --- Engine ---

    @asynccontextmanager
    async def _open_engine(self, texts: TextThreads, world: trio.Nursery) -> AsyncIterator[Engine]:
        stage = self.plan.stage
        adapters = Adapters(read_adapter, adapters_max=ADAPTERS_MAX, reserved_names=("model",))

        def make_engine(parts: EngineParts) -> Engine:
            engine = Engine(
                model=ModelDescription(
                    served_names=("model",),
                    source="model",
                    context_tokens_max=parts.core.settings.context_tokens_max,
                    vocab_size=BYTE_VOCAB_SIZE,
                    eos_token_ids=(END_TOKEN_ID,),
                    created_at=0,
                ),
                core=parts.core,
                steps=parts.steps,
                tokenizer=byte_tokenizer(),
                text_threads=texts,
                metrics=Metrics("model"),
                settings=EngineSettings(
                    waiting_requests_max=WAITING_MAX,
                    step_seconds_max=stage.answer_seconds_max,
                    restarts_max=stage.restarts_max,
                ),
                new_request_id=map("req-{}".format, itertools.count(1)).__next__,
                when_idle=parts.when_idle,
                guides=GuideFactory(byte_form_compiler()),
                adapters=adapters,
                guard=parts.guard,
                weights=parts.weights,
            )
            self._engine = engine
            engine.on_fault = engine.wait_until_idle  # After a fault, clients get time to finish.
            return engine

        with errors_unwrapped():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._look)

                @asynccontextmanager
                async def open_parts() -> AsyncIterator[EngineParts]:
                    self._note_opening()
                    # Without this record, the engine would treat a failed check as a fault of its executor.
                    with self._noting():
                        async with self._open_parts(adapters, world) as parts:
                            yield parts

                engine = await nursery.start(supervise, open_parts, make_engine)
                nursery.start_soon(engine.keep_deadlines)
                self._was_open = True
                yield engine
                nursery.cancel_scope.cancel()

    @asynccontextmanager
    async def _open_parts(self, adapters: Adapters, world: trio.Nursery) -> AsyncIterator[EngineParts]:
        stage = self.plan.stage
        opening = self._new_opening(world)
        masks = LateMasks(stage.mask_seconds, world)
        try:
            async with open_ranks(
                rank_setups(stage),
                opening.make_links,
                answer_seconds_max=stage.answer_seconds_max,
                find_missing=opening.find_missing,
                wait_for_masks=masks.wait,
            ) as group:
                world.start_soon(self._watch, opening, group)
                await group.load()
                assert group.loaded.block_count == stage.block_count, (
                    "more blocks than fit into the memory of every rank"
                )
                self._core = EngineCore(core_settings(stage), mask_maker=masks)
                await adapters.attach(group)
                try:
                    self.log_line(f"opening {opening.index} is open")
                    opening.is_open = True
                    yield EngineParts(
                        self._core,
                        CheckedSteps(group, self._violate),
                        when_idle=group.claim_memory,
                        guard=group.guard,
                        weights=RankedWeights(group, TrainerGroups()),
                    )
                finally:
                    opening.is_open = False
                    adapters.detach()
        finally:
            self._core = None
            opening.check_closed()

    def _new_opening(self, nursery: trio.Nursery) -> PlayedOpening:
        index = len(self._openings)
        harms = [part for part in self.plan.parts if isinstance(part, Harm) and part.opening == index]
        opening = PlayedOpening(
            index,
            self.plan.stage,
            harms,
            {source_of(part.number): part.refused_by for part in self.plan.parts if isinstance(part, Swap)},
            nursery,
            log_line=self.log_line,
            count=self.count,
            check=self._check_reported,
            noting=self._noting,
        )
        self._openings.append(opening)
        return opening

    async def _watch(self, opening: PlayedOpening, group: RankGroup) -> None:
        """Record the time and the error at which the group breaks."""
        try:
            await group.guard()
        except (RankLost, ModelLoadError) as error:
            with self._noting():
                opening.note_failure(error)

    def _note_opening(self) -> None:
        """Check, when the engine opens again, that it may restart."""
        with suppress(AssertionError), self._noting():
            self._check_opening()

    def _check_opening(self) -> None:
        openings, stage = self._openings, self.plan.stage
        if not openings:
            return
        last = openings[-1]
        assert last.failure is not None, "the engine restarts, but nothing had broken"
        assert len(openings) <= stage.restarts_max, f"the engine restarts {len(openings)} times"
        seconds = trio.current_time() - last.failed_at
        assert seconds <= BACKOFF_SECONDS_MAX + 0.001, f"the engine restarts {seconds:.3f} s after it broke"
        fruitless = [opening for opening in openings[-FRUITLESS_MAX:] if opening.failure is not None]
        is_fruitless = len(fruitless) == FRUITLESS_MAX and not any(opening.step_count for opening in fruitless)
        assert not is_fruitless, f"the engine restarts after {FRUITLESS_MAX} openings that computed nothing"
        self.count("engines reopened")

    # --- Tasks of clients and operators ---

    async def _live(self, engine: Engine) -> None:
        async with trio.open_nursery() as nursery:
            for part in self.plan.parts:
                if isinstance(part, Client):
                    nursery.start_soon(self._be_client, engine, part)
                elif isinstance(part, Abort):
                    nursery.start_soon(self._abort, engine, part)
                elif isinstance(part, Load):
                    nursery.start_soon(self._load, engine, part)
                elif isinstance(part, Unload):
                    nursery.start_soon(self._unload, engine, part)
                elif isinstance(part, Swap):
                    nursery.start_soon(self._swap, engine, part)
        await engine.wait_until_idle()
        # After this time, the group has noticed all harm, and the engine is open again or stays closed.
        await trio.sleep(self.plan.stage.answer_seconds_max + 2.0)
        while not engine.ready:  # noqa: ASYNC110  # no event reports it
            await trio.sleep(LOOK_SECONDS)
        self._check_all_free(engine)
        last = Client(number=len(self.plan.parts), at=0.0, prompt=(1, 2, 3, 4, 5), output=4)
        opening_count = len(self._openings)
        outcome = await self._be_client(engine, last)
        is_lost = len(self._openings) > opening_count or self._openings[-1].failure is not None
        assert outcome == READ or is_lost, f"no client is left, but the next client is {outcome}"
        await trio.sleep(0.5)
        if engine.ready:
            self._check_all_free(engine)

    async def _be_client(self, engine: Engine, client: Client) -> str:
        await trio.sleep(client.at)
        self.count("requests")
        stream = engine.generate(
            client.prompt,
            _sampling(client),
            request_id=f"c{client.number}",
            deadlines=Deadlines(timeout=client.timeout),
            adapter=client.adapter or None,
        )
        outcome, openings_before = "left early", len(self._openings)
        self._forget_given_up(engine)
        has_adapter = client.adapter in ("", *self._named)
        self._streams[client.number] = stream
        try:
            with trio.move_on_after(math.inf if client.patience is None else client.patience) as scope:
                async with stream:
                    assert has_adapter, f"client {client.number} uses {client.adapter}, which is not loaded"
                    with self._noting():
                        if await self._read(client, stream, openings_before):
                            outcome = READ
        except EngineReopening:
            assert not self._openings[-1].is_open, "a request is refused because of a restart, but the engine is open"
            outcome = "refused: reopening"
        except StepOverdue:
            assert any(opening.harmed for opening in self._openings), "a step is overdue, but no rank was harmed"
            outcome = "refused: overdue"
        except Overloaded as error:
            raise AssertionError(f"client {client.number} is refused: {error}") from error
        except EngineFault as fault:
            self._check_fault(client, fault)
            outcome = "got the engine's fault"
        except UnknownModel:
            assert not has_adapter, f"client {client.number}: {client.adapter} is loaded"
            outcome = "refused: no such adapter"
        finally:
            self._streams.pop(client.number, None)
            self._check_left(client, stream)
        if scope.cancelled_caught:
            outcome = "client timeout"
        self.log_line(f"client {client.number}: {outcome}")
        self.count(f"clients: {outcome}")
        return outcome

    def _check_fault(self, client: Client, fault: EngineFault) -> None:
        failure = self._last_failure
        assert failure is not None, f"client {client.number} got a fault, but nothing had broken: {fault}"
        assert str(failure) in str(fault), f"client {client.number} got {fault}, but the failure is {failure}"

    async def _read(self, client: Client, stream: RequestStream, openings_before: int) -> bool:
        """Read the stream of a client.

        Returns:
            True if the client has read the whole stream.
        """
        responses = [self._expected.response(_sequence(client, index)) for index in range(client.choices)]
        counts, ends = [0] * client.choices, [0] * client.choices
        if client.leaves_after == 0:
            return False
        delta_count = whole = 0
        async for delta in stream:
            self.log_line(f"client {client.number}: {_shown(delta)}")
            index, begin, expected = delta.index, counts[delta.index], responses[delta.index]
            name = f"client {client.number}, choice {index}"
            counts[index] += len(delta.token_ids)
            assert ends[index] == 0, f"{name}: {delta} after its end"
            tokens = expected.token_ids
            assert delta.token_ids == tokens[begin : counts[index]], f"{name}: {delta} at {begin} of {tokens}"
            if client.logprobs is not None and delta.token_ids:
                assert expected.logprobs is not None
                assert delta.logprobs == expected.logprobs[begin : counts[index]], f"{name}: {delta} at {begin}"
            if delta.finish_reason is not None:
                ends[index] = 1
                self._check_end(client, delta, expected, counts[index], openings_before)
                whole += delta.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
            self._check()
            delta_count += 1
            if delta_count == client.leaves_after:
                return False
            await trio.sleep(client.pause)
        assert all(ends), f"client {client.number}: the stream has ended, but these choices have not: {ends}"
        if client.logprobs is not None and whole == client.choices:
            assert stream.prompt_logprobs == responses[0].prompt_logprobs, (
                f"client {client.number}: other prompt logprobs"
            )
        return True

    def _check_end(
        self, client: Client, delta: Delta, expected: ReferenceResponse, count: int, openings_before: int
    ) -> None:
        reason = delta.finish_reason
        assert reason is not None
        self.count(f"ends: {reason.value}")
        name = f"client {client.number}, choice {delta.index}"
        if reason in (FinishReason.LENGTH, FinishReason.STOP):
            assert reason is expected.reason, f"{name} ended with {reason}, the reference with {expected.reason}"
            assert count == len(expected.token_ids), f"{name} is reported as complete with {count} tokens"
        elif reason is FinishReason.ABORT and delta.stop_reason == WEIGHTS_REPLACED:
            swaps = [part for part in self.plan.parts if isinstance(part, Swap) and part.in_flight == "abort"]
            assert swaps, f"{name} was ended for new weights, but no swap aborts requests"
        elif reason is FinishReason.ABORT:
            assert client.number in self._aborted, f"{name} was aborted, but no operator aborted it"
        elif reason is FinishReason.DEADLINE:
            assert client.timeout is not None, f"{name} passed a deadline, but has none"
        elif "adapter of this request is not loaded" in str(delta.message):
            # The adapter was loaded during a restart, and the new ranks had no memory for it.
            assert self.plan.stage.adapters_max < ADAPTERS_MAX, f"{name} ended with {delta.message}"
            assert len(self._openings) > 1, f"{name} ended with {delta.message}"
        else:
            since = [opening for opening in self._openings[openings_before - 1 :] if opening.failure is not None]
            assert len(since) >= 2, f"{name} was ended, but was in {len(since)} steps that failed: {delta.message}"
            assert str(since[-1].failure) in str(delta.message), (
                f"{name} ended with {delta.message}: {since[-1].failure}"
            )

    def _check_left(self, client: Client, stream: RequestStream) -> None:
        if self._core is None:
            return
        sequences = {live.request.id: live for live in self._core.live_requests()}
        is_broken = self._openings[-1].failure is not None
        for choice in stream._request.choices:
            live = sequences.get(choice.sequence_id)
            assert live is None or is_broken or (live.steps_in_flight and live.abort_reason is not None), (
                f"client {client.number} has left, but {choice.sequence_id} continues"
            )
        self._check()

    async def _abort(self, engine: Engine, part: Abort) -> None:
        await trio.sleep(part.at)
        stream = self._streams.get(part.number)
        if stream is not None and not stream.is_finished:
            self._aborted.add(part.number)
        engine.abort([f"c{part.number}"])
        self.count("aborts")
        self._check()

    async def _load(self, engine: Engine, part: Load) -> None:
        await trio.sleep(part.at)
        try:
            await engine.load_adapter(part.name, f"/{part.name}")
        except AdapterRefused as error:
            self.count(f"loads: {error.reason}")
            self._check_refused(part, error)
            return
        loaded = engine.adapters.book.get(part.name)
        assert loaded is not None
        self._named[part.name] = loaded.id
        self.count("loads: ready")

    def _check_refused(self, part: Load, error: AdapterRefused) -> None:
        is_full = error.reason == "no_memory" and self.plan.stage.adapters_max < ADAPTERS_MAX
        assert is_full or error.reason == "unloaded", f"{part.name} is not loaded: {error}"

    async def _unload(self, engine: Engine, part: Unload) -> None:
        await trio.sleep(part.at)
        self._forget_given_up(engine)
        id = self._named.pop(part.name, None)
        try:
            await engine.unload_adapter(part.name)
        except UnknownModel:
            assert id is None, f"{part.name} was loaded, but could not be unloaded"
            return
        self.count("unloads")
        opening = self._openings[-1]
        if id is not None and opening.failure is None and not opening.harmed:
            for rank in opening.ranks:
                assert rank.executor is None or id not in rank.executor.adapters, (
                    f"{part.name} is unloaded, but still takes memory"
                )

    async def _swap(self, engine: Engine, part: Swap) -> None:
        await trio.sleep(part.at)
        version, outcome, since = version_of(part.number), "left", self._openings[-1]
        try:
            with trio.move_on_after(math.inf if part.patience is None else part.patience):
                await engine.update_weights(source_of(part.number), version=version, in_flight=part.in_flight)
                outcome = part.in_flight
        except (InvalidRequest, WeightsLost, EngineReopening, EngineFault) as error:
            last = self._openings[-1]
            # The task that records the failure was woken at the same time, and must run first.
            await trio.lowlevel.checkpoint()
            with self._noting():
                outcome = self._why_kept(part, error, is_over=last is not since or self._is_over(last))
        self.log_line(f"weights {part.number}: {outcome}")
        self.count(f"swaps: {outcome}")
        with self._noting():
            self._check_weights(engine, part, outcome)

    def _is_over(self, opening: PlayedOpening) -> bool:
        return opening.failure is not None or not opening.is_open

    def _why_kept(self, part: Swap, error: Exception, *, is_over: bool) -> str:
        """Check that a failed replacement of the weights had a reason.

        Args:
            part: the swap.
            error: the exception that the swap raised.
            is_over: True if an opening of the engine ended during the swap.

        Returns:
            The outcome for the trace.
        """
        if isinstance(error, InvalidRequest):
            assert part.refused_by, f"weights {part.number} fit every rank: {error}"
            assert all(f"do not fit rank {rank}" in str(error) for rank in part.refused_by), str(error)
            return "refused"
        if isinstance(error, WeightsLost):
            assert is_over, f"weights {part.number} are reported as lost, but no rank is lost: {error}"
            assert "the engine ended meanwhile" in str(error), f"weights {part.number} were written in part: {error}"
            return "lost"
        if isinstance(error, EngineReopening):
            assert is_over, "a swap is refused because of a restart, but the engine is open"
            return "reopening"
        assert self._last_failure is not None, f"a swap got a fault, but nothing had broken: {error}"
        return "got the engine's fault"

    def _check_weights(self, engine: Engine, part: Swap, outcome: str) -> None:
        """Check that all ranks have the same weights, and that the engine reports the version of these weights."""
        assert not engine.has_half_weights, (
            f"weights {part.number} are reported as half written, but ranks write all or nothing"
        )
        path, opening = source_of(part.number), self._openings[-1]
        has_version = engine.weight_version == version_of(part.number)
        if outcome == part.in_flight:
            assert has_version, f"weights {part.number} are written, but the engine reports {engine.weight_version}"
        else:
            assert not has_version or outcome == "left", (
                f"weights {part.number}: {outcome}, but the engine reports them"
            )
        if opening.failure is None and not opening.harmed and (has_version or outcome == "refused"):
            for rank in opening.ranks:
                assert (rank.weights == path) == has_version, f"{rank.name} has {rank.weights}, and {path}: {outcome}"

    # --- Rules ---

    async def _look(self) -> None:
        """Check the rules periodically, even while no task runs."""
        while True:
            await trio.sleep(LOOK_SECONDS)
            self._check_reported()

    @property
    def _last_failure(self) -> Exception | None:
        return next((opening.failure for opening in reversed(self._openings) if opening.failure is not None), None)

    def _check_reported(self) -> None:
        if self._violations:
            raise self._violations[0]
        with self._noting():
            self._check_openings()

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Record a failed check. The simulation reports the first record, since later failures may be its effects."""
        try:
            yield
        except AssertionError as violation:
            self._violations.append(violation)
            raise

    def _check_openings(self) -> None:
        for opening in self._openings:
            opening.check_reported(is_engine_over=self._engine is not None and self._engine.fault is not None)

    def _check(self) -> None:
        self._check_reported()
        if self._core is not None and self._openings[-1].failure is None:
            check_core(self._core)

    def _check_all_free(self, engine: Engine) -> None:
        assert_all_free(engine)
        self._forget_given_up(engine)
        assert self._core is not None
        check_idle(self._core)
        opening = self._openings[-1]
        if not opening.harmed:
            for rank in opening.ranks:
                assert rank.executor is not None
                assert rank.executor.adapters == {*self._named.values()}, f"{rank.name} has {rank.executor.adapters}"

    def _forget_given_up(self, engine: Engine) -> None:
        """Forget adapters for which the ranks of a restarted engine have no memory."""
        if len(self._openings) > 1 and self.plan.stage.adapters_max < ADAPTERS_MAX:
            self._named = {name: id for name, id in self._named.items() if name in engine.adapters.names}

    def _violate(self, what: str) -> None:
        self._violations.append(AssertionError(what))


def _sampling(client: Client) -> SamplingParams:
    return SamplingParams(
        n=client.choices,
        temperature=client.temperature,
        top_k=client.top_k,
        repetition_penalty=client.repetition_penalty,
        presence_penalty=client.presence_penalty,
        logit_bias=None if client.bias is None else {client.bias: 2.5},
        max_tokens=client.output,
        min_tokens=client.min_tokens,
        stop_token_ids=client.stops,
        seed=client.number,
        logprobs=client.logprobs,
        prompt_logprobs=client.logprobs,
        structured=StructuredOutput.choice(client.form) if client.form else None,
    )


def _sequence(client: Client, index: int) -> EngineRequest:
    """Return the engine's request for one choice, with the fields that affect the response."""
    adapter = AdapterRef(AdapterId(1), fake_adapter_digest(f"/{client.adapter}")) if client.adapter else None
    return EngineRequest(
        id=RequestId(f"{client.number}/{index}"),
        prompt_token_ids=client.prompt,
        sampling=_sampling(client),
        output_tokens_max=client.output,
        stop_token_ids=frozenset((*client.stops, END_TOKEN_ID)),
        seed=(client.number + index * SEED_STRIDE) % 2**64,
        guide=guide_of(client.form),
        adapter=adapter,
    )


def _shown(delta: Delta) -> str:
    end = "" if delta.finish_reason is None else f" {delta.finish_reason.value}"
    return f"{delta.index}: {','.join(map(str, delta.token_ids))}{end}"
