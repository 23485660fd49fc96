"""Describes a model layer by layer. All implementations of the computation read this description.

families/ and loading/ create the description from config.json or from GGUF metadata.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from trioserve.contracts.errors import ModelLoadError
from trioserve.model.layer_config import (
    CONTEXT_TOKENS_MAX,
    DIMENSION_MAX,
    AttentionConfig,
    KVAttention,
    KVEntry,
    LatentAttentionConfig,
    LayerConfig,
    MlpConfig,
    NormKind,
    RotaryConfig,
    Temperature,
    check_count,
    check_positive,
)

__all__ = [
    "LAYERS_MAX",
    "CrossAttention",
    "Dtype",
    "LayerPart",
    "ModelConfig",
    "RankPart",
    "RelativePositions",
    "RowFactors",
    "StagePart",
    "StreamsConfig",
]

Dtype = Literal["bfloat16", "float16", "float32"]

# The limit prevents a huge tuple of layers for a damaged header. The largest models of these families have 126 layers.
LAYERS_MAX = 1_024
STREAMS_MAX = 8
POSITION_FIRST_MAX = 64
ROWS_STEP = 64  # A multiple of all usual block sizes.


class RowFactors(msgspec.Struct, frozen=True, kw_only=True):
    """Factors by which the rows of a tensor are multiplied when it is read from the checkpoint.

    Attributes:
        name: name of the tensor without the layer, such as "q_proj.weight". The factors apply to this tensor in every
            layer.
        parts: number of rows and factor for each range of rows, in the order of the rows.
    """

    name: str
    parts: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        for _row_count, factor in self.parts:
            if not (math.isfinite(factor) and factor != 0):
                raise ModelLoadError(
                    f"a multiplier of {self.name} is {factor}, but it must be a number other than 0: the checkpoint's "
                    "config is damaged"
                )


class StreamsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs of layers, and a hidden state of several streams, of which a layer computes one (AltUp, arXiv 2301.13310).

    Each layer has its own embedding of every token, its input. The input is gated by the active stream, and added to
    all streams except the first. With only one stream, it is added to this stream, and nothing else applies.

    The first stream is a token's embedding. The other streams are products of the embedding with matrices, scaled to
    its magnitude. Before a layer, each stream is predicted as a mixture of all streams. The weights of the mixture
    depend on the active stream. After the layer, each stream is corrected by the difference between the layer's result
    and the prediction. After the last layer, the result is the mean of the first stream and of products of the other
    streams, scaled to the first stream's magnitude.

    Attributes:
        count: number of streams. 1: the hidden state is one vector.
        active: index of the stream that layers compute.
        has_scale: the corrected active stream is multiplied by weights before it gates the layer's inputs.
        input_size: size of a layer's input. Each layer has its own embedding table.
        input_vocab_size: number of tokens in each layer's table. All other tokens use the row of token 0.
    """

    count: int
    active: int = 0
    has_scale: bool = False
    input_size: int
    input_vocab_size: int

    def __post_init__(self) -> None:
        check_count("altup_num_inputs", self.count, STREAMS_MAX)
        if not 0 <= self.active < self.count:
            raise ModelLoadError(
                f"altup_active_idx is {self.active}, but there are {self.count} streams: the checkpoint's config is "
                "damaged"
            )
        check_count("hidden_size_per_layer_input", self.input_size, DIMENSION_MAX)
        check_count("vocab_size_per_layer_input", self.input_vocab_size, DIMENSION_MAX)


class CrossAttention(msgspec.Struct, frozen=True, kw_only=True):
    """Describes how the layers of a decoder attend to the rows of an encoder (arXiv 1706.03762).

    The rows take the first positions of a sequence. The KV cache has their cross-attention keys and values there. These
    keys and values are projections of the rows in every layer, and the layers change no row. The decoder's tokens
    begin with the next block, so rows and tokens share no block. A token attends to all rows, and to the decoder's
    tokens up to its own position. The decoder's own positions count from its first token.

    Attributes:
        rows_max: most rows of one sequence.
        tokens_max: most tokens of the decoder, of prompt and output together.
    """

    rows_max: int
    tokens_max: int

    def __post_init__(self) -> None:
        check_count("the encoder's row count", self.rows_max, CONTEXT_TOKENS_MAX)
        check_count("the decoder's token count", self.tokens_max, CONTEXT_TOKENS_MAX)

    @property
    def context_tokens_max(self) -> int:
        """Most positions of a sequence, with rows that fill a usual block."""
        return -(-self.rows_max // ROWS_STEP) * ROWS_STEP + self.tokens_max


class RelativePositions(msgspec.Struct, frozen=True, kw_only=True):
    """Biases of attention scores by the distance between two tokens (T5, arXiv 1910.10683), in all layers.

    A head has one number for each bucket of distances. Short distances have their own buckets, and longer ones share
    buckets of logarithmic size.

    Attributes:
        bucket_count: number of buckets.
        distance_max: shortest distance of the last bucket.
    """

    bucket_count: int
    distance_max: int

    def __post_init__(self) -> None:
        check_count("relative_attention_num_buckets", self.bucket_count, DIMENSION_MAX, 4)
        check_count("relative_attention_max_distance", self.distance_max, CONTEXT_TOKENS_MAX, self.bucket_count)


class LayerPart(msgspec.Struct, frozen=True, kw_only=True):
    """Describes the shard of a layer that one rank computes.

    Attributes:
        sums_attention: the rank computes a partial sum of attention's result, and the ranks add their partial sums.
            False: each rank computes the whole result.
        sums_mlp: the rank computes a partial sum of the MLP's result. False: each rank computes the whole result.
        first_expert: first expert of a mixture that this rank has.
        expert_count: number of experts that this rank has. None: the rank has a shard of each expert.
    """

    sums_attention: bool
    sums_mlp: bool
    first_expert: int = 0
    expert_count: int | None = None


class RankPart(msgspec.Struct, frozen=True, kw_only=True):
    """Describes the shard of a model that one rank computes.

    The rank's config describes a whole model with fewer heads and smaller MLPs. This class describes how the results of
    all ranks are combined.

    Attributes:
        vocab_first: first token whose row of embedding and head this rank has.
        vocab_count: number of these rows. vocab_size of the config is the whole model's.
        layers: one entry per layer.
    """

    rank: int
    size: int
    vocab_first: int
    vocab_count: int
    layers: tuple[LayerPart, ...]


class StagePart(msgspec.Struct, frozen=True, kw_only=True):
    """Describes the layers of one stage of a pipeline.

    Each stage except the first receives the hidden state of each row from the previous stage.

    Attributes:
        first_layer: index of the stage's first layer in the whole model. The stage's config has the number of layers.
        has_embedding: True for the first stage.
        has_head: True for the last stage, which also has the last norm.
    """

    first_layer: int
    has_embedding: bool
    has_head: bool


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Description of one decoder.

    Attributes:
        family: name of a Family, see families/registry.py.
        norm: "rms", or LayerNorm: "layer" has weights, "layer_biased" has weights and biases, "layer_bare" has neither.
        has_head_bias: the output projection to logits has a bias.
        has_unit_head: rows of the output projection are scaled to length 1 when they are read from the checkpoint.
        embedding_scale: factor of embeddings.
        position_first: row of the first position in a table of learned position embeddings, which are added to the
            embeddings of tokens. None: there is no such table.
        has_embedding_norm: embeddings are normalized.
        logit_scale: factor of logits, applied before logit_cap.
        logit_cap: with the cap c, a logit becomes c * tanh(logit / c). None: there is no cap.
        dtype_name: number format of the checkpoint. For a quantized checkpoint, it is the format of the embeddings. For
            a GGUF file, it is "bfloat16".
        row_factors: factors that tensors are multiplied with when they are read.
        streams: streams of the hidden state, and inputs of layers. None: the hidden state is one vector, and no layer
            has an input.
        has_last_norm: the last layer's output is normalized before the head.
        relative: biases of attention scores by distance. None: there are none.
        cross: rows of an encoder that all layers attend to. None: the model has no encoder.
        part: shard of the model that one rank has. None: the config describes the whole model.
        stage: layers that one stage has. None: the config describes all layers.

    Raises:
        ModelLoadError: values contradict each other. The message names the field.
    """

    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    context_tokens_max: int
    norm: NormKind = "rms"
    norm_eps: float
    has_head_bias: bool = False
    has_unit_head: bool = False
    embedding_scale: float = 1.0
    position_first: int | None = None
    has_embedding_norm: bool = False
    logit_scale: float = 1.0
    logit_cap: float | None = None
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype_name: Dtype
    row_factors: tuple[RowFactors, ...] = ()
    streams: StreamsConfig | None = None
    has_last_norm: bool = True
    relative: RelativePositions | None = None
    cross: CrossAttention | None = None
    part: RankPart | None = None
    stage: StagePart | None = None

    def __post_init__(self) -> None:
        check_count("vocab_size", self.vocab_size, DIMENSION_MAX)
        check_count("hidden_size", self.hidden_size, DIMENSION_MAX)
        check_count("layer_count", len(self.layers), LAYERS_MAX)
        check_count("context_tokens_max", self.context_tokens_max, CONTEXT_TOKENS_MAX)
        check_positive("the norms' epsilon", self.norm_eps)
        check_positive("the embeddings' scale", self.embedding_scale)
        check_count("the first position's row", self.position_first or 0, POSITION_FIRST_MAX, 0)
        check_positive("the logits' scale", self.logit_scale)
        if self.logit_cap is not None:
            check_positive("final_logit_softcapping", self.logit_cap)
        heads = {(attention.kv_entry, attention.head_count) for attention in self.attentions}
        assert len(heads) <= 1 or not self.sections, "layers with sections have equal heads"
        if any(isinstance(attention, LatentAttentionConfig) for attention in self.attentions):
            _check_latents(self.attentions)
        for index, layer in enumerate(self.layers):
            _check_kv_from(index, layer, self.layers)
            if layer.shortcut is not None:
                following = self.layers[index + 1 : index + 2]
                assert any(isinstance(each.mlp, MlpConfig) and each.shortcut is None for each in following), (
                    "the next layer adds the result of a shortcut"
                )
            if self.cross is not None:
                assert isinstance(layer.attention, AttentionConfig), "the encoder's keys and values have heads"
                assert layer.mlp is not None, "cross attention is between attention and an MLP"
                is_plain = not (layer.is_parallel or layer.has_mlp_output_norm or layer.laurel_rank)
                assert is_plain, "cross attention is the second of three sums"
            if self.streams is not None:
                assert layer.mlp is not None, "streams need layers with an MLP"
                assert layer.has_output_norms, "streams need layers with output norms"
        for token_id in (self.bos_token_id, *self.eos_token_ids):
            if token_id is not None and not 0 <= token_id < self.vocab_size:
                raise ModelLoadError(
                    f"a special token id is {token_id}, but the vocabulary has {self.vocab_size} tokens: "
                    "the checkpoint's config is damaged"
                )
        if self.dtype_name not in ("bfloat16", "float16", "float32"):
            raise ModelLoadError(
                f"the checkpoint stores {self.dtype_name}; supported are bfloat16, float16 and float32"
            )

    @property
    def attentions(self) -> tuple[AttentionConfig | LatentAttentionConfig, ...]:
        """Attention of each layer that has attention. Layers with a replacement of attention are omitted."""
        return tuple(layer.attention for layer in self.layers if isinstance(layer.attention, KVAttention))

    @property
    def layer_count(self) -> int:
        return len(self.layers)

    @property
    def has_embedding(self) -> bool:
        """True if this stage computes the embeddings of tokens. False if another stage sends hidden states."""
        return self.stage is None or self.stage.has_embedding

    @property
    def has_head(self) -> bool:
        """True if this stage has the last norm and the head, and therefore samples tokens."""
        return self.stage is None or self.stage.has_head

    @property
    def position_rows(self) -> int:
        """Rows of this stage's table of learned position embeddings. 0: there is no such table."""
        if self.position_first is None or not self.has_embedding:
            return 0
        return self.position_first + (self.context_tokens_max if self.cross is None else self.cross.tokens_max)

    @property
    def vocab_count(self) -> int:
        """Number of tokens whose rows of embedding and head this rank has."""
        if not (self.has_embedding or self.has_head):
            return 0
        return self.vocab_size if self.part is None else self.part.vocab_count

    def experts_of(self, index: int) -> range:
        """Return the experts of a layer that this rank has.

        Args:
            index: index of a layer with a mixture of experts.
        """
        mlp = self.layers[index].experts
        assert mlp is not None, "experts_of of a layer without experts"
        part = None if self.part is None else self.part.layers[index]
        if part is None or part.expert_count is None:
            return range(mlp.expert_count)
        return range(part.first_expert, part.first_expert + part.expert_count)

    @property
    def has_attention(self) -> bool:
        """True if the KV cache contains an entry for each token."""
        return bool(self.attentions)

    @property
    def heads(self) -> AttentionConfig:
        """Attention of the first layer that has attention. The model must have attention without latents."""
        attention = self.kv_attention
        assert isinstance(attention, AttentionConfig), "heads of a model with latent attention"
        return attention

    @property
    def kv_attention(self) -> AttentionConfig | LatentAttentionConfig:
        """Attention of the first layer that has attention. The model must have attention."""
        return self.attentions[0]

    @property
    def common_kv_entry(self) -> KVEntry | None:
        """Shape of a token's KV cache entry in all layers with entries. None: there are none, or they differ."""
        found = {entry for entry in self.kv_entries if entry is not None}
        return found.pop() if len(found) == 1 else None

    @property
    def kv_entries(self) -> tuple[KVEntry | None, ...]:
        """Shape of a token's KV cache entry for each layer.

        The shape is None for a layer without KV entries, and for a layer that uses the entries of another layer.
        """
        mixers = (layer.attention for layer in self.layers)
        return tuple(
            mixer.kv_entry if isinstance(mixer, KVAttention) and mixer.kv_from is None else None for mixer in mixers
        )

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """For each layer, the index of the layer whose KV entries it reads.

        A layer reads its own entries, unless it has kv_from.
        """
        found = (layer.attention.kv_from if isinstance(layer.attention, KVAttention) else None for layer in self.layers)
        return tuple(index if other is None else other for index, other in enumerate(found))

    @property
    def has_latents(self) -> bool:
        return self.has_attention and isinstance(self.kv_attention, LatentAttentionConfig)

    @property
    def is_sparse(self) -> bool:
        """True if an indexer selects the tokens that attention attends to, in some layers."""
        return any(isinstance(each, LatentAttentionConfig) and each.is_sparse for each in self.attentions)

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's states in all layers, in float32. 0 if no layer has a state."""
        return 4 * sum(layer.recurrent.state_size for layer in self.layers if layer.recurrent is not None)

    @property
    def has_experts(self) -> bool:
        return any(layer.experts is not None for layer in self.layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Distinct windows, in the order of the layers."""
        return tuple(dict.fromkeys(attention.window for attention in self.attentions))

    @property
    def window_max(self) -> int | None:
        """Largest window of all layers, in tokens. None if a layer has no window."""
        found = [window for window in self.windows if window is not None]
        return max(found) if found and len(found) == len(self.windows) else None

    @property
    def sections(self) -> tuple[int, ...]:
        """Distinct sections, in the order of the layers."""
        return tuple(dict.fromkeys(heads.section for heads in self.attentions if heads.section is not None))

    @property
    def temperatures(self) -> tuple[Temperature, ...]:
        """Distinct temperatures, in the order of the layers."""
        return tuple(dict.fromkeys(heads.temperature for heads in self.attentions if heads.temperature is not None))

    @property
    def rotaries(self) -> tuple[tuple[RotaryConfig | None, int], ...]:
        """Distinct rotary configs with the sizes of their heads (turned_dim), in the order of the layers."""
        return tuple(dict.fromkeys((attention.rotary, attention.turned_dim) for attention in self.attentions))


def _check_latents(attentions: Sequence[AttentionConfig | LatentAttentionConfig]) -> None:
    """Check that all layers have equal latents, and that an indexer precedes each layer that needs selected tokens.

    Raises:
        ModelLoadError: they do not.
    """
    selects = False
    for attention in attentions:
        if not isinstance(attention, LatentAttentionConfig) or _heads(attention) != _heads(attentions[0]):
            raise ModelLoadError("latent attention differs from layer to layer, which is not supported")
        selects = selects or attention.indexer is not None
        if attention.has_selected_tokens and not selects:
            raise ModelLoadError("a layer needs the tokens that an earlier indexer selects, but there is none")


def _heads(attention: AttentionConfig | LatentAttentionConfig) -> object:
    return (attention.entry_dim, attention.head_count) if isinstance(attention, LatentAttentionConfig) else None


def _check_kv_from(index: int, layer: LayerConfig, layers: tuple[LayerConfig, ...]) -> None:
    """Check that a layer can use the keys and values of the layer that its kv_from contains.

    Raises:
        ModelLoadError: the other layer is not an earlier layer, has no keys and values, or has a different window or
            different heads.
    """
    attention = layer.attention
    if not isinstance(attention, AttentionConfig) or attention.kv_from is None:
        return
    other = layers[attention.kv_from].attention if 0 <= attention.kv_from < index else None
    if (
        not isinstance(other, AttentionConfig)
        or other.kv_from is not None
        or other.window != attention.window
        or (other.kv_entry, other.head_count) != (attention.kv_entry, attention.head_count)
    ):
        raise ModelLoadError(
            f"layer {index} shares the keys and values of layer {attention.kv_from}, which has none of its kind: "
            "the checkpoint's config is damaged"
        )
