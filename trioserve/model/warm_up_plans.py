"""Steps that a runner computes before the first request, so that libraries choose and cache their kernels.

All steps belong to one prompt and write the first KV blocks of the pool. A later owner of these blocks overwrites them
before it reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import structs

from trioserve.contracts.ids import RequestId
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.step import ScheduledChunk, StateSpan, StepPlan
from trioserve.model.step_rows import FilledMasks

__all__ = ["first_step_plan", "fused_kernel_plans", "largest_step_plan", "warm_up_plans"]

PROMPT_TOKENS = 64
GREEDY = SamplingParams(temperature=0.0)


def warm_up_plans(
    context_max: int, block_count: int, vocab_size: int, *, has_states: bool = False, first: int = 0
) -> Iterator[StepPlan]:
    """Yield steps of common shapes: a prompt and a decode, both with greedy sampling and with a temperature.

    Args:
        context_max: longest context in tokens that model, settings and KV cache allow.
        block_count: KV blocks of the pool.
        vocab_size: tokens in the vocabulary.
        has_states: the model has layers that keep a state. State slot 0 is written.
        first: position of the first computed token. Rows of an encoder take the positions before it.
    """
    count = min(PROMPT_TOKENS, context_max - first)
    for temperature in (0.0, 1.0):
        request = _request("warm-up", first + count, vocab_size, SamplingParams(temperature=temperature))
        prompt, decode = _chunk(request, first, count, block_count), _chunk(request, first + count - 1, 1, block_count)
        if has_states:
            prompt = _with_state(prompt)
            decode = structs.replace(decode, states=(StateSpan(1, 0, 0),))
        yield _plan(prompt)
        yield _plan(decode)


def first_step_plan(block_count: int, vocab_size: int, *, has_states: bool = False) -> StepPlan:
    """Return a step with a prompt of one token. Computing the step allocates the memory that every step needs.

    Args:
        block_count: KV blocks of the pool.
        vocab_size: tokens in the vocabulary.
        has_states: the model has layers that keep a state.
    """
    chunk = _chunk(_request("warm-up", 1, vocab_size, GREEDY), 0, 1, block_count)
    return _plan(_with_state(chunk) if has_states else chunk)


def fused_kernel_plans(context_max: int, block_count: int, vocab_size: int) -> Iterator[StepPlan]:
    """Yield additional steps, so that Triton does not have to compile their kernels during the first requests.

    For a decode, Triton compiles two kernels: one computes the context in one part, one in several parts. A step of
    fixed shape chooses the kernel by the longest possible context, and other steps choose it by their longest context.
    Therefore, one plan has a prompt and a decode with one part, and one plan has a decode with two parts. Both ask for
    prompt logprobs, so they have no fixed shape. Adjusted scores are float32. Scores with and without adjustment may
    have masks.

    Args:
        context_max: see warm_up_plans.
        block_count: KV blocks of the pool.
        vocab_size: tokens in the vocabulary.
    """
    # This import imports torch, but only models that have already imported torch need these plans.
    from trioserve_kernels.paged import SPLIT_TOKENS

    for context in dict.fromkeys(min(count, context_max) for count in (SPLIT_TOKENS, SPLIT_TOKENS + 1)):
        if context < 3:
            continue  # The context is too short for a prompt chunk, which has at least two tokens, and one more token.
        sampling = SamplingParams(temperature=0.0, prompt_logprobs=0)
        prompt = _request("warm-up, prompt", context, vocab_size, sampling)
        decode = _request("warm-up, decode", context, vocab_size, sampling)
        # Both chunks use the same blocks, so the decode reads only blocks that the prompt writes.
        yield _plan(_chunk(prompt, 0, context - 1, block_count), _chunk(decode, context - 1, 1, block_count))
    biased = _request("warm-up", 1, vocab_size, SamplingParams(temperature=0.0, logit_bias={0: 1.0}))
    yield _plan(_chunk(biased, 0, 1, block_count))
    masks = FilledMasks((range(vocab_size),), vocab_size)
    for request in (biased, _request("warm-up", 1, vocab_size, GREEDY)):
        chunk = _chunk(request, 0, 1, block_count)
        yield structs.replace(_plan(structs.replace(chunk, mask_row=0)), masks=masks)


def largest_step_plan(
    token_count: int,
    sequence_count: int,
    context_max: int,
    vocab_size: int,
    *,
    has_states: bool = False,
    first: int = 0,
) -> StepPlan:
    """Return a step that needs as much memory as a step can: one long prompt, beside as many sequences as possible.

    Every sequence samples. All sequences write the same KV blocks, the first ones of the pool. If the context is short,
    several sequences have long prompts.

    Args:
        token_count: tokens of the step, if the sequences have so many.
        sequence_count: sequences of the step, at most token_count.
        context_max: longest prompt in tokens.
        vocab_size: tokens in the vocabulary.
        has_states: the model has layers that keep a state. State slots 0 to sequence_count - 1 are written.
        first: see warm_up_plans.
    """
    chunks: list[ScheduledChunk] = []
    for index in range(sequence_count):
        later = sequence_count - 1 - index  # Each later sequence needs at least one token.
        count = min(context_max - first, token_count - sum(chunk.count for chunk in chunks) - later)
        request = _request(f"profile {index}", first + count, vocab_size, SamplingParams(temperature=1.0, top_p=0.9))
        chunk = _chunk(request, first, count, first + count)
        chunks.append(structs.replace(chunk, states=(StateSpan(count, None, index),)) if has_states else chunk)
    return _plan(*chunks)


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
