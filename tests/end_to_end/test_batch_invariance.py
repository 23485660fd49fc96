"""Tests batch invariance with the real model: logprobs of a greedy request have the same bits however it is computed.

The request runs with an empty cache, with a prefix cache hit, beside other requests, after a preemption, resumed, with
draft tokens, with overlapped steps, with another number of threads, and on a prefill-decode pair. Without batch
invariance the bits differ.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import trio

from trioserve import SamplingParams, open_engine
from trioserve.contracts.events import TokenLogprob
from trioserve.contracts.request import KVTransferParams
from trioserve.contracts.resume import Resume
from trioserve.model.torch_step.layers import Linear
from trioserve_kernels.native import NoNativeKernels, load_library

PROMPT = (
    "The keeper of the lighthouse writes down each ship that passes, its flag, its colours and its captain. When the "
    "keeper is done, the"
)
OTHERS = [f"{PROMPT} {number} keepers of other lighthouses" for number in range(3)]
OTHERS += [f"A list of {number} animals, without comments: cat, dog, horse, cow," for number in range(3)]
OUTPUT_TOKENS = 24
# bytes of a block: K and V, 30 layers, 3 heads of 64, 2 bytes (bfloat16), 16 tokens
KV_BLOCK_BYTES = 2 * 30 * 3 * 64 * 2 * 16


@pytest.fixture(params=("native", "torch"))
def kernels(request: pytest.FixtureRequest) -> str:
    if request.param == "native":
        try:
            load_library()
        except NoNativeKernels as error:
            pytest.skip(f"no native kernels: {error}")
    return str(request.param)


class Answer:
    def __init__(self) -> None:
        self.prompt_token_ids: tuple[int, ...] = ()
        self.token_ids: tuple[int, ...] = ()
        self.logprobs: tuple[TokenLogprob, ...] = ()
        self.cached_token_count = 0
        self.resume: Resume | None = None


def sampling(max_tokens: int = OUTPUT_TOKENS) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=5)


async def ask(engine: Any, prompt: Any, *, leave_after: int | None = None, **options: Any) -> Answer:
    answer = Answer()
    params = options.pop("params", sampling())
    async with engine.generate(prompt, params, **options) as stream:
        async for delta in stream:
            answer.token_ids += delta.token_ids
            answer.logprobs += delta.logprobs or ()
            answer.resume = stream.resume_state()
            if leave_after is not None and len(answer.token_ids) >= leave_after:
                break
        answer.prompt_token_ids = stream.prompt_token_ids
        answer.cached_token_count = stream.cached_token_count or 0
    return answer


async def ask_all(engine: Any, prompts: list[str]) -> list[Answer]:
    answers: list[Answer | None] = [None] * len(prompts)

    async def one(place: int) -> None:
        answers[place] = await ask(engine, prompts[place])

    async with trio.open_nursery() as nursery:
        for place in range(len(prompts)):
            nursery.start_soon(one, place)
    return [answer for answer in answers if answer is not None]


def engine_of(kernels: str, **options: Any) -> Any:
    settings = {"threads": 1, "max_model_len": 256, "kv_cache_memory": 0.05, "batch_invariant": True, **options}
    return open_engine("smollm2", cpu_kernels=kernels, **settings)


async def answers_alone(kernels: str, prompts: list[str]) -> list[Answer]:
    async with engine_of(kernels, enable_prefix_caching=False) as engine:
        return [await ask(engine, prompt) for prompt in prompts]


def count_of_files(directory: Path) -> int:
    return len(list(directory.glob("kv-*/*.kv")))


def check(answer: Answer, wanted: Answer) -> None:
    assert len(wanted.logprobs) == OUTPUT_TOKENS
    assert answer.token_ids == wanted.token_ids
    assert answer.logprobs == wanted.logprobs


@pytest.mark.slow
def test_logprobs_have_the_same_bits_in_any_batch(kernels: str) -> None:
    async def main() -> None:
        prompts = [PROMPT, *OTHERS] if kernels == "native" else [PROMPT, *OTHERS[:2]]
        [cold, *others] = await answers_alone(kernels, prompts)
        async with engine_of(kernels) as engine:
            await ask(engine, PROMPT)
            hit = await ask(engine, PROMPT)
            assert hit.cached_token_count >= 16
            check(hit, cold)
            for answer, wanted in zip(await ask_all(engine, prompts), [cold, *others], strict=True):
                check(answer, wanted)
            begun = await ask(engine, PROMPT, leave_after=9)
            rest = await ask(engine, PROMPT, resume=begun.resume)
            assert begun.token_ids + rest.token_ids == cold.token_ids
            assert begun.logprobs + rest.logprobs == cold.logprobs
            text = (*cold.prompt_token_ids, *cold.token_ids)
            asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=5)
            async with engine.generate(text, asked) as stream:
                async for _ in stream:
                    pass
            assert stream.prompt_logprobs is not None
            assert tuple(stream.prompt_logprobs[len(cold.prompt_token_ids) :]) == cold.logprobs
        small = {"kv_cache_memory": 17 * KV_BLOCK_BYTES / 2**30, "max_num_batched_tokens": 16, "max_num_seqs": 8}
        ways = ({**small, "threads": 2}, {**small, "overlap_steps": True}, {"speculative_ngram": 4})
        # Plain torch is slow, so only one variant is tested with it.
        for options in ways if kernels == "native" else ways[1:2]:
            async with engine_of(kernels, **options) as engine:
                for answer, wanted in zip(await ask_all(engine, prompts), [cold, *others], strict=True):
                    check(answer, wanted)
                if "max_num_seqs" in options:
                    assert engine.stats().preemptions_total > 0 or kernels == "torch"

    trio.run(main)


@pytest.mark.slow
def test_logprobs_have_the_same_bits_on_a_prefill_decode_pair(kernels: str) -> None:
    async def main() -> None:
        [cold] = await answers_alone(kernels, [PROMPT])
        transfer = {"kv_connector": "tcp"}
        async with (
            engine_of(kernels, role="prefill", kv_transfer_config={**transfer, "kv_role": "kv_producer"}) as first,
            engine_of(kernels, role="decode", kv_transfer_config={**transfer, "kv_role": "kv_consumer"}) as second,
        ):
            stream_request = KVTransferParams(do_remote_decode=True)
            async with first.generate(
                PROMPT, sampling(1), kv_transfer=stream_request
            ) as held:  # The blocks stay held within this scope.
                deltas = [delta async for delta in held]
                check(await ask(second, PROMPT, kv_transfer=deltas[-1].kv_transfer), cold)
            assert second.stats().loaded_tokens_total >= 16

    trio.run(main)


@pytest.mark.slow
def test_logprobs_have_the_same_bits_with_kv_files_of_an_earlier_engine(kernels: str, tmp_path: Path) -> None:
    """Files of an engine without batch invariance are not loaded by an engine with batch invariance."""
    limits = {"memory_gib": 0.05, "directory": str(tmp_path), "directory_gib": 0.1}
    transfer = {"kv_connector": "host", "kv_role": "kv_both", "kv_connector_extra_config": limits}

    async def main() -> None:
        [cold] = await answers_alone(kernels, [PROMPT])
        loaded = []
        for is_invariant, file_count in ((False, 2), (True, 4), (True, 4)):
            async with engine_of(kernels, kv_transfer_config=transfer, batch_invariant=is_invariant) as engine:
                answer = await ask(engine, PROMPT)
                if is_invariant:
                    check(answer, cold)
                loaded.append(engine.stats().loaded_tokens_total)
                with trio.fail_after(60):
                    while count_of_files(tmp_path) < file_count:  # noqa: ASYNC110  # another thread writes the files
                        await trio.sleep(0.01)
        assert loaded[:2] == [0, 0]
        assert loaded[2] >= 16

    trio.run(main)


def torch_products_depend_on_the_batch() -> bool:
    generator = torch.Generator().manual_seed(1)
    linear = Linear(576, {"out": 576}, bias=False, dtype=torch.bfloat16, device=torch.device("cpu"))
    linear.take(torch.randn(576, 576, generator=generator).to(torch.bfloat16))
    rows = torch.randn(64, 576, generator=generator).to(torch.bfloat16)
    return any(not torch.equal(linear(rows[:count])[0], linear(rows)[0]) for count in (1, 7, 33))


@pytest.mark.slow
def test_logprobs_depend_on_the_batch_without_batch_invariance() -> None:
    """The test uses plain torch, because most native kernels are always batch-invariant."""
    if not torch_products_depend_on_the_batch():
        pytest.skip("torch's bfloat16 products do not depend on the batch on this processor")

    async def main() -> None:
        async with engine_of("torch", batch_invariant=False) as engine:
            cold, hit = await ask(engine, PROMPT), await ask(engine, PROMPT)
            assert hit.cached_token_count >= 16
            beside = (await ask_all(engine, [PROMPT, *OTHERS]))[0]
            assert len({answer.logprobs for answer in (cold, hit, beside)}) > 1

    trio.run(main)


@pytest.mark.slow
def test_resumed_partial_result_has_the_same_bits_as_an_uninterrupted_response(kernels: str) -> None:
    """The request is sampled. It is stopped by its id while another request runs beside it."""

    async def main() -> None:
        drawn = SamplingParams(temperature=1.0, seed=11, max_tokens=OUTPUT_TOKENS, ignore_eos=True, logprobs=0)
        async with engine_of(kernels) as engine:
            whole = await ask(engine, PROMPT, params=drawn)
            cut, partials = Answer(), []
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask, engine, OTHERS[0])
                async with engine.generate(PROMPT, drawn, request_id="r", keep_logprobs=True) as stream:
                    async for delta in stream:
                        cut.token_ids += delta.token_ids
                        cut.logprobs += delta.logprobs or ()
                        if len(cut.token_ids) >= 9 and not partials:
                            partials += engine.abort_with_partial("r")["r"].partials
            [partial] = partials
            [choice] = partial.choices
            assert (choice.token_ids, choice.logprobs) == (cut.token_ids, cut.logprobs)
            assert 9 <= len(cut.token_ids) < OUTPUT_TOKENS
            rest = await ask(engine, PROMPT, params=drawn, resume=partial.resume)
        assert cut.token_ids + rest.token_ids == whole.token_ids
        assert cut.logprobs + rest.logprobs == whole.logprobs

    trio.run(main)
