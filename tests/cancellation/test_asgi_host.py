"""Tests the app in an ASGI host that reports a disconnect.

In each state of the handler, its cancel scope ends and the blocks of its request are freed. The handler does not poll
for the disconnect.
"""

from __future__ import annotations

import contextlib
import itertools
import json

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.api.routes import App
from trioserve.http.asgi.app import AsgiApp
from trioserve.testing.fake_engine import open_fake_engine
from trioserve.testing.invariants import check_idle

STEP_SECONDS = 0.01


class Host:
    """An ASGI host that forwards one request to the app.

    Args:
        app: the app under test.
        body: body of the request.
        takes: True to accept the messages that the app sends. False to block each send forever.
    """

    def __init__(self, app: AsgiApp, body: bytes = b"{}", *, takes: bool = True) -> None:
        self.app = app
        self.takes = takes
        self.sent: list[dict] = []
        self._put, self._messages = trio.open_memory_channel(10)
        self._put.send_nowait({"type": "http.request", "body": body, "more_body": False})

    def disconnect(self) -> None:
        self._put.send_nowait({"type": "http.disconnect"})

    async def run(self) -> None:
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "query_string": b"",
            "headers": [(b"host", b"localhost")],
            "http_version": "2",
            "client": ("192.0.2.7", 99),
        }
        await self.app(scope, self._messages.receive, self._send)

    async def _send(self, message) -> None:
        if not self.takes:
            await trio.sleep_forever()
        await trio.lowlevel.checkpoint()
        self.sent.append(message)


async def only_sends(exchange):
    await exchange.start(200, [])
    while True:
        await exchange.send(b"more")
        await trio.sleep(STEP_SECONDS)


async def only_sends_to_a_host_that_accepts_nothing(exchange):
    await exchange.start(200, [])
    while True:
        await exchange.send(bytes(10_000))


async def only_waits(exchange):
    await trio.sleep_forever()


async def only_computes(exchange):
    for _ in itertools.count():
        await trio.sleep(STEP_SECONDS)


async def waits_in_tasks_of_its_own(exchange):
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(trio.sleep_forever)


async def catches_every_exception(exchange):
    while True:
        with contextlib.suppress(Exception):
            await trio.sleep_forever()


HANDLERS = [
    only_sends,
    only_sends_to_a_host_that_accepts_nothing,
    only_waits,
    only_computes,
    waits_in_tasks_of_its_own,
    catches_every_exception,
]


@pytest.mark.parametrize("handler", HANDLERS, ids=lambda handler: handler.__name__)
async def test_disconnect_cancels_a_handler_that_sends_waits_computes_or_catches_exceptions(handler, autojump_clock):
    """Scenario S43 of tests/README.md: a disconnect is noticed whatever the handler does."""
    ended_at = []

    async def watched(exchange):
        try:
            await handler(exchange)
        finally:
            ended_at.append(trio.current_time())

    app = AsgiApp(watched)
    host = Host(app, takes=handler is not only_sends_to_a_host_that_accepts_nothing)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(host.run)
        await trio.sleep(0.105)
        assert app.counters().exchanges_open == 1
        left_at = trio.current_time()
        host.disconnect()
    assert ended_at == [left_at]
    assert app.counters().exchanges_open == 0
    assert app.counters().exchanges_left_total == 1


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("takes", [True, False], ids=["takes", "takes nothing"])
@pytest.mark.parametrize("steps_before", [0, 1, 5], ids=lambda count: f"{count} steps")
async def test_disconnect_frees_the_blocks_when_the_step_in_flight_ends(stream, takes, steps_before, autojump_clock):
    """Scenarios S28 and S43 of tests/README.md: responses are streamed or not, the step is a prefill or a decode, and
    the host may accept no messages.
    """
    async with open_fake_engine(max_num_batched_tokens=16) as fake, trio.open_nursery() as nursery:
        app = AsgiApp(App(fake))
        asked = {"prompt": "a prompt of two chunks and more", "max_tokens": 50, "ignore_eos": True, "stream": stream}
        host = Host(app, json.dumps(asked).encode(), takes=takes)
        fake.steps.hold()
        nursery.start_soon(host.run)
        await fake.steps.entered()
        for _ in range(steps_before):
            fake.steps.release()
            fake.steps.hold()
            await wait_all_tasks_blocked()
        used = fake.core.stats().blocks_used
        assert used > 0
        host.disconnect()
        await wait_all_tasks_blocked()
        assert app.counters().exchanges_open == 0
        assert fake.core.stats().blocks_used == used, "the forward pass still reads them"
        fake.steps.release()
        await wait_all_tasks_blocked()
        assert fake.steps.step_count == steps_before + 1
        check_idle(fake.core)
        assert not nursery.child_tasks
