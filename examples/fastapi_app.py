"""A FastAPI application with its own handler and the server's whole API. If a client disconnects, its KV blocks are
freed.

Run `uvicorn fastapi_app:app` in this folder, or run a demonstration: python examples/fastapi_app.py
"""

import asyncio
import socket

import httpx
import uvicorn
from fastapi import FastAPI, Request

import trioserve
import trioserve.asyncio

llm = trioserve.asgi_app("smollm2", max_num_seqs=8)
app = FastAPI(lifespan=llm.lifespan)  # The lifespan opens and closes the engine.
app.mount("/llm", llm)  # The mounted application serves /llm/v1/chat/completions and all other routes.


@app.post("/story")
async def story(words: int, request: Request) -> dict[str, str]:
    sampling = trioserve.SamplingParams(max_tokens=words, ignore_eos=True)
    async with (
        trioserve.asyncio.cancel_on_disconnect(request),
        llm.engine.generate("Once upon a time,", sampling) as stream,
    ):
        return {"text": "".join([delta.text async for delta in stream])}


async def main() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=60) as client:
        answer = await client.post("/story", params={"words": 8})
        print("a story:", answer.json()["text"])
        models = await client.get("/llm/v1/models")
        print("models:", [model["id"] for model in models.json()["data"]])
        try:
            await client.post("/story", params={"words": 4000}, timeout=0.5)
        except httpx.ReadTimeout:
            print("the client has left")
        await asyncio.sleep(0.5)  # A step takes less time than this.
        print("KV blocks in use:", llm.engine.stats().blocks_used)
    server.should_exit = True
    await serving


if __name__ == "__main__":
    asyncio.run(main())
