"""Tests of RankGroup: how it handles reports, missing reports and lost connections.

The tests take the role of the ranks, at the other ends of real sockets.
"""

from __future__ import annotations

import array
import ctypes
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import trio
import trio.testing

from trioserve.contracts.errors import ModelLoadError, RankLost, StartupError
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.step import IsAbandoned, ScheduledChunk, StepPlan, StepResult, never_abandoned
from trioserve.model.settings import ModelSettings
from trioserve.ranks.group import RankGroup, open_ranks
from trioserve.ranks.link import RankLink, SocketConnection
from trioserve.ranks.messages import (
    Abandon,
    AddAdapter,
    Allocate,
    Answer,
    Claim,
    Fault,
    FrameReader,
    Loaded,
    Masks,
    Ping,
    Pong,
    Progress,
    RankSetup,
    RemoveAdapter,
    Report,
    Run,
    WarmUp,
    decode_order,
    encode,
    framed,
)
from trioserve.trio_tools.errors_unwrapped import errors_unwrapped

SETUP = RankSetup(
    rank=0,
    size=2,
    path="/model",
    settings=ModelSettings(block_size=4),
    context_tokens=None,
    uses_further_layers=False,
    expert_parallel=False,
)
LOADED = Loaded(
    device="cpu",
    dtype="float32",
    kv_dtype="float32",
    computed_by="a test",
    arithmetic="a test",
    is_batch_invariant=True,
    launches=False,
    max_num_seqs=64,
    step_tokens_max=512,
    block_count=100,
    state_slot_count=0,
    snapshot_slot_count=0,
    block_bytes=1000,
    step_weight_bytes=5,
    token_flops=6,
    attended_token_flops=7,
)


class PlayedRank:
    """The far end of a rank's connection. It answers pings unless it is frozen."""

    def __init__(self, connection: socket.socket) -> None:
        self._stream = trio.SocketStream(trio.socket.from_stdlib_socket(connection))
        self._reader = FrameReader()
        self._orders: list[Any] = []
        self.is_frozen = False

    async def order(self, kind: type[Any]) -> Any:
        """Return the next order, which must have this type."""
        while True:
            while not self._orders:
                received = await self._stream.receive_some()
                assert received, "the server has closed the connection"
                for message in self._reader.feed(received):
                    order = decode_order(message)
                    if not isinstance(order, Ping):
                        self._orders.append(order)
                    elif not self.is_frozen:
                        await self.say(Pong(order.serial))
            order = self._orders.pop(0)
            assert isinstance(order, kind), f"{order} came, and no {kind.__name__}"
            return order

    async def answer(self, kind: type[Any], value: Any = None) -> Any:
        order = await self.order(kind)
        await self.say(Answer(order.serial, value))
        return order

    async def answer_step(self, order: Run, token: int | None, *, is_first: bool) -> None:
        result = None if token is None else StepResult((token,))
        await self.say(Answer(order.serial, None, result if is_first else None, token))

    async def say(self, report: Report) -> None:
        await self._stream.send_all(framed(encode(report)))

    async def load(self, loaded: Loaded = LOADED) -> None:
        await self.order(RankSetup)
        await self.say(loaded)
        await self.answer(Allocate)
        await self.answer(WarmUp)

    async def end(self) -> None:
        await self._stream.aclose()

    def close(self) -> None:
        self._stream.socket.close()

    async def answer_pings(self) -> None:
        """Answer pings until cancelled. Fail if an order arrives."""
        await self.order(type(None))


@dataclass
class Played:
    group: RankGroup
    ranks: list[PlayedRank]
    progress: list[Progress] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)


@asynccontextmanager
async def opened(size: int = 2, answer_seconds_max: float | None = 10.0, stage_count: int = 1) -> AsyncIterator[Played]:
    ranks: list[PlayedRank] = []

    def make_links(on_report: Callable[[int, Report], None], on_end: Callable[[int, str], None]) -> list[RankLink]:
        links = []
        for rank in range(size):
            ours, its = socket.socketpair()
            ranks.append(PlayedRank(its))
            links.append(RankLink(rank, SocketConnection(ours), on_report, on_end))
        return links

    progress: list[Progress] = []
    missing: list[int] = []
    try:
        with errors_unwrapped():
            async with open_ranks(
                [msgspec.structs.replace(SETUP, size=size, stage_count=stage_count)] * size,
                make_links,
                answer_seconds_max=answer_seconds_max,
                find_missing=lambda: missing,
                on_progress=progress.append,
            ) as group:
                yield Played(group, ranks, progress, missing)
    finally:
        for rank in ranks:
            rank.close()


@asynccontextmanager
async def loaded(size: int = 2, answer_seconds_max: float | None = 10.0, stage_count: int = 1) -> AsyncIterator[Played]:
    async with opened(size, answer_seconds_max, stage_count) as played:
        async with trio.open_nursery() as nursery:
            for rank in played.ranks:
                nursery.start_soon(rank.load)
            await played.group.load()
        yield played


def plan(index: int = 0, masks: Any = None) -> StepPlan:
    request = EngineRequest(
        id="r",  # type: ignore[arg-type]
        prompt_token_ids=(1, 2),
        sampling=SamplingParams(),
        output_tokens_max=9,
        stop_token_ids=frozenset(),
        seed=0,
    )
    chunk = ScheduledChunk(request, [1, 2], 0, 2, [0], True)  # type: ignore[list-item]
    return StepPlan(index, (chunk,), 2, masks=masks)


async def test_all_ranks_load_and_get_the_smallest_block_count() -> None:
    async with opened() as played:
        first, second = played.ranks

        async def load_second() -> None:
            await second.order(RankSetup)
            await second.say(Progress("", 20, 50))
            await second.say(msgspec.structs.replace(LOADED, block_count=80, block_bytes=500))
            allocate = await second.answer(Allocate)
            assert allocate.block_count == 80
            await second.answer(WarmUp)

        async def load_first() -> None:
            await first.order(RankSetup)
            await first.say(Progress("", 10, 50))
            await first.say(LOADED)
            allocate = await first.answer(Allocate)
            assert allocate.block_count == 80
            await first.answer(WarmUp)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(load_first)
            nursery.start_soon(load_second)
            await played.group.load()
        assert (played.group.loaded.block_count, played.group.loaded.block_bytes) == (80, 1500)
        assert played.progress[-1] == Progress("", 30, 100)


async def test_step_returns_the_result_of_rank_0_before_the_other_ranks_answer() -> None:
    async with loaded() as played, trio.open_nursery() as nursery:
        first, second = played.ranks
        step = played.group.run_step(plan(), never_abandoned)
        orders = [await rank.order(Run) for rank in played.ranks]
        await first.answer_step(orders[0], 42, is_first=True)
        assert (await step) == StepResult((42,))
        await second.answer_step(orders[1], 42, is_first=False)
        nursery.start_soon(first.answer, Claim, False)
        nursery.start_soon(second.answer, Claim, True)
        assert await played.group.claim_memory()


async def test_ranks_that_choose_different_tokens_end_the_group() -> None:
    async with loaded() as played:
        step = played.group.run_step(plan(), never_abandoned)
        orders = [await rank.order(Run) for rank in played.ranks]
        await played.ranks[1].answer_step(orders[1], 41, is_first=False)
        await played.ranks[0].answer_step(orders[0], 42, is_first=True)
        with pytest.raises(RankLost, match="ranks 0 and 1 have chosen different tokens"):
            await step
        with pytest.raises(RankLost, match="different tokens"):
            await played.group.guard()


async def test_step_returns_the_result_of_the_last_stage() -> None:
    async with loaded(4, stage_count=2) as played:
        step = played.group.run_step(plan(), never_abandoned)
        orders = [await rank.order(Run) for rank in played.ranks]
        for rank in (0, 1, 3):
            token = 42 if rank == 3 else None
            await played.ranks[rank].answer_step(orders[rank], token, is_first=False)
        async with trio.open_nursery() as nursery:
            results: list[StepResult | None] = []

            async def wait() -> None:
                results.append(await step)

            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert results == []
            await played.ranks[2].answer_step(orders[2], 42, is_first=True)
        assert results == [StepResult((42,))]


async def test_only_ranks_of_the_last_stage_are_compared() -> None:
    async with loaded(4, stage_count=2) as played:
        step = played.group.run_step(plan(), never_abandoned)
        orders = [await rank.order(Run) for rank in played.ranks]
        for rank, token in enumerate((None, None, 41, 42)):
            await played.ranks[rank].answer_step(orders[rank], token, is_first=False)
        with pytest.raises(RankLost, match="ranks 2 and 3 have chosen different tokens"):
            await played.group.guard()
        await step  # The result arrived before the failure.


@pytest.mark.parametrize(("answered", "named"), [((), "rank 0 .*, rank 1"), ((0,), "rank 1"), ((0, 1, 3), "rank 2")])
async def test_first_stage_that_does_not_answer_is_named(
    answered: tuple[int, ...], named: str, autojump_clock: object
) -> None:
    async with loaded(4, answer_seconds_max=10.0, stage_count=2) as played, trio.open_nursery() as nursery:
        step = played.group.run_step(plan(), never_abandoned)
        for rank, played_rank in enumerate(played.ranks):
            order = await played_rank.order(Run)
            if rank in answered:
                await played_rank.answer_step(order, None, is_first=False)
            nursery.start_soon(played_rank.answer_pings)
        with pytest.raises(RankLost, match=rf"^{named} \([^)]*\) has not answered"):
            await step
        nursery.cancel_scope.cancel()


async def test_state_slots_ignore_stages_without_states() -> None:
    async with opened(2, stage_count=2) as played, trio.open_nursery() as nursery:
        for rank, slots in zip(played.ranks, (0, 7), strict=True):
            nursery.start_soon(
                rank.load,
                msgspec.structs.replace(
                    LOADED, state_slot_count=slots, snapshot_slot_count=slots, arithmetic=f"a test of {slots}"
                ),
            )
        await played.group.load()
        assert played.group.loaded.state_slot_count == 7
        assert played.group.loaded.snapshot_slot_count == 7
        assert played.group.loaded.block_bytes == 2000
        assert played.group.loaded.arithmetic == "a test of 0, and a test of 7"


async def test_all_ranks_are_notified_once_of_an_abandoned_step() -> None:
    async with loaded() as played:
        is_abandoned = IsAbandoned(2)
        step = played.group.run_step(plan(), is_abandoned)
        orders = [await rank.order(Run) for rank in played.ranks]
        is_abandoned.leave()
        is_abandoned.leave()
        for rank, order in zip(played.ranks, orders, strict=True):
            assert (await rank.order(Abandon)).serial == order.serial
        await played.ranks[1].answer_step(orders[1], 7, is_first=False)  # Rank 1 finished before the notice arrived.
        await played.ranks[0].answer_step(orders[0], None, is_first=True)
        assert await step is None


async def test_token_masks_are_sent_to_ranks_after_the_plan_when_filled() -> None:
    class Filling:
        row_count, words_per_row = 1, 2

        def __init__(self) -> None:
            self._bits = array.array("I", [0, 0])
            self._filled = ctypes.c_int(0)
            self.address, _ = self._bits.buffer_info()
            self.filled_address = ctypes.addressof(self._filled)
            self.may_go_on = trio.Event()

        def wait(self) -> None:
            trio.from_thread.run(self.may_go_on.wait, trio_token=self.token)
            self._bits[0], self._bits[1] = 5, 6

        token = trio.lowlevel.current_trio_token()

    async with loaded(1) as played:
        masks = Filling()
        (rank,) = played.ranks
        async with trio.open_nursery() as nursery:
            step = played.group.run_step(plan(masks=masks), never_abandoned)

            async def take() -> None:
                assert await step == StepResult((3,))

            nursery.start_soon(take)
            order = await rank.order(Run)
            assert (order.plan.mask_rows, order.plan.mask_words) == (1, 2)
            masks.may_go_on.set()
            sent = await rank.order(Masks)
            assert (sent.serial, array.array("I", sent.bits).tolist()) == (order.serial, [5, 6])
            await rank.answer_step(order, 3, is_first=True)


async def test_rank_that_ends_while_idle_is_named_at_once(autojump_clock: object) -> None:
    async with loaded() as played:
        ended_at = trio.current_time()
        await played.ranks[1].end()
        with pytest.raises(RankLost, match=r"rank 1 .* has closed its connection"):
            await played.group.guard()
        assert trio.current_time() - ended_at < 0.05


async def test_when_a_rank_ends_the_first_step_fails_and_the_second_is_dropped(
    autojump_clock: object,
) -> None:
    async with loaded() as played:
        steps = [played.group.run_step(plan(index), never_abandoned) for index in range(2)]
        await played.ranks[0].order(Run)
        await played.ranks[0].end()
        with pytest.raises(RankLost, match=r"rank 0 .* has closed its connection"):
            await steps[0]
        assert await steps[1] is None
        with pytest.raises(RankLost):
            await played.group.claim_memory()


async def test_cancelled_caller_waits_for_its_step() -> None:
    async with loaded(1) as played, trio.open_nursery() as nursery:
        (rank,) = played.ranks
        has_come = trio.Event()

        async def compute() -> None:
            step = played.group.run_step(plan(), never_abandoned)
            with trio.CancelScope() as scope:
                scope.cancel()
                assert await step == StepResult((1,))
                has_come.set()

        nursery.start_soon(compute)
        order = await rank.order(Run)
        await trio.testing.wait_all_tasks_blocked()
        assert not has_come.is_set()
        await rank.answer_step(order, 1, is_first=True)
        await has_come.wait()


async def test_rank_may_take_longer_to_start_than_the_step_timeout(autojump_clock: object) -> None:
    async with opened(1, answer_seconds_max=0.5) as played, trio.open_nursery() as nursery:
        (rank,) = played.ranks

        async def start_slowly() -> None:
            await trio.sleep(30)  # The group receives nothing in these 30 s.
            await rank.load()

        nursery.start_soon(start_slowly)
        await played.group.load()


async def test_rank_that_never_starts_is_named(autojump_clock: object) -> None:
    async with opened(1, answer_seconds_max=0.5) as played:
        with pytest.raises(RankLost, match=r"rank 0 .* has not answered for"):
            await played.group.load()
        assert trio.current_time() >= 60


async def test_start_of_ranks_can_be_cancelled_during_warm_up() -> None:
    async with opened(1) as played, trio.open_nursery() as nursery:
        (rank,) = played.ranks

        async def load() -> None:
            await played.group.load()

        nursery.start_soon(load)
        await rank.order(RankSetup)
        await rank.say(LOADED)
        await rank.answer(Allocate)
        await rank.order(WarmUp)
        nursery.cancel_scope.cancel()


async def test_rank_that_hangs_in_a_step_is_named_after_the_time_limit(autojump_clock: object) -> None:
    async with loaded(answer_seconds_max=10.0) as played, trio.open_nursery() as nursery:
        played.missing.append(1)
        begun_at = trio.current_time()
        step = played.group.run_step(plan(), never_abandoned)
        for rank in played.ranks:
            await rank.order(Run)
            nursery.start_soon(rank.answer_pings)
        with pytest.raises(RankLost, match=r"rank 1 .* has not answered for 1\d\.\d s, 10 s are allowed"):
            await step
        assert 10.0 <= trio.current_time() - begun_at <= 12.0
        nursery.cancel_scope.cancel()


async def test_rank_that_is_stopped_while_idle_is_named(autojump_clock: object) -> None:
    async with loaded(answer_seconds_max=10.0) as played, trio.open_nursery() as nursery:
        played.ranks[0].is_frozen = True
        for rank in played.ranks:
            nursery.start_soon(rank.answer_pings)
        with pytest.raises(RankLost, match=r"rank 0 .* has not answered"):
            await played.group.guard()
        nursery.cancel_scope.cancel()


async def test_step_timeout_of_0_lets_ranks_answer_at_any_time(autojump_clock: object) -> None:
    async with loaded(1, answer_seconds_max=0.0) as played, trio.open_nursery() as nursery:
        (rank,) = played.ranks

        async def compute() -> None:
            order = await rank.order(Run)
            with trio.move_on_after(3600):
                await rank.answer_pings()
            await rank.answer_step(order, 1, is_first=True)

        nursery.start_soon(compute)
        assert await played.group.run_step(plan(), never_abandoned) == StepResult((1,))


@pytest.mark.parametrize(
    ("kind", "raised"), [("ModelLoadError", ModelLoadError), ("StartupError", StartupError), ("KeyError", RankLost)]
)
async def test_error_of_a_rank_while_loading_equals_the_error_of_one_process(
    kind: str, raised: type[Exception]
) -> None:
    async with opened() as played, trio.open_nursery() as nursery:
        first, second = played.ranks

        async def fail() -> None:
            await first.order(RankSetup)
            await first.say(LOADED)
            await second.order(RankSetup)
            await second.say(Fault("while it loaded", kind, "no such file"))
            await second.end()

        nursery.start_soon(fail)
        with pytest.raises(raised, match="no such file"):
            await played.group.load()


async def test_adapter_that_one_rank_refuses_is_removed_from_all() -> None:
    class Weights:
        digest, dtype = "ab", "float32"

        def __init__(self) -> None:
            self.matrices: dict[str, Any] = {}

    async with loaded() as played, trio.open_nursery() as nursery:
        first, second = played.ranks

        async def play(rank: PlayedRank, value: str | None) -> None:
            await rank.answer(AddAdapter, value)
            await rank.answer(RemoveAdapter)

        nursery.start_soon(play, first, None)
        nursery.start_soon(play, second, "no memory")
        with pytest.raises(MemoryError, match="rank 1: no memory"):
            await played.group.add(1, Weights())  # type: ignore[arg-type]


async def test_invalid_message_of_a_rank_breaks_the_group() -> None:
    async with loaded(1) as played:
        await played.ranks[0]._stream.send_all(framed(b"\xc1"))
        with pytest.raises(RankLost, match="sent an invalid message"):
            await played.group.guard()


async def test_orders_larger_than_the_send_buffer_reach_ranks_in_order() -> None:
    async with loaded(1) as played, trio.open_nursery() as nursery:
        (rank,) = played.ranks
        large = msgspec.structs.replace(plan(), chunks=plan().chunks * 20_000)
        step = played.group.run_step(large, never_abandoned)
        behind = played.group.run_step(plan(1), never_abandoned)

        async def take() -> None:
            assert await step == StepResult((1,))
            assert await behind == StepResult((2,))

        nursery.start_soon(take)
        first = await rank.order(Run)
        assert len(first.plan.chunks) == 20_000
        await rank.answer_step(first, 1, is_first=True)
        await rank.answer_step(await rank.order(Run), 2, is_first=True)
