"""The steps that a runner computes before the first request, so that libraries choose and cache their kernels then.

All of them are of one prompt and write the first KV blocks of the pool, as if these were a request's own; whoever gets
the blocks later writes them again before they are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import structs

from trioserve.contracts.ids import RequestId
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.step import ScheduledChunk, StateSpan, StepPlan
from trioserve.model.mask_rows import FilledMasks

__all__ = ["first_step_plan", "fused_kernel_plans", "warm_up_plans"]

PROMPT_TOKENS = 64
GREEDY = SamplingParams(temperature=0.0)


def warm_up_plans(
    context_max: int, block_count: int, vocab_size: int, *, has_states: bool = False
) -> Iterator[StepPlan]:
    """The common shapes: a prompt, and a decode behind it, greedy and drawn. context_max: of model, settings and KV
    cache, the fewest tokens. has_states: of layers that keep one; the first is written."""
    count = min(PROMPT_TOKENS, context_max)
    for temperature in (0.0, 1.0):
        request = _request("warm-up", count, vocab_size, SamplingParams(temperature=temperature))
        prompt, decode = _chunk(request, 0, count, block_count), _chunk(request, count - 1, 1, block_count)
        if has_states:
            prompt = _with_state(prompt)
            decode = structs.replace(decode, states=(StateSpan(1, 0, 0),))
        yield _plan(prompt)
        yield _plan(decode)


def first_step_plan(block_count: int, vocab_size: int, *, has_states: bool = False) -> StepPlan:
    """A prompt of one token. After it, steps of every other shape take what they will always take."""
    chunk = _chunk(_request("warm-up", 1, vocab_size, GREEDY), 0, 1, block_count)
    return _plan(_with_state(chunk) if has_states else chunk)


def fused_kernel_plans(context_max: int, block_count: int, vocab_size: int) -> Iterator[StepPlan]:
    """What else Triton would compile for the first requests, while all others wait for their tokens. Whether a decode's
    parts are joined is settled for steps of fixed shape by the longest context that may come, for others by the longest
    of the step: so a decode of one part, and one of two, beside a prompt. Scores that were changed are float32, and
    either may have masks.

    context_max: as above."""
    # With torch, which a model that launches has loaded.
    from trioserve_kernels.paged import SPLIT_TOKENS

    for context in dict.fromkeys(min(count, context_max) for count in (SPLIT_TOKENS, SPLIT_TOKENS + 1)):
        if context < 3:
            continue  # no room for a chunk of two tokens, which is the least that is no decode, and for what follows it
        prompt = _request("warm-up, prompt", context, vocab_size, GREEDY)
        decode = _request("warm-up, decode", context, vocab_size, GREEDY)
        # In the same blocks: so the decode sees what the prompt writes, and nothing that was never written.
        yield _plan(_chunk(prompt, 0, context - 1, block_count), _chunk(decode, context - 1, 1, block_count))
    biased = _request("warm-up", 1, vocab_size, SamplingParams(temperature=0.0, logit_bias={0: 1.0}))
    yield _plan(_chunk(biased, 0, 1, block_count))
    masks = FilledMasks((range(vocab_size),), vocab_size)
    for request in (biased, _request("warm-up", 1, vocab_size, GREEDY)):
        chunk = _chunk(request, 0, 1, block_count)
        yield structs.replace(_plan(structs.replace(chunk, mask_row=0)), masks=masks)


def _request(name: str, token_count: int, vocab_size: int, sampling: SamplingParams) -> EngineRequest:
    return EngineRequest(
        id=RequestId(name),
        prompt_token_ids=tuple(index % vocab_size for index in range(token_count)),
        sampling=sampling,
        output_tokens_max=1,
        stop_token_ids=frozenset(),
        seed=0,
    )


def _chunk(request: EngineRequest, start: int, count: int, block_count: int) -> ScheduledChunk:
    tokens: Sequence[int] = request.prompt_token_ids
    return ScheduledChunk(request, tokens, start, count, range(block_count), start + count == len(tokens))


def _with_state(prompt: ScheduledChunk) -> ScheduledChunk:
    return structs.replace(prompt, states=(StateSpan(prompt.count, None, 0),))


def _plan(*chunks: ScheduledChunk) -> StepPlan:
    return StepPlan(0, chunks, sum(chunk.count for chunk in chunks))
