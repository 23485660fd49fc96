"""Compute the same tokens alone, in a batch, and as a prompt: all log-probabilities have equal bits.

python examples/same_bits.py
"""

import trio

import trioserve

PROMPT = "The three largest rivers of Africa are"
SAMPLED = trioserve.SamplingParams(temperature=0.8, seed=7, max_tokens=40, ignore_eos=True, logprobs=0)
SCORED = trioserve.SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)


class Response:
    def __init__(self) -> None:
        self.tokens: tuple[int, ...] = ()
        self.logprobs: list[float] = []


async def ask(engine, prompt: str) -> Response:
    response = Response()
    async with engine.generate(prompt, SAMPLED) as stream:
        async for delta in stream:
            response.logprobs += [entry.logprob for entry in delta.logprobs or ()]
            response.tokens += delta.token_ids
        response.tokens = stream.prompt_token_ids + response.tokens
    return response


async def main() -> None:
    async with trioserve.open_engine("smollm2", batch_invariant=True) as engine:
        alone = await ask(engine, PROMPT)

        async with trio.open_nursery() as nursery:
            for number in range(7):
                nursery.start_soon(ask, engine, f"{number} other prompts: {PROMPT}")
            in_batch = await ask(engine, PROMPT)  # The request's prompt is now in the prefix cache.
        print("in a batch:", in_batch.logprobs == alone.logprobs)

        async with engine.generate(alone.tokens, SCORED) as stream:
            async for _ in stream:
                pass
        scored = [entry.logprob for entry in stream.prompt_logprobs[-len(alone.logprobs) :]]
        print("as a prompt:", scored == alone.logprobs)


if __name__ == "__main__":
    trio.run(main)
