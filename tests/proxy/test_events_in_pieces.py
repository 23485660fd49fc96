"""Tests streams of other servers: the router forwards their events unchanged, and sends its own error as a separate
event.
"""

from __future__ import annotations

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.api.caller import AccessRules

TEXT = "/v1/completions"
BODY = {"model": "fake", "prompt": "hello", "max_tokens": 5, "stream": True}
LONG = {"prompt": "a prompt that is long enough to be computed elsewhere " * 4}
COMMENTS = [": ping\n\n", ": ping\r\n\r\n", ": ping\r\r", ":\n", ": pi"]


async def said(ask, *pieces: str) -> None:
    for piece in pieces:
        ask.say(piece)
        await wait_all_tasks_blocked()


@pytest.mark.parametrize("http", [1, 2])
@pytest.mark.parametrize("cut", ['data: {"choices": [{"text": "ab', 'data: {"choices": []}\n', "data", ": pi"])
async def test_error_of_the_router_is_separate_from_an_incomplete_event(open_pair, cut, http):
    async with open_pair("w") as pair, pair.client(http=http).ask(TEXT, BODY) as response:
        ask = await pair.ask_of("w")
        ask.token("good ")
        await said(ask, cut)
        ask.hang_up()
        first, error = [event async for event in response]
        assert first["choices"][0]["text"] == "good "
        assert error["error"]["code"] == "endpoint_lost"
    await pair.assert_all_free()


async def test_client_gets_an_error_event_if_the_stream_is_aborted_in_the_middle_of_an_event(open_pair):
    async with open_pair("w") as pair, pair.client().ask(TEXT, BODY, headers={"x-request-id": "mine"}) as response:
        ask = await pair.ask_of("w")
        ask.token("good ")
        await said(ask, 'data: {"choices": [{"text": "ab')
        await pair.client().post("/v1/requests/abort", {"ids": ["mine"]})
        events = [event async for event in response]
        assert events[-1]["error"]["code"] == "request_aborted"
        assert len(events) == 2
    await pair.assert_all_free()


@pytest.mark.parametrize("comment", COMMENTS)
async def test_comment_with_any_line_end_does_not_count_as_a_token(open_pair, comment):
    async with open_pair("w w2", policy="round_robin") as pair, pair.client().ask(TEXT, BODY) as response:
        await wait_all_tasks_blocked()
        [(first, ask)] = [(id, endpoint.open[0]) for id, endpoint in pair.endpoints.items() if endpoint.open]
        await said(ask, comment)
        ask.hang_up()
        other = await pair.ask_of("w2" if first == "w" else "w")
        other.token("hello")
        other.finish()
        await response.read()
        assert b'"hello"' in response.body
        assert b"error" not in response.body
    await pair.assert_all_free()


@pytest.mark.parametrize("ids", ["w", "p d"])
@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n", "\r\r"])
@pytest.mark.parametrize("length", [1, 2, 3, 7, 1000])
async def test_events_in_pieces_that_end_anywhere_are_forwarded_unchanged(open_pair, ids, end, length, autojump_clock):
    stream = (
        f": ping{end}"
        + "".join(f'data: {{"choices":[],"t":{number}}}{end}' for number in range(3))
        + f"data: [DONE]{end}"
    )
    async with open_pair(ids) as pair, pair.client().ask(TEXT, {**BODY, **(LONG if ids == "p d" else {})}) as response:
        if ids == "p d":
            (await pair.ask_of("p")).hold()
        ask = await pair.ask_of(ids[-1])
        await said(ask, *(stream[at : at + length] for at in range(0, len(stream), length)))
        ask.end()
        with trio.fail_after(60):
            await response.read()
        assert response.body.decode() == stream
    await pair.assert_all_free()


async def test_last_event_without_an_empty_line_is_forwarded(open_pair):
    async with open_pair("w") as pair, pair.client().ask(TEXT, BODY) as response:
        ask = await pair.ask_of("w")
        await said(ask, 'data: {"choices":[]}\n\ndata: [DONE]\n')
        ask.end()
        await response.read()
        assert response.body == b'data: {"choices":[]}\n\ndata: [DONE]\n'
    await pair.assert_all_free()


async def test_cors_headers_of_endpoints_are_not_forwarded(open_pair):
    access = AccessRules(page_origins=("https://chat.example.org",))
    async with open_pair("w", access=access) as pair:
        page = {"origin": "https://chat.example.org"}
        async with pair.client().ask(TEXT, {**BODY, "stream": False}, headers=page) as response:
            ask = await pair.ask_of("w")
            assert "origin" not in ask.headers
            ask.respond({"choices": []}, headers={"Access-Control-Allow-Origin": "*", "x-other": "kept"})
            await response.read()
            assert response.headers["x-other"] == "kept"
            assert not [name for name in response.headers if name.startswith("access-control-")]
    await pair.assert_all_free()
