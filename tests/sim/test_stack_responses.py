"""Tests which HTTP responses a simulated client accepts and which it refuses."""

from __future__ import annotations

import json

import pytest

from trioserve.simulation.stack.calls import FAMILIES, TEXTS, CallChoice, CallingModel, shown_of
from trioserve.simulation.stack.http_connection import Ask, Response, StrictClient
from trioserve.simulation.stack.http_requests import BROKEN_OFF, COMPLETE, expected_tokens, outcome_of

TOKENS = [tuple("añb".encode())]  # The character in the middle consists of two tokens.
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
def test_simulated_client_accepts_complete_and_partial_responses(body, is_complete, expected):
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
        (event("b"), False, "not a beginning"),
        (event("añ", token_ids=[97]), False, "not a beginning"),
        (event("a", token_ids=[98]), False, r"\[98\]"),
        (event("añb", "length") + DONE + b"data", True, "half an event"),
        (b"event: x\n\n", False, "is not an event"),
    ],
)
def test_simulated_client_refuses_wrong_responses(body, is_complete, objection):
    with pytest.raises(AssertionError, match=objection):
        outcome(body, is_complete=is_complete)


def test_simulated_client_refuses_invalid_http():
    one, two = StrictClient(http=1), StrictClient(http=2, window=100)
    for client in (one, two):
        client.begin(Response(), "GET", "/", [], has_body=False)
    with pytest.raises(AssertionError, match=r"broke HTTP/1\.1"):
        one.receive(b"nonsense\r\n\r\n")
    with pytest.raises(AssertionError, match="broke HTTP/2"):
        two.receive(b"\0\0\4\0\1\0\0\0\1data")  # The DATA frame comes before SETTINGS and before a head.
    with pytest.raises(AssertionError, match="without a request"):
        StrictClient(http=1).receive(b"HTTP/1.1 200 OK\r\n\r\n")


def test_pipelined_responses_are_separated():
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


# --- Chats with tools ---


def call_choice(number: int, tokens_max: int = 150, ids: set[str] | None = None) -> CallChoice:
    prompt = tuple(b"f g text %d" % number)
    ask = Ask(number=0, connection=0, prompts=(prompt,), output=tokens_max, has_tools=True)
    [tokens] = expected_tokens(ask, CallingModel("hermes", vocab_size=256))
    return CallChoice("c", tokens, "hermes", prompt, 0, set() if ids is None else ids)


def chunk(finish_reason: str | None = None, **delta: object) -> dict[str, object]:
    return {"index": 0, "delta": delta, "finish_reason": finish_reason}


def begun(name: str, index: int = 0, call_id: str = "i") -> dict[str, object]:
    call = {"index": index, "id": f"{call_id}{index}", "type": "function"}
    return chunk(tool_calls=[{**call, "function": {"name": name, "arguments": ""}}])


def more(arguments: str, index: int = 0) -> dict[str, object]:
    return chunk(tool_calls=[{"index": index, "function": {"arguments": arguments}}])


def message(content: str | None, *calls: tuple[str, str], finish_reason: str) -> dict[str, object]:
    shown = [
        {"id": f"i{index}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for index, (name, arguments) in enumerate(calls)
    ]
    return {"message": {"content": content, "tool_calls": shown}, "finish_reason": finish_reason}


TWO = (("f", r'{"b": [1, "\""]}'), ("g", '{"c": "é"}'))  # text 2
PARTIAL_FINISH = (("g", r'{"d": "\ud83d\ude00"}'), ("f", r'{"a": "\tz'))  # text 4
STREAMED_TWO = [begun("f"), more(TWO[0][1]), begun("g", 1), more('{"c"', 1), more(': "é"}', 1)]


@pytest.mark.parametrize(
    ("number", "tokens_max", "pieces"),
    [
        (1, 150, [chunk(content="Well, é!"), begun("g"), more("{}"), chunk("tool_calls")]),
        (2, 150, [*STREAMED_TWO, chunk("tool_calls")]),
        (2, 150, [message(None, *TWO, finish_reason="tool_calls")]),
        (3, 5, [message("There", finish_reason="length")]),
        (4, 150, [message(None, PARTIAL_FINISH[0], finish_reason="stop")]),
        (4, 150, [begun("g"), more(PARTIAL_FINISH[0][1]), begun("f", 1), more(PARTIAL_FINISH[1][1], 1), chunk("stop")]),
        (1, 12, [chunk(content="Well, é!<to"), chunk("length")]),
        (0, 11, [chunk("length")]),  # The text begins a tool call and ends before the call's name.
    ],
)
def test_simulated_client_accepts_tool_calls_of_the_model(number, tokens_max, pieces):
    choice = call_choice(number, tokens_max)
    for piece in pieces:
        choice.check_prefix()
        choice.take(piece)
    choice.check_complete()


@pytest.mark.parametrize(
    ("number", "tokens_max", "pieces", "objection"),
    [
        (2, 150, [*STREAMED_TWO, chunk("stop")], "ended with stop"),
        (2, 150, [*STREAMED_TWO[:-1], chunk("tool_calls")], "instead of"),
        (2, 150, [begun("f"), begun("f")], "begins the call that is open"),
        (2, 150, [begun("f"), more(TWO[0][1]), more("{}", 2)], "after 1 calls"),
        (2, 150, [chunk("tool_calls"), begun("f")], "instead of"),
        (2, 150, [message(None, TWO[0], finish_reason="tool_calls")], "instead of"),
        (2, 150, [message("f", *TWO, finish_reason="tool_calls")], "instead of"),
        (4, 150, [message(None, *PARTIAL_FINISH, finish_reason="stop")], "instead of"),
        (4, 150, [message(None, PARTIAL_FINISH[0], finish_reason="tool_calls")], "ended with tool_calls"),
        (1, 150, [chunk(content="Well, é!<?")], "not a beginning"),
        (1, 150, [begun("g"), more("{}"), chunk(content="Well, é!")], "not a beginning"),
        (1, 150, [chunk(content="Well, é!"), begun("f")], "not a beginning"),
    ],
)
def test_simulated_client_refuses_wrong_tool_calls(number, tokens_max, pieces, objection):
    choice = call_choice(number, tokens_max)
    with pytest.raises(AssertionError, match=objection):
        for piece in pieces:
            choice.take(piece)
            choice.check_prefix()


@pytest.mark.parametrize("content", ["Well, \ufffd", "Well, é!<tool"])
def test_aborted_choice_may_end_with_withheld_text(content):
    choice = call_choice(1)
    choice.take(chunk(content=content))
    choice.check_prefix()


def test_tool_calls_of_a_response_have_different_ids():
    ids: set[str] = set()
    call_choice(2, ids=ids).take(begun("f"))
    with pytest.raises(AssertionError, match="the id of another call"):
        call_choice(2, ids=ids).take(begun("f"))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_text_of_a_chat_is_expected_without_its_markers(family):
    for number, text in enumerate(TEXTS):
        ask = Ask(number=0, connection=0, prompts=(tuple(b"f g text %d" % number),), output=150, has_tools=True)
        [tokens] = expected_tokens(ask, CallingModel(family, vocab_size=256))
        shown = shown_of(family, ask.prompts[0], 0, bytes(tokens[:-1]).decode(), is_over=True)
        assert shown.content == "".join(part for part in text if isinstance(part, str))
        assert shown.calls == tuple((part.name, part.arguments) for part in text if not isinstance(part, str))
        assert shown.is_partial == any(not isinstance(part, str) and not part.is_whole for part in text)
