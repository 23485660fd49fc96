"""Checks the Responses API with openai-python.

The responses are streamed or not, have a tool or a class as schema, follow an earlier response, or run in the
background.
"""

import time

from _env import BASE_URL, KEY, MODEL, WEATHER
from openai import NotFoundError, OpenAI
from pydantic import BaseModel


class User(BaseModel):
    name: str
    age: int


client = OpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0)
tool = {"type": "function", "strict": True, **WEATHER}

whole = client.responses.create(model=MODEL, input="What is 17 + 25?")
assert whole.status == "completed"
assert whole.output_text == "42", whole
assert client.responses.retrieve(whole.id).output_text == "42"

stored = client.responses.input_items.list(whole.id)
assert [item.type for item in stored] == ["message"]

events = list(client.responses.create(model=MODEL, input="Count from 1 to 5.", stream=True))
assert events[0].type == "response.created"
assert events[-1].type == "response.completed"
assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "1, 2, 3, 4, 5."
assert [event.sequence_number for event in events] == list(range(len(events)))

called = client.responses.create(model=MODEL, input="What is the weather in Paris?", tools=[tool])
[call] = [item for item in called.output if item.type == "function_call"]
assert (call.name, call.arguments) == ("get_weather", '{"city": "Paris"}'), call
after = client.responses.create(
    model=MODEL,
    previous_response_id=called.id,
    input=[{"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees"}],
    tools=[tool],
)
assert after.output_text == "It is 18 degrees in Paris.", after

with client.responses.stream(model=MODEL, input="What is the weather in Paris?", tools=[tool]) as stream:
    kinds = {event.type for event in stream}
assert {"response.function_call_arguments.delta", "response.function_call_arguments.done"} <= kinds, kinds

parsed = client.responses.parse(model=MODEL, input="Jason is 25 years old.", text_format=User)
assert parsed.output_parsed == User(name="Jason", age=25), parsed

background = client.responses.create(model=MODEL, input="What is 17 + 25?", background=True)
for _ in range(100):
    background = client.responses.retrieve(background.id)
    if background.status not in ("queued", "in_progress"):
        break
    time.sleep(0.05)
assert background.output_text == "42", background

client.responses.delete(whole.id)
try:
    client.responses.retrieve(whole.id)
except NotFoundError:
    pass
else:
    raise AssertionError("a deleted response is still there")
print("ok")
