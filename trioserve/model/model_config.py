"""What a model is made of, layer by layer, as values: whatever computes a model executes this description.

How it is found in config.json or in GGUF metadata is settled in families/ and loading/.
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
CONV_KERNEL_MIN, CONV_KERNEL_MAX = 2, 64  # one token alone leaves no state, and no kernel was made for that
STATE_NUMBERS_MAX = 2**28  # of one layer's state
EXPERT_GROUPS_MAX = 64
STREAMS_MAX = 8
DIMENSION_MAX = 2**24
CONTEXT_TOKENS_MAX = 2**31 - 1  # positions are int32 in the step tensors


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True):
    """How rotary frequencies are changed to reach a longer context.

    linear: every inverse frequency is divided by factor.
    llama3: low frequencies are divided by factor, high ones stay, between them it blends (low_freq_factor,
    high_freq_factor, original_context_tokens; as in Llama 3.1). Where the file carries the result instead,
    frequency_factors has one number for each of the head_dim / 2 inverse frequencies, each is divided by its number,
    and no other field counts.
    yarn: YaRN (arXiv 2309.00071) with beta_fast and beta_slow; cosine and sine are multiplied by attention_factor,
    and None means 0.1 * ln(factor) + 1. The ends of the blended range are rounded outwards to whole indices, if
    rounds_ends.
    longrope: LongRoPE (arXiv 2402.13753): each inverse frequency is divided by its number of frequency_factors; cosine
    and sine are multiplied by attention_factor, and None means sqrt(1 + ln(factor) / ln(original_context_tokens)).
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
        """How far the model reaches when its config names context_tokens.

        linear: the config names the length before scaling. yarn: it names one or the other. llama3 and longrope: the
        scaled one.
        """
        if self.kind == "linear":
            return int(min(context_tokens * self.factor, CONTEXT_TOKENS_MAX + 1))  # which is refused
        if self.kind == "yarn":
            return max(context_tokens, int(min(self.original_context_tokens * self.factor, CONTEXT_TOKENS_MAX + 1)))
        return context_tokens


class RotaryConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How queries and keys learn their positions (RoFormer, arXiv 2104.09864).

    rotated_dims: how many numbers of each head are turned, an even count; the others stay as they are. Which two are
    turned together is settled when the weights are read: afterwards it is j and j + head_dim / 2, and those j that are
    not turned have an angle of 0.
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
    """What the KV cache keeps of a token in one layer: [part_count, head_count, head_dim] numbers. Keys and values are
    two parts; latents, from which both are computed, are one."""

    part_count: int
    head_count: int
    head_dim: int

    @property
    def size(self) -> int:
        return self.part_count * self.head_count * self.head_dim


class Temperature(msgspec.Struct, frozen=True, kw_only=True):
    """Queries are multiplied by 1 + scale * ln(1 + floor((position + first) / interval)) (arXiv 2501.19399).

    first: what the first position counts as."""

    scale: float
    interval: int
    first: Literal[0, 1] = 1

    def __post_init__(self) -> None:
        if not (math.isfinite(self.scale) and self.scale >= 0):
            raise ModelLoadError(f"attn_scale is {self.scale}, but it must be 0 or more")
        _count("floor_scale", self.interval, CONTEXT_TOKENS_MAX)


class AttentionConfig(msgspec.Struct, frozen=True, kw_only=True, tag="attention"):
    """One layer's attention.

    rotary: None sees no positions. window: None sees every earlier position, N the last N, its own included. section:
    N cuts the positions into sections of N, and each sees those of its own up to itself; None does not. temperature: of
    queries, by their positions. scale: what query times key is multiplied by; None is 1 / sqrt(head_dim). score_cap: c
    bounds the scaled scores to c * tanh(score / c). has_sinks: each head has a number that stands in its softmax beside
    the scores, for no value. has_bias: of q, k and v; has_output_bias: of o. qk_norm: queries and keys are normed
    before they are turned: each head, by the weights that all have ("head"), by its own ("heads") or by none ("unit"),
    or all heads of a row together ("row"). has_value_norm: each head's values are normed, by no weights. kv_from: the
    layer whose keys and values it sees, by its index, which is less; it then has only queries. None: it has its own.
    has_gate: what the heads attend to is multiplied by the sigmoid of a projection of the same size.
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
        """Of the keys of one token, and of its values."""
        return self.kv_head_count * self.head_dim

    @property
    def query_factor(self) -> float:
        """What queries are multiplied by, so that a score divided by sqrt(head_dim) has the layer's scale."""
        return 1.0 if self.scale is None else self.scale * math.sqrt(self.head_dim)

    @property
    def projected_size(self) -> int:
        """What is projected of one token: its queries, and keys and values where it has its own."""
        return self.query_size + (2 * self.key_size if self.kv_from is None else 0)

    @property
    def kv_entry(self) -> KVEntry:
        return KVEntry(part_count=2, head_count=self.kv_head_count, head_dim=self.head_dim)

    @property
    def turned_dim(self) -> int:
        """How many numbers the angles of positions are computed for."""
        return self.head_dim


class LatentAttentionConfig(msgspec.Struct, frozen=True, kw_only=True, tag="latent"):
    """One layer's multi-head latent attention (MLA, arXiv 2405.04434). Of a token the KV cache keeps a latent, whose
    projections are every head's keys and values, and one key that is turned, for all heads.

    query_rank: queries are projections of a latent of their own of this size; None: of the hidden state. latent_dim: of
    the latent, which is normed, as that of queries is. plain_dim: of the part of a head's query that meets a projection
    of the latent; turned_dim: of the part that is turned, before it meets the turned key. value_dim: of a head's value.
    scale: what query times key is multiplied by.
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
        """What queries are multiplied by, so that a score divided by sqrt(entry_dim) has the layer's scale."""
        return self.scale * math.sqrt(self.entry_dim)


KVAttention: TypeAlias = AttentionConfig | LatentAttentionConfig
"""What the KV cache keeps something for."""


class MlpConfig(msgspec.Struct, frozen=True, kw_only=True, tag="mlp"):
    """down(activation(gate(x)) * up(x)), each with a bias if has_bias. gelu_tanh: the approximation of gelu by tanh.
    clamped_swiglu: in the place of activation(gate) * up, g * sigmoid(1.702 g) * (u + 1), where g is gate, but at most
    7, and u is up, but within 7 of 0.

    cutoff: before its activation a gate becomes what it is above the mean of its row's gates and so many of their
    standard deviations, or 0 (Gemma 3n); None: it stays. It keeps few gates of a row, without sorting them.
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
    """A mixture of experts in the place of an MLP (arXiv 2101.03961): a router's scores of all experts choose
    experts_per_token of them, and a token's result is the sum of theirs, weighed by their scores.

    intermediate_size: of each expert, which is an MLP, with biases if has_bias. has_router_bias: the router has one.
    scoring: the softmax of the router's products over all experts, or the sigmoid of each. normalizes: the chosen
    scores are divided by their sum; those of a softmax then are one over the chosen alone. scale: what they are
    multiplied by then. has_score_bias: each expert has a number that is added to its score where experts are chosen,
    and not where they are weighed (arXiv 2408.15664). group_count: experts are chosen from the groups_per_token best of
    so many groups of neighbours; a group counts by the sum of the group_leaders best of its experts. shared_size:
    intermediate size of an MLP that every token goes through besides; 0 is none. has_shared_gate: its result is
    multiplied by the sigmoid of a product of the token with a vector. weighs_inputs: it is what experts read that is
    multiplied by their weights, and not what they give.
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
    """A layer that sees a token and the kernel_size - 1 before it, in the place of attention (LFM2). Of a token's three
    projections b, c and x: out(c * convolved(b * x)), where each channel is convolved by weights of its own.

    channel_count: of each projection. has_bias: of both projections and of the convolution.
    """

    channel_count: int
    kernel_size: int
    has_bias: bool = False

    def __post_init__(self) -> None:
        _count("the convolution's channels", self.channel_count, DIMENSION_MAX)
        _count("the convolution's kernel size", self.kernel_size, CONV_KERNEL_MAX, CONV_KERNEL_MIN)

    @property
    def convolved_size(self) -> int:
        """Channels of the convolution."""
        return self.channel_count

    @property
    def projected_size(self) -> int:
        """What the first projection gives of a token."""
        return 3 * self.channel_count

    @property
    def inner_size(self) -> int:
        """What the last projection takes of a token."""
        return self.channel_count

    @property
    def state_size(self) -> int:
        """Numbers that it keeps of a sequence: what it convolved last."""
        return (self.kernel_size - 1) * self.channel_count


class StateSpaceConfig(msgspec.Struct, frozen=True, kw_only=True, tag="state_space"):
    """A selective state space in the place of attention (Mamba-2, arXiv 2405.21060). Of a token's projections z, x, b,
    c and time steps, x, b and c are convolved, each channel by weights of its own, and go through silu. Each head keeps
    a state of [vector_size, head_dim] numbers, which a token multiplies with exp(time step * rate), the head's rate
    being negative, and adds time step * b * x to; what comes out is c * state + skip * x. It is multiplied with
    silu(z), and normed by groups ("gated"); or normed before it is multiplied ("ungated"), or not at all ("none").

    group_count: heads of a group share b and c, and are normed together. kernel_size: tokens that a convolution sees.
    has_bias: of both projections; has_conv_bias: of the convolution. time_step_min, _max: what softplus(time step + the
    head's bias) is kept within.
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
        """What the first projection gives of a token."""
        return self.inner_size + self.convolved_size + self.head_count

    @property
    def inner_size(self) -> int:
        """What the last projection takes of a token."""
        return self.head_count * self.head_dim

    @property
    def state_size(self) -> int:
        """Numbers that it keeps of a sequence: what it convolved last, and the heads' states."""
        return (self.kernel_size - 1) * self.convolved_size + self.vector_size * self.inner_size


class DeltaNetConfig(msgspec.Struct, frozen=True, kw_only=True, tag="delta_net"):
    """A layer with the gated delta rule in the place of attention (arXiv 2412.06464). Of a token's projections q, k and
    v are convolved, each channel by weights of its own, and go through silu; q and k are then of length 1, and q is
    divided by sqrt(vector_size). Each head keeps a state of [vector_size, head_dim] numbers, which a token multiplies
    with exp(rate * softplus(its own decay + the head's bias)), the head's rate being negative. What the state then says
    of k is brought nearer to v by a share, the sigmoid of another projection; what comes out is what it says of q. Each
    head's is normed and multiplied with silu(z).

    head_count: of values. group_count: of keys and of queries: so many heads share each. has_heads_in_turn: neighbours
    among the heads have different keys, and not the same.
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
        """What is projected of a token: z, what is convolved, decays and shares."""
        return self.inner_size + self.convolved_size + 2 * self.head_count

    @property
    def inner_size(self) -> int:
        """What the last projection takes of a token."""
        return self.head_count * self.head_dim

    @property
    def state_size(self) -> int:
        """Numbers that it keeps of a sequence: what it convolved last, and the heads' states."""
        return (self.kernel_size - 1) * self.convolved_size + self.vector_size * self.inner_size


Recurrent: TypeAlias = ShortConvConfig | StateSpaceConfig | DeltaNetConfig
"""What keeps a state of a whole sequence."""


class LayerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Attention, or what is in its place, and an MLP or a mixture of experts; each with a norm before (input) and a
    norm behind (output), where there is one, and a sum.

    mlp: None: the layer ends with the first sum. beside: a state space that reads what attention reads, and whose
    result is added to attention's.
    is_parallel: the MLP reads what attention reads, and both are added at once; the MLP then has no norm before it.
    residual_scale: what either is multiplied by before it is added. laurel_rank: what attention reads, and the norm of
    its product with two matrices of this rank, are added behind attention, and the sum is divided by sqrt(2) (LAuReL,
    arXiv 2411.07501); 0: they are not.
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
            assert self.has_input_norms, "what attention reads is added"
            assert self.mlp is not None, "there is a second sum"
            assert not self.is_parallel, "there is a second sum"
        if self.beside is None:
            return
        attends = isinstance(self.attention, AttentionConfig)
        assert attends, "what is beside attention has the layer to itself otherwise"
        assert self.has_input_norms, "what attention reads is there twice"
        assert not self.has_output_norms, "a norm of two results"
        assert not self.is_parallel, "a sum of three results"

    @property
    def recurrent(self) -> Recurrent | None:
        """What keeps a state, in the place of attention or beside it."""
        return self.beside if isinstance(self.attention, KVAttention) else self.attention


class RowFactors(msgspec.Struct, frozen=True, kw_only=True):
    """What the rows of a tensor of each layer are multiplied by when they are read: by parts, one behind the other,
    the number of rows and their factor. name: in here without the layer's, such as "q_proj.weight"."""

    name: str
    parts: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        for _count_of_rows, factor in self.parts:
            if not (math.isfinite(factor) and factor != 0):
                raise ModelLoadError(
                    f"a multiplier of {self.name} is {factor}, but it must be a number other than 0: the checkpoint's "
                    "config is damaged"
                )


class StreamsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A hidden state of several streams, of which a layer computes one (AltUp, arXiv 2301.13310).

    The first is a token's embedding, and the others are products of it, with its magnitude. Before a layer each stream
    becomes a mixture of all, which depends on the active one. Behind it each is corrected by how far the layer went
    from that. What comes behind the last layer is the mean of the first and products of the others, with its magnitude.

    count: of streams. active: which is computed, by its index. has_scale: a corrected active stream is multiplied by
    weights before it gates what the streams but the first get: an input of so many numbers (input_size) that each layer
    has for each token, from a table of its own for the first input_vocab_size tokens, others being read as token 0.
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
    """What one rank of a group has of a layer. sums_attention, sums_mlp: its result is a part, and the result is the
    sum of all ranks' parts; else each rank computes the whole. first_expert: of a mixture, the first expert that is
    here, of as many as there are of expert_count; None: there is a part of each."""

    sums_attention: bool
    sums_mlp: bool
    first_expert: int = 0
    expert_count: int | None = None


class RankPart(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank of a group has of a model. Its config is that of a whole model with fewer heads and narrower MLPs;
    this says how the ranks' results become one.

    Of embedding and head it has the rows of vocab_count tokens from vocab_first on, while vocab_size is that of the
    whole. layers: of each."""

    rank: int
    size: int
    vocab_first: int
    vocab_count: int
    layers: tuple[LayerPart, ...]


class StagePart(msgspec.Struct, frozen=True, kw_only=True):
    """Which of a model's layers are here, where several stages compute them one after the other: those from first_layer
    on, as many as its config has. has_embedding: of the first one. has_head: of the last one, which has the last norm,
    too. What the others begin with, and end with, is the hidden state of each row."""

    first_layer: int
    has_embedding: bool
    has_head: bool


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One decoder-only model.

    family: the name of a Family, see families/registry.py. norm: "rms", or "layer" for LayerNorm without biases.
    embedding_scale: what embeddings are multiplied by. logit_scale: what logits are multiplied by, before logit_cap, c,
    bounds them to c * tanh(logit / c). dtype_name: what the checkpoint stores; of a quantized one that of its
    embeddings, and "bfloat16" for a GGUF file. row_factors: what tensors of its files are multiplied by when they are
    read; whoever computes finds them in the weights. streams: None: the hidden state is one vector. part: None: this is
    the whole model, and else what one rank has of it. stage: None: all layers are here.
    Raises ModelLoadError, naming the field, when the values cannot belong together.
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
                "what the KV cache keeps of a token, or the number of heads, differs from layer to layer, which is not "
                "supported"
            )
        for index, layer in enumerate(self.layers):
            _check_kv_from(index, layer, self.layers)
            if self.streams is not None:
                assert isinstance(layer.mlp, MlpConfig), "no family has other streams"
                assert layer.has_output_norms, "no family has other streams"
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
        """Without what is in their place."""
        return tuple(layer.attention for layer in self.layers if isinstance(layer.attention, KVAttention))

    @property
    def layer_count(self) -> int:
        return len(self.layers)

    @property
    def has_embedding(self) -> bool:
        """Whether rows begin as the embeddings of their tokens here, and not as what another stage made of these."""
        return self.stage is None or self.stage.has_embedding

    @property
    def has_head(self) -> bool:
        """Whether tokens are chosen here, behind the last norm and the head."""
        return self.stage is None or self.stage.has_head

    @property
    def vocab_count(self) -> int:
        """Tokens that embedding and head have rows of here."""
        if not (self.has_embedding or self.has_head):
            return 0
        return self.vocab_size if self.part is None else self.part.vocab_count

    def experts_of(self, index: int) -> range:
        """Of a layer with a mixture, the experts that are here."""
        mlp = self.layers[index].mlp
        assert isinstance(mlp, ExpertsConfig), "asked of another layer"
        part = None if self.part is None else self.part.layers[index]
        if part is None or part.expert_count is None:
            return range(mlp.expert_count)
        return range(part.first_expert, part.first_expert + part.expert_count)

    @property
    def has_attention(self) -> bool:
        """Whether the KV cache keeps anything of a token."""
        return bool(self._attentions)

    @property
    def heads(self) -> AttentionConfig:
        """The first attention of a layer: the shape of its heads is that of all layers. For models without latents."""
        attention = self.kv_attention
        assert isinstance(attention, AttentionConfig), "asked of a model whose attention is latent"
        return attention

    @property
    def kv_attention(self) -> AttentionConfig | LatentAttentionConfig:
        """The first attention of a layer: what the KV cache keeps of a token for it, it keeps for all. For models with
        attention."""
        return self._attentions[0]

    @property
    def kv_entries(self) -> tuple[KVEntry | None, ...]:
        """What the KV cache keeps of a token, by layer; None where it has none, or sees another layer's."""
        mixers = (layer.attention for layer in self.layers)
        return tuple(
            mixer.kv_entry if isinstance(mixer, KVAttention) and mixer.kv_from is None else None for mixer in mixers
        )

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """By layer, in which one's part of the KV cache its keys and values lie: its own, but for those that share."""
        found = (layer.attention.kv_from if isinstance(layer.attention, KVAttention) else None for layer in self.layers)
        return tuple(index if other is None else other for index, other in enumerate(found))

    @property
    def has_latents(self) -> bool:
        return self.has_attention and isinstance(self.kv_attention, LatentAttentionConfig)

    @property
    def state_bytes(self) -> int:
        """Of the states that layers keep of one sequence, float32; 0 where none does."""
        return 4 * sum(layer.recurrent.state_size for layer in self.layers if layer.recurrent is not None)

    @property
    def has_experts(self) -> bool:
        return any(isinstance(layer.mlp, ExpertsConfig) for layer in self.layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The distinct ones, in the order of the layers."""
        return tuple(dict.fromkeys(attention.window for attention in self._attentions))

    @property
    def window_max(self) -> int | None:
        """How far back any layer sees; None: some layer sees everything."""
        found = [window for window in self.windows if window is not None]
        return max(found) if found and len(found) == len(self.windows) else None

    @property
    def sections(self) -> tuple[int, ...]:
        """The distinct ones, in the order of the layers."""
        return tuple(dict.fromkeys(heads.section for heads in self._attentions if heads.section is not None))

    @property
    def temperatures(self) -> tuple[Temperature, ...]:
        """The distinct ones, in the order of the layers."""
        return tuple(dict.fromkeys(heads.temperature for heads in self._attentions if heads.temperature is not None))

    @property
    def rotaries(self) -> tuple[RotaryConfig | None, ...]:
        """The distinct ones, in the order of the layers."""
        return tuple(dict.fromkeys(attention.rotary for attention in self._attentions))


def _check_kv_from(index: int, layer: LayerConfig, layers: tuple[LayerConfig, ...]) -> None:
    """Raises ModelLoadError if the layer cannot see what it is to see."""
    attention = layer.attention
    if not isinstance(attention, AttentionConfig) or attention.kv_from is None:
        return
    other = layers[attention.kv_from].attention if 0 <= attention.kv_from < index else None
    if not isinstance(other, AttentionConfig) or other.kv_from is not None or other.window != attention.window:
        raise ModelLoadError(
            f"layer {index} is to see the keys and values of layer {attention.kv_from}, which has none of its kind: "
            "the checkpoint's config is damaged"
        )


def _count(name: str, value: int, largest: int, least: int = 1) -> None:
    if not least <= value <= largest:
        raise ModelLoadError(f"{name} is {value}, allowed is {least} to {largest}: the checkpoint's config is damaged")


def _positive_number(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ModelLoadError(f"{name} is {value}, but it must be a positive number: the checkpoint's config is damaged")
