"""Tests CORS: which web pages may use the API, and which fields of a response they may read."""

from __future__ import annotations

import pytest
import trio

from trioserve.contracts.errors import StartupError
from trioserve.http.exchange import Beats
from trioserve.http.handler_call import CrossOrigin

CHAT = "https://chat.example.org"


class Handler:
    """A handler that streams a response and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    async def __call__(self, exchange) -> None:
        self.calls += 1
        body = await exchange.body()
        if exchange.path == "/stream":
            await exchange.start(200, [("content-type", "text/event-stream")])
            assert exchange.started
            await exchange.send(b"one ")
            await exchange.send(body)
            await exchange.finish()
        else:
            await exchange.respond(429, [("retry-after", "1")], body)


PREFLIGHT = (
    ("origin", CHAT),
    ("access-control-request-method", "POST"),
    ("access-control-request-headers", "authorization,content-type, x-stainless-lang"),
)


async def test_preflight_of_an_allowed_page_is_answered_without_the_handler(autojump_clock, front):
    """A preflight has no API key, so the check of keys must not see it."""
    handler = Handler()
    client = await front(CrossOrigin(handler, [CHAT, "http://localhost:3000"])).h2()
    response = await client.response(await client.request("/v1/models", method="OPTIONS", headers=PREFLIGHT))
    assert (response.status, response.body, handler.calls) == (204, b"", 0)
    assert response.headers["access-control-allow-origin"] == CHAT
    assert "POST" in response.headers["access-control-allow-methods"]
    assert response.headers["access-control-allow-headers"] == "authorization, content-type, x-stainless-lang"
    assert response.headers["vary"] == "origin"
    assert "access-control-allow-credentials" not in response.headers


async def test_preflight_of_another_page_gets_no_permission(autojump_clock, front):
    client = await front(CrossOrigin(Handler(), ["https://other.example.org"])).h2()
    response = await client.response(await client.request(method="OPTIONS", headers=PREFLIGHT))
    assert response.status == 204
    assert not [name for name in response.headers if name.startswith("access-control")]


@pytest.mark.parametrize("path, body", [("/stream", b"one two"), ("/", b"two")])
async def test_allowed_page_can_read_responses(autojump_clock, front, path, body):
    the_front = front(CrossOrigin(Handler(), [CHAT]))
    h2, http1 = await the_front.h2(), the_front.h11()
    response = await h2.response(await h2.request(path, headers=(("origin", CHAT),), body=b"two"))
    await http1.request(path, headers=(("Origin", CHAT),), body=b"two")
    _, headers, http1_body = await http1.response()
    assert response.body == http1_body == body
    for fields in (response.headers, headers):
        assert fields["access-control-allow-origin"] == CHAT
        assert fields["vary"] == "origin"
        for name in ("x-request-id", "retry-after"):
            assert name in fields["access-control-expose-headers"]


async def test_responses_to_other_pages_and_clients_have_no_cors_fields(autojump_clock, front):
    the_front = front(CrossOrigin(Handler(), [CHAT]))
    client = await the_front.h2()
    for headers in ((), (("origin", "https://evil.example.org"),), (("origin", "null"),), (("origin", CHAT + ":81"),)):
        response = await client.response(await client.request(headers=headers, body=b"x"))
        assert (response.status, response.body) == (429, b"x")
        assert not [name for name in response.headers if name.startswith("access-control")]


async def test_allowed_origin_star_allows_every_page(autojump_clock, front):
    client = await front(CrossOrigin(Handler(), ["*"])).h2()
    for headers in ((("origin", "null"),), (("origin", CHAT),)):
        response = await client.response(await client.request(headers=headers))
        assert response.headers["access-control-allow-origin"] == "*"


async def test_options_request_that_is_no_preflight_goes_to_the_handler(autojump_clock, front):
    handler = Handler()
    client = await front(CrossOrigin(handler, [CHAT])).h2()
    await client.response(await client.request(method="OPTIONS", headers=(("origin", CHAT),)))
    assert handler.calls == 1


async def test_invalid_requested_header_names_are_not_repeated(autojump_clock, front):
    client = await front(CrossOrigin(Handler(), [CHAT])).h2()
    asked = "good, b@d, <script>, " + ", ".join(f"x-{n}" for n in range(1000))
    headers = (*PREFLIGHT[:2], ("access-control-request-headers", asked))
    response = await client.response(await client.request(method="OPTIONS", headers=headers))
    allowed = response.headers["access-control-allow-headers"]
    assert allowed.startswith("good, x-0, x-1, ")
    assert len(allowed) <= 2000


async def test_client_that_leaves_cancels_the_wrapped_handler(autojump_clock, front, watched):
    handler = watched()
    the_front = front(CrossOrigin(handler, [CHAT]))
    client = await the_front.h2()
    stream_id = await client.request(headers=(("origin", CHAT),))
    await handler.begun.wait()
    await client.reset(stream_id)
    with trio.fail_after(1):
        await handler.ended.wait()
    assert handler.cancelled


@pytest.mark.parametrize("origin", ["chat.example.org", "https://chat.example.org/", "https://Chat.example.org", ""])
def test_invalid_origin_is_a_startup_error(origin):
    with pytest.raises(StartupError, match="without a path"):
        CrossOrigin(Handler(), [CHAT, origin])


async def test_heartbeats_reach_a_page_that_asks_for_them(autojump_clock, front):
    async def handler(exchange) -> None:
        assert exchange.expect_beats(Beats(fields=(("x-trioserve-instance", "a"),), within={}))
        exchange.beat()
        await trio.sleep(1)
        await exchange.respond(200, [], b"late")

    end = front(CrossOrigin(handler, [CHAT])).connect()
    await end.send_all(b"GET / HTTP/1.1\r\nhost: x\r\norigin: %b\r\n\r\n" % CHAT.encode())
    received = b""
    while not received.endswith(b"late"):
        received += await end.receive_some()
    assert received.startswith(b"HTTP/1.1 102 Processing\r\nx-trioserve-instance: a\r\n\r\nHTTP/1.1 200 OK\r\n")
    assert b"access-control-allow-origin: " + CHAT.encode() in received
