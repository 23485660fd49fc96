"""Every promise of a KV connector (contracts/kv_transfer.py), as tests that any connector class can be run through.

    from trioserve.testing.connector_conformance import PairConformance

    class TestMyConnector(PairConformance):
        factory = staticmethod(make_connector)

        def options(self, side):
            return {"port": 0}

That is all; pytest finds the tests in the class. Take the part that fits:

    ConnectorConformance   what holds for every connector, also one that moves nothing
    SenderConformance      and for one that holds blocks of a request with do_remote_decode for somebody else
    PairConformance        and for two engines, of which one reads what the other holds
    StoreConformance       instead, for one that keeps blocks by itself and brings them to the next equal prompt

A test runs a Trio program of its own, by default with a clock that jumps. Set real_time where threads, sockets or other
processes are at work. It plays both cores, judges from outside (reports, and the bytes of both caches), and overwrites
blocks in the very moment in which they belong to another. Some tests do one thing at each moment of a load: after so
many passes of Trio's loop, until the load is over before.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import msgspec
import trio
from trio.testing import MockClock

from trioserve.contracts.errors import StartupError
from trioserve.contracts.events import FinishReason
from trioserve.contracts.ids import RequestId
from trioserve.contracts.kv_transfer import (
    ConnectorFactory,
    ConnectorSetup,
    KVConnector,
    KVLayout,
    LoadFailed,
    Released,
)
from trioserve.contracts.kv_transfer_params import KVTransferParams
from trioserve.contracts.request import EngineRequest
from trioserve.testing.connector_stage import KV, Load, Side, is_same, kv_of, make_request
from trioserve.testing.memory_pages import SMALL_LAYOUT, MemoryPages
from trioserve.trio_tools.errors_unwrapped import errors_unwrapped

__all__ = ["ConnectorConformance", "PairConformance", "SenderConformance", "Stage", "StoreConformance"]

LENGTH, ABORT = FinishReason.LENGTH, FinishReason.ABORT
MOMENTS_MAX = 60  # beyond that, one moment of a load is like another
TOKENS = range(100, 130)  # a prompt: seven blocks and a half of SMALL_LAYOUT


class Offered(msgspec.Struct, frozen=True):
    """What a sender has: name, of its request; request, for the reader; kv, of the prompt."""

    name: RequestId
    request: EngineRequest
    kv: KV


class Stage:
    """The engines of one test, the connectors of which run in `nursery`. reader is sender where a connector serves one
    engine alone."""

    def __init__(self, suite: ConnectorConformance, sender: Side, reader: Side) -> None:
        self.suite = suite
        self.sender, self.reader = sender, reader
        self.sides = [sender] if sender is reader else [sender, reader]
        self.scopes: dict[str, trio.CancelScope] = {}
        self._names = 0

    def name(self) -> str:
        self._names += 1
        return f"r{self._names}"

    def drain(self) -> None:
        for side in self.sides:
            side.drain()

    async def until(self, side: Side, is_so: Callable[[], bool], what: str) -> None:
        """Take reports until it is so. The connector has to call `wake` for each."""
        with trio.move_on_after(self.suite.patience_seconds):
            while not is_so():
                woken = side.woken
                if not woken.is_set():
                    await woken.wait()
                side.drain()
            return
        raise AssertionError(
            f"{what} was not reported within {self.suite.patience_seconds} seconds, or nobody was woken for it"
        )

    async def until_load_ends(self, load: Load) -> None:
        name = load.request.id
        await self.until(self.reader, lambda: name not in self.reader.loads, f"the end of the load of {name}")

    async def until_released(self, name: RequestId, side: Side | None = None) -> None:
        here = side or self.sender
        await self.until(here, lambda: name not in here.sends, f"the end of the send of {name}")

    async def settle(self) -> None:
        """Whatever was begun comes to its end, or nothing comes of it."""
        if self.suite.real_time:
            await trio.sleep(self.suite.settle_seconds)
        else:
            await trio.sleep(self.suite.patience_seconds)
        self.drain()
        self.check()

    def check(self) -> None:
        for side in self.sides:
            side.check()
        broken = [f"{side.name}: {violation}" for side in self.sides for violation in side.violations]
        assert not broken, "; ".join(broken)

    def end(self, side: Side) -> None:
        """The connector's task ends, as with its engine."""
        self.scopes.pop(side.name).cancel()


class ConnectorConformance:
    """For any connector.

    factory: makes a connector, as an engine would do it. real_time: threads, sockets or processes are at work.
    patience_seconds: how long anything may take that must come some time; settle_seconds: how long the suite waits, in
    real time, for what must not come. layout: of the engines' caches.
    """

    factory: ClassVar[ConnectorFactory | Callable[[ConnectorSetup], KVConnector]]
    real_time: bool = False
    patience_seconds: float = 30.0
    settle_seconds: float = 0.05
    layout: KVLayout = SMALL_LAYOUT

    def options(self, side: str) -> Mapping[str, Any]:
        """kv_connector_extra_config of the engine that plays this side: "sender" or "reader"."""
        return {}

    # --- how a test is played ---

    def sides(self, *, reader_layout: KVLayout | None = None, has_views: bool = True) -> tuple[Side, Side]:
        reader = Side("reader", reader_layout or self.layout, has_views=has_views)
        return Side("sender", self.layout, has_views=has_views), reader

    def play(self, script: Callable[[Stage], Coroutine[Any, Any, None]], **how: Any) -> None:
        async def main() -> None:
            async with self._opened(**how) as stage:
                await script(stage)
                await stage.settle()
                open_holds = [f"{side.name}: {name}" for side in stage.sides for name in (*side.sends, *side.loads)]
                assert not open_holds, f"nothing was reported of {', '.join(open_holds)}"
            stage.check()

        with errors_unwrapped():
            if self.real_time:
                trio.run(main)
            else:
                trio.run(main, clock=MockClock(autojump_threshold=0))

    @asynccontextmanager
    async def _opened(self, **how: Any) -> AsyncIterator[Stage]:
        stage = Stage(self, *self.sides(**how))
        for side in stage.sides:
            side.connect(type(self).factory, dict(self.options(side.name)), f"engine-of-{side.name}")
        task_count = trio.lowlevel.current_statistics().tasks_living
        async with trio.open_nursery() as nursery:
            for side in stage.sides:
                if hasattr(side.connector, "run"):  # one without a life of its own is none the worse
                    stage.scopes[side.name] = await nursery.start(_run_scoped, side.connector.run)
            yield stage
            nursery.cancel_scope.cancel()
        left = trio.lowlevel.current_statistics().tasks_living - task_count
        assert left == 0, f"{left} tasks are left when the connectors have ended"

    # --- the tests ---

    def test_a_request_that_wants_nothing_is_left_alone(self) -> None:
        async def script(stage: Stage) -> None:
            side = stage.sender
            for reason in FinishReason:
                request = make_request(stage.name(), TOKENS)
                assert side.connector.num_matched_tokens(request, 0) == 0
                assert side.connector.num_matched_tokens(request, side.pages.layout.block_size) == 0
                assert side.finish(request, side.take(len(TOKENS)), TOKENS, reason) is None
            for name in list(side.sends):
                await stage.until_released(name)

        self.play(script)

    def test_one_that_only_ever_sees_aborts(self) -> None:
        """Every request's end is told, also of one that the connector never heard of before, whatever it wanted."""

        async def script(stage: Stage) -> None:
            for side in stage.sides:
                for params in (None, *_WANTED):
                    for token_count in (0, 1, len(TOKENS)):
                        request = make_request(stage.name(), TOKENS, params)
                        side.finish(request, side.take(token_count), TOKENS[:token_count], ABORT)
                        side.abort_after_finish(request.id)
                for name in list(side.sends):
                    await stage.until_released(name, side)

        self.play(script)

    def test_params_that_name_nobody_fail_one_load_in_time(self) -> None:
        async def script(stage: Stage) -> None:
            reader = stage.reader
            for params in _WANTED:
                request = make_request(stage.name(), TOKENS, params)
                count = reader.connector.num_matched_tokens(request, 0)
                assert isinstance(count, int), f"{count!r} tokens match"
                assert count >= 0, f"{count} tokens match"
                if count > 0:
                    load = reader.start_load(request, 0, min(count, len(TOKENS) - 1))
                    await stage.until_load_ends(load)
                reader.finish(request, (), (), ABORT)
            assert not reader.loaded, "KV came from nobody"

        self.play(script)

    def test_progress_is_told_once(self) -> None:
        async def script(stage: Stage) -> None:
            for side in stage.sides:
                assert list(side.connector.progress()) == []

        self.play(script)

    def test_counts_are_numbers(self) -> None:
        async def script(stage: Stage) -> None:
            for side in stage.sides:
                counts = side.connector.counts() if hasattr(side.connector, "counts") else {}
                assert all(isinstance(name, str) and value >= 0 for name, value in counts.items()), counts

        self.play(script)

    def test_an_option_that_it_does_not_know_is_refused(self) -> None:
        setup = ConnectorSetup(
            engine_id="e",
            role="both",
            pages=MemoryPages(8, self.layout),
            options={**self.options("sender"), "an option that nobody has": 1},
            wake=lambda: None,
        )
        try:
            type(self).factory(setup)
        except StartupError:
            return
        raise AssertionError("an option that does not exist was taken")


class SenderConformance(ConnectorConformance):
    """For a connector that holds the blocks of a request with do_remote_decode that ended by itself."""

    async def offer(self, stage: Stage, tokens: Sequence[int] = TOKENS) -> Offered:
        """A request of the sender ends, and its blocks are held."""
        sender, name = stage.sender, stage.name()
        request = make_request(name, tokens, KVTransferParams(do_remote_decode=True), output_tokens_max=1)
        blocks = sender.take(len(tokens))
        kv = kv_of(sender.pages, blocks, range(len(tokens)))
        params = sender.finish(request, blocks, tokens, LENGTH)
        assert request.id in sender.sends, f"the blocks of {name} are not held"
        assert params is not None, "nobody is told how to read what is held"
        assert params.do_remote_prefill, "what the sender tells is passed on as it is, and has to say what it is for"
        return Offered(request.id, make_request(f"{name}-there", tokens, params), kv)

    def test_an_abort_after_the_end_releases_once(self) -> None:
        async def script(stage: Stage) -> None:
            offers = [await self.offer(stage) for _ in range(3)]
            for offered in reversed(offers):
                stage.sender.abort_after_finish(offered.name)
                await stage.until_released(offered.name)

        self.play(script)

    def test_nothing_is_said_of_a_hold_that_expired(self) -> None:
        async def script(stage: Stage) -> None:
            quiet, aborted = await self.offer(stage), await self.offer(stage)
            stage.sender.expire_send(quiet.name)
            stage.sender.abort_after_finish(aborted.name)
            stage.sender.expire_send(aborted.name)  # before anybody has asked for its report

        self.play(script)

    def test_it_ends_while_it_holds(self) -> None:
        async def script(stage: Stage) -> None:
            offered = await self.offer(stage)
            stage.end(stage.sender)
            await stage.settle()
            stage.sender.abort_after_finish(offered.name)
            stage.sender.expire_send(offered.name)
            request = make_request(stage.name(), TOKENS, KVTransferParams(do_remote_decode=True))
            stage.sender.finish(request, stage.sender.take(4), TOKENS[:4], LENGTH)
            stage.sender.expire_send(request.id)

        self.play(script)


class _LoadConformance(ConnectorConformance):
    """What holds wherever KV comes from."""

    async def offer(self, stage: Stage, tokens: Sequence[int] = TOKENS) -> Offered:
        raise NotImplementedError

    def matched(self, stage: Stage, offered: Offered, computed_count: int = 0) -> int:
        """How much a core would load."""
        request = offered.request
        count = stage.reader.connector.num_matched_tokens(request, computed_count)
        return min(count, len(request.prompt_token_ids) - 1 - computed_count)

    def begin(self, stage: Stage, offered: Offered, computed_count: int = 0, token_count: int | None = None) -> Load:
        matched_count = self.matched(stage, offered, computed_count)
        assert matched_count > 0, f"nothing matches of {offered.name} from token {computed_count} on"
        count = matched_count if token_count is None else min(token_count, matched_count)
        return stage.reader.start_load(offered.request, computed_count, count)

    def compare(self, stage: Stage, offered: Offered, load: Load) -> bool:
        """Whether it was loaded, with nothing but what was offered."""
        loaded = stage.reader.loaded.get(load.request.id)
        if loaded is None:
            return False
        count = len(loaded[0])
        expected = [layer[load.start : load.start + count] for layer in offered.kv]
        layouts = stage.reader.pages.layout, stage.sender.pages.layout
        assert is_same(loaded, expected, layouts[0].dtype, layouts[1].dtype), (
            f"{load.request.id}: what was loaded from token {load.start} on is not what was held"
        )
        return True

    async def conclude(self, stage: Stage, offered: Offered, load: Load | None = None) -> None:
        """The reader's request ends, and then nobody waits for anything any more."""
        if load is not None:
            stage.reader.abandon(load)
            await stage.until_load_ends(load)
        stage.reader.finish(offered.request, (), (), ABORT)
        stage.drain()
        stage.sender.expire_send(offered.name)

    async def load_whole(self, stage: Stage, offered: Offered, computed_count: int, token_count: int | None) -> None:
        load = self.begin(stage, offered, computed_count, token_count)
        await stage.until_load_ends(load)
        assert self.compare(stage, offered, load), f"it was not loaded: {stage.reader.reports[-1]}"
        await self.conclude(stage, offered)

    async def at_each_moment(
        self, stage: Stage, act: Callable[[Offered, Load], None], *, ends_load: bool = True
    ) -> None:
        """`act` after every number of passes of the loop, up to the load's end; then both sides come to an end."""
        for moment in range(MOMENTS_MAX):
            offered = await self.offer(stage)
            load = self.begin(stage, offered)
            for _ in range(moment):
                await trio.lowlevel.checkpoint()
            stage.reader.drain()
            is_over = load.request.id not in stage.reader.loads
            act(offered, load)
            stage.check()
            if load.request.id in stage.reader.loads:
                await stage.until_load_ends(load)
            self.compare(stage, offered, load)
            stage.drain()
            stage.check()
            await self.conclude(stage, offered)
            if is_over:
                return

    def test_a_load_brings_what_was_held_and_writes_nowhere_else(self) -> None:
        size = self.layout.block_size

        async def script(stage: Stage) -> None:
            for computed_count in (0, size, 5 * size):
                for token_count in (None, 1, size - 1, size, size + 1, 2 * size + 3):
                    await self.load_whole(stage, await self.offer(stage), computed_count, token_count)

        self.play(script)

    def test_blocks_that_the_host_cannot_address(self) -> None:
        async def script(stage: Stage) -> None:
            await self.load_whole(stage, await self.offer(stage), 0, None)
            await self.load_whole(stage, await self.offer(stage), self.layout.block_size, 3)

        self.play(script, has_views=False)

    def test_asking_what_matches_changes_nothing(self) -> None:
        async def script(stage: Stage) -> None:
            offered = await self.offer(stage)
            size = self.layout.block_size
            counts = [self.matched(stage, offered, computed_count) for computed_count in range(0, len(TOKENS), size)]
            await stage.settle()
            again = [self.matched(stage, offered, computed_count) for computed_count in range(0, len(TOKENS), size)]
            assert counts == again, f"first {counts}, then {again}"
            await self.load_whole(stage, offered, 0, None)

        self.play(script)

    def test_several_loads_at_a_time(self) -> None:
        async def script(stage: Stage) -> None:
            offers = [await self.offer(stage, range(start, start + 14)) for start in range(0, 100, 20)]
            loads = [self.begin(stage, offered) for offered in offers]
            for offered, load in zip(reversed(offers), reversed(loads), strict=True):
                await stage.until_load_ends(load)
                assert self.compare(stage, offered, load), f"it was not loaded: {stage.reader.reports}"
                await self.conclude(stage, offered)

        self.play(script)

    def test_an_abandoned_load_ends_once_at_any_moment(self) -> None:
        async def script(stage: Stage) -> None:
            await self.at_each_moment(stage, lambda offered, load: stage.reader.abandon(load))

        self.play(script)

    def test_a_load_that_expired_writes_nothing_and_says_nothing_at_any_moment(self) -> None:
        async def script(stage: Stage) -> None:
            def act(_offered: Offered, load: Load) -> None:
                stage.reader.abandon(load)
                stage.reader.expire_load(load)

            await self.at_each_moment(stage, act)

        self.play(script)

    def test_a_load_that_expired_some_time_after_it_was_abandoned(self) -> None:
        async def script(stage: Stage) -> None:
            for moment in range(10):
                offered = await self.offer(stage)
                load = self.begin(stage, offered)
                for _ in range(moment):
                    await trio.lowlevel.checkpoint()
                stage.reader.abandon(load)
                await trio.lowlevel.checkpoint()
                stage.reader.expire_load(load)
                await stage.settle()
                await self.conclude(stage, offered)

        self.play(script)

    def test_the_reader_ends_in_the_middle(self) -> None:
        for moment in range(10):

            async def script(stage: Stage, moment: int = moment) -> None:
                offered = await self.offer(stage)
                load = self.begin(stage, offered)
                for _ in range(moment):
                    await trio.lowlevel.checkpoint()
                stage.end(stage.reader)
                await stage.settle()
                stage.reader.abandon(load)
                stage.reader.expire_load(load)
                stage.reader.finish(offered.request, (), (), ABORT)
                stage.sender.expire_send(offered.name)

            self.play(script)


class PairConformance(_LoadConformance, SenderConformance):
    """For two engines, each with a connector of its own, of which the reader reads what the sender holds.

    tells_early: a reader that leaves before it has read, or in the middle, tells the sender, whose hold ends then and
    not at its deadline. other_layouts: of the reader, where they are not the sender's: converted, or refused.
    """

    tells_early: bool = True
    other_layouts: Sequence[KVLayout] = tuple(
        msgspec.structs.replace(SMALL_LAYOUT, **change)
        for change in (
            {"block_size": 8},
            {"block_size": 2},
            {"block_size": 3},
            {"dtype": "bfloat16"},
            {"dtype": "float16", "block_size": 16},
        )
    )
    foreign_layouts: Sequence[KVLayout] = tuple(
        msgspec.structs.replace(SMALL_LAYOUT, **change)
        for change in ({"model": "another"}, {"layer_count": 3}, {"kv_head_count": 2}, {"head_dim": 4})
    )

    async def offer(self, stage: Stage, tokens: Sequence[int] = TOKENS) -> Offered:
        return await SenderConformance.offer(self, stage, tokens)

    def test_a_send_ends_once_when_it_has_been_read(self) -> None:
        async def script(stage: Stage) -> None:
            for _ in range(3):
                offered = await self.offer(stage)
                load = self.begin(stage, offered)
                await stage.until_load_ends(load)
                assert self.compare(stage, offered, load)
                await stage.until_released(offered.name)
                stage.reader.finish(offered.request, (), (), ABORT)
                assert stage.sender.reports.count(Released(offered.name)) == 1

        self.play(script)

    def test_a_hold_that_expires_at_any_moment_brings_no_foreign_bytes(self) -> None:
        async def script(stage: Stage) -> None:
            await self.at_each_moment(stage, lambda offered, load: stage.sender.expire_send(offered.name))

        self.play(script)

    def test_an_abort_of_what_is_held_at_any_moment_of_its_reading(self) -> None:
        async def script(stage: Stage) -> None:
            for moment in range(MOMENTS_MAX):
                offered = await self.offer(stage)
                load = self.begin(stage, offered)
                for _ in range(moment):
                    await trio.lowlevel.checkpoint()
                stage.reader.drain()
                is_over = load.request.id not in stage.reader.loads
                stage.sender.abort_after_finish(offered.name)
                await stage.until_released(offered.name)
                await stage.until_load_ends(load)
                self.compare(stage, offered, load)
                await self.conclude(stage, offered)
                if is_over:
                    return

        self.play(script)

    def test_a_reader_that_leaves_tells_the_sender(self) -> None:
        """Before it began, and in the middle."""
        if not self.tells_early:
            return

        async def script(stage: Stage) -> None:
            for moment in range(8):
                offered = await self.offer(stage)
                if moment > 0:
                    load = self.begin(stage, offered)
                    for _ in range(moment):
                        await trio.lowlevel.checkpoint()
                    stage.reader.abandon(load)
                stage.reader.finish(offered.request, (), (), ABORT)
                await stage.until_released(offered.name)
                if moment > 0:
                    await stage.until_load_ends(load)

        self.play(script)

    def test_what_is_not_held_any_more_fails_the_load(self) -> None:
        async def script(stage: Stage) -> None:
            for end in (stage.sender.expire_send, stage.sender.abort_after_finish):
                offered = await self.offer(stage)
                end(offered.name)
                await stage.settle()
                await self._fail(stage, offered)

        self.play(script)

    def test_another_engine_and_another_request_fail_the_load(self) -> None:
        async def script(stage: Stage) -> None:
            offered = await self.offer(stage)
            params = offered.request.kv_transfer
            assert params is not None
            for change in ({"remote_engine_id": "engine-before"}, {"remote_request_id": "nobody"}):
                wrong = msgspec.structs.replace(params, **change)
                name, request = RequestId("nobody"), make_request(stage.name(), TOKENS, wrong)
                await self._fail(stage, msgspec.structs.replace(offered, name=name, request=request))
            await self.load_whole(stage, offered, 0, None)

        self.play(script)

    def test_a_sender_that_is_gone_fails_the_load_in_time(self) -> None:
        async def script(stage: Stage) -> None:
            offered = await self.offer(stage)
            stage.end(stage.sender)
            await stage.settle()
            stage.sender.expire_send(offered.name)
            await self._fail(stage, offered)

        self.play(script)

    def test_a_sender_that_goes_at_any_moment(self) -> None:
        for moment in range(12):

            async def script(stage: Stage, moment: int = moment) -> None:
                offered = await self.offer(stage)
                load = self.begin(stage, offered)
                for _ in range(moment):
                    await trio.lowlevel.checkpoint()
                stage.end(stage.sender)
                stage.sender.drain()
                await trio.lowlevel.checkpoint()
                stage.sender.expire_send(offered.name)  # its memory is another's
                await stage.until_load_ends(load)
                self.compare(stage, offered, load)
                await self.conclude(stage, offered)

            self.play(script)

    def test_two_readers_of_one_send(self) -> None:
        async def script(stage: Stage) -> None:
            offered = await self.offer(stage)
            second = msgspec.structs.replace(offered.request, id=RequestId("second"))
            again = msgspec.structs.replace(offered, request=second)
            loads = [(each, self.begin(stage, each)) for each in (offered, again)]
            for each, load in loads:
                await stage.until_load_ends(load)
                self.compare(stage, each, load)
                await self.conclude(stage, each)

        self.play(script)

    def test_a_block_that_two_sends_share(self) -> None:
        async def script(stage: Stage) -> None:
            sender = stage.sender
            blocks = sender.take(len(TOKENS))
            kv = kv_of(sender.pages, blocks, range(len(TOKENS)))
            offers = []
            for _ in range(2):
                name = stage.name()
                request = make_request(name, TOKENS, KVTransferParams(do_remote_decode=True), output_tokens_max=1)
                there = make_request(f"{name}-there", TOKENS, sender.finish(request, blocks, TOKENS, LENGTH))
                offers.append(Offered(request.id, there, kv))
            load = self.begin(stage, offers[1])
            sender.expire_send(offers[0].name)
            await stage.until_load_ends(load)
            assert self.compare(stage, offers[1], load), "a hold that is not this one's has expired"
            for offered in offers:
                await self.conclude(stage, offered)

        self.play(script)

    def test_both_ways_at_a_time(self) -> None:
        async def script(stage: Stage) -> None:
            there = await self.offer(stage)
            stage.sender, stage.reader = stage.reader, stage.sender
            back = await self.offer(stage)
            load_back = self.begin(stage, back)
            stage.sender, stage.reader = stage.reader, stage.sender
            load_there = self.begin(stage, there)
            await stage.until_load_ends(load_there)
            assert self.compare(stage, there, load_there)
            await self.conclude(stage, there)
            stage.sender, stage.reader = stage.reader, stage.sender
            await stage.until_load_ends(load_back)
            assert self.compare(stage, back, load_back)
            await self.conclude(stage, back)

        self.play(script)

    def test_unequal_layouts_are_converted_or_refused(self) -> None:
        for layout in self.other_layouts:

            async def script(stage: Stage) -> None:
                for blocks_computed in (0, 1):
                    offered = await self.offer(stage)
                    computed_count = blocks_computed * stage.reader.pages.layout.block_size
                    if self.matched(stage, offered, computed_count) > 0:
                        load = self.begin(stage, offered, computed_count)
                        await stage.until_load_ends(load)
                        self.compare(stage, offered, load)
                    await self.conclude(stage, offered)

            self.play(script, reader_layout=layout)

    def test_another_model_is_refused(self) -> None:
        for layout in self.foreign_layouts:

            async def script(stage: Stage) -> None:
                offered = await self.offer(stage)
                await self._fail(stage, offered)

            self.play(script, reader_layout=layout)

    async def _fail(self, stage: Stage, offered: Offered) -> None:
        """It must not be loaded, and the end comes in time, with a sentence."""
        if self.matched(stage, offered) > 0:
            load = self.begin(stage, offered)
            await stage.until_load_ends(load)
            report = next(event for event in reversed(stage.reader.reports) if event.request_id == load.request.id)
            assert isinstance(report, LoadFailed), f"{report}, and there was nothing to load"
            assert report.message, "it failed, and nobody says why"
        await self.conclude(stage, offered)


class StoreConformance(_LoadConformance):
    """For a connector that keeps the blocks of requests that end (StoreConformance.offer), and brings them to a later
    request with the same tokens and salt; one engine, one connector. How much it keeps is its own affair, but a prompt
    of some blocks that has just ended must match in part."""

    def sides(self, *, reader_layout: KVLayout | None = None, has_views: bool = True) -> tuple[Side, Side]:
        side = Side("sender", self.layout, has_views=has_views)
        return side, side

    async def offer(self, stage: Stage, tokens: Sequence[int] = TOKENS, salt: str | None = None) -> Offered:
        """A request ends, and has been saved. Equal tokens under equal salts have equal KV, and here they would not: so
        without a salt it gets one of its own."""
        side, name = stage.sender, stage.name()
        salt = name if salt is None else salt
        request = make_request(name, tokens, cache_salt=salt)
        blocks = side.take(len(tokens))
        kv = kv_of(side.pages, blocks, range(len(tokens)))
        side.finish(request, blocks, tokens, LENGTH)
        await stage.until_released(request.id)
        return Offered(request.id, make_request(f"{name}-again", tokens, cache_salt=salt), kv)

    def test_other_tokens_and_salts_match_nothing(self) -> None:
        async def script(stage: Stage) -> None:
            await self.offer(stage, salt="s")
            connector = stage.reader.connector
            shifted = make_request(stage.name(), range(101, 131), cache_salt="s")
            assert connector.num_matched_tokens(shifted, 0) == 0, "other tokens match"
            for salt in ("another", "", None):
                salted = make_request(stage.name(), TOKENS, cache_salt=salt)
                assert connector.num_matched_tokens(salted, 0) == 0, "what was kept under another salt matches"

        self.play(script)

    def test_a_common_beginning_matches_as_far_as_it_goes(self) -> None:
        async def script(stage: Stage) -> None:
            offered = await self.offer(stage)
            common = len(TOKENS) // 2
            tokens = [*TOKENS[:common], *range(500, 515)]
            other = make_request(stage.name(), tokens, cache_salt=offered.request.cache_salt)
            count = stage.reader.connector.num_matched_tokens(other, 0)
            assert 0 <= count <= common, f"{count} tokens match, and {common} are the same"
            if count > 0:
                load = stage.reader.start_load(other, 0, count)
                await stage.until_load_ends(load)
                self.compare(stage, offered, load)
            stage.reader.finish(other, (), (), ABORT)

        self.play(script)

    def test_a_hold_that_expires_while_it_is_saved_keeps_no_foreign_bytes(self) -> None:
        async def script(stage: Stage) -> None:
            side = stage.sender
            for moment in range(MOMENTS_MAX):
                tokens = [1000 * (moment + 1) + token for token in TOKENS]
                request = make_request(stage.name(), tokens)
                blocks = side.take(len(tokens))
                kv = kv_of(side.pages, blocks, range(len(tokens)))
                side.finish(request, blocks, tokens, LENGTH)
                for _ in range(moment):
                    await trio.lowlevel.checkpoint()
                side.drain()
                is_over = request.id not in side.sends
                side.expire_send(request.id)
                await stage.settle()
                again = Offered(request.id, make_request(stage.name(), tokens), kv)
                if self.matched(stage, again) > 0:
                    load = self.begin(stage, again)
                    await stage.until_load_ends(load)
                    self.compare(stage, again, load)
                side.finish(again.request, (), (), ABORT)
                if is_over:
                    return

        self.play(script)


async def _run_scoped(
    run: Callable[..., Coroutine[Any, Any, None]], *, task_status: trio.TaskStatus[trio.CancelScope]
) -> None:
    """Starts a connector's task in a scope of its own; tells the scope when the connector is ready."""

    class Status:
        def started(self, value: Any = None) -> None:
            task_status.started(scope)

    with trio.CancelScope() as scope:
        await run(task_status=Status())


_WANTED = (
    KVTransferParams(do_remote_decode=True),
    KVTransferParams(do_remote_prefill=True),
    KVTransferParams(
        do_remote_prefill=True,
        remote_engine_id="nobody",
        remote_request_id="nothing",
        remote_block_ids=(0, 1, 2),
        remote_host="127.0.0.1",
        remote_port=9,  # nobody listens there; the port of the discard protocol
        remote_block_size=4,
        remote_num_tokens=12,
    ),
    KVTransferParams(
        do_remote_prefill=True,
        remote_engine_id="",
        remote_request_id="",
        remote_block_ids=((-1, 10**9), ()),
        remote_host="",
        remote_port=-1,
        remote_block_size=0,
        remote_num_tokens=10**9,
        tp_size=0,
    ),
    KVTransferParams(do_remote_prefill=True, do_remote_decode=True, remote_engine_id="x", remote_num_tokens=-5),
)
