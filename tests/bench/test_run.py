"""Tests of a whole measurement: requests, figures, messages and exit codes."""

from __future__ import annotations

import io
import json
import signal
import socket
import threading

import pytest
import trio
import trio.testing

from trioserve.bench.run import main, measure
from trioserve.bench.runner import CannotMeasure, Measured

both = pytest.mark.parametrize("http", [1, 2])


async def measured(server, settings, progress=None) -> Measured:
    outcome = await measure(settings, open_stream=server.open_stream, progress=progress or io.StringIO())
    assert isinstance(outcome, Measured), outcome
    return outcome


async def refused(server, settings) -> CannotMeasure:
    outcome = await measure(settings, open_stream=server.open_stream, progress=io.StringIO())
    assert isinstance(outcome, CannotMeasure), outcome
    return outcome


@both
async def test_closed_loop_measurement_has_exact_figures(start_server, tokens, bench_settings, autojump_clock, http):
    server = start_server(lambda call: tokens(call, first_seconds=0.5, gap_seconds=0.1), http=http)
    outcome = await measured(server, bench_settings(http=http, requests=4, concurrency=2, output_tokens=3))
    figures = outcome.report.figures
    assert outcome.exit_code == 0
    assert outcome.report.model == "first-model"
    assert server.in_flight_max == 2
    assert figures.duration_seconds == pytest.approx(1.4)
    assert (figures.completed_requests, figures.output_tokens, figures.prompt_tokens) == (4, 12, 24)
    assert figures.output_tokens_per_second == pytest.approx(12 / 1.4)
    for spread, milliseconds, count in [
        (figures.ttft_ms, 500, 4),
        (figures.itl_ms, 100, 8),
        (figures.tpot_ms, 100, 4),
        (figures.e2e_ms, 700, 4),
    ]:
        assert spread is not None
        assert (spread.mean, spread.p99, spread.max) == pytest.approx((milliseconds,) * 3)
        assert spread.count == count
    assert figures.requests_counted_by_usage == 4


async def test_model_of_the_settings_is_requested(start_server, tokens, bench_settings, autojump_clock):
    server = start_server(tokens, http=1)
    outcome = await measured(server, bench_settings(model="other"))
    assert {call.body["model"] for call in server.calls} == {"other"}
    assert outcome.report.model == "other"


async def test_paths_of_requests_begin_with_the_path_of_the_url(start_server, tokens, bench_settings, autojump_clock):
    server = start_server(tokens, http=1)
    await measured(server, bench_settings(url="http://127.0.0.1:8000/llm/v1", api_key="key"))
    assert {call.path for call in server.calls} == {"/llm/v1/completions"}
    assert {call.headers["host"] for call in server.calls} == {"127.0.0.1:8000"}
    assert {call.headers["authorization"] for call in server.calls} == {"Bearer key"}


async def test_chat_is_measured_at_the_chat_path(start_server, bench_settings, autojump_clock):
    async def chat(call):
        await call.start(200)
        await call.chunk({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        await trio.sleep(0.25)
        await call.chunk({"choices": [{"delta": {"content": "hello"}}]})
        await call.chunk({"choices": [{"delta": {}, "finish_reason": "stop"}]})
        await call.done()

    server = start_server(chat, http=2)
    outcome = await measured(server, bench_settings(endpoint="chat", http=2, output_tokens=3))
    assert {call.path for call in server.calls} == {"/v1/chat/completions"}
    figures = outcome.report.figures
    assert figures.ttft_ms is not None
    assert figures.ttft_ms.p50 == pytest.approx(250)
    assert (figures.output_tokens, figures.requests_counted_by_chunks) == (4, 4)
    assert outcome.report.prompt_mode == "text"
    assert any("4 of 4 completed responses do not have the 3 tokens" in note for note in outcome.report.notes)


async def test_server_that_refuses_token_ids_gets_words(start_server, tokens, bench_settings, autojump_clock):
    server = start_server(tokens, http=1)
    server.takes_ids = False
    outcome = await measured(server, bench_settings())
    assert outcome.report.prompt_mode == "text"
    assert all(isinstance(call.body["prompt"], str) for call in server.calls)
    assert any("does not accept token ids (status 400, prompt must be text)" in note for note in outcome.report.notes)
    assert outcome.exit_code == 0


async def test_refused_token_ids_end_the_measurement_if_they_were_requested(
    start_server, tokens, bench_settings, autojump_clock
):
    server = start_server(tokens, http=1)
    server.takes_ids = False
    outcome = await refused(server, bench_settings(prompt_mode="ids"))
    assert outcome.exit_code == 1
    assert "refuses a small request" in outcome.message
    assert "prompt must be text" in outcome.message


@both
async def test_open_loop_arrivals_do_not_depend_on_responses(
    start_server, tokens, bench_settings, autojump_clock, http
):
    server = start_server(lambda call: tokens(call, first_seconds=100.0), http=http)
    settings = bench_settings(http=http, requests=10, rate_per_second=2.0)
    outcome = await measured(server, settings)
    assert server.in_flight_max == 10
    figures = outcome.report.figures
    assert figures.ttft_ms is not None
    assert figures.ttft_ms.max == pytest.approx(100_000)
    assert 100 < figures.duration_seconds < 110


async def test_ttft_includes_the_wait_for_a_free_stream(start_server, tokens, bench_settings, autojump_clock):
    server = start_server(lambda call: tokens(call, first_seconds=1.0), http=2)
    server.streams_max = 1
    outcome = await measured(server, bench_settings(http=2, requests=3, concurrency=3))
    assert outcome.report.figures.ttft_ms is not None
    assert outcome.report.figures.ttft_ms.max == pytest.approx(3000)
    assert any("2 requests waited for a free HTTP/2 stream" in note for note in outcome.report.notes)


@pytest.mark.parametrize("http, how", [(1, "close"), (2, "reset CANCEL")])
async def test_clients_leave_after_their_tokens_and_are_not_errors(
    start_server, tokens, bench_settings, autojump_clock, http, how
):
    server = start_server(lambda call: tokens(call, gap_seconds=1.0), http=http)
    settings = bench_settings(http=http, requests=8, output_tokens=5, abort_fraction=0.25, abort_after_tokens=2)
    outcome = await measured(server, settings)
    figures = outcome.report.figures
    assert outcome.exit_code == 0
    assert (figures.completed_requests, figures.aborted_requests, figures.failed_requests) == (6, 2, 0)
    gone = [call for call in server.calls if call.sent_count < 5]
    assert [(call.left, call.sent_count) for call in gone] == [(how, 2)] * 2
    assert figures.output_tokens == 6 * 5 + 2 * 2
    assert (figures.requests_counted_by_usage, figures.requests_counted_by_chunks) == (6, 2)


@both
async def test_failures_are_counted_by_kind_and_give_exit_code_1(
    start_server, tokens, bench_settings, autojump_clock, http
):
    async def fail_in_turn(call):
        turn = len(server.calls)
        if turn == 1:
            await call.respond(503, {"error": {"message": "queue full"}})
        elif turn == 2:
            await call.start(200)
            await call.chunk({"error": {"message": "engine broke"}})
            await call.finish()
        elif turn == 3:
            await trio.sleep(60)
        elif turn == 4:
            await call.start(200)
            await call.drop()
        else:
            await tokens(call)

    server = start_server(fail_in_turn, http=http)
    settings = bench_settings(http=http, requests=6, concurrency=1, timeout_seconds=30.0)
    outcome = await measured(server, settings)
    assert outcome.report.figures.errors == {"status 503": 1, "answer error": 1, "timeout": 1, "disconnect": 1}
    assert outcome.report.figures.completed_requests == 2
    assert outcome.exit_code == 1
    assert server.calls[2].left == ("close" if http == 1 else "reset CANCEL")
    assert server.calls[2].left_at is not None


async def test_warmup_requests_are_sent_first_and_not_measured(start_server, bench_settings, tokens, autojump_clock):
    server = start_server(lambda call: tokens(call, first_seconds=9.0 if len(server.calls) <= 3 else 0.5), http=1)
    outcome = await measured(server, bench_settings(warmup_requests=3, requests=2, concurrency=1))
    assert len(server.calls) == 5
    assert outcome.report.figures.completed_requests == 2
    assert outcome.report.figures.ttft_ms is not None
    assert outcome.report.figures.ttft_ms.max == pytest.approx(500)


async def test_failed_warmup_is_reported_and_gives_exit_code_1(start_server, bench_settings, tokens, autojump_clock):
    async def fail_first(call):
        await (call.respond(500, "no") if len(server.calls) == 1 else tokens(call))

    server = start_server(fail_first, http=1)
    outcome = await measured(server, bench_settings(warmup_requests=1))
    assert outcome.exit_code == 1
    assert outcome.report.figures.failed_requests == 0
    assert any("1 warm-up requests failed" in note for note in outcome.report.notes)


@both
async def test_interruption_reports_the_requests_so_far(start_server, tokens, bench_settings, autojump_clock, http):
    async def interrupt_at_the_fourth(call):
        if len(server.calls) == 4:
            await call.start(200)
            await call.chunk({"choices": [{"text": "a"}]})
            await trio.testing.wait_all_tasks_blocked()
            signal.raise_signal(signal.SIGINT)
            await trio.sleep_forever()
        await tokens(call)

    server = start_server(interrupt_at_the_fourth, http=http)
    outcome = await measured(server, bench_settings(http=http, requests=100, concurrency=1))
    figures = outcome.report.figures
    assert outcome.exit_code == 130
    assert (figures.completed_requests, figures.interrupted_requests, figures.failed_requests) == (3, 1, 0)
    assert figures.output_tokens == 10
    await trio.testing.wait_all_tasks_blocked()
    assert server.open_count == 0


async def test_interruption_before_the_first_request_has_no_report(bench_settings, autojump_clock):
    async def open_stream():
        signal.raise_signal(signal.SIGTERM)
        await trio.sleep_forever()

    outcome = await measure(bench_settings(), open_stream=open_stream, progress=io.StringIO())
    assert isinstance(outcome, CannotMeasure)
    assert outcome.exit_code == 130


@both
async def test_unreachable_server_gives_exit_code_2_and_one_sentence(bench_settings, autojump_clock, http):
    async def refuse():
        raise ConnectionRefusedError("nobody listens")

    outcome = await measure(bench_settings(http=http), open_stream=refuse, progress=io.StringIO())
    assert isinstance(outcome, CannotMeasure)
    assert outcome.exit_code == 2
    assert outcome.message.startswith("cannot reach http://127.0.0.1:8000 over HTTP/")
    assert "nobody listens" in outcome.message
    assert "\n" not in outcome.message


async def test_server_without_a_model_list_needs_a_model_name(start_server, tokens, bench_settings, autojump_clock):
    server = start_server(tokens, http=1)
    server.models = None
    outcome = await refused(server, bench_settings())
    assert outcome.exit_code == 1
    assert "give --model" in outcome.message
    assert (await measured(server, bench_settings(model="m"))).exit_code == 0


async def test_progress_without_a_terminal_is_a_line_every_ten_seconds(
    start_server, tokens, bench_settings, autojump_clock
):
    progress = io.StringIO()
    server = start_server(lambda call: tokens(call, first_seconds=12.0), http=1)
    await measured(server, bench_settings(requests=2, concurrency=1, output_tokens=3), progress)
    assert progress.getvalue() == "0/2 requests, 0.0 tokens/s, 10 s\n1/2 requests, 0.1 tokens/s, 20 s\n"


async def test_progress_on_a_terminal_rewrites_one_line_and_clears_it(
    start_server, tokens, bench_settings, autojump_clock
):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    progress = Terminal()
    server = start_server(lambda call: tokens(call, first_seconds=1.0), http=1)
    await measured(server, bench_settings(requests=2, concurrency=1), progress)
    shown = progress.getvalue()
    assert "\n" not in shown
    assert "\r\x1b[K1/2 requests" in shown
    assert shown.endswith("\r\x1b[K")


def test_main_reports_a_refused_connection_in_one_line(bench_settings, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # The port is bound, but no process listens, so connections are refused.
        port = taken.getsockname()[1]
        assert main(bench_settings(url=f"http://127.0.0.1:{port}")) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert f"cannot reach http://127.0.0.1:{port}" in shown.err
    assert "Connection refused" in shown.err


@pytest.fixture
def listening_port(tokens, start_server_type):
    """Run a server on a real socket in a separate thread, since main() has its own event loop."""
    ready = threading.Event()
    found = {}

    async def serve():
        async with trio.open_nursery() as nursery:
            server = start_server_type(nursery, tokens, 1)
            listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
            found.update(
                port=listeners[0].socket.getsockname()[1],
                token=trio.lowlevel.current_trio_token(),
                stop=nursery.cancel_scope.cancel,
            )
            ready.set()
            await trio.serve_listeners(server.serve, listeners)

    thread = threading.Thread(target=trio.run, args=(serve,))
    thread.start()
    ready.wait()
    yield found["port"]
    trio.from_thread.run_sync(found["stop"], trio_token=found["token"])
    thread.join()


def test_main_prints_the_table_and_writes_the_json(listening_port, bench_settings, capsys, tmp_path):
    path = tmp_path / "figures.json"
    settings = bench_settings(url=f"http://127.0.0.1:{listening_port}", json_path=str(path))
    assert main(settings) == 0
    assert "first token (TTFT)" in capsys.readouterr().out
    assert json.loads(path.read_bytes())["figures"]["completed_requests"] == 4


def test_main_writes_only_json_to_standard_output_on_request(listening_port, bench_settings, capsys):
    assert main(bench_settings(url=f"http://127.0.0.1:{listening_port}", json_path="-")) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["figures"]["output_tokens"] == 12
    assert "first token (TTFT)" in shown.err
