"""Close a client's connection during the prefill of a long prompt. One step later, the request's KV blocks are free.

python examples/leave_during_prefill.py
"""

import functools
import json

import trio

import trioserve

PROMPT = "All work and no play makes a dull boy. " * 700


async def request(port: int, method: str, path: str, body: bytes = b"") -> trio.SocketStream:
    stream = await trio.open_tcp_stream("127.0.0.1", port)
    head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    await stream.send_all(head.encode() + body)
    return stream


async def main() -> None:
    async with trioserve.open_engine("smollm2", max_num_batched_tokens=256) as engine, trio.open_nursery() as nursery:
        [url] = await nursery.start(functools.partial(trioserve.serve, engine, port=0))
        port = int(url.rpartition(":")[2])

        client = await request(port, "POST", "/v1/completions", json.dumps({"prompt": PROMPT, "stream": True}).encode())
        await client.receive_some()  # The server sends the response's head after the first chunk of the prompt.
        print("in the middle of its prompt:", engine.live_requests()[0])

        await client.aclose()
        await engine.wait_all_free()
        print("a step later, KV blocks in use:", engine.stats().blocks_used)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main)
