"""Tests the events of a response: numbers, ids, order, and the output after each kind of end."""

from __future__ import annotations

import typing

import msgspec
import pytest
from openai.types.responses import ResponseStreamEvent

from trioserve.api.generation import Usage
from trioserve.api.openai.response_types import ChatToken
from trioserve.api.responses.events import ResponseEvents, event_bytes
from trioserve.api.responses.request_types import ResponsesBody
from trioserve.api.responses.response_object import ResponseHead
from trioserve.api.responses.response_types import ResponseEvent
from trioserve.api.responses.stored_responses import StoredResponse, stored_bytes
from trioserve.api.responses.tools import parse_tools
from trioserve.contracts.output import Delta
from trioserve.contracts.sampling import SamplingParams
from trioserve.text.response_parts import ContentText, ReasoningText, ToolCallArguments, ToolCallBegin, ToolCallEnd

USAGE = msgspec.convert(
    {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 1},
        "completion_tokens_details": {"reasoning_tokens": 1},
    },
    Usage,
)
TOOLS = [
    {"type": "function", "name": "f", "parameters": {"type": "object"}},
    {"type": "custom", "name": "patch"},
    {"type": "local_shell"},
    {"type": "namespace", "name": "space", "description": "", "tools": [{"type": "function", "name": "inner"}]},
]
KNOWN = {
    typing.get_args(kind.model_fields["type"].annotation)[0]: kind
    for kind in typing.get_args(typing.get_args(ResponseStreamEvent)[0])
}


def call(name, arguments, *, index=0, is_complete=True):
    begin = ToolCallBegin(index, name, f"call_{index}")
    pieces = [ToolCallArguments(index, piece) for piece in (arguments[:4], arguments[4:])]
    return [begin, *pieces, *([ToolCallEnd(index)] if is_complete else [])]


class Played:
    """All events of one response, and the whole response."""

    def __init__(self, *parts, finish="stop", end="complete", **fields):
        body = msgspec.convert({"model": "m", "input": "hi", **fields}, ResponsesBody)
        head = ResponseHead(
            id="resp_k1",
            created_at=100,
            model="m",
            body=body,
            tools=parse_tools(TOOLS, None),
            sampling=SamplingParams(),
            stores=True,
        )
        events = ResponseEvents(
            head, logprobs_of=lambda delta: [ChatToken(token="t", logprob=0.0, bytes=[116], top_logprobs=[])]
        )
        self.events = msgspec.to_builtins(events.begin())
        for part in parts:
            self.events += msgspec.to_builtins(events.take([part], Delta(index=0, text="", token_ids=())))
        if end == "complete":
            last, response = events.complete(finish, USAGE, 101)
        elif end == "fail":
            last, response = events.fail("broken", usage=USAGE)
        else:
            last, response = events.cancel(usage=USAGE)
        self.encoded = b"".join(map(event_bytes, last))
        self.events += msgspec.to_builtins(last)
        self.response = msgspec.to_builtins(response)
        self.check()

    def check(self):
        assert [event["sequence_number"] for event in self.events] == list(range(len(self.events)))
        for event in self.events:
            KNOWN[event["type"]].model_validate(event)  # The types are those of OpenAI's client library.
            msgspec.convert(event, ResponseEvent)  # Forbids fields that the type does not describe.
        assert f"event: {self.events[-1]['type']}\ndata: {{".encode() in self.encoded
        open_items, added, done = {}, [], {}
        for event in self.events:
            if event["type"] == "response.output_item.added":
                assert event["output_index"] == len(added)
                assert event["item"]["status"] == "in_progress"
                added.append(event["item"]["id"])
                open_items[event["item"]["id"]] = event["output_index"]
            elif event["type"] == "response.output_item.done":
                assert open_items.pop(event["item"]["id"]) == event["output_index"]
                done[event["item"]["id"]] = event["item"]
            elif "item_id" in event:
                assert open_items[event["item_id"]] == event["output_index"]
        if self.response["status"] in ("completed", "incomplete"):
            assert list(done.values()) == self.response["output"]
        assert self.events[-1]["response"] == self.response
        assert all(event["response"]["id"] == "resp_k1" for event in self.events if "response" in event)

    @property
    def types(self):
        return [event["type"].removeprefix("response.") for event in self.events[2:]]

    def text(self, kind):
        return "".join(event["delta"] for event in self.events if event["type"] == f"response.{kind}.delta")


def test_text_becomes_one_message_item():
    played = Played(ContentText("Hel"), ContentText("lo"))
    assert [event["type"] for event in played.events[:2]] == ["response.created", "response.in_progress"]
    assert played.types == [
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    [message] = played.response["output"]
    assert message["id"] == "msg_k1_0"
    assert message["content"][0]["text"] == "Hello"
    assert played.response["usage"]["output_tokens_details"] == {"reasoning_tokens": 1}
    assert (played.response["created_at"], played.response["completed_at"]) == (100, 101)


def test_reasoning_text_and_calls_become_items():
    played = Played(
        ReasoningText("hm"),
        ContentText("\n\n"),
        ContentText("So:"),
        *call("f", '{"a": 1}'),
        ContentText("\n"),
        *call("inner", "{}", index=1),
    )
    kinds = [(item["type"], item["id"]) for item in played.response["output"]]
    assert kinds == [
        ("reasoning", "rs_k1_0"),
        ("message", "msg_k1_1"),
        ("function_call", "fc_k1_2"),
        ("function_call", "fc_k1_3"),
    ]
    thought, message, first, second = played.response["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert message["content"][0]["text"] == "\n\nSo:"
    assert (first["name"], first["arguments"], first["call_id"]) == ("f", '{"a": 1}', "call_0")
    assert second["namespace"] == "space"
    assert played.text("function_call_arguments") == '{"a": 1}{}'
    assert played.text("reasoning_text") == "hm"


def test_reasoning_is_sent_as_summary_on_request():
    played = Played(ReasoningText("h"), ReasoningText("m"), ContentText("x"), reasoning={"summary": "auto"})
    assert played.types[:6] == [
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
    ]
    assert played.response["output"][0]["summary"] == [{"type": "summary_text", "text": "hm"}]


def test_interleaved_tool_calls_keep_their_output_indices():
    first, second = call("f", '{"a": 1}'), call("f", '{"b": 2}', index=1)
    mixed = [part for pair in zip(first, second, strict=True) for part in pair]
    assert [item["arguments"] for item in Played(*mixed).response["output"]] == ['{"a": 1}', '{"b": 2}']


@pytest.mark.parametrize(
    ("arguments", "expect"),
    [('{"input": "*** Begin\\nx"}', "*** Begin\nx"), ("not json", "not json"), ('"text"', "text"), ("[1]", "[1]")],
)
def test_custom_tool_call_has_plain_text_input(arguments, expect):
    played = Played(*call("patch", arguments))
    assert played.response["output"][0]["input"] == expect
    assert played.text("custom_tool_call_input") == expect
    assert played.text("function_call_arguments") == ""


def test_local_shell_call_has_an_action():
    played = Played(*call("local_shell", '{"command": ["ls"], "timeout_ms": 5}'))
    action = {"type": "exec", "command": ["ls"], "env": {}, "timeout_ms": 5}
    assert played.response["output"][0]["action"] == action


@pytest.mark.parametrize("end", ["complete", "fail", "cancel"])
def test_incomplete_tool_call_is_never_reported_as_complete(end):
    played = Played(ContentText("x"), *call("f", '{"a": 1}', is_complete=False), finish="length", end=end)
    assert [item["type"] for item in played.response["output"]] == ["message"]
    assert "function_call_arguments.done" not in played.types
    done = [event["item"]["type"] for event in played.events if event["type"] == "response.output_item.done"]
    assert "function_call" not in done


def test_token_limit_makes_the_response_incomplete():
    played = Played(ContentText("Hel"), finish="length")
    assert played.types[-1] == "incomplete"
    assert played.response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert played.response["output"][0]["status"] == "incomplete"
    assert played.response["completed_at"] is None


def test_failed_response_has_an_error_and_its_text_so_far():
    played = Played(ContentText("Hel"), end="fail")
    assert played.types[-1] == "failed"
    assert played.response["error"] == {"code": "server_error", "message": "broken"}
    assert played.response["output"][0]["content"][0]["text"] == "Hel"
    assert Played(ContentText("x"), end="cancel").response["status"] == "cancelled"


@pytest.mark.parametrize("parts", [(), (ContentText(" \n"),)])
def test_output_of_white_space_becomes_a_message(parts):
    [message] = Played(*parts).response["output"]
    assert message["content"][0]["text"] == "".join(part.text for part in parts)
    assert message["status"] == "completed"


def test_stored_responses_of_earlier_versions_are_readable():
    output = [
        {"type": "reasoning", "id": "rs_k1_0", "status": "completed", "summary": [], "content": []},
        {
            "type": "message",
            "id": "msg_k1_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "x", "annotations": [], "logprobs": []}],
        },
    ]
    before = {
        "id": "resp_k1",
        "object": "response",
        "created_at": 100,
        "completed_at": 101,
        "status": "completed",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": None,
        "max_tool_calls": None,
        "model": "m",
        "output": output,
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": None,
        "service_tier": "default",
        "store": True,
        "temperature": 1.0,
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "truncation": "disabled",
        "usage": None,
        "user": None,
        "metadata": {},
    }
    # The assistant's text of an input had no annotations if it was sent as a string.
    spoken = {"type": "output_text", "text": "y"}
    said = {"type": "message", "role": "assistant", "status": "completed", "content": [spoken], "id": "msg_k1_in0"}
    stored = msgspec.json.decode(msgspec.json.encode({"response": before, "input": [said]}), type=StoredResponse)
    assert msgspec.to_builtins(stored.response) == before
    assert [item.id for item in stored.items] == ["msg_k1_in0", "rs_k1_0", "msg_k1_1"]
    assert msgspec.json.decode(stored_bytes(stored), type=StoredResponse) == stored
