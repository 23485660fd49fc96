"""Replays sessions of agents at servers with KV pools of different sizes: session retention beside plain recency,
stored responses, and another server.

This command starts each server as a process of its own, with a pool of a share of the working set. All servers of one
share are measured one after another with the same sessions.
"""

from __future__ import annotations

import math
import pathlib
import shlex
from collections.abc import Sequence

import msgspec
import trio

from trioserve.bench.agents.traces import (
    SMALL_SHAPE,
    ChatConversation,
    Reply,
    ResponsesConversation,
    Session,
    Shape,
    Traffic,
    draw_traffic,
    session_texts,
)
from trioserve.bench.agents.transport import TransportReport, measure_transport, transport_text
from trioserve.bench.client import Failure, OpenStream
from trioserve.bench.report import Machine, Spread, measured_at, report_json
from trioserve.bench.runner import (
    EXIT_REQUESTS_FAILED,
    CannotMeasure,
    Measured,
    ServerProcess,
    ask,
    cancel_on_signal,
    conclude,
    http1_client,
    parts_so_far,
    print_progress,
    scrape,
)
from trioserve.bench.server_settings import AgentBenchSettings
from trioserve.bench.settings import Target

__all__ = ["AgentsReport", "RowFigures", "agents_text", "main", "measured_row"]

READY_SECONDS_MAX = 300.0
SESSION_HEADER = "x-session-id"
RECENCY_FLAGS = ("--no-session-retention",)
BLOCK_SIZE = 16
CONTEXT_MARGIN = 1.1  # A response may have more tokens when a tokenizer reads its text again.
PROBE_MEMORY_GIB = 1.0
PROBE_TURNS = 3
SHOWN_MAX = 20  # maximum number of failures that the text report shows


class RowFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one server.

    Attributes:
        row: name of the row.
        share: KV pool relative to the working set.
        pool_tokens: tokens of the pool.
        turns: turns with a whole response.
        prompt_tokens: tokens of their prompts.
        cached_tokens: of these, tokens from the prefix cache. None: the server does not report them.
        ttft_ms: time to first token of the turns. None: no turn has a response.
        seconds: time of the replay.
        failures: messages of failed turns.
    """

    row: str
    share: float
    pool_tokens: int
    turns: int
    prompt_tokens: int
    cached_tokens: int | None
    ttft_ms: Spread | None
    seconds: float
    failures: list[str]

    @property
    def computed_tokens(self) -> int | None:
        return None if self.cached_tokens is None else self.prompt_tokens - self.cached_tokens

    @classmethod
    def from_replies(
        cls, row: str, share: float, pool_tokens: int, replies: Sequence[Reply], seconds: float
    ) -> RowFigures:
        """Return the figures of a row.

        Args:
            row: name of the row.
            share: KV pool relative to the working set.
            pool_tokens: size of the server's KV cache, in tokens.
            replies: the responses to all turns.
            seconds: time of the replay.
        """
        whole = [reply for reply in replies if reply.failure is None]
        cached = [reply.cached_tokens for reply in whole if reply.cached_tokens is not None]
        return cls(
            row=row,
            share=share,
            pool_tokens=pool_tokens,
            turns=len(whole),
            prompt_tokens=sum(reply.prompt_tokens for reply in whole),
            cached_tokens=sum(cached) if len(cached) == len(whole) and cached else None,
            ttft_ms=Spread.from_seconds([reply.ttft_seconds for reply in whole if reply.ttft_seconds is not None]),
            seconds=seconds,
            failures=[reply.failure for reply in replies if reply.failure is not None],
        )


class Pool(msgspec.Struct, frozen=True):
    """The KV pool of a server.

    Attributes:
        tokens: tokens of all blocks.
        context_tokens: the longest context that a session needs.
    """

    tokens: int
    context_tokens: int


class Probe(msgspec.Struct, frozen=True):
    """Values that a server reports before the measurement.

    Attributes:
        token_bytes: bytes of KV of one token.
        tokens_per_word: tokens of a prompt for each of its words, with those of the chat template.
        working_set_tokens: tokens whose KV is needed again.
    """

    token_bytes: float
    tokens_per_word: float
    working_set_tokens: int

    def pool(self, share: float, traffic: Traffic) -> Pool:
        """Return the pool for a share of the working set. It holds at least the longest context.

        Args:
            share: size relative to the working set.
            traffic: the sessions.
        """
        context = _whole_blocks(traffic.context_tokens_max * self.tokens_per_word * CONTEXT_MARGIN)
        return Pool(max(context, _whole_blocks(share * self.working_set_tokens)), context)


def _whole_blocks(tokens: float) -> int:
    return math.ceil(tokens / BLOCK_SIZE) * BLOCK_SIZE


class AgentsReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a replay.

    Attributes:
        settings: settings of the replay.
        date: end of the measurement, ISO 8601.
        machine: the machine.
        sessions: number of sessions.
        probe: values that the first server reported.
        rows: figures of the servers, in the order of the measurement.
    """

    settings: AgentBenchSettings
    date: str = msgspec.field(default_factory=measured_at)
    machine: Machine = msgspec.field(default_factory=Machine.here)
    sessions: int
    probe: Probe
    rows: list[RowFigures]


def main(settings: AgentBenchSettings) -> int:
    """Measure, print the report, and return the exit code of bench.

    After an interruption, the report of the servers so far is printed.

    Args:
        settings: settings of the replay.
    """
    if settings.mode != "replay":
        return _measure_transport(settings)
    shape = (SMALL_SHAPE if settings.shape == "small" else Shape()).scaled(settings.scale)
    traffic = draw_traffic("agents", shape, clients=settings.concurrency, rounds=settings.rounds, seed=settings.seed)
    rows: list[RowFigures] = []
    with parts_so_far() as ending:
        probe = _probed(settings, traffic)
        for share in settings.shares:
            pool = probe.pool(share, traffic)
            for row in settings.chosen_rows:
                with _server(settings, row, pool, probe) as server:
                    print_progress(f"{row} with a pool of {share:.0%}, {pool.tokens} tokens")
                    rows.append(trio.run(_interruptible, settings, traffic, row, share, pool, server))
    if not rows:
        return ending.exit_code
    report = AgentsReport(settings=settings, sessions=len(traffic.sessions), probe=probe, rows=rows)
    has_failures = any(figures.failures for figures in rows)
    exit_code = ending.exit_code or (EXIT_REQUESTS_FAILED if has_failures else 0)
    return conclude(Measured(report, exit_code), settings.json_path, agents_text, report_json)


def _measure_transport(settings: AgentBenchSettings) -> int:
    reports: list[TransportReport] = []
    with parts_so_far() as ending:
        reports.append(trio.run(measure_transport, settings))
    if not reports:
        return ending.exit_code
    return conclude(Measured(reports[0], 0), settings.json_path, transport_text, report_json)


def agents_text(report: AgentsReport) -> str:
    """Return a table with one line per server, and what was scaled.

    Args:
        report: figures of all servers.
    """
    settings = report.settings
    lines = [
        "| KV pool | row | turns | prefix hits | prompt tokens computed | of recency | TTFT p50 | p99 | turns/min |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    recency = {figures.share: figures for figures in report.rows if figures.row == "recency"}
    for figures in report.rows:
        computed, base = figures.computed_tokens, recency.get(figures.share)
        ratio = (
            ""
            if computed is None or base is None or not base.computed_tokens
            else f"{computed / base.computed_tokens:.2f}"
        )
        hits = "" if figures.cached_tokens is None else f"{figures.cached_tokens / max(1, figures.prompt_tokens):.1%}"
        ttft = figures.ttft_ms
        lines.append(
            f"| {figures.share:.0%} | {figures.row} | {figures.turns} | {hits} | "
            f"{'' if computed is None else format(computed, ',')} | {ratio} | "
            + ("| | " if ttft is None else f"{ttft.p50:.0f} ms | {ttft.p99:.0f} ms | ")
            + f"{figures.turns / figures.seconds * 60:.1f} |"
        )
    lines += [
        "",
        f"{report.sessions} sessions of {settings.concurrency} agents, shape {settings.shape}, token counts times "
        f"{settings.scale:g}, pauses times {settings.pause_scale:g}, seed {settings.seed}; working set of "
        f"{report.probe.working_set_tokens:,} tokens.",
        f"{settings.model}, {report.machine}, {report.date}{': ' + settings.label if settings.label else ''}.",
    ]
    messages = [(figures, message) for figures in report.rows for message in figures.failures]
    lines += [f"failed: {figures.row} at {figures.share:.0%}: {message}" for figures, message in messages[:SHOWN_MAX]]
    return "\n".join(lines) + "\n"


# --- Servers ---


def _server(settings: AgentBenchSettings, row: str, pool: Pool, probe: Probe) -> ServerProcess:
    logs = None if settings.log_directory is None else pathlib.Path(settings.log_directory)
    if row == "peer":
        assert settings.peer_command is not None
        command = settings.peer_command.format(tokens=pool.tokens, blocks=pool.tokens // BLOCK_SIZE)
        return ServerProcess("peer", [], log_directory=logs, program=shlex.split(command), ready_path="/v1/models")
    # Half a block more, because the number of blocks is rounded down.
    gib = (pool.tokens + BLOCK_SIZE / 2) * probe.token_bytes / 2**30
    words = [*_serve(settings), "--kv-cache-memory", f"{gib:.9f}", "--max-model-len", str(pool.context_tokens)]
    return ServerProcess(row, [*words, *(RECENCY_FLAGS if row == "recency" else ())], log_directory=logs)


def _serve(settings: AgentBenchSettings) -> list[str]:
    return ["serve", settings.model, "--block-size", str(BLOCK_SIZE), *settings.server_flags]


def _probed(settings: AgentBenchSettings, traffic: Traffic) -> Probe:
    """Start a server, and ask it for the bytes of a token and the tokens of a prompt."""
    words = [*_serve(settings), "--kv-cache-memory", f"{PROBE_MEMORY_GIB:g}"]
    with ServerProcess("probe", words) as server:
        return trio.run(_probe, settings, traffic, server)


async def _probe(settings: AgentBenchSettings, traffic: Traffic, server: ServerProcess) -> Probe:
    await server.wait_until_ready(READY_SECONDS_MAX)
    target = Target.from_url(server.url)
    client = http1_client(target)
    session = traffic.sessions[0]
    system, *inputs = session_texts(session, settings.seed)
    conversation = ChatConversation(client, "", settings.model, system, settings.timeout_seconds)
    words = session.prefix_tokens
    reply: Reply | None = None
    for turn, text in list(zip(session.turns, inputs, strict=True))[:PROBE_TURNS]:
        reply = await conversation.ask(text, turn.output_tokens)
        words += turn.input_tokens + turn.output_tokens
    metrics = await scrape(client, target, seconds_max=settings.timeout_seconds)
    await client.aclose()
    token_bytes = None if metrics is None else metrics.total("trioserve:token_kv_bytes")
    if reply is None or reply.failure is not None or not token_bytes:
        message = "no metric trioserve:token_kv_bytes" if reply is None or not reply.failure else reply.failure
        raise CannotMeasure(f"the first turns failed: {message}", EXIT_REQUESTS_FAILED)
    ratio = reply.prompt_tokens / (words - session.turns[min(PROBE_TURNS, len(session.turns)) - 1].output_tokens)
    return Probe(token_bytes, ratio, math.ceil(traffic.working_set_tokens() * ratio))


# --- Agents ---


async def _interruptible(
    settings: AgentBenchSettings, traffic: Traffic, row: str, share: float, pool: Pool, server: ServerProcess
) -> RowFigures:
    """Measure one server. Raise KeyboardInterrupt on a signal."""
    figures: RowFigures | None = None
    async with trio.open_nursery() as nursery:
        await nursery.start(cancel_on_signal, nursery.cancel_scope)
        await server.wait_until_ready(READY_SECONDS_MAX)
        figures = await measured_row(
            settings, traffic, row=row, share=share, pool_tokens=pool.tokens, target=Target.from_url(server.url)
        )
        nursery.cancel_scope.cancel()
    if figures is None:
        raise KeyboardInterrupt
    return figures


async def measured_row(
    settings: AgentBenchSettings,
    traffic: Traffic,
    *,
    row: str,
    share: float,
    pool_tokens: int,
    target: Target,
    open_stream: OpenStream | None = None,
) -> RowFigures:
    """Replay all sessions at a server that is ready.

    Args:
        settings: settings of the replay.
        traffic: the sessions.
        row: name of the row, which says how agents ask.
        share: KV pool relative to the working set.
        pool_tokens: size of the server's KV cache, in tokens.
        target: the server.
        open_stream: opens a connection. None: as the target says.
    """
    replies: list[Reply] = []
    began_at = trio.current_time()

    async def run_client(sessions: Sequence[Session]) -> None:
        for session in sessions:
            await trio.sleep(session.wait_seconds * settings.pause_scale)
            await _run_session(settings, row, session, target, open_stream, replies)

    async with trio.open_nursery() as nursery:
        for sessions in traffic.clients:
            nursery.start_soon(run_client, sessions)
    return RowFigures.from_replies(row, share, pool_tokens, replies, trio.current_time() - began_at)


async def _run_session(
    settings: AgentBenchSettings,
    row: str,
    session: Session,
    target: Target,
    open_stream: OpenStream | None,
    replies: list[Reply],
) -> None:
    """Run one session. It ends early if a turn fails, because its history is then incomplete."""
    session_id = f"bench-{settings.seed}-{session.number}"
    names_session = row == "sessions"
    headers = [(SESSION_HEADER, session_id)] if names_session else []
    client = http1_client(target, *headers, open_stream=open_stream)
    system, *inputs = session_texts(session, settings.seed)
    kind = ResponsesConversation if row == "responses" else ChatConversation
    conversation = kind(client, target.path_prefix, settings.model, system, settings.timeout_seconds)
    for turn, text in zip(session.turns, inputs, strict=True):
        reply = await conversation.ask(text, turn.output_tokens)
        replies.append(reply)
        if reply.failure is not None:
            break
        if turn is not session.turns[-1]:
            await trio.sleep(turn.pause_seconds * settings.pause_scale)
    if names_session:
        path = f"/v1/sessions/{session_id}"
        ended = await ask(client, target, path, method="DELETE", seconds_max=settings.timeout_seconds)
        if isinstance(ended, Failure):
            print_progress(f"{session_id} was not ended: {ended.message}")
    await client.aclose()
