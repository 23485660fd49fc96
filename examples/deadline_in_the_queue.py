"""Use a deadline in the queue: only one request can run, so the second request leaves the queue and is never computed.

python examples/deadline_in_the_queue.py
"""

import trio

import trioserve


async def main() -> None:
    async with trioserve.open_engine("smollm2", max_num_seqs=1) as engine:
        long = trioserve.SamplingParams(max_tokens=400, ignore_eos=True, seed=1)
        async with engine.generate("Once upon a time,", long, request_id="first") as first:
            await anext(first)  # The first request now runs.
            limits = trioserve.Deadlines(queue_timeout=0.5)
            async with engine.generate("And then?", deadlines=limits, request_id="second") as second:
                for request in engine.live_requests():
                    print(f"{request.id}: {request.state}, {request.block_count} KV blocks")
                last = await anext(second)
            print("the second request:", last.finish_reason, "-", last.message)
            print("left in the queue:", engine.stats().waiting_count)
            print("the first request continues:", repr((await anext(first)).text))


if __name__ == "__main__":
    trio.run(main)
