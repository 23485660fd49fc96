"""Endpoints behind relays, the router before them, and the interruptions of endpoints."""

from __future__ import annotations

import enum
import pathlib
from collections import Counter
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

import msgspec
import trio

from trioserve.bench.client import Failure
from trioserve.bench.runner import Scrape, ServerProcess, ask, http1_client, start_all
from trioserve.bench.server_settings import SurviveSettings
from trioserve.bench.settings import Target
from trioserve.bench.survive_plan import Interruption, InterruptionKind
from trioserve.trio_tools.tcp_stream import connect_tcp

__all__ = [
    "Cable",
    "Endpoint",
    "Relay",
    "SurviveFleet",
    "open_fleet",
]

CHUNK_BYTES = 65_536
READY_SECONDS_MAX = 180.0
GONE = frozenset({None})  # The router no longer lists the endpoint.
QUIET_SECONDS_MAX = 60.0  # time in which all servers must have released everything
QUIET_PERIOD_SECONDS = 0.2
GONE_SECONDS_MAX = 30.0  # time for moving the streams of a draining endpoint
WELL_SECONDS_MAX = 60.0  # time in which the router must use a returned endpoint again
ASK_SECONDS_MAX = 10.0
TAKES_REQUESTS = frozenset({"healthy", "probing"})
"""Health of an endpoint that gets requests. Without requests, an endpoint that has passed a probe stays "probing"."""


class Cable(enum.Enum):
    WHOLE = "whole"
    CUT = "cut"  # All connections break, and new connections fail.
    SILENT = "silent"  # Connections stay open, and new connections succeed, but no byte arrives.


class Relay:
    """Accepts connections at `port` of 127.0.0.1 and forwards their bytes to and from another port there.

    Args:
        target_port: port of the endpoint.
    """

    def __init__(self, target_port: int) -> None:
        self.port = 0
        self._target_port = target_port
        self._cable = Cable.WHOLE
        self._passes = trio.Event()
        self._passes.set()
        self._scopes: set[trio.CancelScope] = set()

    def set_cable(self, cable: Cable) -> None:
        if self._cable is Cable.SILENT:
            self._passes.set()
        if cable is Cable.SILENT:
            self._passes = trio.Event()
        self._cable = cable
        if cable is Cable.CUT:
            for scope in self._scopes:
                scope.cancel()

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until this call is cancelled. Cancellation breaks every connection.

        Args:
            task_status: started when the relay listens.
        """
        [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
        self.port = listener.socket.getsockname()[1]
        await trio.serve_listeners(self._connect, [listener], task_status=_Started(task_status))

    async def _connect(self, near: trio.SocketStream) -> None:
        with trio.CancelScope() as scope:
            self._scopes.add(scope)
            far: trio.SocketStream | None = None
            try:
                if self._cable is Cable.CUT:
                    return
                await self._passes.wait()
                far = await connect_tcp("127.0.0.1", self._target_port)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._pass_on, near, far, nursery.cancel_scope)
                    nursery.start_soon(self._pass_on, far, near, nursery.cancel_scope)
            except OSError:
                pass  # The endpoint is down, so the router's connection ends.
            finally:
                self._scopes.discard(scope)
                for stream in (near, far):
                    if stream is not None:
                        stream.socket.close()  # This call closes at once, even in a cancelled scope.

    async def _pass_on(self, source: trio.SocketStream, to: trio.SocketStream, both: trio.CancelScope) -> None:
        try:
            while data := await source.receive_some(CHUNK_BYTES):
                await self._passes.wait()
                await to.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        both.cancel()


class _Started:
    """A task status that drops the listeners that serve_listeners reports."""

    def __init__(self, task_status: trio.TaskStatus[None]) -> None:
        self._task_status = task_status

    def started(self, value: object = None) -> None:
        self._task_status.started()


class Endpoint:
    """One endpoint, its process and its relay.

    Attributes:
        is_well: True if this endpoint is not interrupted now.
    """

    def __init__(self, name: str, process: ServerProcess, relay: Relay) -> None:
        self.name = name
        self.process = process
        self.relay = relay
        self.is_well = True

    @property
    def spec(self) -> dict[str, str]:
        return {"url": f"http://127.0.0.1:{self.relay.port}", "id": self.name}


class SurviveFleet:
    """All endpoints and their router.

    Attributes:
        happened: number of interruptions of each kind.
        troubles: interruptions that did not work as planned, one sentence each.
    """

    def __init__(self, endpoints: list[Endpoint], router: ServerProcess) -> None:
        self.router = router
        self.happened: Counter[InterruptionKind] = Counter()
        self.troubles: list[str] = []
        self._endpoints = endpoints
        self._recovered = trio.Event()

    # --- Interruptions ---

    async def claim_endpoint(self, interruption: Interruption) -> Endpoint:
        """Choose an endpoint for an interruption. Wait as long as it is the only endpoint without an interruption.

        Args:
            interruption: the interruption that follows.

        Returns:
            The endpoint. Its `is_well` is False now.
        """
        while True:
            well = [endpoint for endpoint in self._endpoints if endpoint.is_well]
            if len(well) > 1:
                endpoint = well[int(interruption.choice * len(well))]
                endpoint.is_well = False
                return endpoint
            self._recovered = trio.Event()
            await self._recovered.wait()

    async def interrupt(self, endpoint: Endpoint, interruption: Interruption) -> None:
        """Interrupt an endpoint, and return when the router sends it requests again.

        Args:
            endpoint: endpoint that `claim_endpoint` returned.
            interruption: what happens.
        """
        self.happened[interruption.kind] += 1
        try:
            if interruption.kind is InterruptionKind.KILL:
                endpoint.process.kill()
                await trio.sleep(interruption.seconds)
                endpoint.process.start()
                await endpoint.process.wait_until_ready(READY_SECONDS_MAX)
            elif interruption.kind is InterruptionKind.STOP:
                endpoint.process.stop()
                try:
                    await trio.sleep(interruption.seconds)
                finally:
                    endpoint.process.proceed()
            elif interruption.kind is InterruptionKind.DRAIN:
                await self._move_away(endpoint, interruption.seconds)
            else:
                cut = Cable.CUT if interruption.kind is InterruptionKind.DROP else Cable.SILENT
                endpoint.relay.set_cable(cut)
                try:
                    await trio.sleep(interruption.seconds)
                finally:
                    endpoint.relay.set_cable(Cable.WHOLE)
            await self.wait_until_well(endpoint)
        finally:
            endpoint.is_well = True
            self._recovered.set()

    async def _move_away(self, endpoint: Endpoint, seconds: float) -> None:
        status, said = await self.ask("POST", f"/endpoints/{endpoint.name}/drain?move=true")
        if status != 200:
            self.troubles.append(f"draining {endpoint.name}: status {status}, {said[:200]!r}")
            return
        with trio.move_on_after(GONE_SECONDS_MAX) as patience:
            await self._wait_for_health(endpoint, GONE)
        if patience.cancelled_caught:
            self.troubles.append(f"{endpoint.name} was not empty {GONE_SECONDS_MAX:g} s after its drain began")
        await trio.sleep(seconds)
        status, said = await self.ask("POST", "/endpoints", msgspec.json.encode(endpoint.spec))
        if status != 201:
            self.troubles.append(f"adding {endpoint.name} again: status {status}, {said[:200]!r}")

    async def wait_until_well(self, endpoint: Endpoint) -> None:
        with trio.move_on_after(WELL_SECONDS_MAX) as patience:
            await self._wait_for_health(endpoint, TAKES_REQUESTS)
        if patience.cancelled_caught:
            self.troubles.append(f"{endpoint.name} got no requests again within {WELL_SECONDS_MAX:g} s")

    async def _wait_for_health(self, endpoint: Endpoint, wanted: Collection[str | None]) -> None:
        while True:
            healths = await self._healths()
            if healths is not None and healths.get(endpoint.name) in wanted:
                return
            await trio.sleep(QUIET_PERIOD_SECONDS)

    async def _healths(self) -> dict[str, str] | None:
        """Ask the router for the health of each endpoint.

        Returns:
            Health by name of the endpoint, or None if the router gave no list.
        """
        status, said = await self.ask("GET", "/endpoints")
        if status != 200:
            return None
        return {one["id"]: str(one.get("health")) for one in msgspec.json.decode(said)["data"]}

    # --- Requests to the router and the endpoints ---

    async def ask(self, method: str, path: str, body: bytes = b"", *, port: int | None = None) -> tuple[int, bytes]:
        """Send one request and read the whole response.

        Args:
            method: HTTP method.
            path: path and query.
            body: body of the request.
            port: port of the server. None: the router's.

        Returns:
            Status and body. Status 0 means that no response came; then the body has the reason.
        """
        target = Target.from_url(f"http://127.0.0.1:{port or self.router.port}")
        client = http1_client(target)
        try:
            response = await ask(client, target, path, seconds_max=ASK_SECONDS_MAX, method=method, body=body)
        finally:
            await client.aclose()
        if isinstance(response, Failure):
            return 0, response.message.encode()
        return response.status, response.text().encode()

    async def scrape_router(self) -> Scrape:
        return Scrape((await self.ask("GET", "/metrics"))[1].decode())

    async def left_behind(self) -> dict[str, float]:
        """Wait until router and endpoints have released everything.

        Returns:
            Counts that are still not 0 after `QUIET_SECONDS_MAX`, by name. Empty: everything was released.
        """
        left: dict[str, float] = {"the router does not answer": 1.0}
        with trio.move_on_after(QUIET_SECONDS_MAX):
            while left:
                left = await self._left_now()
                if left:
                    await trio.sleep(QUIET_PERIOD_SECONDS)
        return left

    async def _left_now(self) -> dict[str, float]:
        found: dict[str, float] = {}
        router = await self.scrape_router()
        for name in ("endpoint_leases", "endpoint_in_flight", "queued_requests", "continuing_requests"):
            found[f"router: {name}"] = _shown(router, f"trioserve_router:{name}")
        found["router: continuation_bytes_held"] = _shown(router, "trioserve_router:continuation_bytes_held")
        for endpoint in self._endpoints:
            said = Scrape((await self.ask("GET", "/metrics", port=endpoint.process.port))[1].decode())
            for state in ("used", "held"):
                found[f"{endpoint.name}: {state} blocks"] = _shown(said, "trioserve:kv_blocks", state=state)
            for name in ("live_requests", "num_requests_running", "num_requests_waiting"):
                found[f"{endpoint.name}: {name}"] = _shown(said, f"trioserve:{name}")
        return {name: value for name, value in found.items() if value}


def _shown(scrape: Scrape, name: str, **labels: str) -> float:
    """Return the value of a metric, or -1 if it does not exist."""
    value = scrape.total(name, **labels)
    return -1.0 if value is None else value


@asynccontextmanager
async def open_fleet(settings: SurviveSettings) -> AsyncIterator[SurviveFleet]:
    """Start endpoints and router, and kill all processes at the end.

    Args:
        settings: settings of the run.

    Raises:
        CannotMeasure: a server did not become ready.
    """
    words = ["serve", "--host", "127.0.0.1", "--model", settings.model, "--served-model-name", "survive"]
    names = [f"e{index}" for index in range(settings.endpoints)]
    logs = None if settings.log_directory is None else pathlib.Path(settings.log_directory)
    if logs is not None:
        logs.mkdir(parents=True, exist_ok=True)
    processes = [ServerProcess(name, [*words, *settings.server_flags], log_directory=logs) for name in names]
    relays = [Relay(process.port) for process in processes]
    endpoints = [Endpoint(*parts) for parts in zip(names, processes, relays, strict=True)]
    router: ServerProcess | None = None
    try:
        async with trio.open_nursery() as nursery:
            for relay in relays:
                await nursery.start(relay.serve)
            named = [f"--endpoint={endpoint.name}={endpoint.spec['url']}" for endpoint in endpoints]
            routing = ["route", "--host", "127.0.0.1", *named, *settings.router_flags]
            router = ServerProcess("router", routing, log_directory=logs)
            await start_all(processes, seconds_max=READY_SECONDS_MAX)
            await start_all([router], seconds_max=READY_SECONDS_MAX)
            fleet = SurviveFleet(endpoints, router)
            for endpoint in endpoints:
                await fleet.wait_until_well(endpoint)
            yield fleet
            nursery.cancel_scope.cancel()
    finally:
        for process in [*processes, *([] if router is None else [router])]:
            process.close()
