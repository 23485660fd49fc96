"""Checks anthropic-python: messages, streams, tools, token counts, and the error for an unknown model."""

import anthropic
from _env import KEY, MODEL, ROOT, WEATHER

client = anthropic.Anthropic(base_url=ROOT, api_key=KEY, max_retries=0)
tool = {
    "name": WEATHER["name"],
    "description": WEATHER["description"],
    "input_schema": WEATHER["parameters"],
}
ask = [{"role": "user", "content": "What is the weather in Paris?"}]

whole = client.messages.create(
    model=MODEL, max_tokens=500, system="Be short.", messages=[{"role": "user", "content": "What is 17 + 25?"}]
)
assert whole.content[0].text == "42", whole
assert whole.stop_reason == "end_turn"
assert whole.usage.output_tokens > 0

with client.messages.stream(
    model=MODEL, max_tokens=500, messages=[{"role": "user", "content": "Count from 1 to 5."}]
) as stream:
    assert "".join(stream.text_stream) == "1, 2, 3, 4, 5."
    assert stream.get_final_message().stop_reason == "end_turn"

called = client.messages.create(model=MODEL, max_tokens=500, messages=ask, tools=[tool])
assert called.stop_reason == "tool_use", called
[use] = [block for block in called.content if block.type == "tool_use"]
assert (use.name, use.input) == ("get_weather", {"city": "Paris"})
after = client.messages.create(
    model=MODEL,
    max_tokens=500,
    tools=[tool],
    messages=[
        *ask,
        {"role": "assistant", "content": called.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "18 degrees"}]},
    ],
)
assert after.content[0].text == "It is 18 degrees in Paris.", after

with client.messages.stream(model=MODEL, max_tokens=500, messages=ask, tools=[tool]) as stream:
    final = stream.get_final_message()
assert final.content[-1].input == {"city": "Paris"}, final

assert client.messages.count_tokens(model=MODEL, messages=ask).input_tokens > 0
assert MODEL in [model.id for model in client.models.list()]
try:
    client.messages.create(model="nobody", max_tokens=5, messages=ask)
except anthropic.NotFoundError as error:
    assert error.body["error"]["type"] == "not_found_error"
else:
    raise AssertionError("an unknown model was served")
print("ok")
