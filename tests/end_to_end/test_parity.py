"""Tests that the engine generates the same greedy tokens as transformers from the same weights, with any schedule.

Both compute in float32. The reference generates each prompt alone. Tokens must be identical. Log probabilities differ
only because additions have another order (float32, 30 layers: allowed below 1e-3, measured below 1e-4).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
import trio

from trioserve import SamplingParams, open_engine
from trioserve.contracts.events import TokenLogprob
from trioserve.contracts.page import EngineStats
from trioserve.model.loading.default_model import find_default_model
from trioserve.testing.invariants import check_idle

OUTPUT_TOKENS = 48
LOGPROB_TOLERANCE = 1e-3
KV_BYTES_PER_TOKEN = 2 * 30 * 3 * 64 * 4

COMMON = "You are reading a list of short exercises. Continue each one in plain English, without comments.\n\n"
PROMPTS = [
    COMMON + text
    for text in (
        "The capital of France is",
        "Once upon a time, in a village by the sea,",
        "def fibonacci(n):\n",
        "1, 2, 3, 5, 8,",
        "Dear Sir or Madam,",
        "Water boils at",
        "The three primary colours are",
    )
] + [
    "The quick brown fox",
    "import numpy as np\n\n",
    "Q: Who wrote Hamlet?\nA:",
    "In 1969, the first",
    "A",
    "Roses are red,",
    "To be, or not to be,",
    "SELECT name FROM users WHERE",
    "Die Hauptstadt von Deutschland ist",
    "<|im_start|>user\nWhat is a cancel scope?<|im_end|>\n<|im_start|>assistant\n",
    "The following is a very long list of animals: " + "cat, dog, horse, cow, sheep, goat, " * 12,
    "x = 3\ny = 4\nprint(x + y)  #",
    "There are seven days in a week:",
]


class Response:
    def __init__(self) -> None:
        self.prompt_token_ids: tuple[int, ...] = ()
        self.token_ids: tuple[int, ...] = ()
        self.logprobs: tuple[TokenLogprob, ...] = ()
        self.cached_token_count = 0


class Reference:
    """Computes expected tokens with the model of transformers in float32.

    A response is greedy if each of its tokens is the most likely one after the tokens before it. So one forward pass
    checks a whole response.
    """

    def __init__(self) -> None:
        path = find_default_model("smollm2")
        assert path is not None
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        ).eval()
        self._continued: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[list[int], list[float]]] = {}

    def continued(self, prompt_token_ids: tuple[int, ...], response: tuple[int, ...]) -> tuple[list[int], list[float]]:
        """Return the most likely token at each position of the response, and their log probabilities.

        Results are cached, because a response should be the same in all tests.
        """
        key = prompt_token_ids, response
        if key not in self._continued:
            self._continued[key] = self._continuation(*key)
        return self._continued[key]

    @torch.inference_mode()
    def _continuation(
        self, prompt_token_ids: tuple[int, ...], response: tuple[int, ...]
    ) -> tuple[list[int], list[float]]:
        logits = self.model(torch.tensor([prompt_token_ids + response])).logits[0, len(prompt_token_ids) - 1 : -1]
        best = torch.log_softmax(logits, dim=-1).max(dim=-1)
        return best.indices.tolist(), best.values.tolist()

    def generated(self, prompt_token_ids: tuple[int, ...]) -> list[int]:
        output = self.model.generate(
            torch.tensor([prompt_token_ids]),
            attention_mask=torch.ones(1, len(prompt_token_ids)),
            do_sample=False,
            min_new_tokens=OUTPUT_TOKENS,
            max_new_tokens=OUTPUT_TOKENS,
            eos_token_id=[],
            pad_token_id=0,
        )
        return output[0, len(prompt_token_ids) :].tolist()


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


def responses_of(
    prompts: list[str] = PROMPTS, *, rounds: int = 1, at_a_time: int = len(PROMPTS), **options: Any
) -> tuple[list[Response], EngineStats]:
    """Generate responses with the engine.

    Args:
        prompts: texts of the prompts.
        rounds: how often to send all prompts.
        at_a_time: how many requests may run at the same time.
        options: options of open_engine.

    Returns:
        The responses of the last round, in the order of the prompts, and the statistics of the engine.
    """
    sampling = SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, logprobs=1)

    async def main() -> tuple[list[Response], EngineStats]:
        async with open_engine("smollm2", dtype="float32", max_model_len=512, **options) as engine:
            responses: list[Response] = []
            limiter = trio.CapacityLimiter(at_a_time)

            async def ask(prompt: str, response: Response) -> None:
                async with limiter, engine.generate(prompt, sampling) as stream:
                    async for delta in stream:
                        response.token_ids += delta.token_ids
                        response.logprobs += delta.logprobs or ()
                    response.prompt_token_ids = stream.prompt_token_ids
                    response.cached_token_count = stream.cached_token_count

            for _ in range(rounds):
                responses = [Response() for _ in prompts]
                async with trio.open_nursery() as nursery:
                    for prompt, response in zip(prompts, responses, strict=True):
                        nursery.start_soon(ask, prompt, response)
            check_idle(engine._core)
            return responses, engine.stats()

    return trio.run(main)


def check_equal(responses: list[Response], reference: Reference) -> None:
    for response in responses:
        token_ids, logprobs = reference.continued(response.prompt_token_ids, response.token_ids)
        assert len(response.token_ids) == OUTPUT_TOKENS
        assert list(response.token_ids) == token_ids
        for ours, theirs in zip(response.logprobs, logprobs, strict=True):
            assert ours.logprob == pytest.approx(theirs, abs=LOGPROB_TOLERANCE)


@pytest.mark.slow
def test_sequential_requests_generate_the_tokens_of_transformers(reference):
    responses, stats = responses_of(PROMPTS[:2], at_a_time=1, enable_prefix_caching=False)
    check_equal(responses, reference)
    assert [list(response.token_ids) for response in responses] == [
        reference.generated(response.prompt_token_ids) for response in responses
    ]
    assert stats.steps_total >= 2 * OUTPUT_TOKENS


@pytest.mark.slow
def test_batched_requests_generate_the_tokens_of_transformers(reference):
    assert len(PROMPTS) == 20
    responses, stats = responses_of(enable_prefix_caching=False)
    check_equal(responses, reference)
    assert stats.steps_total < 3 * OUTPUT_TOKENS


@pytest.mark.slow
def test_chunked_prefill_generates_the_tokens_of_transformers(reference):
    responses, stats = responses_of(enable_prefix_caching=False, max_num_seqs=8, max_num_batched_tokens=11)
    check_equal(responses, reference)
    assert stats.steps_total > 3 * OUTPUT_TOKENS


@pytest.mark.slow
def test_prefix_cache_hits_generate_the_tokens_of_transformers(reference):
    responses, stats = responses_of(rounds=2)
    check_equal(responses, reference)
    assert stats.prefix_hit_tokens_total > 0
    assert sum(response.cached_token_count > 0 for response in responses) >= 8


@pytest.mark.slow
@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_preempted_requests_generate_the_tokens_of_transformers(reference, enable_prefix_caching):
    # 36 blocks of 16 tokens, but the 20 sequences need more than 120 blocks at the end.
    memory = 36 * 16 * KV_BYTES_PER_TOKEN / 2**30
    responses, stats = responses_of(
        kv_cache_memory=memory, max_num_batched_tokens=64, enable_prefix_caching=enable_prefix_caching
    )
    check_equal(responses, reference)
    assert stats.blocks_total == 36
    assert stats.preemptions_total > 3


@pytest.mark.slow
def test_overlapped_steps_generate_the_tokens_of_transformers(reference):
    memory = 32 * 16 * KV_BYTES_PER_TOKEN / 2**30  # The pool has so few blocks that requests are preempted.
    responses, stats = responses_of(
        PROMPTS[:10], overlap_steps=True, kv_cache_memory=memory, max_num_seqs=10, max_num_batched_tokens=64
    )
    check_equal(responses, reference)
    assert stats.preemptions_total > 0
