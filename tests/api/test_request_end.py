"""Tests the log line at the end of each request, and the count of responses."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import trio

from trioserve.api.caller import AccessRules
from trioserve.api.responder import end_line
from trioserve.contracts.errors import Overloaded, RequestFailed
from trioserve.contracts.events import FinishReason
from trioserve.contracts.output import Delta
from trioserve.http.exchange import BodyTimeout
from trioserve.http.handler_call import CrossOrigin

SECRET = "xyzzy"


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture):
    """The log as lines, with all levels down to DEBUG."""
    caplog.set_level(logging.DEBUG, logger="trioserve")
    return lambda: [record.getMessage() for record in caplog.records]


def fields(line: str) -> dict[str, str]:
    assert line.startswith("request ended ")
    return dict(re.findall(r'(\w+)=("(?:[^"\\]|\\.)*"|\S+)', line))


def responses(api: Any) -> dict[tuple[str, str], float]:
    """Return http_requests_total by path and status."""
    api.engine.metrics.expose()  # The counts are written to the metrics at a scrape.
    return {
        (sample.labels["path"], sample.labels["status"]): sample.value
        for family in api.engine.metrics.registry.collect()
        if family.name == "http_requests"
        for sample in family.samples
        if sample.name == "http_requests_total"
    }


@pytest.mark.parametrize("stream", [False, True])
async def test_finished_request_logs_one_line_with_its_token_counts(api: Any, lines, stream: bool) -> None:
    await api.context(
        "POST",
        "/v1/completions",
        {"prompt": SECRET, "stream": stream},
        x_request_id="r-81",
    )
    [line] = lines()
    assert re.fullmatch(
        "request ended request=r-81 method=POST path=/v1/completions status=200 outcome=finished "
        r"seconds=\d+\.\d{3} prompt_tokens=6 completion_tokens=6",
        line,
    )


async def test_the_log_line_of_a_chat_counts_all_choices_and_has_no_text(api: Any, lines) -> None:
    await api.chat(messages=[{"role": "user", "content": SECRET}], n=2)
    [line] = lines()
    assert fields(line)["completion_tokens"] == "12"
    assert SECRET not in line
    assert "Hello" not in line


async def test_without_debug_level_requests_are_not_logged(api: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="trioserve")
    await api.complete()
    assert caplog.records == []


@pytest.mark.parametrize(
    ("path", "body", "status", "reason"),
    [
        ("/v1/completions", {"prompt": "a", "n": 129}, "400", "invalid_request_error"),
        ("/v1/completions", {"prompt": "a", "model": "gpt-9"}, "404", "model_not_found"),
        ("/nowhere", {}, "404", "not_found"),
        ("/health", {}, "405", "method_not_allowed"),
    ],
)
async def test_refused_request_is_logged_with_its_reason(api, lines, path, body, status, reason) -> None:
    await api.context("POST", path, body)
    [line] = lines()
    told = fields(line)
    assert (told["status"], told["outcome"], told["reason"]) == (status, "refused", reason)
    assert "prompt_tokens" not in told


async def test_a_full_queue_and_a_slow_body_are_logged_as_refusals(api: Any, lines) -> None:
    api.engine.enter_errors = [Overloaded("too much", reason="queue_full", retry_after_seconds=2.5)]
    await api.complete()
    exchange = api.exchange("POST", "/v1/completions", {"prompt": "a"})
    exchange.body_error = BodyTimeout("too slow")
    await api.app(exchange)
    assert [(fields(line)["status"], fields(line)["reason"]) for line in lines()] == [
        ("429", "queue_full"),
        ("408", "body_timeout"),
    ]


async def test_an_error_during_a_stream_is_logged_as_a_failure(api: Any, lines) -> None:
    api.engine.script = lambda prompt, sampling: [
        next(iter(api.say("Hel", "lo")(prompt, sampling))),
        RequestFailed("broken"),
    ]
    await api.complete(stream=True)
    told = fields(lines()[-1])
    assert (told["status"], told["outcome"], told["reason"]) == ("200", "failed", "request_failed")
    assert told["completion_tokens"] == "3"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_deadline_after_some_tokens_is_logged_as_a_deadline(api: Any, lines, stream: bool) -> None:
    end = Delta(index=0, text="", token_ids=(), finish_reason=FinishReason.DEADLINE, stop_reason="timeout")
    api.engine.script = lambda prompt, sampling: [next(iter(api.say("Hel", "lo")(prompt, sampling))), end]
    await api.complete(stream=stream)
    told = fields(lines()[-1])
    assert (told["status"], told["outcome"], told["reason"]) == ("200" if stream else "504", "deadline", "timeout")
    assert told["completion_tokens"] == "3"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_left_is_logged_with_its_tokens(api: Any, lines, stream: bool, autojump_clock) -> None:
    held = trio.Event()
    api.engine.script = lambda prompt, sampling: [next(iter(api.say("Hel", "lo")(prompt, sampling))), held]
    exchange = api.exchange("POST", "/v1/completions", {"prompt": "ab", "stream": stream})
    with trio.move_on_after(7.5):
        await api.app(exchange)
    [line] = lines()
    told = fields(line)
    assert (told["outcome"], told.get("status")) == ("left", "200" if stream else None)
    assert (told["prompt_tokens"], told["completion_tokens"], told["seconds"]) == ("3", "3", "7.500")


async def test_a_client_that_left_the_queue_is_logged_without_tokens(api: Any, lines, autojump_clock) -> None:
    api.engine.queue = trio.Event()
    with trio.move_on_after(1):
        await api.app(api.exchange("POST", "/v1/completions", {"prompt": "ab"}))
    [line] = lines()
    assert fields(line)["outcome"] == "left"
    assert "tokens" not in line


async def test_clients_cannot_forge_fields_of_a_log_line(api: Any, lines) -> None:
    await api.context("GET", "/a b\nstatus=200 \x1b[31m", x_request_id='me status=200 "x"')
    [line] = lines()
    assert "\n" not in line
    assert "\x1b" not in line
    assert fields(line)["request"] == r'"me status=200 \"x\""'
    assert fields(line)["status"] == "404"


def test_log_line_quotes_all_values_but_single_words() -> None:
    line = end_line({"a": "/v1/x", "b": None, "c": "", "d": "two words", "e": "k=v", "f": 7, "g": "é"})
    assert line == r'request ended a=/v1/x c="" d="two words" e="k=v" f=7 g="\u00e9"'


# --- preflights ---

PREFLIGHT = {"origin": "https://chat.example.org", "access_control_request_method": "POST"}


async def test_preflights_are_counted_like_other_responses(api: Any, lines) -> None:
    app = api.app
    handler = CrossOrigin(app, ["https://chat.example.org"], on_preflight=app.note_preflight)
    for path in ("/v1/chat/completions", "/v1/chat/completions", "/v1/models/a/b", "/nowhere"):
        exchange = api.exchange(
            "OPTIONS", path, headers={name.replace("_", "-"): value for name, value in PREFLIGHT.items()}
        )
        await handler(exchange)
        assert exchange.status == 204
    assert responses(api) == {
        ("/v1/chat/completions", "204"): 2,
        ("/v1/models/{model}", "204"): 1,
        ("other", "204"): 1,
    }
    assert lines()[0] == "request ended method=OPTIONS path=/v1/chat/completions status=204 outcome=finished"
    assert len(lines()) == 4


async def test_an_options_request_without_cors_is_counted_once(make_api: Any) -> None:
    api = make_api(access=AccessRules(page_origins=("https://chat.example.org",)))
    app = api.app
    handler = CrossOrigin(app, ["https://chat.example.org"], on_preflight=app.note_preflight)
    await handler(api.exchange("OPTIONS", "/health", headers={"origin": "https://chat.example.org"}))
    await handler(api.exchange("GET", "/health", headers={"origin": "https://chat.example.org"}))
    assert responses(api) == {("/health", "405"): 1, ("/health", "200"): 1}
