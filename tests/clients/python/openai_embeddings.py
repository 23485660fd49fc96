"""Checks openai-python: embeddings, which the client requests in base64."""

from _env import BASE_URL, KEY, MODEL
from openai import OpenAI

client = OpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0)
made = client.embeddings.create(model=MODEL, input=["Hello", "World"])
assert [item.index for item in made.data] == [0, 1]
first, second = (item.embedding for item in made.data)
assert len(first) == len(second) > 1
assert abs(sum(value * value for value in first) - 1) < 1e-3
assert made.usage.prompt_tokens > 0
print("ok")
