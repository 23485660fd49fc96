"""Tests endpoints that send responses that no inference server sends. Clients never get these responses, and other
endpoints serve the requests.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.api.images.forms import multipart
from trioserve.contracts.endpoint import EndpointId
from trioserve.contracts.errors import EndpointLost
from trioserve.proxy.endpoint_watch import WatchSettings
from trioserve.proxy.response_shape import EventCheck, InvalidAnswer, check_whole, is_error
from trioserve.router.policies import POLICIES
from trioserve.testing.memory_client import memory_connection
from trioserve.testing.memory_router import MemoryRouter, open_memory_router
from trioserve.testing.memory_server import MemoryServer, open_memory_server

CHAT = "/v1/chat/completions"
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"


def response(
    body: bytes, *, status: int = 200, content_type: str = "application/json", length: int | None = None, more: str = ""
) -> bytes:
    length = len(body) if length is None else length
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {content_type}\r\ncontent-length: {length}\r\n{more}\r\n"
    return head.encode() + body


def events(*said: bytes) -> bytes:
    body = b"".join(b"data: " + each + b"\n\n" for each in said)
    return response(body, content_type="text/event-stream")


FIRST = b'{"id":"x","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"a"}}]}'
ERROR = json.dumps({"error": {"message": "no", "type": "invalid_request_error", "code": "no"}}).encode()

BLACK_HOLES = {
    "a web page": response(b"<html>oops</html>", content_type="text/html"),
    "a page that is not found": response(b"<html>404</html>", status=404, content_type="text/html"),
    "a path that is not found": response(b'{"detail":"Not Found"}', status=404),
    "another API's 404": response(ERROR, status=404),
    "an empty object as 404": response(b"{}", status=404),
    "a login": response(b"<html>log in</html>", status=401, content_type="text/html"),
    "an API that wants a key": response(ERROR, status=401),
    "a redirect": response(b"", status=302, more="location: http://127.0.0.1/login\r\n"),
    "a redirect for good": response(b"", status=301, more="location: http://127.0.0.1/login\r\n"),
    "a gateway's page": response(b"<html>bad gateway</html>", status=502, content_type="text/html"),
    "a balancer's page": response(b"<html>busy</html>", status=503, content_type="text/html"),
    "half of an object": response(b'{"choices": ['),
    "text": response(b"hello", content_type="text/plain"),
    "no body": response(b""),
    "nothing": response(b"", status=204),
    "no events": response(b"", content_type="text/event-stream"),
    "an embedding": response(b'{"object":"list","data":[{"embedding":[1.0]}]}'),
    "an object that says nothing": response(b"{}"),
    "a list": response(b"[]"),
    "events that are no JSON": events(b"hello"),
    "events of another kind": events(b'{"type":"ping"}', b"[DONE]"),
    "less than it promised": response(b"data: {}\r\n\r\n", content_type="text/event-stream", length=99999),
    "no HTTP": b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
    "the end of the connection": b"",
}


class BlackHole:
    """Endpoint with successful checks that answers every POST with the same bytes and closes the connection."""

    def __init__(self, nursery: trio.Nursery, answer: bytes) -> None:
        self.answer = answer
        self.asked: list[bytes] = []
        self._nursery = nursery

    async def connect(self):
        client, server = memory_connection()
        self._nursery.start_soon(self._serve, server)
        return client

    async def _serve(self, end) -> None:
        said = b""
        while b"\r\n\r\n" not in said:
            piece = await end.receive_some(65536)
            if not piece:
                return
            said += piece
        if said.startswith(b"POST"):
            self.asked.append(said)
            answer = self.answer
        elif b" /v1/models" in said.split(b"\r\n")[0]:
            answer = response(b'{"object":"list","data":[{"id":"fake","object":"model"}]}')
        else:
            answer = response(b'{"ready":true}')
        with suppress(trio.BrokenResourceError):
            # The router may close the connection, because it stops reading when it has enough bytes.
            if answer:
                await end.send_all(answer)
        end.close()


def body(**fields: object) -> dict[str, object]:
    return {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, **fields}


class Opened:
    """A router in front of a broken endpoint "a" and two servers "b" and "c"."""

    def __init__(self, router: MemoryRouter, hole: BlackHole) -> None:
        self.router = router
        self.hole = hole


@asynccontextmanager
async def black_hole(answer: bytes, **options: Any) -> AsyncIterator[Opened]:
    def opener(server: MemoryServer):
        async def connect():
            return server.connect()

        return connect

    async with trio.open_nursery() as nursery, AsyncExitStack() as stack:
        hole = BlackHole(nursery, answer)
        servers = [await stack.enter_async_context(open_memory_server(response="abc")) for _ in range(2)]
        connects = {"a": hole.connect, "b": opener(servers[0]), "c": opener(servers[1])}
        router = await stack.enter_async_context(open_memory_router(connects, **options))
        await wait_all_tasks_blocked()
        yield Opened(router, hole)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", BLACK_HOLES)
async def test_clients_never_get_responses_that_no_inference_server_sends(kind, stream):
    async with black_hole(BLACK_HOLES[kind]) as opened:
        for _ in range(12):
            async with opened.router.client().ask(CHAT, body(stream=stream)) as answer:
                await answer.read()
                assert answer.status == 200
                assert b'"abc"' in answer.body or b"a" in answer.body
                assert b"error" not in answer.body
        assert 1 <= len(opened.hole.asked) <= 4, "few requests reach the endpoint"
        await opened.router.assert_all_free()


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"kv_aware"}))
@pytest.mark.parametrize("kind", ["a web page", "another API's 404", "half of an object"])
async def test_endpoint_that_fails_fast_does_not_attract_requests_with_any_policy(policy, kind):
    async with black_hole(BLACK_HOLES[kind], policy=policy) as opened:
        statuses = []

        async def ask(number: int) -> None:
            headers = {"x-session-id": f"session {number}"}
            async with opened.router.client().ask(CHAT, body(stream=True), headers=headers) as answer:
                await answer.read()
                statuses.append(answer.status)

        for batch in range(10):
            async with trio.open_nursery() as nursery:
                for number in range(6):
                    nursery.start_soon(ask, 6 * batch + number)
        assert statuses == [200] * 60
        assert len(opened.hole.asked) <= 10
        await opened.router.assert_all_free()


async def test_ejected_endpoint_returns_after_serving_a_probe(autojump_clock):
    watch = WatchSettings(health_seconds=1.0, load_seconds=3600.0, listens=False)
    async with black_hole(BLACK_HOLES["a web page"], watch=watch, sends_probes=True, failures_max=1) as opened:
        state = opened.router.dispatch.endpoint(EndpointId("a"))
        assert state is not None
        await trio.sleep(1.5)
        for _ in range(20):
            await opened.router.client().post(CHAT, body())
        assert state.health.value == "ejected"
        asked = len(opened.hole.asked)
        await trio.sleep(100)
        assert {said.split(b" ")[1] for said in opened.hole.asked[asked:]} == {b"/v1/completions"}
        assert 3 <= len(opened.hole.asked) - asked <= 10, "the pauses between two probes grow"
        for _ in range(20):
            assert (await opened.router.client().post(CHAT, body())).status == 200
        assert not any(b"/chat/" in said for said in opened.hole.asked[asked:]), "its checks always succeed"
        opened.hole.answer = response(b'{"id":"x","choices":[{"index":0,"text":"a","finish_reason":"length"}]}')
        await trio.sleep(40)
        assert state.health.value == "healthy", "the endpoint has served a probe and passed a check"
        async with opened.router.client().ask(CHAT, body()) as answer:
            await answer.read()
        for _ in range(20):
            await opened.router.client().post(CHAT, body())
        assert state.health.value == "healthy"
        await opened.router.assert_all_free()


async def test_failures_of_an_endpoint_are_counted_by_reason():
    async with black_hole(BLACK_HOLES["a web page"]) as opened:
        for _ in range(12):
            await opened.router.client().post(CHAT, body())
        page = opened.router.metrics.expose().decode()
        assert 'endpoint_failures_total{endpoint="a",reason="content_type"} 1.0' in page


async def test_client_gets_a_refusal_that_two_endpoints_agree_on(open_pair):
    async with (
        open_pair("w1 w2") as pair,
        pair.client().ask("/v1/completions", {"model": "fake", "prompt": "a"}) as got,
    ):
        for id in ("w1", "w2"):
            ask = await pair.ask_of(id)
            ask.refuse(404, "not_here")
        await got.read()
        assert (got.status, json.loads(got.body)["error"]["code"]) == (404, "not_here")
        healths = {state.health.value for state in pair.router.dispatch.endpoints}
        assert healths == {"healthy"}
    await pair.assert_all_free()


async def test_invalid_request_is_refused_at_once_and_ejects_no_endpoint(open_pair):
    async with open_pair("w1 w2") as pair:
        for _ in range(3):
            async with pair.client().ask("/v1/completions", {"model": "fake", "prompt": "a"}) as got:
                await wait_all_tasks_blocked()
                [ask] = [ask for id in ("w1", "w2") for ask in pair[id].open]
                ask.refuse(400, "bad")
                await got.read()
                assert got.status == 400
        assert {state.health.value for state in pair.router.dispatch.endpoints} == {"healthy"}
        assert not any(state.failures_total for state in pair.router.dispatch.endpoints)
    await pair.assert_all_free()


async def test_stream_resumes_at_another_endpoint_after_its_last_valid_token(open_pair):
    async with open_pair("w1 w2") as pair, pair.client().ask("/v1/completions", _stream()) as got:
        ask = await pair.ask_of("w1")
        ask.begin_resumable()
        ask.group("0:1")
        await wait_all_tasks_blocked()
        ask.say("data: <html>\nid: 0:2\n\n")
        again = await pair.ask_of("w2")
        assert again.body["resume"]["token_ids"] == [[1]]
        again.begin_resumable()
        again.group("0:2")
        again.finish_resumable()
        await got.read()
        assert b"html" not in got.body
        assert b"error" not in got.body
    await pair.assert_all_free()


async def test_stream_without_end_that_cannot_resume_ends_with_an_error(open_pair):
    async with open_pair("w1 w2") as pair, pair.client().ask("/v1/completions", _stream()) as got:
        ask = await pair.ask_of("w1")
        ask.begin()
        ask.say('data: {"choices":[{"index":0,"text":"a"}]}\n\n')
        await wait_all_tasks_blocked()
        ask.end()
        await got.read()
        assert b'"endpoint_lost"' in got.body
    await pair.assert_all_free()


def _stream() -> dict[str, object]:
    return {"model": "fake", "prompt": "a", "stream": True}


@pytest.mark.parametrize(
    "said",
    [
        b'{"error":{"message":"no"}}',
        b'{"error":"no"}',
        b'{"type":"error","error":{"type":"not_found_error","message":"no"}}',
        b'{"object":"error","message":"no","code":400}',
        b'{"detail":[{"loc":["body"],"msg":"no"}]}',
    ],
)
def test_error_formats_of_known_servers_are_recognized(said):
    assert is_error("application/json; charset=utf-8", said)
    assert not is_error("text/html", said)


@pytest.mark.parametrize("said", [b"", b"{}", b'{"detail":"Not Found"}', b"no", b"[]", b'{"error":null}', b"\xff"])
def test_other_bodies_are_not_recognized_as_errors(said):
    assert not is_error("application/json", said)


def test_events_of_other_servers_are_accepted():
    check = EventCheck(EndpointId("a"), CHAT)
    check.check(b": OPENROUTER PROCESSING\n\n")
    check.check(b'event: x\r\ndata:{"choices":[],\r\ndata: "usage":{}}\r\n\r\n')
    check.check(b"data: " + FIRST + b"\n\nretry: 10\n\n")
    assert not check.is_over
    check.check(b'data: {"choices":[{"finish_reason":"stop"}]}\n\n')
    assert check.is_over


def test_paths_without_known_fields_accept_any_json():
    check_whole(EndpointId("a"), "/rerank", b'[{"index":0}]')
    with pytest.raises(InvalidAnswer):
        check_whole(EndpointId("a"), "/rerank", b"<html>")
    assert issubclass(InvalidAnswer, EndpointLost)


async def test_plain_text_of_a_transcription_is_forwarded():
    path = "/v1/audio/transcriptions"
    form, kind = multipart(("file", b"RIFF....", "a.wav"), ("model", "fake"), ("response_format", "text"))
    async with black_hole(response(b"Hello.\n", content_type="text/plain; charset=utf-8")) as opened:
        answers = [await opened.router.client().post(path, form, headers={"content-type": kind}) for _ in range(12)]
        heard = [answer for answer in answers if answer.status == 200]
        assert heard
        assert {(answer.body, answer.headers["content-type"]) for answer in heard} == {
            (b"Hello.\n", "text/plain; charset=utf-8")
        }
        assert form in opened.hole.asked[0]
        # The other endpoints have text models, which refuse recordings.
        assert {answer.status for answer in answers if answer not in heard} <= {400}
        await opened.router.assert_all_free()
