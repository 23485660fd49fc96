"""A client closes its connection while its long prompt is being computed: its KV blocks go back one step later.

python examples/leave_during_prefill.py
"""

import json

import trio

from trioserve.commands.serve import serve_configured
from trioserve.config import make_config

PROMPT = "All work and no play makes a dull boy. " * 700


async def request(port: int, method: str, path: str, body: bytes = b"") -> trio.SocketStream:
    stream = await trio.open_tcp_stream("127.0.0.1", port)
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    await stream.send_all(head.encode() + body)
    return stream


async def live_requests(port: int) -> list[dict[str, object]]:
    async with await request(port, "GET", "/v1/requests") as stream:
        response = b"".join([piece async for piece in stream])
    return json.loads(response.partition(b"\r\n\r\n")[2])["data"]


async def live_once(port: int, is_reached) -> list[dict[str, object]]:
    while True:
        live = await live_requests(port)
        if is_reached(live):
            return live
        await trio.sleep(0.01)


async def main() -> None:
    stop, orders = trio.open_memory_channel[object](1)
    urls: list[str] = []
    serving = trio.Event()
    config = make_config(model="smollm2", port=0, max_num_batched_tokens=256)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(
            lambda: serve_configured(config, orders, on_serving=lambda at: (urls.extend(at), serving.set()))
        )
        await serving.wait()
        port = int(urls[0].rpartition(":")[2])

        client = await request(port, "POST", "/v1/completions", json.dumps({"prompt": PROMPT, "stream": True}).encode())
        live = await live_once(port, lambda live: live and live[0]["phase"] == "prefill")
        print("in the middle of its prompt:", live[0])

        await client.aclose()
        print("a step later:", await live_once(port, lambda live: not live))
        stop.send_nowait("stop")


if __name__ == "__main__":
    trio.run(main)
