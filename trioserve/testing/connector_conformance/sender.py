"""Conformance tests for a connector that holds blocks of a request for another engine."""

from __future__ import annotations

from collections.abc import Sequence

from trioserve.contracts.kv_transfer_params import KVTransferParams
from trioserve.testing.connector_conformance.every_connector import ConnectorConformance
from trioserve.testing.connector_conformance.stage import LENGTH, TOKENS, Offered, Stage
from trioserve.testing.connector_stage import kv_of, make_request

__all__ = ["SenderConformance"]


class SenderConformance(ConnectorConformance):
    """Tests for a connector that holds the blocks of a finished request with do_remote_decode."""

    async def offer(self, stage: Stage, tokens: Sequence[int] = TOKENS) -> Offered:
        """End a request of the sender, whose blocks are then held.

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
            stage.sender.expire_send(aborted.name)  # before the core has asked for its report

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
