"""Interface between the runner and a model implementation, which computes steps and returns samples. The interface
needs no tensor library."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from trioserve.contracts.events import TokenLogprob
from trioserve.contracts.guide import TokenMasks
from trioserve.contracts.pooling import PoolingResult
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.step import IsAbandoned, ScheduledChunk
from trioserve.contracts.weights import AdapterId
from trioserve.model.device import DeviceType
from trioserve.model.kv_storage import KVMemory, KVStorage, StateStorage
from trioserve.model.loading.stored_tensor import AdapterWeights
from trioserve.model.model_config import ModelConfig
from trioserve.model.number_formats import Dtype, Float32Array
from trioserve.model.weights import Slot

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
    "is_largest_wanted",
    "is_plain",
    "needs_every_row",
    "prompt_followers",
    "sampled_indexes",
    "sampled_rows",
    "StepModel",
    "why_not_launched",
]

NOT_FINITE = "the model computed NaN or infinity for this request, so its response cannot continue"
NOTHING_ALLOWED = (
    "the response cannot continue: the schema, regex or grammar allows no next token, or finding one takes too long; "
    "use a simpler schema, regex or grammar"
)
NOTHING_LEFT = "min_tokens and logit_bias leave no token that may be sampled: lower min_tokens or change logit_bias"

# Number of rows for which prompt logits are computed at a time. With a vocabulary of 150,000, the logits of 128 rows
# have 77 MB in float32.
PROMPT_LOGPROB_ROWS = 128


@dataclass(slots=True)
class Samples:
    """Sampled tokens of a step, one entry per row.

    Attributes:
        token_ids: sampled token of each row, or None for a row with an error.
        logprobs: logprobs by row, for requests with the option logprobs.
        errors: error messages by row. Each is a sentence for the client.
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
        samples: one row for each chunk of sampled_rows. None if the step samples no tokens.
        prompt_logprobs: logprobs of a chunk's prompt_followers, by the chunk's index, for chunks with the option
            prompt_logprobs. None for a chunk whose logits are not finite.
        pooled: pooled vector or scores of a chunk, by the chunk's index. None for a chunk whose result is not finite.
        tapped: for each chunk, the inputs of the tapped layers, [rows, layers * hidden_size], as an array or a tensor.
            None if no layer is tapped.
        hidden: float32 [rows, hidden_size], the input of the next stage. None for a model with the head.
    """

    samples: Samples | None
    prompt_logprobs: dict[int, tuple[TokenLogprob, ...] | None] = field(default_factory=dict)
    pooled: dict[int, PoolingResult | None] = field(default_factory=dict)
    tapped: list[Any] | None = None
    hidden: Float32Array | None = None


def sampled_rows(chunks: Sequence[ScheduledChunk]) -> list[ScheduledChunk]:
    """Return one chunk for each row that is sampled, in the order of the rows.

    A chunk with draft tokens needs several rows: one row for the chunk, and one row for each draft token. For the row
    of a draft token, the result contains the chunk that would follow if all draft tokens up to this one were accepted.
    Therefore, each row has its own position, history and mask.

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


def sampled_indexes(chunks: Sequence[ScheduledChunk], first_rows: Sequence[int]) -> list[int]:
    """Return the row of the step for each of sampled_rows.

    Args:
        chunks: chunks of the step.
        first_rows: first row of each chunk.
    """
    return [
        row
        for chunk, first in zip(chunks, first_rows, strict=True)
        if chunk.samples
        for row in range(first + chunk.count - 1, first + chunk.row_count)
    ]


def prompt_followers(chunk: ScheduledChunk) -> Sequence[int]:
    """Return the prompt token that follows each prompt token of a chunk. The last token of a prompt has no follower.

    Args:
        chunk: chunk of a prompt.
    """
    return chunk.request.prompt_token_ids[chunk.start + 1 : chunk.start + chunk.count + 1]


def is_plain(chunk: ScheduledChunk) -> bool:
    """Return True if the chunk needs only the token with the largest logit, without a mask.

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


def needs_every_row(chunk: ScheduledChunk) -> bool:
    """Return True if the chunk's results need the hidden states of rows that are not sampled.

    Args:
        chunk: any chunk of a step.
    """
    return chunk.request.sampling.prompt_logprobs is not None or chunk.pools


def draw_parameters(sampling: SamplingParams) -> tuple[float, int, float, float]:
    """Return the sampling parameters of one request, in the order that choose_tokens expects.

    Args:
        sampling: the request's sampling parameters.

    Returns:
        Temperature, top_k, top_p, min_p.
    """
    return sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p


def is_adjusted(chunk: ScheduledChunk) -> bool:
    """Return True if logit_bias, min_tokens, penalties or rules of speech change the chunk's logits.

    Args:
        chunk: a chunk that samples.
    """
    sampling = chunk.request.sampling
    return bool(
        sampling.logit_bias
        or hides_end_tokens(chunk)
        or sampling.repetition_penalty != 1.0
        or counts_output(sampling)
        or sampling.speech is not None
    )


def counts_output(sampling: SamplingParams) -> bool:
    return sampling.presence_penalty != 0 or sampling.frequency_penalty != 0


def hides_end_tokens(chunk: ScheduledChunk) -> bool:
    """Return True if the output has fewer than min_tokens tokens, so that no end token may be sampled.

    Args:
        chunk: a chunk that samples.
    """
    output_count = chunk.start + chunk.count - len(chunk.request.prompt_token_ids)
    return output_count < chunk.request.sampling.min_tokens


class StepModel(Protocol):
    """A model that computes whole steps, and its KV cache."""

    tapped_layers: tuple[int, ...]
    """Indexes of layers whose inputs each step returns, for a drafting head. layer_count means the last layer's output.
    Set it before allocate_kv."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def dtype(self) -> Dtype: ...

    @property
    def device(self) -> DeviceType: ...

    @property
    def arithmetic(self) -> str:
        """Description of all influences on the bits of a batch-invariant model's rows, except tokens and weights.

        The description names kernels and number format. Equal descriptions mean equal bits.
        """
        ...

    @property
    def is_batch_invariant(self) -> bool:
        """True if the bits of a row depend only on its own tokens and the weights. May be True even if the settings do
        not require batch invariance.
        """
        ...

    @property
    def computed_by(self) -> str:
        """Short description of the device and the kernels that compute, for users."""
        ...

    @property
    def step_weight_bytes(self) -> int:
        """Bytes of weights that every decode step reads, independent of the number of tokens."""
        ...

    @property
    def loading_threads(self) -> int:
        """Number of threads that may read tensors and fill slots at the same time. 1: only the compute thread may."""
        ...

    def slots(self) -> Iterator[Slot]:
        """Yield a loading slot for every tensor of the checkpoint."""
        ...

    @property
    def storage(self) -> KVStorage[Any] | None:
        """The KV cache. None before allocate_kv."""
        ...

    @property
    def states(self) -> StateStorage[Any] | None:
        """States of sequences in recurrent layers. None before allocate_kv, and without recurrent layers."""
        ...

    def allocate_kv(self, block_count: int, state_slot_count: int = 0, memory: KVMemory | None = None) -> None:
        """Create the KV cache and the state slots. The content of an earlier cache and of earlier slots is lost.

        Args:
            block_count: number of KV blocks.
            state_slot_count: number of state slots, including slots for copies.
            memory: buffers for the KV cache on a CPU. None allocates new buffers.
        """
        ...

    def release_kv(self) -> None:
        """Free the KV cache and the state slots. Call allocate_kv again before the next step."""
        ...

    def limit_blocks(self, count: int) -> None:
        """Return the memory of the KV blocks from `count` on to the operating system.

        The system provides it again when such a block is written.

        Args:
            count: number of blocks that keep their memory. The content of the others is lost.
        """
        ...

    def claim_memory(self) -> bool:
        """Make the operating system allocate a small piece of the KV cache's memory before it is used.

        Cost:
            At most some milliseconds.

        Returns:
            False if all memory is already allocated.
        """
        ...

    def warm_up(self) -> None:
        """Do preparations now for which the first steps would otherwise wait. The method writes no KV blocks."""
        ...

    @property
    def warms_by_shape(self) -> bool:
        """True if kernels are chosen or compiled at the first step of a shape."""
        ...

    def compute(
        self,
        chunks: Sequence[ScheduledChunk],
        is_abandoned: IsAbandoned,
        masks: TokenMasks | None = None,
        begun: Float32Array | None = None,
    ) -> ComputedStep | None:
        """Compute a step: write the KV of each chunk's tokens, compute attention, and sample tokens.

        Args:
            chunks: chunks of the step.
            is_abandoned: polled between layers. True abandons the step.
            masks: token masks of chunks with a mask_row. Only sampling waits for the masks.
            begun: float32 [rows, hidden_size], for a stage without the embedding: the hidden states from the previous
                stage.

        Returns:
            Results, or None if the step was abandoned.
        """
        ...

    def add_adapter(self, id: AdapterId, weights: AdapterWeights) -> None:
        """Add an adapter that later chunks may use.

        Args:
            id: name of the adapter.
            weights: matrices of the adapter.

        Raises:
            MemoryError: there is not enough memory. The adapter was not added.
        """
        ...

    def remove_adapter(self, id: AdapterId) -> None:
        """Free an adapter. Do nothing if it is not loaded.

        Args:
            id: name of the adapter.
        """
        ...

    def has_adapter(self, id: AdapterId) -> bool: ...

    @property
    def launches(self) -> bool:
        """True if `launch` can start some steps."""
        ...

    def launch(
        self, chunks: Sequence[ScheduledChunk], awaited: Mapping[int, int], masks: TokenMasks | None = None
    ) -> ReadSamples | None:
        """Start a step and return before the step has ended. If there are masks, wait for them.

        When step n is launched, the samples of step n - 2 must have been read. Those of step n - 1 may be unread.

        Args:
            chunks: chunks of the step.
            awaited: row in the previous step that sampled a chunk's token, by the chunk's index. Only contains chunks
                that await their token. The previous step must also have been launched, without draft tokens.
            masks: token masks of chunks with a mask_row.

        Returns:
            A function that waits for the samples. None if this step cannot be launched and must be computed.
        """
        ...

    def close(self) -> None:
        """Free weights, KV cache and threads."""
        ...


def why_not_launched(config: ModelConfig) -> str | None:
    """Return the reason why the host must wait for the device within a step of a model. None if it need not wait.

    Args:
        config: model.
    """
    if config.cross is not None:
        return "only plain torch computes cross attention"
    if config.stage is not None:
        return "hidden states from and to other stages are copied through the host"
    return None
