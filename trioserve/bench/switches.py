"""Measures a server with two models and memory for one of them: switches, lost requests, and memory that is left.

The server is a separate process, and so is each loaded model.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from statistics import median

import msgspec
import trio

from trioserve.bench.client import Failure
from trioserve.bench.report import Machine, measured_at, report_json
from trioserve.bench.runner import (
    EXIT_UNREACHABLE,
    CannotMeasure,
    Measured,
    PlainResponse,
    ServerProcess,
    ask,
    conclude,
    http1_client,
    memory_bytes,
    print_progress,
)
from trioserve.bench.server_settings import SwitchSettings
from trioserve.bench.settings import Target

__all__ = ["SwitchFigures", "SwitchReport", "main", "switch_text"]

NAMES = ("a", "b")
PROMPT = "Once upon a time"


class SwitchFigures(msgspec.Struct, kw_only=True):
    """Times and counts that the clients of one server observed.

    In the storm, many clients send requests for random models, and half of the clients leave at a random time.

    Attributes:
        switch_seconds: times of requests whose model was not loaded, so that the other model had to be unloaded first.
        loaded_seconds: times of similar requests whose model was loaded.
        answered: requests of the storm that were answered.
        left: clients of the storm that left before their response.
        lost: requests of the storm that failed, by reason.
    """

    switch_seconds: list[float] = []
    loaded_seconds: list[float] = []
    answered: int = 0
    left: int = 0
    lost: dict[str, int] = {}

    def storm_text(self) -> str:
        """Return the outcomes of the storm's requests as text."""
        lost = ", ".join(f"{count} {reason}" for reason, count in self.lost.items()) or "none"
        return f"{self.answered} answered, {self.left} clients left, lost: {lost}"


class SwitchReport(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one measurement.

    Attributes:
        server, peer: figures of each server. The peer is None if none was measured.
        storm_switches: loads during the storm at this server.
        memory_before_bytes: resident memory of the server before the first load.
        memory_after_bytes: the same after all models were unloaded.
        processes_after: processes of models that still ran after all models were unloaded.
    """

    settings: SwitchSettings
    date: str = msgspec.field(default_factory=measured_at)
    machine: Machine = msgspec.field(default_factory=Machine.here)
    server: SwitchFigures
    peer: SwitchFigures | None
    storm_switches: int
    memory_before_bytes: int | None
    memory_after_bytes: int | None
    processes_after: int


def main(settings: SwitchSettings) -> int:
    """Measure, print the report, and return the exit code of bench: 1 if a request was lost.

    Args:
        settings: settings of the measurement.
    """
    words = ["serve", *(word for name in NAMES for word in ("--model", f"{name}={settings.model},memory=1"))]
    words += ["--models-memory", "1.5", "--model-turn", str(settings.turn_seconds), "--max-queue-wait", "3600"]
    words += ["--kv-cache-memory", "0.25", "--max-queued-requests", "100000", *settings.server_flags]
    with ServerProcess("server", words) as server:
        report = trio.run(_measure, settings, server)
    return conclude(Measured(report, 1 if report.server.lost else 0), settings.json_path, switch_text, report_json)


def switch_text(report: SwitchReport) -> str:
    """Return the report for people."""
    memory = "not reported by the system"
    if report.memory_before_bytes is not None and report.memory_after_bytes is not None:
        before, after = report.memory_before_bytes / 2**20, report.memory_after_bytes / 2**20
        memory = f"{before:.0f} MiB before the first load, {after:.0f} MiB after all unloads"
    return "\n".join(
        [
            "| request | median, s | least | most |",
            "|---|---|---|---|",
            *_rows(report.server, ""),
            *(_rows(report.peer, " (peer)") if report.peer else ()),
            "",
            f"Storm: {report.server.storm_text()}, {report.storm_switches} loads.",
            *([f"Storm at the peer: {report.peer.storm_text()}."] if report.peer else ()),
            f"Server: {memory}; {report.processes_after} processes of models left.",
            "",
            f"{report.machine}, {report.date}; two models from {report.settings.model}, "
            f"{report.settings.rounds} rounds, {report.settings.pause_seconds:g} s between two switches.",
        ]
    )


def _rows(figures: SwitchFigures, suffix: str) -> list[str]:
    rows = (("its model has to be loaded", figures.switch_seconds), ("its model is loaded", figures.loaded_seconds))
    return [
        f"| {what}{suffix} | {median(seconds):.3f} | {min(seconds):.3f} | {max(seconds):.3f} |"
        for what, seconds in rows
    ]


async def _measure(settings: SwitchSettings, server: ServerProcess) -> SwitchReport:
    await server.wait_until_ready(settings.timeout_seconds)
    clients = _Clients(settings, server.url)
    peer_clients = None if settings.peer is None else _Clients(settings, settings.peer)
    memory_before = memory_bytes(server.pid)[0]
    for number in range(settings.rounds + 1):
        for each in filter(None, (clients, peer_clients)):
            await each.switch_models(f"round {number} at {each.target.authority}", counts=number > 0)
    loads_before = await clients.load_count()
    await clients.storm()
    storm_switches = await clients.load_count() - loads_before
    for name in NAMES:
        await clients.post("/models/unload", {"model": name})
    if peer_clients is not None:
        await peer_clients.storm()
    return SwitchReport(
        settings=settings,
        server=clients.figures,
        peer=None if peer_clients is None else peer_clients.figures,
        storm_switches=storm_switches,
        memory_before_bytes=memory_before,
        memory_after_bytes=memory_bytes(server.pid)[0],
        processes_after=_process_count(server.pid),
    )


class _Clients:
    """Clients of one server.

    Args:
        settings: settings of the measurement.
        url: address of the server.

    Attributes:
        target: the server.
        figures: figures so far.
    """

    def __init__(self, settings: SwitchSettings, url: str) -> None:
        self._settings = settings
        self.target = Target.from_url(url)
        self._rng = random.Random(settings.seed)
        self.figures = SwitchFigures()

    async def switch_models(self, label: str, *, counts: bool) -> None:
        """Request each model twice. The first request needs a switch.

        Args:
            label: name of the round in the line of progress.
            counts: False for a round that fills caches of files and compiles kernels.
        """
        for name in NAMES:
            await trio.sleep(self._settings.pause_seconds)
            first, second = await self.timed(name), await self.timed(name)
            if counts:
                self.figures.switch_seconds.append(first)
                self.figures.loaded_seconds.append(second)
        print_progress(f"{label}: {first:.2f} s with a switch, {second:.3f} s without")

    async def post(self, path: str, body: object) -> PlainResponse | Failure:
        client = http1_client(self.target)
        try:
            raw = msgspec.json.encode(body)
            return await ask(client, self.target, path, seconds_max=3600, method="POST", body=raw)
        finally:
            with trio.move_on_after(1) as closing:
                closing.shield = True
                await client.aclose()

    async def timed(self, name: str) -> float:
        """Return the seconds of one request. Raise CannotMeasure if it fails."""
        began_at = time.perf_counter()
        response = await self.post("/v1/completions", self._body(name, 1))
        if isinstance(response, Failure) or response.status != 200:
            raise CannotMeasure(f"a request for the model {name} failed: {_reason(response)}", EXIT_UNREACHABLE)
        return time.perf_counter() - began_at

    async def load_count(self) -> int:
        """Return the loads of all models since the start of the server."""
        client, total = http1_client(self.target), 0
        response = await ask(client, self.target, "/metrics", seconds_max=60)
        await client.aclose()
        if isinstance(response, Failure):
            raise CannotMeasure(f"the metrics cannot be read: {response.message}", EXIT_UNREACHABLE)
        for line in response.text().splitlines():
            if "hosted_model_loads_total{" in line and 'outcome="loaded"' in line:
                total += int(float(line.rpartition(" ")[2]))
        return total

    async def storm(self) -> None:
        """Send requests for a random model from many clients, of which half leave at a random time."""
        async with trio.open_nursery() as nursery:
            for _ in range(self._settings.clients):
                leaves = self._rng.random() < 0.5
                leaves_after = self._rng.uniform(0, 2 * self._settings.turn_seconds) if leaves else None
                nursery.start_soon(self._send, self._rng.choice(NAMES), leaves_after)
                await trio.sleep(self._rng.expovariate(self._settings.rate_per_second))

    async def _send(self, name: str, leaves_after: float | None) -> None:
        response: PlainResponse | Failure | None = None
        with trio.move_on_after(3600 if leaves_after is None else leaves_after):
            response = await self.post("/v1/completions", self._body(name, self._settings.output_tokens))
        if response is None:
            self.figures.left += 1
        elif isinstance(response, Failure) or response.status != 200:
            lost = self.figures.lost
            lost[_reason(response)] = lost.get(_reason(response), 0) + 1
        else:
            self.figures.answered += 1

    def _body(self, name: str, token_count: int) -> dict[str, object]:
        return {"model": name, "prompt": PROMPT, "max_tokens": token_count, "ignore_eos": True}


def _reason(response: PlainResponse | Failure) -> str:
    return str(response.message) if isinstance(response, Failure) else f"status {response.status}"


def _process_count(pid: int) -> int:
    """Return the processes of models. The server's process on standby is none of them."""
    children = " ".join(file.read_text(encoding="ascii") for file in Path(f"/proc/{pid}/task").glob("*/children"))
    return sum(Path(f"/proc/{child}/comm").read_text(encoding="utf-8").strip() in NAMES for child in children.split())
