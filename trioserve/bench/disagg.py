"""Compares a prefill/decode pair with one server on the same cores: the latency of streams while long prompts are
computed, and the speed of KV transfers relative to a plain socket copy.

This command starts all servers as separate processes. It measures rounds of the pair and of the single server in turn,
so that other work on the machine affects both.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from statistics import median

import msgspec
import trio

from trioserve.bench.load import Load, PlannedRequest, Tally
from trioserve.bench.report import Machine, Measurement, Spread, measured_at, report_json
from trioserve.bench.runner import (
    EXIT_REQUESTS_FAILED,
    EXIT_UNREACHABLE,
    CannotMeasure,
    Measured,
    Scrape,
    ServerProcess,
    cancel_on_signal,
    conclude,
    http1_client,
    parts_so_far,
    perform,
    print_progress,
    scrape,
)
from trioserve.bench.server_settings import DisaggregatedSettings
from trioserve.bench.settings import BenchSettings, Target

__all__ = [
    "CopyFigures",
    "DisaggregatedReport",
    "RoundFigures",
    "TransferFigures",
    "copying_process",
    "disaggregated_text",
    "main",
    "seconds_to_receive",
]

READY_SECONDS_MAX = 120.0
METRICS_SECONDS_MAX = 60.0
LONG_OUTPUT_TOKENS = 8  # With several output tokens, the router sends the request to the decode server.
COPIES = 5
POLL_SECONDS = 0.01
COMPLETIONS = "/v1/completions"


class RoundFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one round, at the single server or at the pair.

    Attributes:
        is_pair: True for the pair.
        seconds: time until the response to the last long prompt was complete.
        itl_ms: inter-token latency of the streams during that time.
        ttft_ms: time to first token of the long prompts.
        output_tokens_per_second: output tokens/s of the streams.
    """

    is_pair: bool
    seconds: float
    itl_ms: Spread
    ttft_ms: Spread
    output_tokens_per_second: float


class TransferFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Counters of KV transfers, as the decode server reports them.

    Attributes:
        transfers: loads that were completed.
        blocks: received blocks.
        bytes: received bytes.
        seconds: sum of the times of all loads, which may overlap.
        failures: failed loads.
    """

    transfers: int
    blocks: int
    bytes: int
    seconds: float
    failures: int

    @property
    def bytes_per_second(self) -> float:
        return self.bytes / self.seconds if self.seconds else 0.0


class CopyFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Plain socket copies.

    Attributes:
        bytes: bytes of each copy.
        seconds: seconds of each copy.
    """

    bytes: int
    seconds: list[float]

    @property
    def bytes_per_second(self) -> float:
        return self.bytes / median(self.seconds)


class DisaggregatedReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a comparison.

    Attributes:
        settings: settings of the comparison.
        date: end of the measurement, ISO 8601.
        machine: the machine.
        rounds: the rounds.
        alone: transfers one at a time, without other requests. None: they were not measured.
        loaded: transfers during the rounds. None: they were not measured.
        copy: socket copies in turn with the transfers of `alone`. None: they were not measured.
    """

    settings: DisaggregatedSettings
    date: str = msgspec.field(default_factory=measured_at)
    machine: Machine = msgspec.field(default_factory=Machine.here)
    rounds: list[RoundFigures]
    alone: TransferFigures | None
    loaded: TransferFigures | None
    copy: CopyFigures | None


def main(settings: DisaggregatedSettings) -> int:
    """Measure, print the report, and return the exit code of bench.

    After an interruption, the report of the rounds so far is printed.

    Args:
        settings: settings of the comparison.
    """
    rounds: list[RoundFigures] = []
    alone: TransferFigures | None = None
    loaded: TransferFigures | None = None
    copy: CopyFigures | None = None
    with parts_so_far() as ending, contextlib.ExitStack() as stack:
        one = _serve(stack, settings, ["--threads", str(settings.threads)])
        pair, decode = _start_pair(stack, settings)
        alone, copy = _alone(settings, pair, decode)
        before = trio.run(_scrape, decode)
        for number in range(settings.rounds):
            for url in (one, pair):
                rounds.append(trio.run(_round, settings, url, number, url == pair))
                print_progress(f"round {number + 1} at {'the pair' if url == pair else 'one server'} is measured")
        loaded = _transfers(before, trio.run(_scrape, decode))
    if not rounds:
        return ending.exit_code
    report = DisaggregatedReport(settings=settings, rounds=rounds, alone=alone, loaded=loaded, copy=copy)
    return conclude(Measured(report, ending.exit_code), settings.json_path, disaggregated_text, report_json)


def disaggregated_text(report: DisaggregatedReport) -> str:
    """Return a table with medians over the rounds for the server and the pair, and the transfers.

    Args:
        report: figures of all rounds.
    """
    settings = report.settings
    lines = [
        "| | ITL p50 | ITL p99 | ITL max | TTFT of long prompts p50 | p99 | tokens/s of the streams |",
        "|---|---|---|---|---|---|---|",
    ]
    p99 = {}
    for is_pair, name in ((False, "one server"), (True, "prefill/decode pair")):
        rounds = [each for each in report.rounds if each.is_pair == is_pair]
        if not rounds:
            continue
        p99[is_pair] = median(each.itl_ms.p99 for each in rounds)
        cells = [
            f"{median(each.itl_ms.p50 for each in rounds):.1f} ms",
            f"{p99[is_pair]:.1f} ms",
            f"{max(each.itl_ms.max for each in rounds):.1f} ms",
            f"{median(each.ttft_ms.p50 for each in rounds):.0f} ms",
            f"{median(each.ttft_ms.p99 for each in rounds):.0f} ms",
            f"{median(each.output_tokens_per_second for each in rounds):.1f}",
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines.append("")
    if len(p99) == 2 and p99[False] > 0:
        lines.append(f"ITL p99 of the pair is {p99[True] / p99[False]:.2f} times that of one server.")
    if report.alone is not None and report.copy is not None:
        lines.append(_transfer_line(report.alone, settings.connector, "without other requests"))
        ratio = report.alone.bytes_per_second / report.copy.bytes_per_second
        lines.append(
            f"A plain socket copy of {report.copy.bytes / 1e6:.1f} MB, in turn with these: "
            f"{report.copy.bytes_per_second / 1e9:.2f} GB/s; the transfers come to {ratio:.2f} of that."
        )
    if report.loaded is not None:
        lines.append(_transfer_line(report.loaded, settings.connector, "under the load above"))
    lines.append(
        f"{settings.concurrency} streams of {settings.output_tokens} tokens; meanwhile {settings.requests} prompts of "
        f"{settings.long_prompt_tokens} tokens, {settings.rate_per_second:g} a second; {settings.threads} threads for "
        f"one server, {settings.threads // 2} for each of the pair; {settings.rounds} rounds in turn."
    )
    lines.append(f"{report.machine}, {report.date}{': ' + settings.label if settings.label else ''}.")
    return "\n".join(lines) + "\n"


def _transfer_line(transfer: TransferFigures, connector: str, when: str) -> str:
    if not transfer.transfers:
        return f"No KV was transferred over {connector} {when}: {transfer.failures} transfers failed."
    return (
        f"{transfer.transfers} transfers over {connector} {when}: {transfer.blocks} blocks, "
        f"{transfer.bytes / 1e6:.1f} MB at {transfer.bytes_per_second / 1e9:.2f} GB/s; {transfer.failures} failed."
    )


# --- Measurements ---


async def _round(settings: DisaggregatedSettings, url: str, number: int, is_pair: bool) -> RoundFigures:
    """Measure one round. Raise CannotMeasure if a request fails, and KeyboardInterrupt on a signal."""
    figures: RoundFigures | CannotMeasure | None = None
    async with trio.open_nursery() as nursery:
        await nursery.start(cancel_on_signal, nursery.cancel_scope)
        figures = await _Round(settings, url, number, is_pair).measure()
        nursery.cancel_scope.cancel()
    if isinstance(figures, CannotMeasure):
        raise figures
    if figures is None:
        raise KeyboardInterrupt
    return figures


class _Round:
    def __init__(self, settings: DisaggregatedSettings, url: str, number: int, is_pair: bool) -> None:
        target = Target.from_url(url)
        self._settings = settings
        self._is_pair = is_pair
        self._client = http1_client(target)
        # Prompts differ between rounds, so that a prefix cache finds nothing. The server and the pair get the same
        # prompts.
        self._seed = settings.seed + 1000 + number
        self._streams: list[Measurement] = []
        self._longs: list[Measurement] = []
        self._tally = Tally()
        self._scope = trio.CancelScope()
        self._failure: CannotMeasure | None = None

    async def measure(self) -> RoundFigures | CannotMeasure:
        settings = self._settings
        steady = self._load(1_000_000, settings.prompt_tokens, settings.output_tokens, seed=2 * self._seed)
        longs = self._load(
            settings.requests, settings.long_prompt_tokens, LONG_OUTPUT_TOKENS, seed=2 * self._seed + 1, rate=True
        )
        began_at = trio.current_time()
        with self._scope:
            async with trio.open_nursery() as nursery:
                for planned in longs.warmups():
                    await self._perform(planned, [])
                requests = steady.requests()
                for _ in range(settings.concurrency):
                    nursery.start_soon(self._decode_on, requests)
                before = self._tally.output_tokens
                while self._tally.output_tokens < before + 2 * settings.concurrency:  # noqa: ASYNC110  # readers have no event
                    await trio.sleep(POLL_SECONDS)  # This loop waits until all streams decode.
                began_at = trio.current_time()
                async with trio.open_nursery() as arrivals:
                    for planned in longs.requests():
                        await trio.sleep_until(began_at + (planned.arrival_seconds or 0.0))
                        arrivals.start_soon(self._perform, planned, self._longs)
                nursery.cancel_scope.cancel()
        seconds = trio.current_time() - began_at
        await self._client.aclose()
        return self._failure or self._figures(seconds)

    async def ask_once(self) -> CannotMeasure | None:
        """Send one long prompt without other requests."""
        settings = self._settings
        load = self._load(1, settings.long_prompt_tokens, LONG_OUTPUT_TOKENS, seed=2 * self._seed)
        with self._scope:
            for planned in load.requests():
                await self._perform(planned, self._longs)
        await self._client.aclose()
        return self._failure

    def _load(self, count: int, prompt_tokens: int, output_tokens: int, *, seed: int, rate: bool = False) -> Load:
        settings = BenchSettings(
            requests=count,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            rate_per_second=self._settings.rate_per_second if rate else None,
            warmup_requests=1,
            seed=seed,
        )
        return Load(settings, model="smollm2", prompt_mode="ids")

    async def _decode_on(self, requests: Iterator[PlannedRequest]) -> None:
        while True:
            await self._perform(next(requests), self._streams)

    async def _perform(self, planned: PlannedRequest, measurements: list[Measurement]) -> None:
        measurement = await perform(
            self._client,
            COMPLETIONS,
            planned,
            started_at=trio.current_time(),
            seconds_max=self._settings.timeout_seconds,
            tally=self._tally,
            measurements=measurements,
        )
        if measurement.failure is not None:
            self._failure = CannotMeasure(f"a request failed: {measurement.failure.message}", EXIT_REQUESTS_FAILED)
            self._scope.cancel()

    def _figures(self, seconds: float) -> RoundFigures | CannotMeasure:
        itl = Spread.from_seconds([gap for each in self._streams for gap in each.gaps_seconds])
        ttft = Spread.from_seconds([each.ttft_seconds for each in self._longs if each.ttft_seconds is not None])
        if itl is None or ttft is None:
            return CannotMeasure("no stream got a token while the long prompts were computed", EXIT_REQUESTS_FAILED)
        return RoundFigures(
            is_pair=self._is_pair,
            seconds=seconds,
            itl_ms=itl,
            ttft_ms=ttft,
            output_tokens_per_second=itl.count / seconds,
        )


def _alone(settings: DisaggregatedSettings, pair: str, decode: str) -> tuple[TransferFigures, CopyFigures]:
    """Measure transfers of long prompts, one at a time, and plain copies of as many bytes, in turn."""
    before = now = trio.run(_scrape, decode)
    copy_bytes, copy_seconds = 0, []
    with contextlib.ExitStack() as stack:
        port = 0
        for number in range(COPIES):
            trio.run(_one_long_prompt, settings, pair, number)
            last, now = now, trio.run(_scrape, decode)
            if not copy_bytes:
                copy_bytes = _transfers(last, now).bytes or 1 << 24
                port = stack.enter_context(copying_process(copy_bytes))
            copy_seconds.append(seconds_to_receive(port, copy_bytes))
    return _transfers(before, now), CopyFigures(bytes=copy_bytes, seconds=copy_seconds)


async def _one_long_prompt(settings: DisaggregatedSettings, url: str, number: int) -> None:
    failure = await _Round(settings, url, -1 - number, True).ask_once()
    if failure is not None:
        raise failure


def _transfers(before: Scrape, after: Scrape) -> TransferFigures:
    def counted(name: str) -> float:
        full_name = f"trioserve:kv_transfer_{name}_total"
        return (after.total(full_name) or 0.0) - (before.total(full_name) or 0.0)

    return TransferFigures(
        transfers=round(counted("loads_completed")),
        blocks=round(counted("blocks_received")),
        bytes=round(counted("bytes_received")),
        seconds=counted("load_seconds"),
        failures=round(counted("loads_failed")),
    )


async def _scrape(url: str) -> Scrape:
    target = Target.from_url(url)
    client = http1_client(target)
    found = await scrape(client, target, seconds_max=METRICS_SECONDS_MAX)
    await client.aclose()
    if found is None:
        raise CannotMeasure("the decode server shows no metrics", EXIT_UNREACHABLE)
    return found


# --- Processes ---


def _start_pair(stack: contextlib.ExitStack, settings: DisaggregatedSettings) -> tuple[str, str]:
    """Start the pair, and return the URLs of the router and of the decode server."""
    connector = msgspec.json.encode({"kv_connector": settings.connector}).decode()
    threads = ["--threads", str(settings.threads // 2), "--kv-transfer-config", connector]
    prefill = _serve(stack, settings, ["--role", "prefill", *threads])
    decode = _serve(stack, settings, ["--role", "decode", *threads])
    words = ["route", "--prefill-endpoint", f"p={prefill}", "--decode-endpoint", f"d={decode}"]
    return _started(stack, ServerProcess("the router", words)), decode


def _serve(stack: contextlib.ExitStack, settings: DisaggregatedSettings, flags: Sequence[str]) -> str:
    words = ["serve", *flags, *settings.server_flags]
    return _started(stack, ServerProcess(f"the server ({' '.join(flags)})", words))


def _started(stack: contextlib.ExitStack, server: ServerProcess) -> str:
    """Start a server and return its URL once it is ready. Raise CannotMeasure if it does not become ready."""
    stack.enter_context(server)
    trio.run(server.wait_until_ready, READY_SECONDS_MAX)
    return server.url


# --- Plain socket copies ---

BUFFER_BYTES = 1 << 20
SECONDS_MAX = 60.0


@contextlib.contextmanager
def copying_process(byte_count: int) -> Iterator[int]:
    """Start a process that sends bytes to every connection. Yield its port. The process ends with the context.

    Args:
        byte_count: bytes to send to each connection.
    """
    command = [sys.executable, "-m", "trioserve.bench.disagg", str(byte_count)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.stdin.close()


def seconds_to_receive(port: int, byte_count: int) -> float:
    """Return the seconds from the connection to the last byte.

    Args:
        port: port of the sending process.
        byte_count: bytes to receive.

    Raises:
        OSError: the connection failed, or too few bytes came.
    """
    buffer = memoryview(bytearray(BUFFER_BYTES))
    began = time.perf_counter()
    left = byte_count
    with socket.create_connection(("127.0.0.1", port), timeout=SECONDS_MAX) as connection:
        while left:
            received = connection.recv_into(buffer[: min(left, BUFFER_BYTES)])
            if received == 0:
                raise ConnectionError(f"{left} of {byte_count} bytes did not arrive")
            left -= received
    return time.perf_counter() - began


def _send(listener: socket.socket, byte_count: int) -> None:
    buffer = memoryview(bytearray(BUFFER_BYTES))
    while True:
        connection, _address = listener.accept()
        with connection:
            for begin in range(0, byte_count, BUFFER_BYTES):
                connection.sendall(buffer[: min(BUFFER_BYTES, byte_count - begin)])


def serve_copies() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        threading.Thread(target=_send, args=(listener, int(sys.argv[1])), daemon=True).start()
        sys.stdin.read()


if __name__ == "__main__":
    serve_copies()
