"""Send three requests from asyncio, keep the first response and cancel the other tasks. This frees their KV blocks.

python examples/asyncio_first_response_wins.py
"""

import asyncio

import trioserve
import trioserve.asyncio

QUESTION = [{"role": "user", "content": "Name a river in Africa. One word."}]


async def ask(engine: trioserve.asyncio.Engine, seed: int) -> str:
    sampling = trioserve.SamplingParams(seed=seed, max_tokens=100, min_tokens=seed * 20)
    async with engine.generate(trioserve.ChatPrompt(messages=QUESTION), sampling) as stream:
        return "".join([delta.text async for delta in stream])


async def main() -> None:
    async with trioserve.asyncio.open_engine("smollm2", max_num_seqs=8) as engine:
        tasks = [asyncio.create_task(ask(engine, seed)) for seed in range(3)]
        done, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        print("first:", done.pop().result())
        print("others:", [view.state for view in engine.live_requests()])

        for task in others:
            task.cancel()  # This also cancels the task's request.
        await asyncio.wait(others)
        await asyncio.sleep(0.5)  # A step takes less time than this.
        print("KV blocks in use:", engine.stats().blocks_used)


if __name__ == "__main__":
    asyncio.run(main())
