"""Checks the Responses API over a websocket with openai-python and with the package websockets.

One connection has turns that continue each other without the store, lanes, a warm-up, a steered response and errors.
"""

import asyncio
import json

import websockets
from _env import BASE_URL, KEY, MODEL, WEATHER
from openai import AsyncOpenAI, OpenAI

ENDS = ("response.completed", "response.incomplete", "response.failed", "error")
client = OpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0)
tool = {"type": "function", "strict": True, **WEATHER}


def end_of(connection, stream_id=None):
    """Return the last event of the next response of a lane."""
    return next(event for event in connection if event.type in ENDS and event.stream_id == stream_id)


with client.responses.connect() as connection:
    connection.response.create(model=MODEL, input="What is the weather in Paris?", tools=[tool], store=False)
    called = end_of(connection).response
    [call] = [item for item in called.output if item.type == "function_call"]
    assert (call.name, call.arguments) == ("get_weather", '{"city": "Paris"}'), call
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees"}
    connection.response.create(model=MODEL, previous_response_id=called.id, input=[output], tools=[tool], store=False)
    after = end_of(connection).response
    assert after.output_text == "It is 18 degrees in Paris.", after

    for stream_id in ("a", "b"):
        connection.response.create(model=MODEL, input="Count from 1 to 5.", stream_id=stream_id)
    texts = {"a": "", "b": ""}
    left = set(texts)
    for event in connection:
        if event.type == "response.output_text.delta":
            texts[event.stream_id] += event.delta
        if event.type == "response.completed":
            left.remove(event.stream_id)
        if not left:
            break
    assert set(texts.values()) == {"1, 2, 3, 4, 5."}, texts

    connection.response.create(model=MODEL, input="Answer with numbers only.", generate=False, store=False)
    warm = end_of(connection).response
    assert (warm.status, warm.output) == ("completed", []), warm
    connection.response.create(model=MODEL, input="What is 17 + 25?", previous_response_id=warm.id)
    stored = end_of(connection).response
    assert stored.output_text == "42", stored
    assert client.responses.retrieve(stored.id).output_text == "42"

    connection.response.create(model=MODEL, input="Hi", previous_response_id="resp_unknown", stream_id="a")
    error = end_of(connection, "a")
    assert (error.status, error.error.code) == (400, "previous_response_not_found"), error
    connection.response.steer(previous_response_id=stored.id, input="Shorter!")
    failed = next(iter(connection))
    assert (failed.type, failed.error.code) == ("response.steer.failed", "response_already_completed"), failed


async def ask_asynchronously():
    async with (
        AsyncOpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0) as asynchronous,
        asynchronous.responses.connect() as connection,
    ):
        await connection.response.create(model=MODEL, input="What is 17 + 25?", store=False)
        [end] = [event async for event in until_end(connection) if event.type in ENDS]
        return end.response.output_text


async def until_end(connection):
    async for event in connection:
        yield event
        if event.type in ENDS:
            return


async def ask_with_websockets():
    url = BASE_URL.replace("http", "ws", 1) + "/responses"
    async with websockets.connect(url, additional_headers={"Authorization": f"Bearer {KEY}"}) as socket:
        await socket.send(b"binary")
        assert json.loads(await socket.recv())["type"] == "error"
        await socket.send(json.dumps({"type": "response.create", "model": MODEL, "input": "What is 17 + 25?"}))
        while (event := json.loads(await socket.recv()))["type"] not in ENDS:
            pass
        return event["response"]["output"][0]["content"][0]["text"]


assert asyncio.run(ask_asynchronously()) == "42"
assert asyncio.run(ask_with_websockets()) == "42"
print("ok")
