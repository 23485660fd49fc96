"""Checks openai-python: a file of requests, its batch and the results."""

import io
import json
import time

from _env import BASE_URL, KEY, MODEL
from openai import OpenAI

client = OpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0)
lines = [
    {
        "custom_id": f"request-{index}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": MODEL, "messages": [{"role": "user", "content": f"Number {index}"}]},
    }
    for index in range(3)
]
uploaded = client.files.create(
    file=("batch.jsonl", io.BytesIO("\n".join(map(json.dumps, lines)).encode())), purpose="batch"
)
batch = client.batches.create(input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h")
for _ in range(200):
    batch = client.batches.retrieve(batch.id)
    if batch.status in ("completed", "failed", "cancelled", "expired"):
        break
    time.sleep(0.05)
assert batch.status == "completed", batch
assert batch.request_counts.completed == 3
results = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
said = {result["custom_id"]: result["response"]["body"]["choices"][0]["message"]["content"] for result in results}
assert said == {f"request-{index}": f"You said: Number {index}" for index in range(3)}, said
client.files.delete(uploaded.id)
print("ok")
