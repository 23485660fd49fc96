"""Description of a model, layer by layer, as values that every implementation of the computation reads.

families/ and loading/ make such a description from config.json or from GGUF metadata.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal, TypeAlias

import msgspec

from trioserve.contracts.errors import ModelLoadError

__all__ = [
    "LAYERS_MAX",
    "Activation",
    "AttentionConfig",
    "DeltaNetConfig",
    "Dtype",
    "ExpertsConfig",
    "KVAttention",
    "KVEntry",
    "LatentAttentionConfig",
    "LayerConfig",
    "LayerPart",
    "MlpConfig",
    "ModelConfig",
    "NormKind",
    "QkNorm",
    "RankPart",
    "Recurrent",
    "RopeScaling",
    "RowFactors",
    "RotaryConfig",
    "ShortConvConfig",
    "StagePart",
    "StateNorm",
    "StateSpaceConfig",
    "StreamsConfig",
    "Scoring",
    "Temperature",
]

Dtype = Literal["bfloat16", "float16", "float32"]
Activation = Literal["silu", "gelu", "gelu_tanh", "clamped_swiglu"]
NormKind = Literal["rms", "layer"]
QkNorm = Literal["none", "head", "heads", "row", "unit"]
Scoring = Literal["softmax", "sigmoid"]
StateNorm = Literal["gated", "ungated", "none"]

# A damaged header must not make us build a tuple with a billion layers or ask torch for a petabyte. The largest models
# of these families have 126 layers, 128 heads and dimensions below 200,000.
LAYERS_MAX = 1_024
HEADS_MAX = 4_096
EXPERTS_MAX = 1_024
CONV_KERNEL_MIN, CONV_KERNEL_MAX = 2, 64  # No implementation supports a kernel of size 1, which would keep no state.
STATE_NUMBERS_MAX = 2**28  # numbers in the state of one layer
EXPERT_GROUPS_MAX = 64
STREAMS_MAX = 8
DIMENSION_MAX = 2**24
CONTEXT_TOKENS_MAX = 2**31 - 1  # step tensors hold positions as int32


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True):
    """Change of rotary frequencies that lets a model reach a longer context.

    Kinds:
        linear: every inverse frequency is divided by factor.
        llama3: as in Llama 3.1. Low frequencies are divided by factor, high ones stay, and frequencies between them are
            blended. The borders follow from low_freq_factor, high_freq_factor and original_context_tokens. If
            frequency_factors is set, each inverse frequency is divided by its number there instead, and no other field
            counts.
        yarn: YaRN (arXiv 2309.00071) with beta_fast and beta_slow. Cosine and sine are multiplied by attention_factor.
        longrope: LongRoPE (arXiv 2402.13753). Each inverse frequency is divided by its number in frequency_factors.
            Cosine and sine are multiplied by attention_factor.

    Attributes:
        original_context_tokens: context length of the model before it was extended.
        attention_factor: None takes the default: 0.1 * ln(factor) + 1 for yarn, and sqrt(1 + ln(factor) /
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
        _positive_number("rope scaling factor", self.factor)
        _positive_number("rope scaling low_freq_factor", self.low_freq_factor)
        _positive_number("rope scaling high_freq_factor", self.high_freq_factor)
        _count("rope scaling original_max_position_embeddings", self.original_context_tokens, CONTEXT_TOKENS_MAX)
        _positive_number("rope scaling beta_fast", self.beta_fast)
        _positive_number("rope scaling beta_slow", self.beta_slow)
        if self.attention_factor is not None:
            _positive_number("rope scaling attention_factor", self.attention_factor)
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
            _positive_number("a rope frequency factor", value)

    def context_tokens(self, context_tokens: int) -> int:
        """Return the longest context of the model in tokens.

        Args:
            context_tokens: length that the model's config names. For linear it is the length before scaling. For yarn
                it is the length before or after scaling. For llama3 and longrope it is the length after scaling.
        """
        if self.kind == "linear":
            # One token above the maximum makes ModelConfig refuse the config.
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
        rotated_dims: how many numbers of each head are rotated, an even count. The other numbers stay unchanged.
        scaling: None leaves the frequencies unchanged.
    """

    theta: float
    rotated_dims: int
    scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        _positive_number("rope_theta", self.theta)
        _count("the number of rotated dimensions", self.rotated_dims, DIMENSION_MAX)
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


class KVEntry(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of what the KV cache keeps of one token in one layer: [part_count, head_count, head_dim].

    Attributes:
        part_count: 2 for keys and values, 1 for latents, from which keys and values are computed.
    """

    part_count: int
    head_count: int
    head_dim: int

    @property
    def size(self) -> int:
        return self.part_count * self.head_count * self.head_dim


class Temperature(msgspec.Struct, frozen=True, kw_only=True):
    """Factor by which queries grow with their position (arXiv 2501.19399).

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
        _count("floor_scale", self.interval, CONTEXT_TOKENS_MAX)


class AttentionConfig(msgspec.Struct, frozen=True, kw_only=True, tag="attention"):
    """Attention of one layer.

    Attributes:
        rotary: rotation of queries and keys by their positions. None: attention ignores positions.
        window: a token sees the last `window` positions, its own included. None: it sees every earlier position.
        section: positions are divided into sections of this many. A token sees the positions of its own section up to
            itself. None: there are no sections.
        temperature: factor of queries that depends on their positions.
        scale: factor of query times key. None means 1 / sqrt(head_dim).
        score_cap: c bounds scaled scores to c * tanh(score / c).
        has_sinks: each head has a learned number that takes part in its softmax next to the scores, without a value.
        has_bias: the projections to queries, keys and values have biases.
        has_output_bias: the output projection has a bias.
        qk_norm: norm of queries and keys before they are rotated. "head": each head is normed with weights that all
            heads share. "heads": each head is normed with its own weights. "unit": each head is normed without weights.
            "row": all heads of a row are normed together.
        has_value_norm: values of each head are normed without weights.
        kv_from: index of an earlier layer whose keys and values this layer attends to. The layer then has only queries.
            None: the layer has its own keys and values.
        has_gate: the output of the heads is multiplied by the sigmoid of a projection of the same size.
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
    has_output_bias: bool = False
    qk_norm: QkNorm = "none"
    has_value_norm: bool = False
    kv_from: int | None = None
    has_gate: bool = False

    def __post_init__(self) -> None:
        _count("head_count", self.head_count, HEADS_MAX)
        _count("kv_head_count", self.kv_head_count, HEADS_MAX)
        _count("head_dim", self.head_dim, DIMENSION_MAX)
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
            _count("sliding_window", self.window, CONTEXT_TOKENS_MAX)
        if self.scale is not None:
            _positive_number("the attention's scale", self.scale)
        if self.section is not None:
            _count("attention_chunk_size", self.section, CONTEXT_TOKENS_MAX)
            if self.window is not None:
                raise ModelLoadError("a layer's attention has both a window and sections, which is not supported")
        if self.score_cap is not None:
            _positive_number("attn_logit_softcapping", self.score_cap)

    @property
    def query_size(self) -> int:
        return self.head_count * self.head_dim

    @property
    def key_size(self) -> int:
        """Numbers in the keys of one token, which is also the count of its values."""
        return self.kv_head_count * self.head_dim

    @property
    def query_factor(self) -> float:
        """Factor of queries for kernels that always divide scores by sqrt(head_dim). It gives scores the layer's
        scale.
        """
        return 1.0 if self.scale is None else self.scale * math.sqrt(self.head_dim)

    @property
    def projected_size(self) -> int:
        """Numbers that the layer projects of one token: queries, and keys and values if the layer has its own."""
        return self.query_size + (2 * self.key_size if self.kv_from is None else 0)

    @property
    def kv_entry(self) -> KVEntry:
        return KVEntry(part_count=2, head_count=self.kv_head_count, head_dim=self.head_dim)

    @property
    def turned_dim(self) -> int:
        """Numbers of a head for which rotary angles are computed."""
        return self.head_dim


class LatentAttentionConfig(msgspec.Struct, frozen=True, kw_only=True, tag="latent"):
    """Multi-head latent attention (MLA, arXiv 2405.04434) of one layer.

    Of each token the KV cache keeps one latent and one rotated key that all heads share. Keys and values of every head
    are projections of the latent.

    Attributes:
        query_rank: size of the latent from which queries are projected. None: queries are projected from the hidden
            state.
        latent_dim: size of the KV latent. Both latents are normed.
        plain_dim: numbers of a head's query that meet a projection of the latent.
        turned_dim: numbers of a head's query that are rotated and meet the rotated key.
        value_dim: numbers of a head's value.
        scale: factor of query times key.
    """

    head_count: int
    query_rank: int | None
    latent_dim: int
    plain_dim: int
    turned_dim: int
    value_dim: int
    rotary: RotaryConfig
    scale: float
    norm_eps: float = 1e-6

    window: ClassVar[None] = None
    section: ClassVar[None] = None
    temperature: ClassVar[None] = None
    score_cap: ClassVar[None] = None
    kv_from: ClassVar[None] = None

    def __post_init__(self) -> None:
        _count("head_count", self.head_count, HEADS_MAX)
        if self.query_rank is not None:
            _count("q_lora_rank", self.query_rank, DIMENSION_MAX)
        _count("kv_lora_rank", self.latent_dim, DIMENSION_MAX)
        _count("qk_nope_head_dim", self.plain_dim, DIMENSION_MAX)
        _count("qk_rope_head_dim", self.turned_dim, DIMENSION_MAX)
        _count("v_head_dim", self.value_dim, DIMENSION_MAX)
        _positive_number("the attention's scale", self.scale)
        _positive_number("the latents' epsilon", self.norm_eps)
        if self.rotary.rotated_dims != self.turned_dim:
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
        return self.latent_dim + self.turned_dim

    @property
    def kv_entry(self) -> KVEntry:
        return KVEntry(part_count=1, head_count=1, head_dim=self.entry_dim)

    @property
    def query_factor(self) -> float:
        """Factor of queries for kernels that always divide scores by sqrt(entry_dim). It gives scores the layer's
        scale.
        """
        return self.scale * math.sqrt(self.entry_dim)


KVAttention: TypeAlias = AttentionConfig | LatentAttentionConfig
"""Attention of a layer that keeps entries in the KV cache."""


class MlpConfig(msgspec.Struct, frozen=True, kw_only=True, tag="mlp"):
    """MLP of one layer: down(activation(gate(x)) * up(x)).

    Activations:
        gelu_tanh: gelu, approximated with tanh.
        clamped_swiglu: activation(gate) * up becomes g * sigmoid(1.702 g) * (u + 1). Here g is gate bounded to at most
            7, and u is up bounded to -7 ... 7.

    Attributes:
        has_bias: each of the three matrices has a bias.
        cutoff: before its activation, a gate becomes max(0, gate - mean - cutoff * deviation), with mean and standard
            deviation of the gates of its row (Gemma 3n). This keeps few gates of a row without sorting them. None:
            gates stay unchanged.
    """

    intermediate_size: int
    activation: Activation = "silu"
    has_bias: bool = False
    cutoff: float | None = None

    def __post_init__(self) -> None:
        _count("intermediate_size", self.intermediate_size, DIMENSION_MAX)
        if self.cutoff is not None and not math.isfinite(self.cutoff):
            raise ModelLoadError(f"the gates' cutoff is {self.cutoff}: the checkpoint's config is damaged")


class ExpertsConfig(msgspec.Struct, frozen=True, kw_only=True, tag="experts"):
    """Mixture of experts in place of an MLP (arXiv 2101.03961).

    A router scores all experts and chooses experts_per_token of them. The result for a token is the sum of their
    results, weighted by their scores.

    Attributes:
        intermediate_size: size of each expert, which is an MLP.
        normalizes: divide chosen scores by their sum. With softmax the chosen scores are then a softmax over the chosen
            experts alone.
        has_bias: experts have biases.
        has_router_bias: the router has a bias.
        scoring: a softmax over the router's products of all experts, or a sigmoid of each product.
        scale: factor of the scores after they are normalized.
        has_score_bias: each expert has a number that is added to its score for choosing experts, not for weighting them
            (arXiv 2408.15664).
        group_count: groups of neighbouring experts.
        groups_per_token: experts are chosen from this many best groups.
        group_leaders: the score of a group is the sum of this many best scores in it.
        shared_size: intermediate size of an MLP that every token passes through in addition. 0 means that there is
            none.
        has_shared_gate: the result of the shared MLP is multiplied by the sigmoid of a token's product with a vector.
        weighs_inputs: weights multiply the inputs of experts instead of their outputs.
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

    def __post_init__(self) -> None:
        _count("the number of experts", self.expert_count, EXPERTS_MAX)
        _count("the number of experts for each token", self.experts_per_token, self.expert_count)
        _count("the experts' intermediate size", self.intermediate_size, DIMENSION_MAX)
        _positive_number("the experts' scale", self.scale)
        _count("the number of groups of experts", self.group_count, min(EXPERT_GROUPS_MAX, self.expert_count))
        _count("the number of groups for each token", self.groups_per_token, self.group_count)
        size = self.expert_count // self.group_count
        if size * self.group_count != self.expert_count:
            raise ModelLoadError(
                f"{self.expert_count} experts are in {self.group_count} groups, but each group must have as many: "
                "the checkpoint's config is damaged"
            )
        _count("the number of experts that a group counts by", self.group_leaders, size)
        _count("the number of experts for each token", self.experts_per_token, self.groups_per_token * size)
        if self.shared_size:
            _count("the shared expert's intermediate size", self.shared_size, DIMENSION_MAX)


class ShortConvConfig(msgspec.Struct, frozen=True, kw_only=True, tag="short_conv"):
    """Short convolution in place of attention (LFM2), which sees a token and the kernel_size - 1 tokens before it.

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
        _count("the convolution's channels", self.channel_count, DIMENSION_MAX)
        _count("the convolution's kernel size", self.kernel_size, CONV_KERNEL_MAX, CONV_KERNEL_MIN)

    @property
    def convolved_size(self) -> int:
        return self.channel_count

    @property
    def projected_size(self) -> int:
        """Numbers that the first projection gives for one token."""
        return 3 * self.channel_count

    @property
    def inner_size(self) -> int:
        """Numbers of one token that the last projection reads."""
        return self.channel_count

    @property
    def state_size(self) -> int:
        """Numbers that the layer keeps of one sequence: the last inputs of the convolution."""
        return (self.kernel_size - 1) * self.channel_count


class StateSpaceConfig(msgspec.Struct, frozen=True, kw_only=True, tag="state_space"):
    """Selective state space in place of attention (Mamba-2, arXiv 2405.21060).

    A token is projected to z, x, b, c and time steps. x, b and c are convolved, each channel with its own weights, and
    pass through silu. Each head keeps a state of [vector_size, head_dim] numbers. A token multiplies the state by
    exp(time step * rate), where the head's rate is negative, and adds time step * b * x. The output is c * state + skip
    * x.

    Attributes:
        group_count: heads of a group share b and c, and are normed together.
        kernel_size: tokens that the convolution sees.
        has_bias: both projections have biases.
        has_conv_bias: the convolution has a bias.
        norm: "gated": the output is multiplied by silu(z) and then normed by groups. "ungated": the output is normed
            and then multiplied. "none": the output is only multiplied.
        time_step_min: lower bound of softplus(time step + the head's bias).
        time_step_max: upper bound of softplus(time step + the head's bias).
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

    def __post_init__(self) -> None:
        _count("the state space's head count", self.head_count, HEADS_MAX)
        _count("the state space's head_dim", self.head_dim, DIMENSION_MAX)
        _count("the state space's group count", self.group_count, self.head_count)
        _count("the state space's state size", self.vector_size, DIMENSION_MAX)
        _count("the convolution's kernel size", self.kernel_size, CONV_KERNEL_MAX, CONV_KERNEL_MIN)
        _count("the state space's state", self.state_size, STATE_NUMBERS_MAX)
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
        """Numbers that the first projection gives for one token."""
        return self.inner_size + self.convolved_size + self.head_count

    @property
    def inner_size(self) -> int:
        """Numbers of one token that the last projection reads."""
        return self.head_count * self.head_dim

    @property
    def state_size(self) -> int:
        """Numbers that the layer keeps of one sequence: the last inputs of the convolution, and the states of the
        heads.
        """
        return (self.kernel_size - 1) * self.convolved_size + self.vector_size * self.inner_size


class DeltaNetConfig(msgspec.Struct, frozen=True, kw_only=True, tag="delta_net"):
    """Gated delta rule in place of attention (arXiv 2412.06464).

    Projections q, k and v of a token are convolved, each channel with its own weights, and pass through silu. q and k
    are scaled to length 1, and q is divided by sqrt(vector_size).

    Each head keeps a state S of [vector_size, head_dim] numbers. For each token:

    1. S is multiplied by exp(rate * softplus(decay + bias)). decay is a projection of the token. rate (negative) and
    bias belong to the head.
    2. S is changed so that S^T k moves towards v by a share, which is the sigmoid of another projection.
    3. The output of the head is S^T q, normed and multiplied by silu(z).

    Attributes:
        head_count: heads of values.
        group_count: heads of keys and of queries. head_count / group_count heads of values share each of them.
        has_heads_in_turn: value head i uses key i % group_count. False: neighbouring value heads share one key.
    """

    head_count: int
    group_count: int
    head_dim: int
    vector_size: int
    kernel_size: int
    has_heads_in_turn: bool = False

    has_bias: ClassVar[bool] = False
    has_conv_bias: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _count("linear_num_value_heads", self.head_count, HEADS_MAX)
        _count("linear_num_key_heads", self.group_count, self.head_count)
        _count("linear_value_head_dim", self.head_dim, DIMENSION_MAX)
        _count("linear_key_head_dim", self.vector_size, DIMENSION_MAX, 2)
        _count("linear_conv_kernel_dim", self.kernel_size, CONV_KERNEL_MAX, CONV_KERNEL_MIN)
        _count("the delta rule's state", self.state_size, STATE_NUMBERS_MAX)
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
    def projected_size(self) -> int:
        """Numbers that the layer projects of one token: z, inputs of the convolution, decays and shares."""
        return self.inner_size + self.convolved_size + 2 * self.head_count

    @property
    def inner_size(self) -> int:
        """Numbers of one token that the last projection reads."""
        return self.head_count * self.head_dim

    @property
    def state_size(self) -> int:
        """Numbers that the layer keeps of one sequence: the last inputs of the convolution, and the states of the
        heads.
        """
        return (self.kernel_size - 1) * self.convolved_size + self.vector_size * self.inner_size


Recurrent: TypeAlias = ShortConvConfig | StateSpaceConfig | DeltaNetConfig
"""Part of a layer that keeps a state of a whole sequence."""


class LayerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One layer: attention or its replacement, then an MLP or a mixture of experts.

    Each of the two may have a norm before it (input norm) and after it (output norm). Each result is added to the
    hidden state.

    Attributes:
        mlp: second part of the layer. None: the layer ends after the first sum.
        is_parallel: the MLP reads the input of attention, and both results are added at once. The MLP then has no norm
            before it.
        residual_scale: factor of each result before it is added.
        beside: a state space that reads the input of attention. Its result is added to the result of attention.
        laurel_rank: rank of two matrices that add a second path around attention (LAuReL, arXiv 2411.07501). The input
            of attention and the norm of its product with both matrices are added to the result of attention, and the
            sum is divided by sqrt(2). 0: there is no such path.
    """

    attention: AttentionConfig | LatentAttentionConfig | ShortConvConfig | StateSpaceConfig | DeltaNetConfig
    mlp: MlpConfig | ExpertsConfig | None
    has_input_norms: bool = True
    has_output_norms: bool = False
    is_parallel: bool = False
    residual_scale: float = 1.0
    beside: StateSpaceConfig | None = None
    laurel_rank: int = 0

    def __post_init__(self) -> None:
        _positive_number("residual_multiplier", self.residual_scale)
        if self.laurel_rank:
            _count("laurel_rank", self.laurel_rank, DIMENSION_MAX)
            assert self.has_input_norms, "laurel adds the normed input of attention"
            assert self.mlp is not None, "laurel needs a layer with two sums"
            assert not self.is_parallel, "laurel needs a layer with two sums"
        if self.beside is None:
            return
        attends = isinstance(self.attention, AttentionConfig)
        assert attends, "a layer with a state space beside attention has no attention"
        assert self.has_input_norms, "the state space reads the normed input of attention"
        assert not self.has_output_norms, "an output norm would have two results to norm"
        assert not self.is_parallel, "a parallel MLP would make a sum of three results"

    @property
    def recurrent(self) -> Recurrent | None:
        """Part of the layer that keeps a state, in place of attention or beside it."""
        return self.beside if isinstance(self.attention, KVAttention) else self.attention


class RowFactors(msgspec.Struct, frozen=True, kw_only=True):
    """Factors by which the rows of a tensor are multiplied when it is read from the checkpoint.

    Attributes:
        name: this code's name of the tensor without the layer, such as "q_proj.weight". The factors apply to this
            tensor in every layer.
        parts: row count and factor of each run of rows, in the order of the rows.
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
    """Hidden state of several streams, of which each layer computes one (AltUp, arXiv 2301.13310).

    The first stream is a token's embedding. The other streams are products of the embedding with matrices, scaled to
    its magnitude. Before a layer, each stream is predicted as a mixture of all streams. The weights of the mixture
    depend on the active stream. After the layer, each stream is corrected by the difference between the layer's result
    and the prediction. After the last layer, the result is the mean of the first stream and of products of the other
    streams, scaled to the first stream's magnitude.

    Attributes:
        count: number of streams.
        active: index of the stream that layers compute.
        has_scale: the corrected active stream is multiplied by weights before it gates the layer's inputs.
        input_size: numbers that each layer has for each token, from an embedding table of its own. They are gated by
            the active stream and added to all streams except the first.
        input_vocab_size: tokens in these tables. Other tokens use the row of token 0.
    """

    count: int
    active: int
    has_scale: bool
    input_size: int
    input_vocab_size: int

    def __post_init__(self) -> None:
        _count("altup_num_inputs", self.count, STREAMS_MAX, 2)
        if not 0 <= self.active < self.count:
            raise ModelLoadError(
                f"altup_active_idx is {self.active}, but there are {self.count} streams: the checkpoint's config is "
                "damaged"
            )
        _count("hidden_size_per_layer_input", self.input_size, DIMENSION_MAX)
        _count("vocab_size_per_layer_input", self.input_vocab_size, DIMENSION_MAX)


class LayerPart(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a layer that one rank of a group computes.

    Attributes:
        sums_attention: the rank's result of attention is a part, and the sum over all ranks is the result. False: each
            rank computes the whole result.
        sums_mlp: the rank's result of the MLP is a part. False: each rank computes the whole result.
        first_expert: first expert of a mixture that this rank has.
        expert_count: number of experts that this rank has. None: it has a part of each expert.
    """

    sums_attention: bool
    sums_mlp: bool
    first_expert: int = 0
    expert_count: int | None = None


class RankPart(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a model that one rank of a group computes.

    The rank's config describes a whole model with fewer heads and narrower MLPs. This value says how the results of all
    ranks are combined.

    Attributes:
        vocab_first: first token whose row of embedding and head this rank has.
        vocab_count: number of such rows. vocab_size of the config is that of the whole model.
        layers: one entry per layer.
    """

    rank: int
    size: int
    vocab_first: int
    vocab_count: int
    layers: tuple[LayerPart, ...]


class StagePart(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that one stage of a pipeline has.

    A stage after the first one receives the hidden state of each row from the stage before it.

    Attributes:
        first_layer: index of the stage's first layer in the whole model. The config has the number of its layers.
        has_embedding: True for the first stage.
        has_head: True for the last stage, which also has the last norm.
    """

    first_layer: int
    has_embedding: bool
    has_head: bool


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Description of one decoder-only model.

    Attributes:
        family: name of a Family, see families/registry.py.
        norm: "rms", or "layer" for LayerNorm without biases.
        embedding_scale: factor of embeddings.
        logit_scale: factor of logits, applied before logit_cap.
        logit_cap: c bounds logits to c * tanh(logit / c).
        dtype_name: number format of the checkpoint. For a quantized checkpoint it is the format of its embeddings, and
            "bfloat16" for a GGUF file.
        row_factors: factors of tensors when they are read. Loaded weights already contain them.
        streams: streams of the hidden state. None: the hidden state is one vector.
        part: part of the model that one rank has. None: this is the whole model.
        stage: layers that one stage has. None: all layers are here.

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
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype_name: Dtype
    row_factors: tuple[RowFactors, ...] = ()
    streams: StreamsConfig | None = None
    part: RankPart | None = None
    stage: StagePart | None = None

    def __post_init__(self) -> None:
        _count("vocab_size", self.vocab_size, DIMENSION_MAX)
        _count("hidden_size", self.hidden_size, DIMENSION_MAX)
        _count("layer_count", len(self.layers), LAYERS_MAX)
        _count("context_tokens_max", self.context_tokens_max, CONTEXT_TOKENS_MAX)
        _positive_number("the norms' epsilon", self.norm_eps)
        _positive_number("the embeddings' scale", self.embedding_scale)
        _positive_number("the logits' scale", self.logit_scale)
        if self.logit_cap is not None:
            _positive_number("final_logit_softcapping", self.logit_cap)
        if len({(attention.kv_entry, attention.head_count) for attention in self._attentions}) > 1:
            raise ModelLoadError(
                "the size of a token's KV cache entry, or the number of heads, differs from layer to layer, which is "
                "not supported"
            )
        for index, layer in enumerate(self.layers):
            _check_kv_from(index, layer, self.layers)
            if self.streams is not None:
                assert isinstance(layer.mlp, MlpConfig), "streams need layers with an MLP"
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
    def _attentions(self) -> tuple[AttentionConfig | LatentAttentionConfig, ...]:
        """Attentions of all layers, without layers that have a replacement of attention."""
        return tuple(layer.attention for layer in self.layers if isinstance(layer.attention, KVAttention))

    @property
    def layer_count(self) -> int:
        return len(self.layers)

    @property
    def has_embedding(self) -> bool:
        """True if rows begin here as embeddings of their tokens, not as the hidden state of another stage."""
        return self.stage is None or self.stage.has_embedding

    @property
    def has_head(self) -> bool:
        """True if the last norm and the head are here, so that tokens are chosen here."""
        return self.stage is None or self.stage.has_head

    @property
    def vocab_count(self) -> int:
        """Tokens whose rows of embedding and head are here."""
        if not (self.has_embedding or self.has_head):
            return 0
        return self.vocab_size if self.part is None else self.part.vocab_count

    def experts_of(self, index: int) -> range:
        """Return the experts of a layer that are here.

        Args:
            index: index of a layer with a mixture of experts.
        """
        mlp = self.layers[index].mlp
        assert isinstance(mlp, ExpertsConfig), "experts_of of a layer without experts"
        part = None if self.part is None else self.part.layers[index]
        if part is None or part.expert_count is None:
            return range(mlp.expert_count)
        return range(part.first_expert, part.first_expert + part.expert_count)

    @property
    def has_attention(self) -> bool:
        """True if the KV cache keeps an entry of each token."""
        return bool(self._attentions)

    @property
    def heads(self) -> AttentionConfig:
        """Attention of the first layer that has one. All layers have heads of its shape.

        The model must have attention without latents.
        """
        attention = self.kv_attention
        assert isinstance(attention, AttentionConfig), "heads of a model with latent attention"
        return attention

    @property
    def kv_attention(self) -> AttentionConfig | LatentAttentionConfig:
        """Attention of the first layer that has one. All layers keep KV entries of its shape.

        The model must have attention.
        """
        return self._attentions[0]

    @property
    def kv_entries(self) -> tuple[KVEntry | None, ...]:
        """Shape of a token's KV cache entry for each layer.

        None for a layer that keeps no entry, or that attends to the entries of another layer.
        """
        mixers = (layer.attention for layer in self.layers)
        return tuple(
            mixer.kv_entry if isinstance(mixer, KVAttention) and mixer.kv_from is None else None for mixer in mixers
        )

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """For each layer, the index of the layer whose part of the KV cache it reads.

        It is the layer itself, except for layers with kv_from.
        """
        found = (layer.attention.kv_from if isinstance(layer.attention, KVAttention) else None for layer in self.layers)
        return tuple(index if other is None else other for index, other in enumerate(found))

    @property
    def has_latents(self) -> bool:
        return self.has_attention and isinstance(self.kv_attention, LatentAttentionConfig)

    @property
    def state_bytes(self) -> int:
        """Bytes of the states that layers keep of one sequence, in float32. 0 if no layer keeps a state."""
        return 4 * sum(layer.recurrent.state_size for layer in self.layers if layer.recurrent is not None)

    @property
    def has_experts(self) -> bool:
        return any(isinstance(layer.mlp, ExpertsConfig) for layer in self.layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Distinct windows, in the order of the layers."""
        return tuple(dict.fromkeys(attention.window for attention in self._attentions))

    @property
    def window_max(self) -> int | None:
        """Largest window of any layer, in tokens. None if some layer sees every position."""
        found = [window for window in self.windows if window is not None]
        return max(found) if found and len(found) == len(self.windows) else None

    @property
    def sections(self) -> tuple[int, ...]:
        """Distinct sections, in the order of the layers."""
        return tuple(dict.fromkeys(heads.section for heads in self._attentions if heads.section is not None))

    @property
    def temperatures(self) -> tuple[Temperature, ...]:
        """Distinct temperatures, in the order of the layers."""
        return tuple(dict.fromkeys(heads.temperature for heads in self._attentions if heads.temperature is not None))

    @property
    def rotaries(self) -> tuple[RotaryConfig | None, ...]:
        """Distinct rotary configs, in the order of the layers."""
        return tuple(dict.fromkeys(attention.rotary for attention in self._attentions))


def _check_kv_from(index: int, layer: LayerConfig, layers: tuple[LayerConfig, ...]) -> None:
    """Check that a layer can share the keys and values of the layer that it names.

    Raises:
        ModelLoadError: the other layer does not come earlier, has no keys and values of its own, or has another window.
    """
    attention = layer.attention
    if not isinstance(attention, AttentionConfig) or attention.kv_from is None:
        return
    other = layers[attention.kv_from].attention if 0 <= attention.kv_from < index else None
    if not isinstance(other, AttentionConfig) or other.kv_from is not None or other.window != attention.window:
        raise ModelLoadError(
            f"layer {index} shares the keys and values of layer {attention.kv_from}, which has none of its kind: "
            "the checkpoint's config is damaged"
        )


def _count(name: str, value: int, largest: int, least: int = 1) -> None:
    if not least <= value <= largest:
        raise ModelLoadError(f"{name} is {value}, allowed is {least} to {largest}: the checkpoint's config is damaged")


def _positive_number(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ModelLoadError(f"{name} is {value}, but it must be a positive number: the checkpoint's config is damaged")
