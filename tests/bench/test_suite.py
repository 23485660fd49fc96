"""Tests that the suite measures its rows at every server in turn, and of its table."""

from __future__ import annotations

import contextlib
import json
import sys
import threading

import pytest
import trio

from trioserve.api.routes import App
from trioserve.bench import suite
from trioserve.bench.runner import CannotMeasure
from trioserve.bench.settings import SUITE_ROWS, BenchSettings, SuiteSettings
from trioserve.bench.suite import Cost, decode_bound, main, product_rate, read_bandwidth, row_bound
from trioserve.contracts.errors import StartupError
from trioserve.http.server import FrontendServer
from trioserve.testing.fake_engine import open_fake_engine


@contextlib.contextmanager
def served(**metrics: float):
    """Run a trioserve server without weights in a separate thread, on a real port."""
    started, port, stop = threading.Event(), [], []

    async def serve() -> None:
        async with open_fake_engine(block_count=4096, max_model_len=2048, max_num_batched_tokens=4096) as engine:
            for name, value in metrics.items():
                getattr(engine.metrics, name).set(value)
            listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
            async with trio.open_nursery() as nursery:
                await nursery.start(FrontendServer(App(engine)).serve, listeners)
                port.append(listeners[0].socket.getsockname()[1])
                stop.append((trio.lowlevel.current_trio_token(), nursery.cancel_scope))
                started.set()

    thread = threading.Thread(target=lambda: trio.run(serve))
    thread.start()
    assert started.wait(60)
    try:
        yield f"http://127.0.0.1:{port[0]}"
    finally:
        token, scope = stop[0]
        token.run_sync_soon(scope.cancel)
        thread.join(60)


@pytest.fixture(autouse=True)
def measured_rates(monkeypatch):
    """Fake the machine speeds, since measuring them takes seconds."""
    monkeypatch.setattr(suite, "read_bandwidth", lambda: 1e10)
    monkeypatch.setattr(suite, "product_rate", lambda: 1e12)


MODEL = {"step_weight_bytes": 1e9, "token_kv_bytes": 1000.0, "token_flops": 1e9, "attended_token_flops": 1e5}


@pytest.fixture
def short_rows(monkeypatch):
    """Replace the rows by rows with few requests and tokens."""
    rows = tuple(
        type(row)(
            name=row.name,
            meaning=row.meaning,
            load={
                **row.load,
                "requests": 4,
                "prompt_tokens": min(row.load["prompt_tokens"], 24),
                "prefix_tokens": min(row.load.get("prefix_tokens", 0), 16),
                "output_tokens": min(row.load["output_tokens"], 10),
            },
            is_decode=row.is_decode,
            counts_requests=row.counts_requests,
        )
        for row in SUITE_ROWS
    )
    monkeypatch.setattr("trioserve.bench.settings.SUITE_ROWS", rows)


@pytest.mark.slow
def test_every_row_is_measured_at_every_server(short_rows, tmp_path, capsys):
    with served(**MODEL) as first, served() as second:
        settings = SuiteSettings(
            url=first,
            peers=(second,),
            vocab_size=256,
            json_path=str(tmp_path / "suite.json"),
            markdown_path=str(tmp_path / "suite.md"),
        )
        assert main(settings) == 0
    report = json.loads((tmp_path / "suite.json").read_text())
    assert [(one["row"], one["url"]) for one in report["results"]] == [
        (row.name, url) for row in SUITE_ROWS for url in (first, second)
    ]
    assert "api_key" not in report["settings"]
    for one in report["results"]:
        assert one["figure"] > 0
        assert one["failed_requests"] == 0
        assert (one["bound"] is not None) == (one["url"] == first)
        assert (one["decode_bound"] is not None) == (one["row"] in "abc" and one["url"] == first)
        assert one["unit"] == ("requests/s" if one["row"].startswith("o") else "tokens/s")
    table = (tmp_path / "suite.md").read_text()
    assert capsys.readouterr().out == table
    assert [line.split(" | ")[0] for line in table.splitlines()[2 : 2 + len(SUITE_ROWS)]] == [
        f"| {row.name}" for row in SUITE_ROWS
    ]
    assert table.count("x |") == len(SUITE_ROWS)


def test_unreachable_server_is_reported_and_has_empty_cells(short_rows, capsys, monkeypatch):
    with served() as url:
        nobody = "http://127.0.0.1:9"
        assert main(SuiteSettings(url=url, peers=(nobody,), rows=("a",), vocab_size=256)) == 2
    shown = capsys.readouterr()
    assert "row a: cannot reach http://127.0.0.1:9" in shown.err
    assert "| - | - |" in shown.out


COST = Cost(100_000.0, 10.0, 1_000.0, 2.0)


def row_named(name):
    return next(row for row in SUITE_ROWS if row.name == name)


def test_decode_bound_is_the_time_to_read_a_steps_memory():
    # 16 sequences with 192 tokens of context each read 3,072 * 10 bytes, and the weights.
    assert decode_bound(row_named("b"), COST, 1e6) == pytest.approx(16 / 0.130_720)


def test_bound_of_a_suite_row_includes_the_prompts():
    # 16 prompts of 128 tokens, which attend to 64.5 tokens on average, at a million operations per second, then 127
    # steps.
    prompts = 16 * 128 * (1_000 + 64.5 * 2) / 1e6
    assert row_bound(row_named("b"), COST, 1e6, 1e6) == pytest.approx(16 * 128 / (prompts + 127 * 0.130_720))


def test_shared_prefix_is_not_computed_and_is_read_once():
    prompts = 16 * 20 * (1_000 + 1_010.5 * 2) / 1e6
    step = (100_000 + (1_000 + 16 * (20 + 16)) * 10) / 1e6
    assert row_bound(row_named("e"), COST, 1e6, 1e6) == pytest.approx(16 * 32 / (prompts + 31 * step))


def test_responses_of_leaving_clients_count_with_their_tokens():
    prompts = 16 * 128 * (1_000 + 64.5 * 2) / 1e6
    # A long response has 136 steps: 128 of them have 64 response tokens on average, and 8 have 4.
    step = (100_000 + 16 * (128 + (128 * 64 + 8 * 4) / 136) * 10) / 1e6
    assert row_bound(row_named("f"), COST, 1e6, 1e6) == pytest.approx(16 * 68 / (prompts + 67 * step))


@pytest.mark.parametrize(
    ("name", "flops", "seconds"), [("o1", 1e6, 0.1), ("o32", 1e9, 0.1), ("o32", 1e6, 0.32 + 0.003_52)]
)
def test_prefill_bound_of_a_short_prompt_is_the_time_to_read_the_weights(name, flops, seconds):
    row = row_named(name)
    assert row_bound(row, COST, 1e6, flops) == pytest.approx(row.load["concurrency"] / seconds)


def test_server_without_all_cost_metrics_has_no_bound(short_rows, tmp_path):
    path = tmp_path / "suite.json"
    with served(step_weight_bytes=1e9, token_kv_bytes=1000.0) as url:
        assert main(SuiteSettings(url=url, rows=("a",), vocab_size=256, json_path=str(path))) == 0
    assert [(one["bound"], one["decode_bound"]) for one in json.loads(path.read_text())["results"]] == [(None, None)]


def test_decode_bound_is_known_without_a_product_rate(short_rows, monkeypatch, capsys):
    monkeypatch.setattr(suite, "product_rate", lambda: None)
    with served(**MODEL) as url:
        assert main(SuiteSettings(url=url, rows=("a",), vocab_size=256)) == 0
    assert "tokens/s | - | " in capsys.readouterr().out


def test_every_row_has_valid_settings():
    assert len({row.name for row in SUITE_ROWS}) == len(SUITE_ROWS)
    for row in SUITE_ROWS:
        assert BenchSettings(**row.load).requests >= BenchSettings(**row.load).concurrency


def test_unknown_row_of_the_suite_is_refused():
    with pytest.raises(StartupError, match="--rows has 'z', allowed are: a, b, c, d, e, f, o1, o32"):
        SuiteSettings(rows=("a", "z"))


@pytest.mark.slow
def test_machine_speed_is_measured():
    assert read_bandwidth() > 1e8
    rate = product_rate()
    assert rate is not None
    assert rate > 1e9


def test_machine_without_torch_has_no_product_rate(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert product_rate() is None


def test_interruption_ends_the_suite_and_reports_the_rows_so_far(short_rows, capsys, monkeypatch):
    measure, calls = suite.measure, []

    async def interrupted_at_the_third(settings):
        calls.append(settings.url)
        outcome = await measure(settings)
        return outcome if len(calls) < 3 else type(outcome)(outcome.report, 130)

    monkeypatch.setattr(suite, "measure", interrupted_at_the_third)
    # The machine is measured before the rows. After an interruption, it is not measured a second time.
    rates = iter((1e12,))
    monkeypatch.setattr(suite, "product_rate", lambda: next(rates))
    with served() as first, served() as second:
        assert main(SuiteSettings(url=first, peers=(second,), vocab_size=256)) == 130
        assert calls == [first, second, first]
    assert "| a | " in capsys.readouterr().out


@pytest.mark.parametrize("rates", [(1e9, 5e9), (5e9, 1e9), (None, 5e9), (5e9, None)])
def test_bounds_use_the_faster_of_two_measured_rates(rates, short_rows, monkeypatch, tmp_path):
    speeds, products = iter((1e9, 4e9)), iter(rates)
    monkeypatch.setattr(suite, "read_bandwidth", lambda: next(speeds))
    monkeypatch.setattr(suite, "product_rate", lambda: next(products))
    path = tmp_path / "suite.json"
    with served(**{**MODEL, "token_kv_bytes": 0.001}) as url:
        assert main(SuiteSettings(url=url, rows=("a",), vocab_size=256, json_path=str(path))) == 0
    report = json.loads(path.read_text())
    assert (report["read_bytes_per_second"], report["product_flops_per_second"]) == (4e9, 5e9)
    assert report["results"][0]["decode_bound"] == pytest.approx(4.0, rel=1e-3)


def test_all_rows_and_rounds_have_different_prompts(monkeypatch):
    """Later suites also have other prompts, unless they have the same seed."""
    seeds: list[int] = []

    async def nothing(settings: BenchSettings) -> CannotMeasure:
        seeds.append(settings.seed)
        return CannotMeasure("nobody listens", 2)

    monkeypatch.setattr(suite, "measure", nothing)
    urls = {"url": "http://127.0.0.1:9", "peers": ("http://127.0.0.1:10",)}

    def seeds_of(seed: int | None) -> list[int]:
        seeds.clear()
        main(SuiteSettings(**urls, rounds=2, seed=seed))
        assert seeds[::2] == seeds[1::2]  # All servers of a turn get the same prompts.
        return seeds[::2]

    drawn = seeds_of(None)
    assert len(set(drawn)) == len(drawn) == 2 * len(SUITE_ROWS)
    assert not set(drawn) & set(seeds_of(None))
    assert seeds_of(7) == seeds_of(7)


def test_request_share_keeps_at_least_the_concurrency():
    rows = SuiteSettings(rows=("a", "c"), request_share=0.5).chosen_rows
    assert [row.load["requests"] for row in rows] == [3, 96]
    rows = SuiteSettings(rows=("a", "c"), request_share=0.001).chosen_rows
    assert [row.load["requests"] for row in rows] == [1, 64]
    assert SuiteSettings().chosen_rows == SUITE_ROWS
    with pytest.raises(StartupError, match="--request-share"):
        SuiteSettings(request_share=0.0)
