"""Use a cancel scope as a deadline: after one second the response ends, and its KV blocks are freed.

python examples/deadline.py
"""

import trio

import trioserve


async def main() -> None:
    async with trioserve.open_engine("smollm2", max_num_seqs=8) as engine:
        with trio.move_on_after(1.0) as scope:
            async with engine.generate("Once upon a time,", trioserve.SamplingParams(seed=1)) as stream:
                async for delta in stream:
                    print(delta.text, end="", flush=True)
        print("\n-- deadline passed" if scope.cancelled_caught else "\n-- finished")

        await engine.wait_all_free()  # The running step must end first.
        print("KV blocks in use:", engine.stats().blocks_used)


if __name__ == "__main__":
    trio.run(main)
