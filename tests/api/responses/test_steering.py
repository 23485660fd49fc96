"""Tests input that a user sends while a response runs on a websocket connection."""

from __future__ import annotations

from typing import Any

import pytest

from .test_connection import Agent, connected, opened, text_of

TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'


async def steer(agent: Agent, response_id: str, given: Any = "Shorter!") -> None:
    await agent.send({"type": "response.steer", "previous_response_id": response_id, "input": given})


async def begun(agent: Agent, text: str = "one", **fields: Any) -> str:
    await agent.create(text, **fields)
    created = await agent.until("response.created", lane=fields.get("stream_id"))
    await agent.until("response.output_text.delta", lane=fields.get("stream_id"))
    return str(created["response"]["id"])


async def test_steering_cuts_a_response_and_its_successor_has_the_input(autojump_clock):
    seen: list[str] = []
    lengths = iter((500, 2))
    async with (
        opened(response=lambda text: seen.append(text) or "x" * next(lengths), step_seconds=0.01) as server,
        connected(server) as agent,
    ):
        first = await begun(agent, stream_id="a", metadata={"k": "v"})
        await steer(agent, first)
        accepted = await agent.until("response.steer.accepted", lane="a")
        assert accepted["steer"]["previous_response_id"] == first
        cut = await agent.response("a")
        assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "steered"})
        assert 0 < len(text_of(cut)) < 500
        successor = await agent.response("a")
        assert (successor["previous_response_id"], successor["metadata"]) == (first, {"k": "v"})
        assert text_of(successor) == "xx"
        assert seen[-1] == f"user: one\nassistant: {text_of(cut)}\nuser: Shorter!\nassistant: "


async def test_several_inputs_go_to_one_response(autojump_clock):
    seen: list[str] = []
    outputs = iter((CALL + "x" * 100, "ok"))
    async with (
        opened(response=lambda text: seen.append(text) or next(outputs), step_seconds=0.01) as server,
        connected(server) as agent,
    ):
        await agent.create(tools=[TOOL])
        first = (await agent.until("response.created"))["response"]["id"]
        await agent.until("response.output_item.added")
        await steer(agent, first, "two")
        await steer(agent, first, [{"type": "message", "role": "user", "content": "three"}])
        call_id = (await agent.response())["output"][0]["call_id"]
        for _ in range(2):
            await agent.until("response.steer.pending")
        output = {"type": "function_call_output", "call_id": call_id, "output": "rain"}
        await agent.ask([output, {"role": "user", "content": "four"}], previous_response_id=first, tools=[TOOL])
        assert seen[-1].endswith("user: two\nuser: three\nuser: four\nassistant: ")


async def test_steering_of_a_response_with_tool_calls_waits_for_their_outputs(autojump_clock):
    seen: list[str] = []
    outputs = iter((CALL + "x" * 100, "ok"))
    async with (
        opened(response=lambda text: seen.append(text) or next(outputs), step_seconds=0.01) as server,
        connected(server) as agent,
    ):
        await agent.create(tools=[TOOL])
        first = (await agent.until("response.created"))["response"]["id"]
        await agent.until("response.output_item.added")
        await steer(agent, first, "Hurry!")
        ended = await agent.response()
        assert ended["status"] == "completed"
        call_id = ended["output"][0]["call_id"]
        pending = await agent.until("response.steer.pending")
        assert pending["reason"] == "waiting_for_required_input"
        assert pending["required_input"] == [{"type": "function_call_output", "call_id": call_id, "name": "weather"}]
        output = {"type": "function_call_output", "call_id": call_id, "output": "rain"}
        response = await agent.ask([output], previous_response_id=first, tools=[TOOL])
        assert text_of(response) == "ok"
        assert seen[-1].index("rain") < seen[-1].index("Hurry!")
        # The input was given to one response only.
        await agent.refused([output], previous_response_id=first, temperature=-1)


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ("", "invalid_input"),
        ([], "invalid_input"),
        ([{"role": "assistant", "content": "x"}], "invalid_input"),
        ([{"type": "function_call_output", "call_id": "c", "output": "x"}], "invalid_input"),
        ([{"type": "other"}], "invalid_input"),
    ],
)
async def test_invalid_input_is_returned(autojump_clock, given, code):
    async with opened(response="x" * 50, step_seconds=0.01) as server, connected(server) as agent:
        first = await begun(agent)
        await steer(agent, first, given)
        failed = await agent.until("response.steer.failed")
        assert failed["error"]["code"] == code
        assert failed["steer"] == {"previous_response_id": first, "input": given}
        assert (await agent.response())["status"] == "completed"


async def test_a_response_that_does_not_run_cannot_be_steered(autojump_clock):
    async with opened() as server, connected(server) as agent:
        first = await agent.ask()
        for response_id, code in ((first["id"], "response_already_completed"), ("resp_x", "response_not_found")):
            await steer(agent, response_id)
            assert (await agent.next())["error"]["code"] == code


async def test_input_of_a_cancelled_response_is_returned(autojump_clock):
    async with opened(response=CALL + "x" * 100, step_seconds=0.01) as server, connected(server) as agent:
        await agent.create(tools=[TOOL])
        first = (await agent.until("response.created"))["response"]["id"]
        await agent.until("response.output_item.added")
        await steer(agent, first)
        accepted = await agent.until("response.steer.accepted")
        await agent.send({"type": "response.cancel"})
        assert (await agent.response())["status"] == "cancelled"
        failed = await agent.until("response.steer.failed")
        assert failed["error"]["code"] == "response_not_active"
        assert failed["steer"] == {"id": accepted["steer"]["id"], "previous_response_id": first, "input": "Shorter!"}


async def test_input_whose_successor_is_refused_is_returned(autojump_clock):
    async with opened(response="x" * 500, step_seconds=0.01) as server, connected(server) as agent:
        first = await begun(agent)
        await steer(agent, first, "y" * 5000)
        assert (await agent.response())["incomplete_details"] == {"reason": "steered"}
        failed = await agent.until("response.steer.failed")
        assert failed["error"]["code"] == "successor_creation_failed"
        assert (await agent.error())["error"]["code"] == "context_length_exceeded"
        assert (await agent.ask(max_output_tokens=1))["status"] == "incomplete"


async def test_number_of_waiting_inputs_is_limited(autojump_clock):
    async with opened(response=CALL + "x" * 100, step_seconds=0.01) as server, connected(server) as agent:
        await agent.create(tools=[TOOL])
        first = (await agent.until("response.created"))["response"]["id"]
        await agent.until("response.output_item.added")
        for _ in range(33):
            await steer(agent, first)
        failed = await agent.until("response.steer.failed")
        assert failed["error"]["code"] == "too_many_pending_steers"
