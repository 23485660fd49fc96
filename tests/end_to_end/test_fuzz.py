"""Tests the API with valid and invalid requests that are generated from its OpenAPI document.

No request may cause a server error or a hang, and every response must match the document. Requests go over a real
socket. The model is fake, so a response takes milliseconds.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import requests
import trio
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from trioserve.api.error_responses import Error
from trioserve.api.openai import response_types as responses
from trioserve.api.routes import OPERATIONS, App
from trioserve.http.limits import FrontendLimits
from trioserve.http.listener import addresses, open_listeners
from trioserve.http.server import FrontendServer
from trioserve.store.store import open_store
from trioserve.testing.fake_engine import open_fake_engine
from trioserve.testing.invariants import check_idle

EXAMPLES = 15  # number of examples per operation and mode. All examples together take half a minute.
RESPONSE_SECONDS_MAX = 20  # This time is enough on a busy machine. A response that takes longer counts as a hang.


class ServerThread(threading.Thread):
    """Runs a whole server in a thread until `stop` is called.

    Attributes:
        url: base URL of the server.
        fault: exception that ended the server, or None.
    """

    def __init__(self) -> None:
        super().__init__(name="server")
        self.url = ""
        self.fault: BaseException | None = None
        self._is_serving = threading.Event()
        self.start()
        assert self._is_serving.wait(60)
        if self.fault is not None:
            raise self.fault

    def stop(self) -> None:
        trio.from_thread.run_sync(self._is_told_to_stop.set, trio_token=self._token)
        self.join(60)
        assert not self.is_alive()
        if self.fault is not None:
            raise self.fault

    def run(self) -> None:
        try:
            trio.run(self._serve)
        except BaseException as fault:
            self.fault = fault
        finally:
            self._is_serving.set()

    async def _serve(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._is_told_to_stop = trio.Event()
        listeners = await open_listeners("127.0.0.1", 0)
        async with (
            open_store() as store,
            open_fake_engine(max_num_seqs=32, max_queued_requests=256, max_model_len=128) as fake,
        ):
            # Some requests announce a body and never send it. The default wait for a body is half a minute.
            app = App(fake, store=store)
            server = FrontendServer(app, limits=FrontendLimits(body_wait_seconds_max=5))
            async with app.running(), trio.open_nursery() as nursery:
                await nursery.start(server.serve, listeners)
                self.url = f"http://{addresses(listeners)[0]}"
                self._is_serving.set()
                await self._is_told_to_stop.wait()
                server.drain()
            check_idle(fake.core)
            assert server.counters().exchanges_open == 0
            assert server.counters().exchanges_failed_total == 0
            assert server.counters().connections_failed_total == 0


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    thread = ServerThread()
    try:
        yield thread.url
    finally:
        thread.stop()


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as session:
        session.trust_env = False
        yield session


@pytest.fixture(scope="module")
def schemathesis() -> Any:
    """Import schemathesis only where these tests run, because its import takes a second."""
    return pytest.importorskip("schemathesis", reason="schemathesis is not installed: pip install '.[test]'")


@pytest.fixture(scope="module")
def schema(url: str, session: requests.Session, schemathesis: Any) -> Any:
    document = session.get(url + "/openapi.json", timeout=RESPONSE_SECONDS_MAX).json()
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=url)
    return schema


fuzzed = settings(
    max_examples=EXAMPLES,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(autouse=True)
def no_error_in_the_log(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert [record.getMessage() for record in caplog.get_records("call") if record.levelno >= logging.ERROR] == []


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["positive", "negative"])
@pytest.mark.parametrize(("method", "path"), [(operation.method, operation.path) for operation in OPERATIONS])
def test_every_response_matches_the_openapi_document_and_is_no_server_error(
    schemathesis, schema, session, method, path, mode
):
    mode = schemathesis.GenerationMode(mode)
    # The check below is stricter than not_a_server_error. The schema types do not state every range, and the server
    # refuses values out of range with 400, as documented. So a request that matches the types may still be refused.
    checks = [schemathesis.checks.not_a_server_error, schemathesis.checks.positive_data_acceptance]
    # The stream of this path never ends, so only one event is read.
    schema.config.max_stream_events = 1 if path == "/ui/events" else None

    @fuzzed
    @given(case=schema[path][method].as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        response = case.call(session=session, timeout=RESPONSE_SECONDS_MAX)
        # 504 is no fault: a generated request may have a deadline of a nanosecond.
        assert response.status_code < 500 or response.status_code == 504, response.text
        case.validate_response(response, excluded_checks=checks)

    check()


SAMPLING = st.fixed_dictionaries(
    {},
    optional={
        "n": st.integers(1, 4),
        "max_tokens": st.integers(1, 8),
        "min_tokens": st.integers(0, 1),
        "temperature": st.floats(0, 2),
        "top_p": st.floats(0.01, 1),
        "top_k": st.integers(-1, 100),
        "min_p": st.floats(0, 1),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(0.5, 2),
        "seed": st.integers(-(2**63), 2**64 - 1),
        "stop": st.text(min_size=1, max_size=3) | st.lists(st.text(min_size=1, max_size=3), max_size=4),
        "stop_token_ids": st.lists(st.integers(0, 300), max_size=3),
        "logit_bias": st.dictionaries(st.integers(0, 300).map(str), st.floats(-100, 100), max_size=3),
        "ignore_eos": st.booleans(),
        "include_stop_str_in_output": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "return_token_ids": st.booleans(),
        "echo": st.booleans(),
        "priority": st.integers(-10, 10),
        "cache_salt": st.text(min_size=1, max_size=5),
        "timeout": st.floats(5, 100),
        "stream": st.booleans(),
    },
)
TEXT = st.text(max_size=20)
CHATS = st.fixed_dictionaries(
    {
        "messages": st.lists(
            st.fixed_dictionaries(
                {
                    "role": st.sampled_from(["system", "user", "assistant"]),
                    "content": TEXT | st.lists(TEXT.map(lambda text: {"type": "text", "text": text}), max_size=2),
                }
            ),
            min_size=1,
            max_size=3,
        )
    },
    optional={"logprobs": st.booleans(), "chat_template_kwargs": st.dictionaries(TEXT, TEXT, max_size=2)},
)
PROMPTS = st.fixed_dictionaries(
    {"prompt": TEXT | st.lists(TEXT, min_size=1, max_size=3) | st.lists(st.integers(0, 255), min_size=1, max_size=20)},
    optional={"logprobs": st.integers(0, 20), "suffix": st.just("")},
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "path, bodies, whole, event",
    [
        ("/v1/chat/completions", CHATS, responses.ChatCompletion, responses.ChatCompletionChunk),
        ("/v1/completions", PROMPTS, responses.Completion, responses.Completion),
    ],
)
def test_valid_requests_get_responses_of_the_documented_types(url, session, path, bodies, whole, event):
    answered = 0

    @settings(fuzzed, max_examples=4 * EXAMPLES)
    @given(body=bodies, sampling=SAMPLING)
    def check(body: dict[str, Any], sampling: dict[str, Any]) -> None:
        nonlocal answered
        with session.post(url + path, json={**body, **sampling}, timeout=RESPONSE_SECONDS_MAX) as response:
            content = response.content
        if response.status_code != 200:
            # Empty prompts, and fields that exclude each other, are refused with the name of the field.
            assert response.status_code == 400
            assert msgspec.json.decode(content, type=Error).error.param is not None, content
            return
        answered += 1
        if not sampling.get("stream"):
            msgspec.json.decode(content, type=whole)
            return
        *events, done, end = content.split(b"\n\n")
        assert (done, end) == (b"data: [DONE]", b"")
        for line in events:
            msgspec.json.decode(line.removeprefix(b"data: "), type=event)

    check()
    assert answered > 2 * EXAMPLES
