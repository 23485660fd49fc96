"""Description of one layer: attention, MLP, mixture of experts, and layers with a recurrent state."""

from __future__ import annotations

import math
from typing import ClassVar, Literal, TypeAlias

import msgspec

from trioserve.contracts.errors import ModelLoadError

__all__ = [
    "HEADS_MAX",
    "DIMENSION_MAX",
    "alibi_slopes",
    "Activation",
    "AttentionConfig",
    "DeltaNetConfig",
    "ExpertsConfig",
    "IndexerConfig",
    "KVAttention",
    "KVEntry",
    "LatentAttentionConfig",
    "LayerConfig",
    "LightningConfig",
    "MlpConfig",
    "NormKind",
    "NormedSums",
    "QkNorm",
    "Recurrent",
    "RopeScaling",
    "RotaryConfig",
    "ShortConvConfig",
    "StateNorm",
    "StateSpaceConfig",
    "Scoring",
    "SelectiveScanConfig",
    "SharedBlock",
    "SelectionNorm",
    "Temperature",
    "XIELU_NUMBERS",
    "check_count",
    "check_positive",
]

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped_swiglu"]
XIELU_NUMBERS = ("alpha_p", "alpha_n", "beta", "eps")
NormKind = Literal["rms", "layer", "layer_biased", "layer_bare"]
QkNorm = Literal["none", "head", "heads", "each", "row", "unit"]
Scoring = Literal["softmax", "sigmoid", "sparsemixer"]
StateNorm = Literal["gated", "ungated", "none"]
SelectionNorm = Literal["none", "unit", "weighted"]

# These limits prevent a huge allocation for a damaged header. The largest models of the supported families have 128
# heads and dimensions below 200,000.
HEADS_MAX = 4_096
EXPERTS_MAX = 1_024
CONV_KERNEL_MIN, CONV_KERNEL_MAX = 2, 64  # A kernel of size 1 would need no state, and no implementation supports it.
STATE_NUMBERS_MAX = 2**28  # limit of the numbers in the state of one layer
EXPERT_GROUPS_MAX = 64
DIMENSION_MAX = 2**24
CONTEXT_TOKENS_MAX = 2**31 - 1  # Step tensors store positions as int32.


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True):
    """Change of rotary frequencies that lets a model reach a longer context.

    Kinds:
        linear: every inverse frequency is divided by factor.
        llama3: as in Llama 3.1. Low frequencies are divided by factor, high frequencies do not change, and frequencies
            between them are blended. The limits are computed from low_freq_factor, high_freq_factor and
            original_context_tokens. If frequency_factors is set, each inverse frequency is divided by its number in
            frequency_factors instead, and no other field is used.
        yarn: YaRN (arXiv 2309.00071) with beta_fast and beta_slow. Cosine and sine are multiplied by attention_factor.
        longrope: LongRoPE (arXiv 2402.13753). Each inverse frequency is divided by its number in frequency_factors.
            Cosine and sine are multiplied by attention_factor.

    Attributes:
        original_context_tokens: context length of the model before it was extended.
        attention_factor: None selects the default: 0.1 * ln(factor) + 1 for yarn, and sqrt(1 + ln(factor) /
            ln(original_context_tokens)) for longrope.
        rounds_ends: for yarn, round the ends of the blended range outwards to whole indices.
        frequency_factors: one number for each inverse frequency, head_dim / 2 numbers.
    """

    kind: Literal["linear", "llama3", "yarn", "longrope"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_tokens: int = 8192
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    rounds_ends: bool = True
    frequency_factors: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        check_positive("rope scaling factor", self.factor)
        check_positive("rope scaling low_freq_factor", self.low_freq_factor)
        check_positive("rope scaling high_freq_factor", self.high_freq_factor)
        check_count("rope scaling original_max_position_embeddings", self.original_context_tokens, CONTEXT_TOKENS_MAX)
        check_positive("rope scaling beta_fast", self.beta_fast)
        check_positive("rope scaling beta_slow", self.beta_slow)
        if self.attention_factor is not None:
            check_positive("rope scaling attention_factor", self.attention_factor)
        if self.kind == "llama3" and self.frequency_factors is None and self.low_freq_factor >= self.high_freq_factor:
            raise ModelLoadError(
                f"rope scaling low_freq_factor is {self.low_freq_factor}, which must be below high_freq_factor "
                f"({self.high_freq_factor}): correct the checkpoint's config"
            )
        if self.kind == "longrope" and self.original_context_tokens < 2:
            raise ModelLoadError(
                f"rope scaling original_max_position_embeddings is {self.original_context_tokens}, which must be 2 or "
                "more for longrope: correct the checkpoint's config"
            )
        for value in self.frequency_factors or ():
            check_positive("a rope frequency factor", value)

    def context_tokens(self, context_tokens: int) -> int:
        """Return the longest context of the model in tokens.

        Args:
            context_tokens: length in the model's config. With linear scaling, this is the length before scaling. With
                yarn, it is the length before or after scaling. With llama3 and longrope, it is the length after
                scaling.
        """
        if self.kind == "linear":
            # For a longer context, return one token more than the maximum. ModelConfig then rejects the config.
            return int(min(context_tokens * self.factor, CONTEXT_TOKENS_MAX + 1))
        if self.kind == "yarn":
            return max(context_tokens, int(min(self.original_context_tokens * self.factor, CONTEXT_TOKENS_MAX + 1)))
        return context_tokens


class RotaryConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding of queries and keys (RoFormer, arXiv 2104.09864).

    Two numbers of a head are rotated together. When weights are read, they are reordered so that number j pairs with
    number j + head_dim / 2. Pairs that are not rotated have an angle of 0.

    Attributes:
        theta: base of the frequencies.
        rotated_dims: number of rotated dimensions of each head, an even number. All other dimensions stay unchanged.
        scaling: scaling of the frequencies. None leaves them unchanged.
        axes: for tokens of images, the position that rotates each pair: 0 for time, 1 for row, 2 for column (M-RoPE,
            arXiv 2409.12191). Tokens of texts have three equal positions. None: every token has one position.
    """

    theta: float
    rotated_dims: int
    scaling: RopeScaling | None = None
    axes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_positive("rope_theta", self.theta)
        check_count("the number of rotated dimensions", self.rotated_dims, DIMENSION_MAX)
        if self.rotated_dims % 2:
            raise ModelLoadError(
                f"{self.rotated_dims} dimensions of each head are rotated, but pairs of them are: "
                "the checkpoint's config is damaged"
            )
        if self.scaling is not None and self.scaling.kind == "yarn" and self.theta <= 1:
            raise ModelLoadError(
                f"rope_theta is {self.theta}, but yarn needs one above 1: the checkpoint's config is damaged"
            )
        factors = self.scaling.frequency_factors if self.scaling else None
        if factors is not None and len(factors) != self.rotated_dims // 2:
            raise ModelLoadError(
                f"the checkpoint has {len(factors)} rope frequency factors, but {self.rotated_dims} rotated dimensions "
                f"need {self.rotated_dims // 2}: the file is damaged"
            )


def alibi_slopes(head_count: int, bias_max: float = 8.0, scale: float = 1.0) -> tuple[float, ...]:
    """Return the slope of each head (ALiBi, arXiv 2108.12409): a geometric sequence for a power of 2.

    Otherwise, the first heads have the slopes of the next lower power of 2. The other heads have every second slope of
    the next higher power of 2.

    Args:
        head_count: number of heads of the whole model.
        bias_max: negative binary logarithm of the smallest slope.
        scale: factor of all slopes.
    """
    lower = 1 << (head_count.bit_length() - 1)
    powers = [bias_max * (head + 1) / lower for head in range(lower)]
    powers += [bias_max * (2 * head + 1) / (2 * lower) for head in range(head_count - lower)]
    return tuple(scale * 2.0**-power for power in powers)


class KVEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of one token's entry in the KV cache of one layer: [part_count, head_count, head_dim].

    Attributes:
        part_count: 2 for keys and values. 1 for latents, from which keys and values are computed.
    """

    part_count: int
    head_count: int
    head_dim: int

    @property
    def size(self) -> int:
        return self.part_count * self.head_count * self.head_dim


class Temperature(msgspec.Struct, frozen=True, kw_only=True):
    """Factor of queries that grows with their position (arXiv 2501.19399).

    Queries are multiplied by 1 + scale * ln(1 + floor((position + first) / interval)).

    Attributes:
        first: number of the first position in this formula.
    """

    scale: float
    interval: int
    first: Literal[0, 1] = 1

    def __post_init__(self) -> None:
        if not (math.isfinite(self.scale) and self.scale >= 0):
            raise ModelLoadError(f"attn_scale is {self.scale}, but it must be 0 or more")
        check_count("floor_scale", self.interval, CONTEXT_TOKENS_MAX)


class AttentionConfig(msgspec.Struct, frozen=True, kw_only=True, tag="attention"):
    """Attention of one layer.

    Attributes:
        rotary: rotation of queries and keys by their positions. None: attention ignores positions.
        window: a token attends to the last `window` positions, including its own position. None: a token attends to all
            earlier positions.
        section: number of positions in a section of the context. A token attends only to the positions of its section
            up to its own position. None: there are no sections.
        temperature: factor of queries that depends on their positions.
        scale: factor of query times key. None means 1 / sqrt(head_dim).
        score_cap: with the cap c, a scaled score becomes c * tanh(score / c). None: there is no cap.
        has_sinks: each head has a learned number that is an additional score of its softmax, without a value.
        has_bias: the projections to queries, keys and values have biases.
        has_key_bias: if has_bias is set, keys have biases, too.
        has_output_bias: the output projection has a bias.
        qk_norm: norm of queries and keys before they are rotated. "head": each head is normalized, and all heads share
            the same weights. "heads": each head is normalized with its own weights. "unit": each head is normalized
            without weights. "each": as "heads", but each head has a tensor in checkpoints. "row": all heads of a row
            are normalized together. If the model's norms have biases, only "head" has biases.
        has_turned_norms: queries and keys are normalized after they are rotated. Only for qk_norm "head".
        clip: queries, keys and values are limited to the range from -clip to clip. None: there is no limit.
        value_head_dim: size of a head's values, at most head_dim. In the KV cache, unused numbers fill a value to
            head_dim numbers. None: head_dim.
        has_value_norm: values of each head are normalized without weights.
        has_values_of_keys: the projection to values has the weights of the projection to keys.
        kv_from: index of an earlier layer whose keys and values this layer attends to. The layer then has only queries.
            None: the layer has its own keys and values.
        has_gate: the output of the heads is multiplied by the sigmoid of a projection of the same size.
        has_softplus_gate: softplus replaces this sigmoid.
        has_gate_of_heads: the projection has one number for each head.
        slopes: number of each head. Times the distance to a token, it is subtracted from the scaled score (ALiBi, arXiv
            2108.12409). None: scores do not depend on distances.
    """

    head_count: int
    kv_head_count: int
    head_dim: int
    rotary: RotaryConfig | None
    window: int | None = None
    section: int | None = None
    temperature: Temperature | None = None
    scale: float | None = None
    score_cap: float | None = None
    has_sinks: bool = False
    has_bias: bool = False
    has_key_bias: bool = True
    has_output_bias: bool = False
    qk_norm: QkNorm = "none"
    has_turned_norms: bool = False
    clip: float | None = None
    value_head_dim: int | None = None
    has_value_norm: bool = False
    has_values_of_keys: bool = False
    kv_from: int | None = None
    has_gate: bool = False
    has_softplus_gate: bool = False
    has_gate_of_heads: bool = False
    slopes: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        check_count("head_count", self.head_count, HEADS_MAX)
        assert self.slopes is None or len(self.slopes) == self.head_count, "each head has a slope"
        check_count("kv_head_count", self.kv_head_count, HEADS_MAX)
        check_count("head_dim", self.head_dim, DIMENSION_MAX)
        if self.head_count % self.kv_head_count:
            raise ModelLoadError(
                f"head_count is {self.head_count} and kv_head_count {self.kv_head_count}, but each key/value head must "
                "serve the same number of heads: the checkpoint's config is damaged"
            )
        if self.head_dim % 2:
            raise ModelLoadError(
                f"head_dim is {self.head_dim}, but rotary positions need an even one: "
                "the checkpoint's config is damaged"
            )
        if self.rotary is not None and self.rotary.rotated_dims > self.head_dim:
            raise ModelLoadError(
                f"{self.rotary.rotated_dims} dimensions of each head are rotated, but a head has {self.head_dim}: "
                "the checkpoint's config is damaged"
            )
        if self.window is not None:
            check_count("sliding_window", self.window, CONTEXT_TOKENS_MAX)
        if self.scale is not None:
            check_positive("the attention's scale", self.scale)
        if self.section is not None:
            check_count("attention_chunk_size", self.section, CONTEXT_TOKENS_MAX)
            if self.window is not None:
                raise ModelLoadError("a layer's attention has both a window and sections, which is not supported")
        if self.score_cap is not None:
            check_positive("attn_logit_softcapping", self.score_cap)
        if self.clip is not None:
            check_positive("clip_qkv", self.clip)
        if self.value_head_dim is not None:
            check_count("v_head_dim", self.value_head_dim, self.head_dim)
            assert not self.has_value_norm, "normalized values have the size of keys"
            assert not self.has_values_of_keys, "values that are keys have their size"
        assert self.has_gate or not (self.has_softplus_gate or self.has_gate_of_heads), "there is no gate"
        assert not self.has_turned_norms or self.qk_norm == "head", "only norms of heads follow the rotation"
        assert not self.has_turned_norms or self.kv_from is None, "rotated keys of another layer are normalized"

    @property
    def query_size(self) -> int:
        return self.head_count * self.head_dim

    @property
    def key_size(self) -> int:
        """Size of one token's keys over all heads."""
        return self.kv_head_count * self.head_dim

    @property
    def value_dim(self) -> int:
        """Size of a head's values."""
        return self.head_dim if self.value_head_dim is None else self.value_head_dim

    @property
    def value_size(self) -> int:
        """Size of one token's values over all heads."""
        return self.kv_head_count * self.value_dim

    @property
    def attended_size(self) -> int:
        """Size of the results of all query heads, which the output projection reads."""
        return self.head_count * self.value_dim

    @property
    def gate_size(self) -> int:
        """Size of the projection whose numbers multiply the results of heads. 0: there is none."""
        return (self.head_count if self.has_gate_of_heads else self.attended_size) if self.has_gate else 0

    @property
    def query_factor(self) -> float:
        """Factor that queries are multiplied with, because kernels always divide scores by sqrt(head_dim). With this
        factor, scores have the layer's scale.
        """
        return 1.0 if self.scale is None else self.scale * math.sqrt(self.head_dim)

    @property
    def projected_size(self) -> int:
        """Size of the projection of one token: queries, and keys and values unless an earlier layer computes them."""
        return self.query_size + (self.key_size + self.value_size if self.kv_from is None else 0)

    @property
    def kv_entry(self) -> KVEntry:
        return KVEntry(part_count=2, head_count=self.kv_head_count, head_dim=self.head_dim)

    @property
    def turned_dim(self) -> int:
        """Number of dimensions of a head for which rotary angles are computed."""
        return self.head_dim


class IndexerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Selection of the tokens that sparse attention attends to (DeepSeek-V3.2, arXiv 2512.02556).

    Each token has one key, which is normalized and kept in the KV cache. The score of an attended token is the sum over
    all heads of weight * relu(query * key). The queries are projections of the latent from which attention projects its
    queries, and the weights are projections of the hidden state.

    The original code also rotates queries and keys by a Hadamard matrix and rounds them to FP8. The rotation changes no
    product, and the rounding only saves memory, so this description contains neither.

    Attributes:
        head_count: number of queries of a token, and of weights.
        head_dim: size of a query, and of a key. The first numbers are rotated by positions, as many as attention
            rotates.
        token_count: number of tokens that a row attends to. A row with fewer earlier tokens attends to all of them.
        has_adjacent_pairs: numbers 2j and 2j + 1 are rotated together. False: numbers j and j + half.
    """

    head_count: int
    head_dim: int
    token_count: int
    has_adjacent_pairs: bool = False

    def __post_init__(self) -> None:
        check_count("index_n_heads", self.head_count, HEADS_MAX)
        check_count("index_head_dim", self.head_dim, DIMENSION_MAX)
        check_count("index_topk", self.token_count, CONTEXT_TOKENS_MAX)


class LatentAttentionConfig(msgspec.Struct, frozen=True, kw_only=True, tag="latent"):
    """Multi-head latent attention (MLA, arXiv 2405.04434) of one layer.

    For each token, the KV cache contains one latent and one rotated key, which all heads share. The keys and values of
    each head are projections of the latent. If the layer has an indexer, the indexer's key of the token follows them.

    Attributes:
        query_rank: size of the latent from which queries are projected. None: queries are projected from the hidden
            state.
        latent_dim: size of the KV latent. Both latents are normalized.
        plain_dim: dimensions of a head's query that are multiplied with a key projected from the latent.
        turned_dim: dimensions of a head's query that are rotated, and multiplied with the rotated key, an even number.
        value_dim: size of a head's value.
        rotary: rotation of these dimensions by positions. None: attention ignores positions.
        scale: factor of query times key.
        indexer: selects the tokens that a row attends to. None: a row attends to all earlier tokens.
        has_selected_tokens: a row attends to the tokens that the last earlier layer with an indexer selects.
    """

    head_count: int
    query_rank: int | None
    latent_dim: int
    plain_dim: int
    turned_dim: int
    value_dim: int
    rotary: RotaryConfig | None
    scale: float
    norm_eps: float = 1e-6
    indexer: IndexerConfig | None = None
    has_selected_tokens: bool = False

    window: ClassVar[None] = None
    section: ClassVar[None] = None
    temperature: ClassVar[None] = None
    score_cap: ClassVar[None] = None
    kv_from: ClassVar[None] = None

    def __post_init__(self) -> None:
        check_count("head_count", self.head_count, HEADS_MAX)
        if self.query_rank is not None:
            check_count("q_lora_rank", self.query_rank, DIMENSION_MAX)
        check_count("kv_lora_rank", self.latent_dim, DIMENSION_MAX)
        check_count("qk_nope_head_dim", self.plain_dim, DIMENSION_MAX)
        check_count("qk_rope_head_dim", self.turned_dim, DIMENSION_MAX)
        check_count("v_head_dim", self.value_dim, DIMENSION_MAX)
        check_positive("the attention's scale", self.scale)
        check_positive("the latents' epsilon", self.norm_eps)
        if self.indexer is not None:
            assert self.query_rank is not None, "an indexer projects its queries from the queries' latent"
            assert self.rotary is not None, "an indexer rotates its keys"
            assert not self.has_selected_tokens, "the layer selects tokens itself"
            if self.indexer.head_dim < self.turned_dim:
                raise ModelLoadError(
                    f"index_head_dim is {self.indexer.head_dim}, but qk_rope_head_dim ({self.turned_dim}) of these "
                    "numbers are rotated: the checkpoint's config is damaged"
                )
        if self.rotary is None and self.turned_dim % 2:
            raise ModelLoadError(f"qk_rope_head_dim is {self.turned_dim}, but it must be even")
        if self.rotary is not None and self.rotary.rotated_dims != self.turned_dim:
            raise ModelLoadError(
                f"{self.rotary.rotated_dims} dimensions of each head are rotated, but qk_rope_head_dim is "
                f"{self.turned_dim}: the checkpoint's config is damaged"
            )

    @property
    def query_size(self) -> int:
        return self.head_count * (self.plain_dim + self.turned_dim)

    @property
    def value_size(self) -> int:
        return self.head_count * self.value_dim

    @property
    def entry_dim(self) -> int:
        """Size of a latent and a rotated key."""
        return self.latent_dim + self.turned_dim

    @property
    def is_sparse(self) -> bool:
        """True if an indexer selects the tokens that a row attends to."""
        return self.indexer is not None or self.has_selected_tokens

    @property
    def kv_entry(self) -> KVEntry:
        index_dim = 0 if self.indexer is None else self.indexer.head_dim
        return KVEntry(part_count=1, head_count=1, head_dim=self.entry_dim + index_dim)

    @property
    def query_factor(self) -> float:
        """Factor that queries are multiplied with, because kernels always divide scores by sqrt(entry_dim). With this
        factor, scores have the layer's scale.
        """
        return self.scale * math.sqrt(self.entry_dim)


KVAttention: TypeAlias = AttentionConfig | LatentAttentionConfig
"""Attention of a layer that keeps entries in the KV cache."""


class MlpConfig(msgspec.Struct, frozen=True, kw_only=True, tag="mlp"):
    """MLP of one layer: down(activation(gate(x)) * up(x)), or without a gate down(activation(up(x))).

    Activations:
        gelu_tanh: gelu, approximated with tanh.
        relu2: square of relu.
        xielu: xIELU (arXiv 2411.13010), whose four numbers belong to the layer. Only for an MLP without a gate.
        clamped_swiglu: the MLP computes g * sigmoid(1.702 g) * (u + 1) in place of activation(gate) * up. g is the gate
            clamped to at most 7, and u is up clamped to the range from -7 to 7.

    Attributes:
        has_bias: each matrix has a bias.
        has_gate: True for three matrices: gate, up and down. False for two: up and down.
        cutoff: before its activation, a gate becomes max(0, gate - mean - cutoff * deviation), with the mean and the
            standard deviation of the gates of its row (Gemma 3n). Few gates of a row are then above 0, and no sorting
            is needed. None: gates stay unchanged.
        limit: activation(gate) is limited to at most this number, and up to its range on both sides of 0. None: there
            is no limit.
    """

    intermediate_size: int
    activation: Activation | Literal["xielu"] = "silu"
    has_bias: bool = False
    has_gate: bool = True
    cutoff: float | None = None
    limit: float | None = None

    def __post_init__(self) -> None:
        check_count("intermediate_size", self.intermediate_size, DIMENSION_MAX)
        assert self.has_gate or self.cutoff is None, "a cutoff applies to gates"
        assert self.has_gate or self.limit is None, "a limit applies to gates"
        if self.limit is not None:
            check_positive("swiglu_limits_shared", self.limit)
        assert self.activation != "xielu" or not self.has_gate, "xielu applies to MLPs without a gate"
        if self.cutoff is not None and not math.isfinite(self.cutoff):
            raise ModelLoadError(f"the gates' cutoff is {self.cutoff}: the checkpoint's config is damaged")


class ExpertsConfig(msgspec.Struct, frozen=True, kw_only=True, tag="experts"):
    """Mixture of experts in place of an MLP (arXiv 2101.03961).

    A router scores all experts and chooses experts_per_token of them. A token's result is the sum of the chosen
    experts' results, weighted by the experts' scores.

    Attributes:
        intermediate_size: intermediate size of each expert, which is an MLP.
        normalizes: divide the chosen experts' scores by their sum. With softmax, these scores are then a softmax over
            only the chosen experts.
        has_bias: experts have biases.
        has_router_bias: the router has a bias.
        scoring: softmax over the router's logits of all experts, or sigmoid of each logit. "sparsemixer" (arXiv
            2409.12136) chooses one expert after the other. Its score is a softmax over the remaining experts with a
            logit near the largest one.
        logit_cap: with the cap c, a logit of the router becomes c * tanh(logit / c). None: there is no cap.
        nearness: with "sparsemixer", largest relative difference of near logits.
        scale: factor of the scores after they are normalized.
        has_score_bias: each expert has a bias that is added to its score when experts are chosen, but not when their
            results are weighted (arXiv 2408.15664).
        group_count: number of groups into which the experts are divided. A group has consecutive experts.
        groups_per_token: number of groups with the highest scores. Experts are chosen only from these groups.
        group_leaders: number of highest expert scores whose sum is the score of a group.
        shared_size: intermediate size of an additional MLP that computes every token. 0: there is no such MLP.
        has_shared_gate: the result of the shared MLP is multiplied by the sigmoid of a token's product with a vector.
        weighs_inputs: weights multiply the inputs of experts instead of their outputs.
        has_gate: experts and the additional MLP have a gate, see MlpConfig.
        has_own_norms: router, experts and the additional MLP read the hidden state through norms of their own. The
            results of the experts and of the additional MLP are normalized before they are added. The weight of each
            chosen expert is multiplied by a number of the expert.
        identity_count: number of further experts of the router, whose result is their input (zero-computation experts,
            arXiv 2410.07348). They follow the other experts.
        limit: see MlpConfig.
        shared_limit: see MlpConfig, for the additional MLP.
        has_identity_results: the results of these experts are part of the mixture's result. False for a rank whose
            partial sum does not contain them.
    """

    expert_count: int
    experts_per_token: int
    intermediate_size: int
    normalizes: bool
    activation: Activation = "silu"
    has_bias: bool = False
    has_router_bias: bool = False
    scoring: Scoring = "softmax"
    scale: float = 1.0
    has_score_bias: bool = False
    group_count: int = 1
    groups_per_token: int = 1
    group_leaders: int = 1
    shared_size: int = 0
    has_shared_gate: bool = False
    weighs_inputs: bool = False
    has_gate: bool = True
    has_own_norms: bool = False
    logit_cap: float | None = None
    nearness: float = 0.0
    identity_count: int = 0
    has_identity_results: bool = True
    limit: float | None = None
    shared_limit: float | None = None

    def __post_init__(self) -> None:
        assert self.has_gate or not self.has_bias, "experts without gates have no biases"
        assert not self.identity_count or (self.group_count == 1 and not self.weighs_inputs), "identity experts"
        assert not self.has_own_norms or self.shared_size, "norms of two results need two results"
        check_count("the number of experts", self.expert_count, EXPERTS_MAX)
        check_count("the number of experts that return their input", self.identity_count, EXPERTS_MAX, 0)
        check_count("the number of experts for each token", self.experts_per_token, self.choice_count)
        check_count("the experts' intermediate size", self.intermediate_size, DIMENSION_MAX)
        check_positive("the experts' scale", self.scale)
        if self.logit_cap is not None:
            check_positive("the cap of the router's logits", self.logit_cap)
        for limit in (self.limit, self.shared_limit):
            if limit is not None:
                check_positive("a limit of experts (swiglu_limits)", limit)
        assert self.has_gate or (self.limit is None and self.shared_limit is None), "a limit applies to gates"
        check_count("the number of groups of experts", self.group_count, min(EXPERT_GROUPS_MAX, self.expert_count))
        check_count("the number of groups for each token", self.groups_per_token, self.group_count)
        size = self.expert_count // self.group_count
        if size * self.group_count != self.expert_count:
            raise ModelLoadError(
                f"{self.expert_count} experts are in {self.group_count} groups, but each group must have as many: "
                "the checkpoint's config is damaged"
            )
        check_count("the number of experts that a group counts by", self.group_leaders, size)
        if self.group_count > 1:
            check_count("the number of experts for each token", self.experts_per_token, self.groups_per_token * size)
        if self.shared_size:
            check_count("the shared expert's intermediate size", self.shared_size, DIMENSION_MAX)

    @property
    def choice_count(self) -> int:
        """Number of experts from which the router chooses."""
        return self.expert_count + self.identity_count


class ShortConvConfig(msgspec.Struct, frozen=True, kw_only=True, tag="short_conv"):
    """Short convolution in place of attention (LFM2). It reads a token and the previous kernel_size - 1 tokens.

    A token is projected to b, c and x. The result is out(c * convolved(b * x)). Each channel has its own convolution
    weights.

    Attributes:
        channel_count: channels of each projection.
        has_bias: both projections and the convolution have biases.
    """

    channel_count: int
    kernel_size: int
    has_bias: bool = False

    def __post_init__(self) -> None:
        check_count("the convolution's channels", self.channel_count, DIMENSION_MAX)
        check_count("the convolution's kernel size", self.kernel_size, CONV_KERNEL_MAX, CONV_KERNEL_MIN)

    @property
    def convolved_size(self) -> int:
        return self.channel_count

    @property
    def projected_size(self) -> int:
        """Number of values that the first projection computes for one token."""
        return 3 * self.channel_count

    @property
    def inner_size(self) -> int:
        """Number of values that the last projection reads for one token."""
        return self.channel_count

    @property
    def state_size(self) -> int:
        """Number of values in the state of one sequence: the last inputs of the convolution."""
        return (self.kernel_size - 1) * self.channel_count


class StateSpaceConfig(msgspec.Struct, frozen=True, kw_only=True, tag="state_space"):
    """Selective state space in place of attention (Mamba-2, arXiv 2405.21060).

    A token is projected to z, x, b, c and time steps. x, b and c are convolved, each channel with its own weights, and
    silu is applied. Each head has a state of [vector_size, head_dim] numbers. For each token, the state is multiplied
    by exp(time step * rate), where the head's rate is negative, and time step * b * x is added. The output is
    c * state + skip * x.

    Attributes:
        group_count: number of groups of heads. The heads of a group share b and c, and are normalized together.
        kernel_size: number of tokens that the convolution reads.
        has_bias: both projections have biases.
        has_conv_bias: the convolution has a bias.
        norm: "gated": the output is multiplied by silu(z), then normalized by groups. "ungated": the output is
            normalized, then multiplied by silu(z). "none": the output is only multiplied by silu(z).
        time_step_min: lower bound of softplus(time step + the head's bias).
        time_step_max: upper bound of softplus(time step + the head's bias).
        norm_eps: number that the norm of the output adds to the mean square. None: that of the model's norms.
    """

    head_count: int
    head_dim: int
    group_count: int
    vector_size: int
    kernel_size: int
    has_bias: bool = False
    has_conv_bias: bool = True
    norm: StateNorm = "gated"
    time_step_min: float = 0.0
    time_step_max: float = math.inf
    norm_eps: float | None = None

    def __post_init__(self) -> None:
        check_count("the state space's head count", self.head_count, HEADS_MAX)
        check_count("the state space's head_dim", self.head_dim, DIMENSION_MAX)
        check_count("the state space's group count", self.group_count, self.head_count)
        check_count("the state space's state size", self.vector_size, DIMENSION_MAX)
        check_count("the convolution's kernel size", self.kernel_size, CONV_KERNEL_MAX, CONV_KERNEL_MIN)
        check_count("the state space's state", self.state_size, STATE_NUMBERS_MAX)
        if self.norm_eps is not None:
            check_positive("the state space's epsilon", self.norm_eps)
        if self.head_count % self.group_count:
            raise ModelLoadError(
                f"the state space has {self.head_count} heads in {self.group_count} groups, but each group must have "
                "the same number of heads: the checkpoint's config is damaged"
            )
        if not 0 <= self.time_step_min < self.time_step_max:
            raise ModelLoadError(
                f"time_step_limit is {self.time_step_min} to {self.time_step_max}, but it must be a range of numbers "
                "of at least 0: the checkpoint's config is damaged"
            )

    @property
    def convolved_size(self) -> int:
        """Channels of the convolution."""
        return self.inner_size + 2 * self.group_count * self.vector_size

    @property
    def projected_size(self) -> int:
        """Number of values that the first projection computes for one token."""
        return self.inner_size + self.convolved_size + self.head_count

    @property
    def inner_size(self) -> int:
        """Number of values that the last projection reads for one token."""
        return self.head_count * self.head_dim

    @property
    def state_size(self) -> int:
        """Number of values in the state of one sequence: the last inputs of the convolution, and the states of the
        heads.
        """
        return (self.kernel_size - 1) * self.convolved_size + self.vector_size * self.inner_size


class SelectiveScanConfig(msgspec.Struct, frozen=True, kw_only=True, tag="selective_scan"):
    """Selective state space in place of attention (Mamba, arXiv 2312.00752).

    A token is projected to x and z. x is convolved, each channel with its own weights, and silu is applied. x is then
    projected to a latent of the time steps, b and c, and the latent to a time step for each channel. Each channel has a
    state of vector_size numbers, and a rate (negative) for each number. For each token, a number is multiplied by
    exp(time step * rate), and time step * b * x is added. The output is (c * state + skip * x) * silu(z).

    Attributes:
        rank: size of the latent of the time steps.
        has_bias: the projection to x and z and the output projection have biases.
        norm: "unit": the latent, b and c are normalized without weights. "weighted": they are normalized with weights.
        norm_eps: number that these norms add to the mean square.
    """

    channel_count: int
    vector_size: int
    rank: int
    kernel_size: int
    has_bias: bool = False
    has_conv_bias: bool = True
    norm: SelectionNorm = "none"
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        check_count("the state space's channels", self.channel_count, DIMENSION_MAX)
        check_count("the state space's state size", self.vector_size, DIMENSION_MAX)
        check_count("the rank of the time steps", self.rank, DIMENSION_MAX)
        check_count("the convolution's kernel size", self.kernel_size, CONV_KERNEL_MAX, CONV_KERNEL_MIN)
        check_count("the state space's state", self.state_size, STATE_NUMBERS_MAX)
        check_positive("the epsilon of the state space's norms", self.norm_eps)

    @property
    def convolved_size(self) -> int:
        """Channels of the convolution."""
        return self.channel_count

    @property
    def projected_size(self) -> int:
        """Number of values that the first projection computes for one token."""
        return 2 * self.channel_count

    @property
    def selected_sizes(self) -> tuple[int, int, int]:
        """Sizes of the latent of the time steps, b and c."""
        return self.rank, self.vector_size, self.vector_size

    @property
    def inner_size(self) -> int:
        """Number of values that the last projection reads for one token."""
        return self.channel_count

    @property
    def state_size(self) -> int:
        """Number of values in the state of one sequence: the last inputs of the convolution, and the states."""
        return (self.kernel_size - 1 + self.vector_size) * self.channel_count


class DeltaNetConfig(msgspec.Struct, frozen=True, kw_only=True, tag="delta_net"):
    """Gated delta rule in place of attention (arXiv 2412.06464).

    Projections q, k and v of a token are convolved, each channel with its own weights, and silu is applied. q and k
    are scaled to length 1, and q is divided by sqrt(vector_size).

    Each head has a state S of [vector_size, head_dim] numbers. For each token:

    1. S is multiplied by exp(rate * softplus(decay + bias)). decay is a projection of the token. rate (negative) and
    bias belong to the head.
    2. S is updated: S^T k moves towards v by a fraction of their difference. The fraction is the sigmoid of another
    projection of the token.
    3. The output of the head is S^T q, normalized and multiplied by silu(z).

    Attributes:
        head_count: number of value heads.
        group_count: number of key heads, and of query heads. head_count / group_count value heads share each of them.
        has_heads_in_turn: value head i uses key head i % group_count. False: consecutive value heads share a key head.
        has_joint_qkv: q, k and v are one projection with one convolution. False: each has its own tensors.
        share_scale: factor of the fraction of an update. With 2, an update may reverse the sign of S^T k.
        rank: size of two latents, from which the decay and z are projected. Each of the vector_size rows of S has its
            own decay and bias, and the output is multiplied by sigmoid(z) (KDA, arXiv 2510.26692). 0: there are no
            latents, and all rows of S have one decay.
        norm_eps: number that the norm of a head adds to the mean square. None: that of the model's norms.
    """

    head_count: int
    group_count: int
    head_dim: int
    vector_size: int
    kernel_size: int
    has_heads_in_turn: bool = False
    has_joint_qkv: bool = True
    share_scale: float = 1.0
    rank: int = 0
    norm_eps: float | None = None

    has_bias: ClassVar[bool] = False
    has_conv_bias: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_count("linear_num_value_heads", self.head_count, HEADS_MAX)
        check_count("linear_num_key_heads", self.group_count, self.head_count)
        check_count("linear_value_head_dim", self.head_dim, DIMENSION_MAX)
        check_count("linear_key_head_dim", self.vector_size, DIMENSION_MAX, 2)
        check_count("linear_conv_kernel_dim", self.kernel_size, CONV_KERNEL_MAX, CONV_KERNEL_MIN)
        check_positive("the scale of an update", self.share_scale)
        check_count("the rank of the decays", self.rank, DIMENSION_MAX, 0)
        assert not self.rank or self.group_count == self.head_count, "with latents, each head has its own decays"
        if self.norm_eps is not None:
            check_positive("the delta rule's epsilon", self.norm_eps)
        check_count("the delta rule's state", self.state_size, STATE_NUMBERS_MAX)
        if self.head_count % self.group_count:
            raise ModelLoadError(
                f"linear_num_value_heads is {self.head_count} and linear_num_key_heads {self.group_count}, but each "
                "key must serve the same number of heads: the checkpoint's config is damaged"
            )

    @property
    def convolved_size(self) -> int:
        """Channels of the convolution."""
        return 2 * self.group_count * self.vector_size + self.inner_size

    @property
    def qkv_sizes(self) -> dict[str, int]:
        """Sizes of q, k and v by the suffix of their tensors' names, or the size of their joint tensor."""
        if self.has_joint_qkv:
            return {"qkv": self.convolved_size}
        return {**dict.fromkeys("qk", self.group_count * self.vector_size), "v": self.inner_size}

    @property
    def conv_sizes(self) -> dict[str, int]:
        """Channels of each tensor with weights of the convolution, by the tensors' names."""
        if self.has_joint_qkv:
            return {"conv": self.convolved_size}
        return {f"conv_{part}": size for part, size in self.qkv_sizes.items()}

    @property
    def decay_count(self) -> int:
        """Number of decays of one token."""
        return self.head_count * (self.vector_size if self.rank else 1)

    @property
    def input_sizes(self) -> dict[str, int]:
        """Output sizes of the projections of a token's hidden state, by module name: z, inputs of the convolution,
        decays, and fractions of the update. With latents, z and the decays are replaced by one latent each.
        """
        of_latent = "_a" if self.rank else ""
        return {
            f"delta_gate{of_latent}": self.rank or self.inner_size,
            **{f"delta_{part}": size for part, size in self.qkv_sizes.items()},
            f"delta_decay{of_latent}": self.rank or self.decay_count,
            "delta_share": self.head_count,
        }

    @property
    def latent_sizes(self) -> dict[str, int]:
        """Output sizes of the projections from the latents to z and to the decays, by module name. Empty without
        latents.
        """
        return {"delta_gate_b": self.inner_size, "delta_decay_b": self.decay_count} if self.rank else {}

    @property
    def projected_size(self) -> int:
        """Number of values that all projections of one token's hidden state compute together."""
        return sum(self.input_sizes.values())

    @property
    def inner_size(self) -> int:
        """Number of values that the last projection reads for one token."""
        return self.head_count * self.head_dim

    @property
    def state_size(self) -> int:
        """Number of values in the state of one sequence: the last inputs of the convolution, and the states of the
        heads.
        """
        return (self.kernel_size - 1) * self.convolved_size + self.vector_size * self.inner_size


class LightningConfig(msgspec.Struct, frozen=True, kw_only=True, tag="lightning"):
    """Lightning attention in place of attention (MiniMax-01, arXiv 2501.08313).

    A token is projected to q, k and v, and silu is applied. Each head has a state S of [head_dim, head_dim] numbers.
    For each token, S is multiplied by exp(-slope), and k v^T is added. The output of the head is S^T q. The outputs of
    all heads are normalized together, and multiplied by the sigmoid of another projection of the token.

    Attributes:
        slopes: number of each head.
        norm_eps: number that the norm adds to the mean square.
    """

    head_count: int
    head_dim: int
    slopes: tuple[float, ...]
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        check_count("num_attention_heads", self.head_count, HEADS_MAX)
        check_count("head_dim", self.head_dim, DIMENSION_MAX)
        check_count("the state of lightning attention", self.state_size, STATE_NUMBERS_MAX)
        check_positive("the epsilon of lightning attention", self.norm_eps)
        assert len(self.slopes) == self.head_count, "each head has a slope"

    @property
    def inner_size(self) -> int:
        """Number of values that the last projection reads for one token."""
        return self.head_count * self.head_dim

    @property
    def projected_size(self) -> int:
        """Number of values that all projections of one token's hidden state compute together."""
        return 4 * self.inner_size

    @property
    def state_size(self) -> int:
        """Number of values in the states of one sequence's heads."""
        return self.inner_size * self.head_dim


Recurrent: TypeAlias = ShortConvConfig | StateSpaceConfig | SelectiveScanConfig | DeltaNetConfig | LightningConfig
"""Part of a layer that keeps a state of a whole sequence."""


class NormedSums(msgspec.Struct, frozen=True, kw_only=True):
    """Weighted sums of the hidden state and a result (MiniMax-01, arXiv 2501.08313).

    Attributes:
        attention: factors of the hidden state and of attention's result, in their sum.
        mlp: factors of the hidden state and of the MLP's result.
        keeps_norms: the result of an input norm replaces the hidden state before a sum.
    """

    attention: tuple[float, float]
    mlp: tuple[float, float]
    keeps_norms: bool = True

    def __post_init__(self) -> None:
        for factor in (*self.attention, *self.mlp):
            check_positive("a factor of a sum (alpha, beta)", factor)


class SharedBlock(msgspec.Struct, frozen=True, kw_only=True):
    """Transformer block that several layers share (Zamba2, arXiv 2411.15242).

    The block reads the hidden state and the token's embedding, concatenated. Its MLP reads the norm of attention's
    result. A projection of the MLP's result is added to the input of the layer's state space, and to nothing else.

    Attention and MLP are those of the LayerConfig. All layers with one block have its weights. The projection, the KV
    entries and the adapters belong to each layer. An adapter is a product of two matrices that is added to a
    projection of the block.

    Attributes:
        first: index of the first layer with this block.
        use: index of this layer among all layers with blocks.
        rank: rank of the adapters.
        adapts_attention: queries, keys and values have adapters. The MLP always has one.
    """

    first: int
    use: int
    rank: int
    adapts_attention: bool = False

    def __post_init__(self) -> None:
        check_count("adapter_rank", self.rank, DIMENSION_MAX)

    def adapters(self, layer: LayerConfig, hidden_size: int) -> dict[str, tuple[int, int]]:
        """Return numbers of inputs and outputs of each adapter, by name: q, k and v if they have any, then gate_up.

        Args:
            layer: the layer with this block.
            hidden_size: size of the model's hidden state.
        """
        attention, mlp = layer.attention, layer.mlp
        assert isinstance(attention, AttentionConfig), "checked by LayerConfig"
        assert isinstance(mlp, MlpConfig), "checked by LayerConfig"
        sizes = {"q": attention.query_size, "k": attention.key_size, "v": attention.value_size}
        found = {name: (2 * hidden_size, size) for name, size in sizes.items() if self.adapts_attention}
        return {**found, "gate_up": (hidden_size, 2 * mlp.intermediate_size)}


class LayerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One layer: attention or its replacement, then an MLP or a mixture of experts.

    Both may have a norm of their input (input norm) and of their result (output norm). Each result is added to the
    hidden state.

    Attributes:
        attention: attention or its replacement. None: the layer consists only of an MLP or a mixture of experts.
        mlp: MLP or mixture of experts. None: the layer consists only of attention or its replacement.
        has_only_mlp_output_norm: the MLP has an output norm, and attention has none.
        shortcut: mixture of experts that reads the input of the MLP. The next layer adds its result to the result of
            its own MLP (ScMoE, arXiv 2404.05019).
        is_parallel: attention and the MLP read the same hidden state, and both results are added in one sum.
        has_own_mlp_norm: in a parallel layer, the MLP has its own input norm. False: the MLP reads the input of
            attention.
        residual_scale: factor of each result before it is added.
        beside: a state space that reads the input of attention. Its result is added to the result of attention.
        laurel_rank: rank of two matrices of an additional path, parallel to attention (LAuReL, arXiv 2411.07501). The
            input of attention, and the norm of its product with both matrices, are added to the result of attention.
            The sum is divided by sqrt(2). 0: there is no such path.
        has_scale: after the layer, the hidden state is multiplied by a number that the checkpoint contains.
        normalizes_sums: input norms normalize the hidden state after each sum, and not the input of attention and the
            MLP (post-norm, arXiv 1706.03762).
        sums: weights of both sums. None: all weights are 1, and no norm replaces the hidden state.
        block: attention and the MLP are a block that several layers share. Its result is added to the input of the
            state space `beside`, whose result is the layer's only one.
    """

    attention: KVAttention | Recurrent | None
    mlp: MlpConfig | ExpertsConfig | None
    shortcut: ExpertsConfig | None = None
    has_input_norms: bool = True
    has_output_norms: bool = False
    has_only_mlp_output_norm: bool = False
    is_parallel: bool = False
    has_own_mlp_norm: bool = False
    residual_scale: float = 1.0
    beside: StateSpaceConfig | None = None
    laurel_rank: int = 0
    has_scale: bool = False
    normalizes_sums: bool = False
    sums: NormedSums | None = None
    block: SharedBlock | None = None

    def __post_init__(self) -> None:
        check_positive("residual_multiplier", self.residual_scale)
        if self.attention is None:
            assert self.mlp is not None, "a layer without any part"
            assert not self.is_parallel, "nothing runs parallel to the MLP"
            assert not self.has_output_norms, "an output norm of attention would have no input"
        assert self.has_input_norms or not self.has_own_mlp_norm, "the MLP's own norm is an input norm"
        assert self.is_parallel or not self.has_own_mlp_norm, "without is_parallel, an MLP always has its own norm"
        assert not self.has_scale or (self.mlp is not None and self.has_output_norms), "the scale follows a norm"
        if self.shortcut is not None:
            assert isinstance(self.mlp, MlpConfig), "a shortcut is beside an MLP"
            assert not self.is_parallel, "a shortcut is added to the result of an MLP"
            assert not self.has_mlp_output_norm, "a norm would change the result of a shortcut"
            assert not self.shortcut.has_own_norms, "a shortcut reads the input of the MLP"
        if self.normalizes_sums:
            is_plain = self.has_input_norms and not (self.has_mlp_output_norm or self.is_parallel or self.laurel_rank)
            assert is_plain, "each sum has one norm"
            assert self.mlp is not None, "there are two sums"
        if self.has_only_mlp_output_norm:
            assert self.mlp is not None, "an output norm of the MLP would have no input"
            assert not self.has_output_norms, "attention has no output norm"
            assert not self.is_parallel, "a parallel MLP would make a sum of two results"
        if self.laurel_rank:
            check_count("laurel_rank", self.laurel_rank, DIMENSION_MAX)
            assert self.has_input_norms, "laurel adds the normed input of attention"
            assert self.mlp is not None, "laurel needs a layer with two sums"
            assert not self.is_parallel, "laurel needs a layer with two sums"
        if self.sums is not None:
            is_plain = self.has_input_norms and not (self.is_parallel or self.normalizes_sums or self.laurel_rank)
            assert is_plain, "each sum has one input norm"
            assert self.mlp is not None, "there are two sums"
            assert self.attention is not None, "there are two sums"
        if self.block is not None:
            assert isinstance(self.mlp, MlpConfig), "a shared block has an MLP"
            assert self.mlp.has_gate, "the MLP of a shared block has a gate"
            assert self.mlp.activation != "xielu", "xielu applies to MLPs without a gate"
            assert self.beside is not None, "a state space reads the result of a shared block"
        if self.beside is None:
            return
        attends = isinstance(self.attention, AttentionConfig)
        assert attends, "a layer with a state space beside attention has no attention"
        assert self.has_input_norms, "the state space reads the normed input of attention"
        assert not self.has_output_norms, "an output norm would have two results to norm"
        assert not self.is_parallel, "a parallel MLP would make a sum of three results"

    @property
    def has_attention_norm(self) -> bool:
        """True if the layer has an input norm of attention."""
        return self.has_input_norms and self.attention is not None

    @property
    def has_mlp_norm(self) -> bool:
        """True if the layer has an input norm of the MLP."""
        return self.has_input_norms and self.mlp is not None and (self.has_own_mlp_norm or not self.is_parallel)

    @property
    def has_mlp_output_norm(self) -> bool:
        """True if the layer has an output norm of the MLP."""
        return self.has_output_norms or self.has_only_mlp_output_norm

    @property
    def experts(self) -> ExpertsConfig | None:
        """Mixture of experts of this layer, which replaces the MLP or is beside it."""
        return self.mlp if isinstance(self.mlp, ExpertsConfig) else self.shortcut

    @property
    def recurrent(self) -> Recurrent | None:
        """Recurrent layer that replaces attention or runs beside it. None if the layer has no state."""
        return self.beside if isinstance(self.attention, KVAttention) else self.attention


def check_count(name: str, value: int, largest: int, least: int = 1) -> None:
    """Check that a number in a model description is in a range.

    Args:
        name: name of the number, for the error text.
        value: the number.
        largest: largest allowed number.
        least: smallest allowed number.

    Raises:
        ModelLoadError: the number is not allowed.
    """
    if not least <= value <= largest:
        raise ModelLoadError(f"{name} is {value}, allowed is {least} to {largest}: the checkpoint's config is damaged")


def check_positive(name: str, value: float) -> None:
    """Check that a number in a model description is finite and above 0.

    Args:
        name: name of the number, for the error text.
        value: the number.

    Raises:
        ModelLoadError: the number is not allowed.
    """
    if not (math.isfinite(value) and value > 0):
        raise ModelLoadError(f"{name} is {value}, but it must be a positive number: the checkpoint's config is damaged")
