"""What sampling asks of a chunk, and what a computed step answers, whoever computes it. Knows no tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from trioserve.contracts.events import TokenLogprob
from trioserve.contracts.pooling import Pooled
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

NOT_FINITE = "the model gave a result that is no number (NaN or infinity) for this request; its response cannot go on"
NOTHING_ALLOWED = (
    "the response cannot go on: in the form that was asked for no token may come next, or finding one takes too long; "
    "take a simpler schema, regex or grammar"
)
NOTHING_LEFT = "min_tokens and logit_bias leave no token that may be sampled: lower min_tokens or change logit_bias"

# Logits of this many prompt tokens at a time: 128 rows of a vocabulary of 150,000 are 77 MB in float32.
PROMPT_LOGPROB_ROWS = 128


@dataclass(slots=True)
class Samples:
    """One entry per row: token_ids (None where errors has the row), and logprobs where the request asked."""

    token_ids: list[int | None]
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)


ReadSamples = Callable[[], Samples]
"""Waits for a step that was launched; to be called once."""


@dataclass(slots=True)
class ComputedStep:
    """samples: a row for each of sampled_rows; None without any. prompt_logprobs: by the place of each chunk that asks,
    those of its prompt_followers; None if the model's numbers for it are not finite. pooled: the same for each chunk
    that pools. tapped: for each chunk what went into the tapped layers, [rows, layers * hidden_size], an array or a
    tensor; None without such layers. hidden: of a stage without the head, float32 [T, hidden_size], what the next one
    begins with."""

    samples: Samples | None
    prompt_logprobs: dict[int, tuple[TokenLogprob, ...] | None] = field(default_factory=dict)
    pooled: dict[int, Pooled | None] = field(default_factory=dict)
    tapped: list[Any] | None = None
    hidden: Float32Array | None = None


def sampled_rows(chunks: Sequence[ScheduledChunk]) -> list[ScheduledChunk]:
    """One chunk for each row that is sampled, in the order of the rows: of a chunk with a draft first itself, then, for
    each draft token, the chunk that it is if the draft tokens up to there are right. So each has its own position and
    history, and its own row of the plan's masks."""
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
    """The prompt tokens after each of the chunk's; the last token of a prompt has none."""
    return chunk.request.prompt_token_ids[chunk.start + 1 : chunk.start + chunk.count + 1]


def is_plain(chunk: ScheduledChunk) -> bool:
    """Whether the chunk's next token is that of its largest logit, and nothing else is asked."""
    return chunk.mask_row is None and is_largest_wanted(chunk)


def is_largest_wanted(chunk: ScheduledChunk) -> bool:
    """Whether the chunk's next token is that of the largest logit of those that its mask allows, if it has one, and
    nothing else is asked."""
    sampling = chunk.request.sampling
    return sampling.temperature == 0 and sampling.logprobs is None and not is_adjusted(chunk)


def is_chosen_alone(chunk: ScheduledChunk) -> bool:
    """Whether nothing is asked of this chunk but its KV and, if it samples, the token that follows from the logits as
    they are, from draw_parameters and from its mask, if it has one."""
    sampling = chunk.request.sampling
    if sampling.prompt_logprobs is not None or chunk.pools:
        return False
    return not chunk.samples or (sampling.logprobs is None and not is_adjusted(chunk))


def draw_parameters(sampling: SamplingParams) -> tuple[float, int, float, float]:
    """A row of the parameters of choose_tokens."""
    return sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p


def is_adjusted(chunk: ScheduledChunk) -> bool:
    """Whether logits are changed before anything is chosen, apart from what a mask does to them."""
    sampling = chunk.request.sampling
    return bool(
        sampling.logit_bias or hides_end_tokens(chunk) or sampling.repetition_penalty != 1.0 or counts_output(sampling)
    )


def counts_output(sampling: SamplingParams) -> bool:
    return sampling.presence_penalty != 0 or sampling.frequency_penalty != 0


def hides_end_tokens(chunk: ScheduledChunk) -> bool:
    """Whether the token to be sampled comes before min_tokens are reached."""
    output_count = chunk.start + chunk.count - len(chunk.request.prompt_token_ids)
    return output_count < chunk.request.sampling.min_tokens
