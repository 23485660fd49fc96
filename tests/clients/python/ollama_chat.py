"""Checks ollama-python: chat, text, a stream, a tool, a schema, the list of models and an unknown model."""

import json

import ollama
from _env import KEY, MODEL, ROOT, USER, WEATHER

client = ollama.Client(host=ROOT, headers={"authorization": f"Bearer {KEY}"})
ask = [{"role": "user", "content": "What is the weather in Paris?"}]
tool = {"type": "function", "function": WEATHER}

whole = client.chat(MODEL, [{"role": "user", "content": "What is 17 + 25?"}], options={"num_predict": 500})
assert whole.message.content == "42", whole
assert (whole.done, whole.done_reason) == (True, "stop"), whole
assert whole.eval_count > 0, whole

pieces = list(client.chat(MODEL, [{"role": "user", "content": "Count from 1 to 5."}], stream=True))
assert "".join(piece.message.content for piece in pieces) == "1, 2, 3, 4, 5.", pieces
assert pieces[-1].done, pieces

assert client.generate(MODEL, "What is 17 + 25?", system="Be short.").response == "42"
assert client.generate(MODEL).done_reason == "load"

called = client.chat(MODEL, ask, tools=[tool])
[call] = called.message.tool_calls
assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Paris"}), called
result = {"role": "tool", "tool_name": "get_weather", "content": "18 degrees"}
after = client.chat(MODEL, [*ask, called.message, result], tools=[tool])
assert after.message.content == "It is 18 degrees in Paris.", after

made = client.chat(MODEL, [{"role": "user", "content": "Jason is 25 years old."}], format=USER)
assert json.loads(made.message.content) == {"name": "Jason", "age": 25}, made

assert f"{MODEL}:latest" in [model.model for model in client.list().models]
assert "tools" in client.show(MODEL).capabilities
try:
    client.chat("nobody", ask)
except ollama.ResponseError as error:
    assert error.status_code == 404, error
else:
    raise AssertionError("an unknown model was served")
print("ok")
