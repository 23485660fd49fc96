"""Checks openai-python: chat, tools streamed and unstreamed, parsing into a class, and errors."""

from _env import BASE_URL, KEY, MODEL, WEATHER
from openai import BadRequestError, NotFoundError, OpenAI
from pydantic import BaseModel


class User(BaseModel):
    name: str
    age: int


client = OpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0)
ask = [{"role": "user", "content": "What is the weather in Paris?"}]
tools = [{"type": "function", "function": WEATHER}]

assert MODEL in [model.id for model in client.models.list()]
assert client.models.retrieve(MODEL).id == MODEL

whole = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "What is 17 + 25?"}])
assert whole.choices[0].message.content == "42", whole
assert whole.usage.total_tokens > 0

with client.chat.completions.stream(model=MODEL, messages=ask, tools=tools) as stream:
    kinds = [event.type for event in stream]
    final = stream.get_final_completion()
assert "tool_calls.function.arguments.done" in kinds, kinds
called = final.choices[0].message.tool_calls[0]
assert (called.function.name, called.function.arguments) == ("get_weather", '{"city": "Paris"}'), called
assert final.choices[0].finish_reason == "tool_calls"

whole = client.chat.completions.create(model=MODEL, messages=ask, tools=tools)
[called] = whole.choices[0].message.tool_calls
follow_up = [*ask, whole.choices[0].message, {"role": "tool", "tool_call_id": called.id, "content": "18 degrees"}]
whole = client.chat.completions.create(model=MODEL, messages=follow_up, tools=tools)
assert whole.choices[0].message.content == "It is 18 degrees in Paris.", whole

both = client.chat.completions.create(
    model=MODEL, messages=[{"role": "user", "content": "The weather in Paris and in Tokyo?"}], tools=tools
)
assert [call.function.arguments for call in both.choices[0].message.tool_calls] == [
    '{"city": "Paris"}',
    '{"city": "Tokyo"}',
]
assert len({call.id for call in both.choices[0].message.tool_calls}) == 2

for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
    forced = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Nothing of the sort."}], tools=tools, tool_choice=choice
    )
    assert forced.choices[0].message.tool_calls[0].function.name == "get_weather", forced
none = client.chat.completions.create(model=MODEL, messages=ask, tools=tools, tool_choice="none")
assert not none.choices[0].message.tool_calls

parsed = client.chat.completions.parse(
    model=MODEL, messages=[{"role": "user", "content": "Jason is 25 years old."}], response_format=User
)
assert parsed.choices[0].message.parsed == User(name="Jason", age=25), parsed
loose = client.chat.completions.create(
    model=MODEL,
    messages=[{"role": "user", "content": "Jason is 25 years old. JSON."}],
    response_format={"type": "json_object"},
)
assert User.model_validate_json(loose.choices[0].message.content).age == 25

try:
    client.chat.completions.create(model="nobody", messages=ask)
except NotFoundError as error:
    assert MODEL in error.message
else:
    raise AssertionError("an unknown model was served")
try:
    client.chat.completions.create(model=MODEL, messages=ask, max_tokens=10**8)
except BadRequestError as error:
    assert "maximum context length" in error.message
    assert error.code == "context_length_exceeded"
else:
    raise AssertionError("a response was promised that has no room")
print("ok")
