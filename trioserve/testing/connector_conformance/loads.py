"""Conformance tests for connectors that load blocks from other engines, or that save and load them in a storage."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import trio

from trioserve.contracts.kv_transfer import KVLayout, LoadFailed
from trioserve.testing.connector_conformance.every_connector import ConnectorConformance
from trioserve.testing.connector_conformance.side import (
    ABORT,
    LENGTH,
    MOMENTS_MAX,
    TOKENS,
    Load,
    Offered,
    Side,
    Stage,
    is_same,
    kv_of,
    make_request,
)

__all__ = ["LoadConformance", "StoreConformance"]


WINDOW_TOKENS = 9  # With SMALL_LAYOUT, the window reaches three or four blocks.


class LoadConformance(ConnectorConformance):
    """Tests for every connector that loads blocks."""

    async def offer(self, stage: Stage, tokens: Sequence[int] = TOKENS) -> Offered:
        raise NotImplementedError

    def matched(self, stage: Stage, offered: Offered, computed_count: int = 0) -> int:
        """Return the number of tokens that a core would load.

        Args:
            stage: the engines.
            offered: the offered prompt.
            computed_count: number of tokens that the reader already has.
        """
        request = offered.request
        count = stage.reader.connector.num_matched_tokens(request, computed_count)
        return min(count, len(request.known_token_ids) - 1 - computed_count)

    def begin(self, stage: Stage, offered: Offered, computed_count: int = 0, token_count: int | None = None) -> Load:
        matched_count = self.matched(stage, offered, computed_count)
        assert matched_count > 0, f"no token of {offered.name} matches from token {computed_count} on"
        count = matched_count if token_count is None else min(token_count, matched_count)
        return stage.reader.start_load(offered.request, computed_count, count)

    def compare(self, stage: Stage, offered: Offered, load: Load) -> bool:
        """Compare the content of the loaded blocks with the content that the sender offered.

        Args:
            stage: the engines.
            offered: the offered prompt.
            load: a load that has ended.

        Returns:
            False if the load failed or was abandoned.

        Raises:
            AssertionError: other content was loaded.
        """
        loaded = stage.reader.loaded.get(load.request.id)
        if loaded is None:
            return False
        first = load.positions.start
        expected = [layer[first : first + len(loaded[0])] for layer in offered.kv]
        layouts = stage.reader.pages.layout, stage.sender.pages.layout
        assert is_same(loaded, expected, layouts[0].dtype, layouts[1].dtype), (
            f"{load.request.id}: the content loaded from token {load.start} on differs from the held content"
        )
        return True

    async def conclude(self, stage: Stage, offered: Offered, load: Load | None = None) -> None:
        """End the reader's request and the sender's hold.

        Args:
            stage: the engines.
            offered: the offered prompt.
            load: an open load, which is abandoned first. None if no load is open.
        """
        if load is not None:
            stage.reader.abandon(load)
            await stage.until_load_ends(load)
        stage.reader.finish(offered.request, (), (), ABORT)
        stage.drain()
        stage.sender.expire_send(offered.name)

    async def load_whole(self, stage: Stage, offered: Offered, computed_count: int, token_count: int | None) -> None:
        load = self.begin(stage, offered, computed_count, token_count)
        await stage.until_load_ends(load)
        assert self.compare(stage, offered, load), f"the load failed: {stage.reader.reports[-1]}"
        await self.conclude(stage, offered)

    async def at_each_moment(
        self, stage: Stage, act: Callable[[Offered, Load], None], *, ends_load: bool = True
    ) -> None:
        """Repeat loads, and call `act` after 0, 1, 2, ... passes of Trio's loop, until a load ends before the call.

        Args:
            stage: the engines.
            act: action on the offer and the load, such as an abort.
            ends_load: unused.
        """
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

    def test_load_writes_the_held_kv_and_no_other_block(self) -> None:
        """Check that a load copies the held content, and changes no other positions of the request's blocks."""
        size = self.layout.block_size

        async def script(stage: Stage) -> None:
            for computed_count in (0, size, 5 * size):
                for token_count in (None, 1, size - 1, size, size + 1, 2 * size + 3):
                    await self.load_whole(stage, await self.offer(stage), computed_count, token_count)

        self.play(script)

    def test_blocks_behind_sliding_window_are_neither_held_nor_loaded(self) -> None:
        async def script(stage: Stage) -> None:
            lengths = []
            # Each stage uses other tokens, because files of an earlier stage may still exist.
            first = 1000 * (stage.reader.window_tokens or 0)
            for length in (len(TOKENS), len(TOKENS) - 1, len(TOKENS) - 2, 5):
                for computed_count in (0, self.layout.block_size):
                    offered = await self.offer(stage, range(first, first + length))
                    if self.matched(stage, offered, computed_count) > 0:
                        await self.load_whole(stage, offered, computed_count, None)
                        lengths.append(length)
                    else:
                        await self.conclude(stage, offered)
            window_tokens = stage.reader.window_tokens
            assert window_tokens is None or window_tokens < WINDOW_TOKENS or len(TOKENS) in lengths, "nothing matches"

        for window_tokens in (2, 6, WINDOW_TOKENS, 100):
            self.play(script, window_tokens=window_tokens)

    def test_load_of_blocks_behind_sliding_window_fails(self) -> None:
        async def script(stage: Stage) -> None:
            offered = await self.offer(stage)
            load = self.begin(stage, offered, 0, WINDOW_TOKENS)
            await stage.until_load_ends(load)
            report = next(event for event in reversed(stage.reader.reports) if event.request_id == load.request.id)
            assert isinstance(report, LoadFailed), f"{report}, but the blocks before the window were freed"
            assert report.message, "the load failed without a message"
            await self.conclude(stage, offered)

        self.play(script, window_tokens=WINDOW_TOKENS)

    def test_load_with_sliding_window_can_be_abandoned_at_any_moment(self) -> None:
        async def script(stage: Stage) -> None:
            await self.at_each_moment(stage, lambda offered, load: stage.reader.abandon(load))

        self.play(script, window_tokens=WINDOW_TOKENS)

    def test_load_succeeds_if_cpu_cannot_address_the_blocks(self) -> None:
        async def script(stage: Stage) -> None:
            await self.load_whole(stage, await self.offer(stage), 0, None)
            await self.load_whole(stage, await self.offer(stage), self.layout.block_size, 3)

        self.play(script, has_views=False)

    def test_matching_a_prompt_has_no_effect(self) -> None:
        """Check that `num_matched_tokens` returns the same counts when it is called again."""

        async def script(stage: Stage) -> None:
            offered = await self.offer(stage)
            size = self.layout.block_size
            counts = [self.matched(stage, offered, computed_count) for computed_count in range(0, len(TOKENS), size)]
            await stage.settle()
            again = [self.matched(stage, offered, computed_count) for computed_count in range(0, len(TOKENS), size)]
            assert counts == again, f"first {counts}, then {again}"
            await self.load_whole(stage, offered, 0, None)

        self.play(script)

    def test_concurrent_loads_all_succeed(self) -> None:
        async def script(stage: Stage) -> None:
            offers = [await self.offer(stage, range(start, start + 14)) for start in range(0, 100, 20)]
            loads = [self.begin(stage, offered) for offered in offers]
            for offered, load in zip(reversed(offers), reversed(loads), strict=True):
                await stage.until_load_ends(load)
                assert self.compare(stage, offered, load), f"the load failed: {stage.reader.reports}"
                await self.conclude(stage, offered)

        self.play(script)

    def test_load_that_is_abandoned_at_any_moment_ends_once(self) -> None:
        """Check that an abandoned load reports its end exactly once, at whatever moment it is abandoned."""

        async def script(stage: Stage) -> None:
            await self.at_each_moment(stage, lambda offered, load: stage.reader.abandon(load))

        self.play(script)

    def test_load_that_expires_at_any_moment_writes_and_reports_nothing_afterwards(self) -> None:
        """Check that a load writes no blocks and reports no events after its deadline has passed."""

        async def script(stage: Stage) -> None:
            def act(_offered: Offered, load: Load) -> None:
                stage.reader.abandon(load)
                stage.reader.expire_load(load)

            await self.at_each_moment(stage, act)

        self.play(script)

    def test_load_that_expires_after_it_was_abandoned_writes_nothing_afterwards(self) -> None:
        """Check that a load which was abandoned writes no blocks after its deadline has passed."""

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

    def test_connector_of_reader_may_end_at_any_moment_of_a_load(self) -> None:
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


class StoreConformance(LoadConformance):
    """Tests for connectors that save the blocks of finished requests, and load them for later requests.

    Only requests with equal tokens and an equal cache salt may load the blocks. One engine has one connector. The
    connector decides how many blocks it saves. After a request with several blocks has finished, at least one block of
    its prompt must match.
    """

    def sides(self, *, reader_layout: KVLayout | None = None, has_views: bool = True) -> tuple[Side, Side]:
        side = Side("sender", self.layout, has_views=has_views)
        return side, side

    async def offer(self, stage: Stage, tokens: Sequence[int] = TOKENS, salt: str | None = None) -> Offered:
        """Finish a request. The connector then saves the blocks of this request.

        Args:
            stage: the engine.
            tokens: the prompt.
            salt: cache salt of the request. The default is the request's name, because equal prompts have different
                content in these tests.

        Returns:
            The offered prompt, with a request for the reader.
        """
        side, name = stage.sender, stage.name()
        salt = name if salt is None else salt
        request = make_request(name, tokens, cache_salt=salt)
        blocks = side.take(len(tokens))
        kv = kv_of(side.pages, blocks, range(len(tokens)))
        side.finish(request, blocks, tokens, LENGTH)
        await stage.until_released(request.id)
        return Offered(request.id, make_request(f"{name}-again", tokens, cache_salt=salt), kv)

    def test_prompt_with_other_tokens_or_salt_matches_nothing(self) -> None:
        async def script(stage: Stage) -> None:
            await self.offer(stage, salt="s")
            connector = stage.reader.connector
            shifted = make_request(stage.name(), range(101, 131), cache_salt="s")
            assert connector.num_matched_tokens(shifted, 0) == 0, "a prompt with other tokens matches"
            for salt in ("another", "", None):
                salted = make_request(stage.name(), TOKENS, cache_salt=salt)
                assert connector.num_matched_tokens(salted, 0) == 0, "a prompt with another salt matches"

        self.play(script)

    def test_only_the_common_prefix_of_two_prompts_matches(self) -> None:
        async def script(stage: Stage) -> None:
            offered = await self.offer(stage)
            common = len(TOKENS) // 2
            tokens = [*TOKENS[:common], *range(500, 515)]
            other = make_request(stage.name(), tokens, cache_salt=offered.request.cache_salt)
            count = stage.reader.connector.num_matched_tokens(other, 0)
            assert 0 <= count <= common, f"{count} tokens match, but only {common} are the same"
            if count > 0:
                load = stage.reader.start_load(other, 0, count)
                await stage.until_load_ends(load)
                self.compare(stage, offered, load)
            stage.reader.finish(other, (), (), ABORT)

        self.play(script)

    def test_hold_that_expires_during_a_save_stores_no_bytes_of_other_requests(self) -> None:
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
