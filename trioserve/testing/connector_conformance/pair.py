"""Conformance tests for a connector that holds blocks for another engine, and for two such engines together."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import trio

from trioserve.contracts.ids import RequestId
from trioserve.contracts.kv_transfer import KVLayout, LoadFailed, Released
from trioserve.contracts.request import KVTransferParams
from trioserve.testing.connector_conformance.every_connector import ConnectorConformance
from trioserve.testing.connector_conformance.loads import LoadConformance
from trioserve.testing.connector_conformance.side import (
    ABORT,
    LENGTH,
    MOMENTS_MAX,
    SMALL_LAYOUT,
    TOKENS,
    Offered,
    Stage,
    kv_of,
    make_request,
)

__all__ = ["PairConformance", "SenderConformance"]


class SenderConformance(ConnectorConformance):
    """Tests for connectors that hold the blocks of finished requests with do_remote_decode."""

    async def offer(self, stage: Stage, tokens: Sequence[int] = TOKENS) -> Offered:
        """Finish a request of the sender. The connector then holds the blocks of this request.

        Args:
            stage: the engines.
            tokens: the prompt.

        Returns:
            The offered prompt, with a request for the reader.
        """
        sender, name = stage.sender, stage.name()
        request = make_request(name, tokens, KVTransferParams(do_remote_decode=True), output_tokens_max=1)
        blocks = sender.take(len(tokens))
        kv = kv_of(sender.pages, blocks, range(len(tokens)))
        params = sender.finish(request, blocks, tokens, LENGTH)
        assert request.id in sender.sends, f"the blocks of {name} are not held"
        assert params is not None, "there are no parameters with which the held blocks can be read"
        assert params.do_remote_prefill, (
            "the sender's parameters must have do_remote_prefill, since routers forward them unchanged"
        )
        return Offered(request.id, make_request(f"{name}-there", tokens, params), kv)

    def test_abort_after_the_end_of_a_request_releases_its_blocks_once(self) -> None:
        """Check that the abort of a finished request releases its held blocks exactly once."""

        async def script(stage: Stage) -> None:
            offers = [await self.offer(stage) for _ in range(3)]
            for offered in reversed(offers):
                stage.sender.abort_after_finish(offered.name)
                await stage.until_released(offered.name)

        self.play(script)

    def test_connector_reports_nothing_about_an_expired_hold(self) -> None:
        """Check that a connector reports no events about a hold whose deadline has passed."""

        async def script(stage: Stage) -> None:
            quiet, aborted = await self.offer(stage), await self.offer(stage)
            stage.sender.expire_send(quiet.name)
            stage.sender.abort_after_finish(aborted.name)
            stage.sender.expire_send(aborted.name)  # The core has not yet taken the report of this hold.

        self.play(script)

    def test_connector_of_sender_may_end_while_it_holds_blocks(self) -> None:
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


class PairConformance(LoadConformance, SenderConformance):
    """Tests for two engines, each with its own connector. The reader reads blocks that the sender holds.

    Attributes:
        tells_early: True if a reader that is aborted before or during its load notifies the sender, which then ends the
            hold. If False, the hold ends at its deadline.
        other_layouts: layouts of the reader that differ from the sender's. The connector converts blocks or refuses the
            load.
        foreign_layouts: layouts of the reader that must be refused.
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
        for change in (
            {"model": "another"},
            {"layer_count": 3},
            {"part_count": 1},
            {"part_count": 1, "head_dim": 4},
            {"kv_head_count": 2},
            {"head_dim": 4},
            {"dtype": "int8"},  # KV in 8 bits is never converted to another dtype.
        )
    )

    async def offer(self, stage: Stage, tokens: Sequence[int] = TOKENS) -> Offered:
        return await SenderConformance.offer(self, stage, tokens)

    def test_send_ends_once_after_it_was_read(self) -> None:
        """Check that a hold is released exactly once after a reader has read all of its blocks."""

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

    def test_hold_that_expires_at_any_moment_transfers_no_bytes_of_other_requests(self) -> None:
        """Check that a load never succeeds with bytes that another request wrote after the hold had expired."""

        async def script(stage: Stage) -> None:
            await self.at_each_moment(stage, lambda offered, load: stage.sender.expire_send(offered.name))

        self.play(script)

    def test_abort_of_held_request_at_any_moment_of_a_read_releases_its_blocks(self) -> None:
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

    def test_reader_that_is_aborted_early_notifies_the_sender(self) -> None:
        """Abort the reader's request before its load begins, or during the load."""
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

    def test_load_of_blocks_that_are_no_longer_held_fails(self) -> None:
        """Check that a load fails if the hold of its blocks has ended before the load begins."""

        async def script(stage: Stage) -> None:
            for end in (stage.sender.expire_send, stage.sender.abort_after_finish):
                offered = await self.offer(stage)
                end(offered.name)
                await stage.settle()
                await self._fail(stage, offered)

        self.play(script)

    def test_load_with_wrong_engine_id_or_request_id_fails(self) -> None:
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

    def test_load_from_a_sender_that_has_ended_fails_in_time(self) -> None:
        """Check that a load fails within the time limit if the engine with the blocks has ended."""

        async def script(stage: Stage) -> None:
            offered = await self.offer(stage)
            stage.end(stage.sender)
            await stage.settle()
            stage.sender.expire_send(offered.name)
            await self._fail(stage, offered)

        self.play(script)

    def test_load_ends_if_sender_ends_at_any_moment(self) -> None:
        for moment in range(12):

            async def script(stage: Stage, moment: int = moment) -> None:
                offered = await self.offer(stage)
                load = self.begin(stage, offered)
                for _ in range(moment):
                    await trio.lowlevel.checkpoint()
                stage.end(stage.sender)
                stage.sender.drain()
                await trio.lowlevel.checkpoint()
                stage.sender.expire_send(offered.name)  # Another engine now uses the memory of these blocks.
                await stage.until_load_ends(load)
                self.compare(stage, offered, load)
                await self.conclude(stage, offered)

            self.play(script)

    def test_two_requests_may_read_the_same_hold(self) -> None:
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

    def test_load_succeeds_if_another_hold_of_the_same_blocks_expires(self) -> None:
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
            assert self.compare(stage, offers[1], load), "the load failed when another hold expired"
            for offered in offers:
                await self.conclude(stage, offered)

        self.play(script)

    def test_two_engines_may_read_from_each_other_at_the_same_time(self) -> None:
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

    def test_kv_of_another_layout_is_converted_or_refused(self) -> None:
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

    def test_kv_of_another_model_is_refused(self) -> None:
        """Check that a load fails if the KV layouts of both engines are not compatible."""
        for layout in self.foreign_layouts:

            async def script(stage: Stage) -> None:
                offered = await self.offer(stage)
                await self._fail(stage, offered)

            self.play(script, reader_layout=layout)

    async def _fail(self, stage: Stage, offered: Offered) -> None:
        """Check that a load fails in time with a message, or that no tokens match."""
        if self.matched(stage, offered) > 0:
            load = self.begin(stage, offered)
            await stage.until_load_ends(load)
            report = next(event for event in reversed(stage.reader.reports) if event.request_id == load.request.id)
            assert isinstance(report, LoadFailed), f"{report}, but there was nothing to load"
            assert report.message, "the load failed without a message"
        await self.conclude(stage, offered)
