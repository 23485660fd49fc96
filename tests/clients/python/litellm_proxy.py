"""Checks the proxy of LiteLLM in front of the server: chat, tools and a stream."""

import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from _env import BASE_URL, KEY, MODEL, WEATHER
from openai import OpenAI

PROXY_KEY = "sk-proxy-" + secrets.token_hex(16)  # The proxy does not start without a key.
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
with tempfile.TemporaryDirectory() as folder:
    config = Path(folder) / "config.yaml"
    config.write_text(
        f"model_list:\n- model_name: behind\n  litellm_params:\n    model: openai/{MODEL}\n"
        f"    api_base: {BASE_URL}\n    api_key: {KEY}\n"
    )
    proxy = subprocess.Popen(
        [Path(sys.executable).parent / "litellm", "--config", config, "--port", str(port), "--host", "127.0.0.1"],
        env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": PROXY_KEY},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(240):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health/liveliness", timeout=5).close()
                break
            except OSError:
                assert proxy.poll() is None, "the proxy has ended"
                time.sleep(0.5)
        client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=PROXY_KEY, max_retries=0)
        whole = client.chat.completions.create(
            model="behind", messages=[{"role": "user", "content": "What is 17 + 25?"}]
        )
        assert whole.choices[0].message.content == "42"
        called = client.chat.completions.create(
            model="behind",
            messages=[{"role": "user", "content": "What is the weather in Paris?"}],
            tools=[{"type": "function", "function": WEATHER}],
        )
        assert called.choices[0].message.tool_calls[0].function.name == "get_weather"
        stream = client.chat.completions.create(
            model="behind", messages=[{"role": "user", "content": "Count from 1 to 5."}], stream=True
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
        assert text == "1, 2, 3, 4, 5."
    finally:
        proxy.terminate()
        proxy.wait(30)
print("ok")
