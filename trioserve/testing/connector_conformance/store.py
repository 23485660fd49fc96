"""Conformance tests for a connector that saves blocks and loads them for the next equal prompt."""

from __future__ import annotations

from collections.abc import Sequence

import trio

from trioserve.contracts.kv_transfer import (
    KVLayout,
)
from trioserve.testing.connector_conformance.loads import LoadConformance
from trioserve.testing.connector_conformance.side import Side, kv_of, make_request
from trioserve.testing.connector_conformance.stage import ABORT, LENGTH, MOMENTS_MAX, TOKENS, Offered, Stage

__all__ = ["StoreConformance"]


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
