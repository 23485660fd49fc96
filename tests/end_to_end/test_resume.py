"""Tests with the real model in float32 that a resumed response continues with the tokens of an uninterrupted one.

The response is interrupted at several positions and resumed in another engine. The cases include features that a fake
model does not have: penalties, biases and log probabilities.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from trioserve import Resume, SamplingParams, StructuredOutput, open_engine

pytestmark = pytest.mark.slow

PROMPT = "The three largest cities of Norway are"
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "top_p": 0.9, "seed": 7},
    "penalties": {"temperature": 0.8, "presence_penalty": 1.0, "frequency_penalty": 0.7, "repetition_penalty": 1.2},
    "many bytes a character": {"temperature": 1.2, "logit_bias": {128: 4.0, 129: 4.0}, "seed": 3},
    "logprobs": {"temperature": 0.0, "logprobs": 2},
    "two choices": {"temperature": 1.0, "n": 2, "stop": ("\n\n", " and")},
    "a schema": {"temperature": 1.0, "structured": StructuredOutput.json(PERSON), "seed": 11},
    "late ends": {"temperature": 1.0, "min_tokens": 20, "stop": (".", " ")},
}


@asynccontextmanager
async def opened(**options: Any) -> AsyncIterator[Any]:
    async with open_engine(
        "smollm2",
        dtype="float32",
        quantization="none",
        max_model_len=512,
        kv_cache_memory=0.25,
        max_num_seqs=4,
        **options,
    ) as engine:
        yield engine


async def read(
    engine: Any, sampling: SamplingParams, resume: Resume | None = None
) -> tuple[dict[int, Any], list[Resume]]:
    """Read a response to its end.

    Args:
        engine: an open engine.
        sampling: parameters of the request.
        resume: state of an earlier, interrupted response; None starts from the prompt.

    Returns:
        By choice: text, tokens, log probabilities and finish reason, with the tokens of `resume`. Then the resume state
        after each delta.
    """
    made: dict[int, list[Any]] = {index: ["", [], [], None] for index in range(sampling.n)}
    states = []
    async with engine.generate(PROMPT, sampling, resume=resume) as stream:
        for delta in stream.known:
            _add_delta(made, delta)
        async for delta in stream:
            _add_delta(made, delta)
            states.append(stream.resume_state())
    return made, states


def _add_delta(made: dict[int, list[Any]], delta: Any) -> None:
    own = made[delta.index]
    own[0] += delta.text
    own[1] += delta.token_ids
    own[2] += delta.logprobs or ()
    own[3] = delta.finish_reason or own[3]


async def test_resumed_response_has_the_same_text_tokens_and_logprobs() -> None:
    wholes: dict[str, tuple[dict[int, Any], list[Resume]]] = {}
    params = {name: SamplingParams(**{"max_tokens": 32, "seed": 5, **fields}) for name, fields in CASES.items()}
    async with opened() as engine:
        for name, sampling in params.items():
            wholes[name] = await read(engine, sampling)
    async with opened(enable_prefix_caching=False, max_num_batched_tokens=16) as engine:
        for name, sampling in params.items():
            whole, states = wholes[name]
            for state in states[:: max(1, len(states) // 4)]:
                made, _ = await read(engine, sampling, state)
                for index, (text, token_ids, logprobs, end) in made.items():
                    assert (text, token_ids, end) == (whole[index][0], whole[index][1], whole[index][3]), name
                    drawn = whole[index][2][len(state.token_ids[index]) :] if not state.finished[index] else []
                    values = [entry.logprob for entry in logprobs]
                    assert values == pytest.approx([entry.logprob for entry in drawn], abs=1e-3), name
