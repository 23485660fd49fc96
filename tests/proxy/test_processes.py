"""Tests the internal port between the processes of one router: its responses, and the callers that it accepts."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager
from types import SimpleNamespace

import pytest
import trio

from trioserve.contracts.endpoint import EndpointId
from trioserve.http.listener import open_listeners
from trioserve.http.server import FrontendServer
from trioserve.proxy.peers.processes import KeptObject, KeptObjects, OtherProcesses, ProcessDoor, ProcessPlace
from trioserve.proxy.remote_endpoint import EndpointAddress, RemoteEndpoint

KEPT = KeptObject(EndpointId("b"), "somebody")


async def app(exchange):
    await exchange.respond(200, [], b"the app")


@asynccontextmanager
async def opened(secret: str = "s"):
    """Open the internal port of process 2, and the connections of process 1 to this port."""
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


async def test_process_finds_an_object_created_through_another_process():
    async with opened() as (others, _):
        assert await others.find_kept("resp_1") == KEPT
        assert await others.find_kept("resp_2") is None
        assert await others.find_kept("../peer") is None


async def test_request_without_the_secret_is_refused():
    async with opened(secret="wrong") as (others, port):
        assert await others.find_kept("resp_1") is None
        stranger = RemoteEndpoint(EndpointId("x"), EndpointAddress.parse(f"http://127.0.0.1:{port}"))
        for path in ("/process/kept/resp_1", "/v1/requests", "/metrics"):
            async with stranger.request("GET", path, [], b"") as response:
                assert response.status == 403
        stranger.close()


async def test_process_that_does_not_answer_is_skipped():
    async with opened() as (_, port):
        pass
    others = OtherProcesses(ProcessPlace(number=1, doors=(0, port), run="run", secret="s"))
    assert await others.find_kept("resp_1") is None


class Processes:
    """Three processes of a router. Each has a table, in which a name can be set once."""

    def __init__(self) -> None:
        self.tables: list[dict[str, str]] = [{}, {}, {}]
        self.others: list[OtherProcesses] = []

    async def set(self, number: int, body: bytes, headers: dict[str, str] | None = None) -> int:
        """Ask process `number` to set a name. Return the status of the response."""
        name, value = body.decode().split("=")

        def apply() -> None:
            if name in self.tables[number - 1]:
                raise ValueError(name)
            self.tables[number - 1][name] = value

        exchange = SimpleNamespace(method="POST", path="/set", query="", headers=headers or {})
        context = SimpleNamespace(exchange=exchange, request_id="r")
        try:
            decided = await self.others[number - 1].change(context, body, apply)
        except ValueError:
            return 400
        return 201 if decided is None else decided.status


@asynccontextmanager
async def opened_processes():
    processes = Processes()
    async with AsyncExitStack() as stack, trio.open_nursery() as nursery:
        ports = []
        for number in range(1, 4):

            async def app(exchange, number=number):
                status = await processes.set(number, await exchange.body(), exchange.headers)
                await exchange.respond(status, [], b"")

            [listener] = await open_listeners("127.0.0.1", 0)
            ports.append(listener.socket.getsockname()[1])
            await nursery.start(FrontendServer(ProcessDoor(app, KeptObjects(), "s")).serve, [listener])
        for number in range(1, 4):
            place = ProcessPlace(number=number, doors=tuple(ports), run="run", secret="s")
            processes.others.append(OtherProcesses(place))
            stack.callback(processes.others[-1].close)
        yield processes
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("numbers", [(1, 2), (2, 3), (3, 3), (1, 1)])
async def test_concurrent_changes_leave_all_processes_equal(numbers):
    async with opened_processes() as processes:
        statuses = []

        async def change(number: int, value: str) -> None:
            statuses.append(await processes.set(number, f"a={value}".encode()))

        async with trio.open_nursery() as nursery:
            for number, value in zip(numbers, "xy", strict=True):
                nursery.start_soon(change, number, value)
        assert sorted(statuses) == [201, 400]
        assert len(processes.tables[0]) == 1
        assert processes.tables[0] == processes.tables[1] == processes.tables[2]


async def test_change_whose_client_leaves_is_made_in_all_processes_or_in_none():
    async with opened_processes() as processes:
        with trio.CancelScope() as scope:
            tables = processes.tables[0]

            class Leaving(dict):
                def __setitem__(self, name, value):
                    super().__setitem__(name, value)
                    scope.cancel()

            processes.tables[0] = Leaving(tables)
            await processes.set(1, b"a=x")
        assert scope.cancel_called
        assert processes.tables == [{"a": "x"}] * 3
