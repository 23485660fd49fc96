"""Send three requests, keep the first response and cancel the other requests. Their KV blocks are free a step later.

python examples/first_response_wins.py
"""

import trio

import trioserve

QUESTION = [{"role": "user", "content": "Name a river in Africa. One word."}]


async def main() -> None:
    async with trioserve.open_engine("smollm2", max_num_seqs=8) as engine:
        responses: list[str] = []

        async def ask(seed: int, nursery: trio.Nursery) -> None:
            sampling = trioserve.SamplingParams(seed=seed, max_tokens=100, min_tokens=seed * 20)
            async with engine.generate(trioserve.ChatPrompt(messages=QUESTION), sampling) as stream:
                text = "".join([delta.text async for delta in stream])
            responses.append(text)
            nursery.cancel_scope.cancel()  # This cancels the other two requests.

        async with trio.open_nursery() as nursery:
            for seed in range(3):
                nursery.start_soon(ask, seed, nursery)
        print("first:", responses[0])

        await engine.wait_all_free()  # The running step must end first.
        print("KV blocks in use:", engine.stats().blocks_used)


if __name__ == "__main__":
    trio.run(main)
