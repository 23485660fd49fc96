"""The door between the processes of one router: what it tells, and to whom."""

from __future__ import annotations

from contextlib import asynccontextmanager

import trio

from trioserve.contracts.endpoint import EndpointId
from trioserve.http.listener import open_listeners
from trioserve.http.server import FrontendServer
from trioserve.proxy.kept_objects import KeptObject, KeptObjects
from trioserve.proxy.peers.processes import OtherProcesses, ProcessDoor, ProcessPlace
from trioserve.proxy.remote_endpoint import EndpointAddress, RemoteEndpoint

KEPT = KeptObject(EndpointId("b"), "somebody")


async def app(exchange):
    await exchange.respond(200, [], b"the app")


@asynccontextmanager
async def opened(secret: str = "s"):
    """The door of process 2, and what process 1 asks with."""
    kept = KeptObjects()
    kept.remember("resp_1", KEPT)
    [listener] = await open_listeners("127.0.0.1", 0)
    port = listener.socket.getsockname()[1]
    async with trio.open_nursery() as nursery:
        await nursery.start(FrontendServer(ProcessDoor(app, kept, "s")).serve, [listener])
        others = OtherProcesses(ProcessPlace(number=1, doors=(0, port), run="run", secret=secret))
        yield others, port
        others.close()
        nursery.cancel_scope.cancel()


async def test_a_process_finds_what_was_made_through_another_one():
    async with opened() as (others, _):
        assert await others.find_kept("resp_1") == KEPT
        assert await others.find_kept("resp_2") is None
        assert await others.find_kept("../peer") is None


async def test_who_does_not_know_the_secret_is_refused():
    async with opened(secret="wrong") as (others, port):
        assert await others.find_kept("resp_1") is None
        stranger = RemoteEndpoint(EndpointId("x"), EndpointAddress.parse(f"http://127.0.0.1:{port}"))
        for path in ("/process/kept/resp_1", "/v1/requests", "/metrics"):
            async with stranger.request("GET", path, [], b"") as response:
                assert response.status == 403
        stranger.close()


async def test_a_process_that_does_not_answer_is_left_out():
    async with opened() as (_, port):
        pass
    others = OtherProcesses(ProcessPlace(number=1, doors=(0, port), run="run", secret="s"))
    assert await others.find_kept("resp_1") is None
