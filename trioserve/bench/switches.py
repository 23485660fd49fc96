"""Measures a server with two models and memory for one of them: switches, lost requests, and memory that is left.

The server is a separate process, and so is each loaded model.
"""

from __future__ import annotations

import random
import time
from collections import Counter
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
    ask,
    conclude,
    http1_client,
    print_progress,
)
from trioserve.bench.server_process import ServerProcess, memory_bytes
from trioserve.bench.server_settings import SwitchSettings
from trioserve.bench.settings import Target

__all__ = ["SwitchReport", "main", "switch_text"]

NAMES = ("a", "b")
PROMPT = "Once upon a time"


class SwitchReport(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one measurement.

    Attributes:
        switch_seconds: times of requests whose model was not loaded, so that the other model had to be unloaded first.
        loaded_seconds: times of similar requests whose model was loaded.
        answered: requests of the storm that were answered.
        left: clients of the storm that left before their response.
        lost: requests of the storm that failed, by reason.
        storm_switches: loads during the storm.
        memory_before_bytes: resident memory of the server before the first load.
        memory_after_bytes: the same after all models were unloaded.
        processes_after: processes of models that were left then.
    """

    settings: SwitchSettings
    date: str = msgspec.field(default_factory=measured_at)
    machine: Machine = msgspec.field(default_factory=Machine.here)
    switch_seconds: list[float]
    loaded_seconds: list[float]
    answered: int
    left: int
    lost: dict[str, int]
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
    return conclude(Measured(report, 1 if report.lost else 0), settings.json_path, switch_text, report_json)


def switch_text(report: SwitchReport) -> str:
    """Return the report for people.

    Args:
        report: the report.
    """
    lost = ", ".join(f"{count} {reason}" for reason, count in report.lost.items()) or "none"
    memory = "not reported by the system"
    if report.memory_before_bytes is not None and report.memory_after_bytes is not None:
        before, after = report.memory_before_bytes / 2**20, report.memory_after_bytes / 2**20
        memory = f"{before:.0f} MiB before the first load, {after:.0f} MiB after all unloads"
    return "\n".join(
        [
            "| request | median, s | least | most |",
            "|---|---|---|---|",
            _row("its model has to be loaded", report.switch_seconds),
            _row("its model is loaded", report.loaded_seconds),
            "",
            f"Storm: {report.answered} answered, {report.left} clients left, lost: {lost}, "
            f"{report.storm_switches} loads.",
            f"Server: {memory}; {report.processes_after} processes of models left.",
            "",
            f"{report.machine}, {report.date}; two models from {report.settings.model}, "
            f"{report.settings.rounds} rounds.",
        ]
    )


def _row(what: str, seconds: list[float]) -> str:
    return f"| {what} | {median(seconds):.3f} | {min(seconds):.3f} | {max(seconds):.3f} |"


async def _measure(settings: SwitchSettings, server: ServerProcess) -> SwitchReport:
    await server.wait_until_ready(settings.timeout_seconds)
    measurement = _Measurement(settings, server)
    memory_before = memory_bytes(server.pid)[0]
    switches, loaded = [], []
    for number in range(settings.rounds + 1):
        for name in NAMES:
            first, second = await measurement.timed(name), await measurement.timed(name)
            if number:  # The first round fills caches of files and compiles kernels.
                switches.append(first)
                loaded.append(second)
        print_progress(f"round {number}: {first:.2f} s with a switch, {second:.3f} s without")
    loads_before = await measurement.load_count()
    await measurement.storm()
    storm_switches = await measurement.load_count() - loads_before
    for name in NAMES:
        await measurement.post("/models/unload", {"model": name})
    return SwitchReport(
        settings=settings,
        switch_seconds=switches,
        loaded_seconds=loaded,
        answered=measurement.answered,
        left=measurement.left,
        lost=dict(measurement.lost),
        storm_switches=storm_switches,
        memory_before_bytes=memory_before,
        memory_after_bytes=memory_bytes(server.pid)[0],
        processes_after=_child_count(server.pid),
    )


class _Measurement:
    """Sends the requests of one measurement.

    Attributes:
        answered, left, lost: see SwitchReport.
    """

    def __init__(self, settings: SwitchSettings, server: ServerProcess) -> None:
        self._settings = settings
        self._target = Target.from_url(server.url)
        self._rng = random.Random(settings.seed)
        self.answered = self.left = 0
        self.lost: Counter[str] = Counter()

    async def post(self, path: str, body: object) -> PlainResponse | Failure:
        client = http1_client(self._target)
        try:
            raw = msgspec.json.encode(body)
            return await ask(client, self._target, path, seconds_max=3600, method="POST", body=raw)
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
        client, total = http1_client(self._target), 0
        response = await ask(client, self._target, "/metrics", seconds_max=60)
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
            self.left += 1
        elif isinstance(response, Failure) or response.status != 200:
            self.lost[_reason(response)] += 1
        else:
            self.answered += 1

    def _body(self, name: str, token_count: int) -> dict[str, object]:
        return {"model": name, "prompt": PROMPT, "max_tokens": token_count, "ignore_eos": True}


def _reason(response: PlainResponse | Failure) -> str:
    return str(response.message) if isinstance(response, Failure) else f"status {response.status}"


def _child_count(pid: int) -> int:
    files = Path(f"/proc/{pid}/task").glob("*/children")
    return sum(len(file.read_text(encoding="ascii").split()) for file in files)
