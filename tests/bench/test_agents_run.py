"""Tests of the replay of agents' sessions at a server, with an engine without weights, and of its report."""

from __future__ import annotations

import json

import pytest

from trioserve.bench.agents.run import AgentsReport, Probe, RowFigures, agents_text, measured_row
from trioserve.bench.agents.traces import SMALL_SHAPE, draw_traffic
from trioserve.bench.report import Spread, report_json
from trioserve.bench.server_settings import AGENT_ROWS, AgentBenchSettings
from trioserve.bench.settings import Target
from trioserve.contracts.errors import StartupError
from trioserve.testing.memory_server import open_memory_server

SHAPE = SMALL_SHAPE.scaled(0.2)
TARGET = Target.from_url("http://127.0.0.1:1")


def settings(**changes) -> AgentBenchSettings:
    return AgentBenchSettings(**{"model": "fake", "concurrency": 3, "pause_scale": 0.1, **changes})


async def replayed(row: str, *, rounds: int = 2, **engine) -> tuple[RowFigures, list[str], float]:
    """Replay a few sessions, and return the figures, the open sessions, and how many prompt tokens were computed."""
    traffic = draw_traffic("agents", SHAPE, clients=3, rounds=rounds, seed=0)
    async with open_memory_server(**{"max_model_len": 8_192, "block_count": 4_096, **engine}) as server:

        async def open_stream():
            return server.connect()

        wanted = settings(model=server.engine.model.name)
        figures = await measured_row(
            wanted, traffic, row=row, share=1.0, pool_tokens=1, target=TARGET, open_stream=open_stream
        )
        stats = server.engine.stats()
        computed = stats.prefix_query_tokens_total - stats.prefix_hit_tokens_total
        return figures, [session.name for session in server.engine.sessions], computed


@pytest.mark.parametrize("row", ["recency", "sessions", "responses"])
async def test_every_turn_of_every_session_is_measured(row, autojump_clock):
    figures, open_sessions, computed = await replayed(row, step_seconds=0.01)
    traffic = draw_traffic("agents", SHAPE, clients=3, rounds=2, seed=0)
    assert figures.failures == []
    assert figures.turns == sum(len(session.turns) for session in traffic.sessions)
    assert figures.computed_tokens == computed
    assert figures.prompt_tokens > 3 * figures.computed_tokens  # Each prompt repeats the context before it.
    assert figures.ttft_ms is not None
    assert figures.ttft_ms.p50 >= 10.0
    assert open_sessions == []


async def test_all_rows_have_the_same_prompts(autojump_clock):
    prompts = {row: (await replayed(row, rounds=1))[0].prompt_tokens for row in ("recency", "sessions", "responses")}
    assert len(set(prompts.values())) == 1, prompts


async def test_session_stops_at_its_first_failed_turn(start_server, autojump_clock):
    async def answer(call):
        await call.respond(503, {"error": {"message": "too busy"}})

    server = start_server(answer, http=1)
    traffic = draw_traffic("agents", SHAPE, clients=3, rounds=2, seed=0)
    figures = await measured_row(
        settings(), traffic, row="recency", share=0.5, pool_tokens=1, target=TARGET, open_stream=server.open_stream
    )
    assert figures.failures == ["status 503: too busy"] * 6
    assert (figures.turns, figures.computed_tokens, figures.ttft_ms) == (0, None, None)
    assert len(server.calls) == 6


def figures_of(row: str, share: float, cached: int | None) -> RowFigures:
    return RowFigures(
        row=row,
        share=share,
        pool_tokens=64,
        turns=30,
        prompt_tokens=1_000,
        cached_tokens=cached,
        ttft_ms=Spread.from_seconds([0.01, 0.02, 0.03]),
        seconds=60.0,
        failures=["no luck"] if row == "peer" else [],
    )


def test_report_compares_each_row_with_the_recency_row_of_the_same_pool_size():
    probe = Probe(token_bytes=10.0, tokens_per_word=1.5, working_set_tokens=128)
    rows = [figures_of("recency", 0.5, 200), figures_of("sessions", 0.5, 600), figures_of("peer", 1.0, None)]
    report = AgentsReport(settings=settings(), sessions=6, probe=probe, rows=rows)
    lines = agents_text(report).splitlines()
    assert "| 50% | recency | 30 | 20.0% | 800 | 1.00 | 20 ms | 30 ms | 30.0 |" in lines
    assert "| 50% | sessions | 30 | 60.0% | 400 | 0.50 | 20 ms | 30 ms | 30.0 |" in lines
    assert "| 100% | peer | 30 |  |  |  | 20 ms | 30 ms | 30.0 |" in lines
    assert "pauses times 0.1" in agents_text(report)
    assert lines[-1] == "failed: peer at 100%: no luck"
    assert json.loads(report_json(report))["rows"][1]["cached_tokens"] == 600


def test_pool_is_a_share_of_the_working_set_and_holds_the_longest_context():
    traffic = draw_traffic("agents", SHAPE, clients=3, rounds=2, seed=0)
    probe = Probe(token_bytes=10.0, tokens_per_word=2.0, working_set_tokens=100_000)
    assert probe.pool(0.5, traffic).tokens == 50_000
    small = probe.pool(0.001, traffic)
    assert small.tokens == small.context_tokens
    assert small.context_tokens >= 2 * traffic.context_tokens_max


@pytest.mark.parametrize(
    "values, said",
    [
        ({"rows": ("nothing",)}, f"allowed are: {', '.join(AGENT_ROWS)}"),
        ({"rows": ("peer",)}, "no --peer-command"),
        ({"shares": (0.0,)}, "--shares is 0.0"),
        ({"scale": 2.0}, "--scale is 2.0"),
    ],
)
def test_settings_of_agents_out_of_range_are_refused(values, said):
    with pytest.raises(StartupError, match=said):
        settings(**values)


def test_peer_is_a_row_if_it_has_a_command():
    assert settings().chosen_rows == ("recency", "sessions", "responses")
    assert settings(peer_command="other serve").chosen_rows == AGENT_ROWS
