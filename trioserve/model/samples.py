"""Samples of a computed step, and sampling options of chunks. Independent of the tensor library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from trioserve.contracts.events import TokenLogprob
from trioserve.contracts.pooling import PoolingResult
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.step import ScheduledChunk
from trioserve.model.number_formats import Float32Array

__all__ = [
    "NOTHING_ALLOWED",
    "NOTHING_LEFT",
    "NOT_FINITE",
    "PROMPT_LOGPROB_ROWS",
    "ComputedStep",
    "ReadSamples",
    "Samples",
    "counts_output",
    "draw_parameters",
    "hides_end_tokens",
    "is_adjusted",
    "is_chosen_alone",
    "is_largest_wanted",
    "is_plain",
    "prompt_followers",
    "sampled_rows",
]

NOT_FINITE = "the model computed NaN or infinity for this request, so its response cannot continue"
NOTHING_ALLOWED = (
    "the response cannot continue: the schema, regex or grammar allows no next token, or finding one takes too long; "
    "use a simpler schema, regex or grammar"
)
NOTHING_LEFT = "min_tokens and logit_bias leave no token that may be sampled: lower min_tokens or change logit_bias"

# Logits of prompt tokens are computed for this many rows at a time. 128 rows of a vocabulary of 150,000 are 77 MB in
# float32.
PROMPT_LOGPROB_ROWS = 128


@dataclass(slots=True)
class Samples:
    """Sampled tokens of a step, one entry per row.

    Attributes:
        token_ids: None for a row that is in errors.
        logprobs: by row, for requests that asked for them.
        errors: by row, a sentence for the client.
    """

    token_ids: list[int | None]
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)


ReadSamples = Callable[[], Samples]
"""Wait for a launched step and return its samples. Call it only once."""


@dataclass(slots=True)
class ComputedStep:
    """Results of one forward pass.

    Attributes:
        samples: one row for each chunk of sampled_rows. None if the step samples nothing.
        prompt_logprobs: by the index of each chunk that asks for them, the logprobs of its prompt_followers. None if
            the model's numbers for the chunk are not finite.
        pooled: by the index of each chunk that pools, its result. None if the model's numbers for the chunk are not
            finite.
        tapped: for each chunk the inputs of the tapped layers, [rows, layers * hidden_size], an array or a tensor. None
            if no layer is tapped.
        hidden: float32 [rows, hidden_size], the input of the next stage. None unless this is a stage without the head.
    """

    samples: Samples | None
    prompt_logprobs: dict[int, tuple[TokenLogprob, ...] | None] = field(default_factory=dict)
    pooled: dict[int, PoolingResult | None] = field(default_factory=dict)
    tapped: list[Any] | None = None
    hidden: Float32Array | None = None


def sampled_rows(chunks: Sequence[ScheduledChunk]) -> list[ScheduledChunk]:
    """Return one chunk for each row that is sampled, in the order of the rows.

    A chunk with draft tokens gives several rows: itself, then one chunk for each draft token. The chunk of a draft
    token is the chunk that would follow if the draft tokens up to it were accepted. So each row has its own position,
    history and row of the plan's masks.

    Args:
        chunks: chunks of the step.
    """
    rows: list[ScheduledChunk] = []
    for chunk in chunks:
        if not chunk.samples:
            continue
        rows.append(chunk)
        if chunk.draft:
            tokens = [*chunk.tokens, *chunk.draft]
            rows += (
                ScheduledChunk(
                    chunk.request,
                    tokens,
                    chunk.start,
                    chunk.count + right,
                    chunk.block_table,
                    True,
                    mask_row=None if chunk.mask_row is None else chunk.mask_row + right,
                )
                for right in range(1, len(chunk.draft) + 1)
            )
    return rows


def prompt_followers(chunk: ScheduledChunk) -> Sequence[int]:
    """Return the prompt token that follows each prompt token of a chunk. The last token of a prompt has no follower.

    Args:
        chunk: part of a prompt.
    """
    return chunk.request.prompt_token_ids[chunk.start + 1 : chunk.start + chunk.count + 1]


def is_plain(chunk: ScheduledChunk) -> bool:
    """Return True if the chunk needs only the token with the largest logit.

    Args:
        chunk: a chunk that samples.
    """
    return chunk.mask_row is None and is_largest_wanted(chunk)


def is_largest_wanted(chunk: ScheduledChunk) -> bool:
    """Return True if the chunk needs only the token with the largest logit among those that its mask allows.

    Args:
        chunk: a chunk that samples, with or without a mask.
    """
    sampling = chunk.request.sampling
    return sampling.temperature == 0 and sampling.logprobs is None and not is_adjusted(chunk)


def is_chosen_alone(chunk: ScheduledChunk) -> bool:
    """Return True if the chunk needs nothing but its KV and, if it samples, its next token from unchanged logits.

    The token then depends on the logits, draw_parameters and the chunk's mask.

    Args:
        chunk: any chunk of a step.
    """
    sampling = chunk.request.sampling
    if sampling.prompt_logprobs is not None or chunk.pools:
        return False
    return not chunk.samples or (sampling.logprobs is None and not is_adjusted(chunk))


def draw_parameters(sampling: SamplingParams) -> tuple[float, int, float, float]:
    """Return the row of choose_tokens' parameters for one request.

    Args:
        sampling: the request's sampling parameters.

    Returns:
        Temperature, top_k, top_p, min_p.
    """
    return sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p


def is_adjusted(chunk: ScheduledChunk) -> bool:
    """Return True if logits must be changed before a token is chosen. Masks do not count as a change.

    Args:
        chunk: a chunk that samples.
    """
    sampling = chunk.request.sampling
    return bool(
        sampling.logit_bias or hides_end_tokens(chunk) or sampling.repetition_penalty != 1.0 or counts_output(sampling)
    )


def counts_output(sampling: SamplingParams) -> bool:
    return sampling.presence_penalty != 0 or sampling.frequency_penalty != 0


def hides_end_tokens(chunk: ScheduledChunk) -> bool:
    """Return True if the next token comes before min_tokens are reached, so that no end token may be sampled.

    Args:
        chunk: a chunk that samples.
    """
    output_count = chunk.start + chunk.count - len(chunk.request.prompt_token_ids)
    return output_count < chunk.request.sampling.min_tokens
