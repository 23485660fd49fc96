"""A FastAPI application on Trio, with its own handler and the server's whole API. If a client disconnects, its KV
blocks are freed.

Run `hypercorn --worker-class trio fastapi_on_trio:app` in this folder, or run a demonstration:
python examples/fastapi_on_trio.py
"""

from functools import partial

import httpx
import hypercorn.trio
import trio
from fastapi import FastAPI, Request
from hypercorn.config import Config

import trioserve

llm = trioserve.asgi_app("smollm2", max_num_seqs=8)
app = FastAPI(lifespan=llm.lifespan)  # The lifespan opens and closes the engine.
app.mount("/llm", llm)  # The mounted application serves /llm/v1/chat/completions and all other routes.


@app.post("/story")
async def story(words: int, request: Request) -> dict[str, str]:
    sampling = trioserve.SamplingParams(max_tokens=words, ignore_eos=True)
    async with (
        trioserve.cancel_on_disconnect(request),
        llm.engine.generate("Once upon a time,", sampling) as response,
    ):
        return {"text": "".join([delta.text async for delta in response])}


async def main() -> None:
    config = Config()
    config.bind = ["127.0.0.1:0"]
    end = trio.Event()
    async with trio.open_nursery() as nursery:
        [url] = await nursery.start(partial(hypercorn.trio.serve, app, config, shutdown_trigger=end.wait))
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            answer = await client.post("/story", params={"words": 8})
            print("a story:", answer.json()["text"])
            models = await client.get("/llm/v1/models")
            print("models:", [model["id"] for model in models.json()["data"]])
            try:
                await client.post("/story", params={"words": 4000}, timeout=0.5)
            except httpx.ReadTimeout:
                print("the client has left")
            await llm.engine.wait_all_free()
            print("KV blocks in use:", llm.engine.stats().blocks_used)
        end.set()


if __name__ == "__main__":
    trio.run(main)
