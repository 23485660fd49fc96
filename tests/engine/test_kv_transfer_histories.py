"""Tests random histories of requests with KV transfer. The connector reports early, late, repeatedly, wrongly or never.

Clients leave at any time, and operators abort requests. At the end, all resources are free.
"""

from __future__ import annotations

import random
from functools import partial

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.contracts.errors import Overloaded
from trioserve.contracts.events import FinishReason
from trioserve.contracts.ids import RequestId
from trioserve.contracts.request import KVTransferParams
from trioserve.contracts.sampling import SamplingParams
from trioserve.testing.fake_engine import FakeEngine, open_fake_engine
from trioserve.testing.inline_work import seeded_schedule
from trioserve.testing.invariants import check_core
from trioserve.testing.scripted_connector import ScriptedConnector

CLIENTS = 24
HOLD_SECONDS, LOAD_SECONDS = 1.0, 0.5


class History:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.is_over = False

    def seconds(self) -> float:
        return self.random.choice((0.0, 0.005, 0.02, 0.1, 0.4))

    async def client(self, fake: FakeEngine, number: int) -> None:
        draw = self.random
        await trio.sleep(draw.random())
        asked = draw.choice((None, KVTransferParams(do_remote_decode=True), KVTransferParams(do_remote_prefill=True)))
        sampling = SamplingParams(
            max_tokens=draw.choice((0, 1, 1, 5, 20)), stop=draw.choice(((), ("a", "e", "i"))), seed=number
        )
        prompt = f"{draw.randrange(4)} prompt {'x' * draw.randrange(40)}"
        with trio.move_on_after(draw.choice((self.seconds(), 100.0))):
            try:
                stream = fake.generate(prompt, sampling, kv_transfer=asked, request_id=f"c{draw.randrange(CLIENTS)}")
                async with stream:
                    last = None
                    async for delta in stream:
                        assert last is None or last.finish_reason is None
                        last = delta
                    assert last is not None
                    if last.kv_transfer is not None:
                        assert last.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
                        assert asked is not None
                        assert asked.do_remote_decode
                    else:
                        await trio.sleep(0.05)  # A step that was planned ahead has ended.
                        assert not stream.is_held, "nobody knows how to get at what is held"
                    way = draw.randrange(3)
                    if way == 0:
                        await stream.wait_until_released()
                        assert not stream.is_held
                    elif way == 1:
                        stream.keep_hold()
            except Overloaded:
                pass

    async def connector(self, fake: FakeEngine) -> None:
        draw, connector = self.random, fake.connector
        while not self.is_over:
            await trio.sleep(draw.choice((0.001, 0.01, 0.05)))
            check_core(fake.core)
            connector.work()
            for request_id in list(connector.sends):
                if draw.random() < 0.2:
                    connector.report(partial(connector.released, request_id))
                    if draw.random() < 0.2:
                        connector.report(partial(connector.released, request_id))
            for request_id in list(connector.loads):
                chance = draw.random()
                if chance < 0.2:
                    connector.report(partial(connector.loaded, request_id, draw.choice((None, 0, 3))))
                elif chance < 0.3:
                    connector.report(partial(connector.load_failed, request_id))
            if draw.random() < 0.05:
                connector.report(partial(connector.released, RequestId("nobody")))
            live = fake.live_requests()
            if live and draw.random() < 0.2:
                fake.abort([draw.choice(live).id])
            wanted = [send for send in connector.sends.values() if not send.is_aborted]
            held = [view for view in fake.live_requests() if view.state == "held"]
            assert len(wanted) <= len(held), "blocks are held, and nobody is left who could want them"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_history_of_kv_transfers_frees_everything(seed):
    history = History(seed)
    overlap_steps = seed % 2 == 1

    async def live() -> None:
        async with open_fake_engine(
            connector=ScriptedConnector,
            overlap_steps=overlap_steps,
            step_seconds=0.01,
            block_count=40,
            max_num_seqs=4,
            max_queued_requests=6,
            kv_hold_timeout=HOLD_SECONDS,
            kv_load_timeout=LOAD_SECONDS,
            kv_load_failure_policy="fail" if seed % 3 == 0 else "recompute",
        ) as fake:
            with trio.fail_after(60):
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(history.connector, fake)
                    async with trio.open_nursery() as clients:
                        for number in range(CLIENTS):
                            clients.start_soon(history.client, fake, number)
                    history.is_over = True
                await fake.wait_until_idle()
                # Abandoned loads and unreleased holds are unknown to all clients. They end at their deadlines.
                await trio.sleep(HOLD_SECONDS + 0.1)
            await wait_all_tasks_blocked()
            fake.connector.check()
            fake.assert_all_free()
            assert fake.live_requests() == []

    with seeded_schedule(seed):
        trio.run(live, clock=trio.testing.MockClock(autojump_threshold=0))
