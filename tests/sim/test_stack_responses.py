"""What a simulated client takes for a correct response over HTTP, and what it objects to."""

from __future__ import annotations

import json

import pytest

from trioserve.simulation.stack.http_plan import Ask
from trioserve.simulation.stack.http_protocol import Response, StrictClient
from trioserve.simulation.stack.http_response import BROKEN_OFF, COMPLETE, outcome_of

TOKENS = [tuple("añb".encode())]  # the middle character is two tokens
DONE = b"data: [DONE]\n\n"


def event(text: str, finish_reason: str | None = None, **fields: object) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": finish_reason, **fields}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def error_event(code: str) -> bytes:
    return b"data: " + json.dumps({"error": {"message": "m", "code": code}}).encode() + b"\n\n"


def outcome(body: bytes, *, is_complete: bool = True, status: int = 200, streamed: bool = True) -> str:
    response = Response()
    response.status, response.is_complete = status, is_complete
    response.headers = {"x-request-id": "h0", "content-type": "text/event-stream; charset=utf-8"}
    response.body += body
    ask = Ask(number=0, connection=0, id="h0", prompts=((1,),), output=4, streamed=streamed)
    return outcome_of(ask, response, TOKENS)


@pytest.mark.parametrize(
    ("body", "is_complete", "expected"),
    [
        (event("a") + event("ñb", "length") + DONE, True, COMPLETE),
        (b": keep-alive\n\n" + event("añb", "length") + DONE, True, COMPLETE),
        (event("a") + event("\ufffd") + error_event("timeout"), True, "200 timeout"),
        (event("a") + event("ñb", "length") + DONE, False, BROKEN_OFF),
        (event("a") + b'data: {"cho', False, BROKEN_OFF),
        (event("a", token_ids=[97]), False, BROKEN_OFF),
        (b"", False, BROKEN_OFF),
    ],
)
def test_a_whole_response_or_a_beginning_is_taken(body, is_complete, expected):
    assert outcome(body, is_complete=is_complete) == expected


@pytest.mark.parametrize(
    ("body", "is_complete", "objection"),
    [
        (event("a") + event("ñb", "length"), True, "without .DONE. and without an error"),
        (event("a") + DONE, True, "complete, and ended with None"),
        (event("a") + error_event("timeout") + DONE, True, "after the last event"),
        (event("añb", "length") + DONE + event("x"), True, "after the last event"),
        (event("añb", "length") + event("x") + DONE, True, "after its end"),
        (event("anb", "length") + DONE, True, "'anb' of"),
        (event("añb", "abort") + DONE, True, "ended with abort"),
        (event("b"), False, "no beginning"),
        (event("añ", token_ids=[97]), False, "no beginning"),
        (event("a", token_ids=[98]), False, r"\[98\]"),
        (event("añb", "length") + DONE + b"data", True, "half an event"),
        (b"event: x\n\n", False, "is no event"),
    ],
)
def test_anything_else_is_objected_to(body, is_complete, objection):
    with pytest.raises(AssertionError, match=objection):
        outcome(body, is_complete=is_complete)


def test_what_is_not_http_is_objected_to():
    one, two = StrictClient(http=1), StrictClient(http=2, window=100)
    for client in (one, two):
        client.begin(Response(), "GET", "/", [], has_body=False)
    with pytest.raises(AssertionError, match=r"broke HTTP/1\.1"):
        one.receive(b"nonsense\r\n\r\n")
    with pytest.raises(AssertionError, match="broke HTTP/2"):
        two.receive(b"\0\0\4\0\1\0\0\0\1data")  # DATA before SETTINGS and before a head
    with pytest.raises(AssertionError, match="nobody asked for"):
        StrictClient(http=1).receive(b"HTTP/1.1 200 OK\r\n\r\n")


def test_responses_to_pipelined_requests_are_told_apart():
    client = StrictClient(http=1)
    responses = [Response(), Response(), Response()]
    for response in responses:
        client.begin(response, "GET", "/", [], has_body=False)
    ok = b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n"
    for byte in (ok + b"a", ok + b"b", ok):
        for position in range(len(byte)):
            client.receive(byte[position : position + 1])
    client.receive(b"")
    assert [bytes(response.body) for response in responses] == [b"a", b"b", b""]
    assert [response.is_complete for response in responses] == [True, True, False]
    assert responses[2].lost
