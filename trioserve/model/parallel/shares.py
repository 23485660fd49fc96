"""What one rank of a group has of a model: a config of fewer heads and narrower MLPs, and of each tensor which rows or
columns.

Of attention each rank has some heads of keys and values, and the heads of queries that see them; of an MLP a part of
its middle; of a mixture a part of each expert's middle, or whole experts; of embedding and head the rows of some
tokens. What is left whole in each rank: norms, routers, streams and what comes in beside attention (LAuReL), which are
small. Attention whose norm is over all heads of a row, MLPs whose gates are cut off by their row's mean and deviation,
state spaces whose norms are over more heads than a rank would have: to divide these would take one sum more in each
layer. Then what is too narrow to be divided, and delta rules where a rank would have other than a multiple of 16 heads,
which the native kernels ask for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import numpy as np
from msgspec.structs import replace

from trioserve.contracts.errors import StartupError
from trioserve.model.model_config import (
    AttentionConfig,
    DeltaNetConfig,
    ExpertsConfig,
    KVAttention,
    LatentAttentionConfig,
    LayerConfig,
    LayerPart,
    MlpConfig,
    ModelConfig,
    RankPart,
    Recurrent,
    ShortConvConfig,
    StateSpaceConfig,
)
from trioserve.model.parallel.cuts import (
    WHOLE,
    Cut,
    Run,
    columns,
    even_runs,
    head_runs,
    rows,
    runs_of,
    times,
    wide_runs,
)

__all__ = ["Cuts", "Share", "divide", "share_of", "vocab_runs"]

VOCAB_UNIT = 16  # rows that the native kernels compute together
HEADS_UNIT = 16  # of delta rules, as the native kernels take them
CHANNELS_UNIT = 16  # of convolutions, as the native kernels take them

Cuts: TypeAlias = Mapping[str, Cut]
"""By what a tensor is called in here, without its layer's, expert's or stream's number and without ".weight" and
".bias". What is not here is not in this rank."""
Place: TypeAlias = tuple[int, int]
"""A rank, and of how many."""
ALONE: Place = (0, 1)

OUTSIDE_LAYERS = ("layer_inputs.embed", "layer_inputs.proj", "layer_inputs.norm", "streams.in_proj", "streams.out_proj")
WHOLE_OF_LAYERS = (
    "attention_norm",
    "attention_output_norm",
    "mlp_norm",
    "mlp_output_norm",
    "laurel_norm",
    "laurel_in",
    "laurel_out",
    "stream_router_norm",
    "stream_router",
    "stream_prediction",
    "stream_correction",
    "streams.scale",
    "input_gate",
    "input_proj",
    "input_norm",
)


class Share(NamedTuple):
    """config: the rank's, with its part. cuts: of what is in no layer; layers: of each layer."""

    config: ModelConfig
    cuts: Cuts
    layers: tuple[Cuts, ...]


def share_of(config: ModelConfig, rank: int, size: int, *, expert_parallel: bool = False) -> ModelConfig:
    """The config of a rank's model, with its part. config: of the whole. expert_parallel: of mixtures a rank has whole
    experts, and not a part of each.

    Raises StartupError if the model cannot be divided so, with what can be.
    """
    return divide(config, rank, size, expert_parallel=expert_parallel).config


def vocab_runs(vocab_size: int, size: int) -> tuple[Run, ...]:
    """Whose rows of embedding and head each rank has."""
    return even_runs(vocab_size, size, VOCAB_UNIT)


def divide(config: ModelConfig, rank: int, size: int, *, expert_parallel: bool = False) -> Share:
    """As share_of, and which part of each tensor that is."""
    assert config.part is None, "a part is divided"
    assert 0 <= rank < size, f"rank {rank} of {size}"
    vocab_first, vocab_count = vocab_runs(config.vocab_size, size)[rank]
    if size > -(-config.vocab_size // VOCAB_UNIT):
        raise StartupError(
            f"{size} ranks are to share a vocabulary of {config.vocab_size} tokens, in multiples of {VOCAB_UNIT}: at "
            f"most {-(-config.vocab_size // VOCAB_UNIT)} can"
        )
    divider = _Divider(config, (rank, size), expert_parallel)
    layers = [divider.layer(layer) for layer in config.layers]
    part = RankPart(
        rank=rank,
        size=size,
        vocab_first=vocab_first,
        vocab_count=vocab_count,
        layers=tuple(layer_part for _, layer_part, _ in layers),
    )
    cuts = {
        "embed": rows((vocab_first, vocab_count)),
        "lm_head": rows((vocab_first, vocab_count)),
        "norm": WHOLE,
        **dict.fromkeys(OUTSIDE_LAYERS, WHOLE),
    }
    # What the checkpoint's rows are multiplied by is in the values that are divided.
    share = replace(config, layers=tuple(layer for layer, _, _ in layers), row_factors=(), part=part)
    return Share(share, cuts, tuple(of_layer for _, _, of_layer in layers))


def _has_row_norms(config: ModelConfig) -> bool:
    mixers = (layer.attention for layer in config.layers)
    return any(isinstance(mixer, AttentionConfig) and mixer.qk_norm == "row" for mixer in mixers)


class _Divider:
    def __init__(self, config: ModelConfig, place: Place, expert_parallel: bool) -> None:
        self._place, self._expert_parallel = place, expert_parallel
        besides = [layer.beside for layer in config.layers if layer.beside is not None]
        # The heads of all layers have one shape, and what is beside attention is a part of the same sum.
        self._divides_attention = not _has_row_norms(config) and all(
            _state_space(beside, place) is not None for beside in besides
        )
        size = place[1]
        if self._divides_attention and config.has_attention and size > config.kv_attention.head_count:
            raise StartupError(
                f"{size} ranks are to share attention of {config.kv_attention.head_count} heads, and each needs one: "
                f"at most {config.kv_attention.head_count} ranks can"
            )

    def layer(self, layer: LayerConfig) -> tuple[LayerConfig, LayerPart, Cuts]:
        mixer, divides_mixer = layer.attention, self._divides_attention
        if not isinstance(mixer, KVAttention):
            divides_mixer = _recurrent(mixer, self._place) is not None
        place = self._place if divides_mixer else ALONE
        smaller = _mixer(mixer, place)
        cuts: dict[str, Cut] = {**dict.fromkeys(WHOLE_OF_LAYERS, WHOLE), **smaller[1]}
        beside = layer.beside
        if beside is not None:
            divided = _state_space(beside, place)
            assert divided is not None, "asked before"
            beside, of_beside = divided
            cuts |= of_beside
        mlp, of_mlp, sums_mlp, experts = self._mlp(layer, divides_mixer)
        cuts |= of_mlp
        is_shared = self._place[1] > 1
        part = LayerPart(
            sums_attention=is_shared and divides_mixer,
            sums_mlp=is_shared and sums_mlp,
            first_expert=0 if experts is None else experts[0],
            expert_count=None if experts is None else experts[1],
        )
        return replace(layer, attention=smaller[0], beside=beside, mlp=mlp), part, cuts

    def _mlp(
        self, layer: LayerConfig, divides_mixer: bool
    ) -> tuple[MlpConfig | ExpertsConfig | None, Cuts, bool, Run | None]:
        """With its cuts, whether it is divided, and which experts are here, if these are whole."""
        mlp, place = layer.mlp, self._place
        if mlp is None:
            return None, {}, False, None
        if isinstance(mlp, ExpertsConfig):
            assert not layer.is_parallel, "no family has such layers"
            experts = None
            if self._expert_parallel:
                experts = _experts_of(mlp, place)
            found = _mixture(mlp, place, experts)
            if found is not None:
                return *found, True, experts
            whole = _mixture(mlp, ALONE, None)
            assert whole is not None, "it is not divided"
            return *whole, False, None
        # What reads the same as attention is added to the same sum.
        divides = divides_mixer if layer.is_parallel else mlp.cutoff is None
        divided = _plain_mlp(mlp, place if divides else ALONE)
        if divided is not None:
            return *divided, divides, None
        if layer.is_parallel:
            raise StartupError(
                f"{place[1]} ranks are to share MLPs with a middle of {mlp.intermediate_size}, which are computed "
                "beside attention and must be divided as that is, in multiples of 16: take fewer ranks"
            )
        whole_mlp = _plain_mlp(mlp, ALONE)
        assert whole_mlp is not None, "it is not divided"
        return *whole_mlp, False, None


def _mixer(
    mixer: AttentionConfig | LatentAttentionConfig | Recurrent, place: Place
) -> tuple[AttentionConfig | LatentAttentionConfig | Recurrent, Cuts]:
    if isinstance(mixer, AttentionConfig):
        return _attention(mixer, place)
    if isinstance(mixer, LatentAttentionConfig):
        return _latent_attention(mixer, place)
    found = _recurrent(mixer, place)
    assert found is not None, "asked before"
    return found


def _attention(attention: AttentionConfig, place: Place) -> tuple[AttentionConfig, Cuts]:
    found = head_runs(attention.head_count, attention.kv_head_count, *place)
    assert found is not None, "checked before"
    heads, groups = found
    queries, keys = times(heads, attention.head_dim), times(groups, attention.head_dim)
    has_norms_of_heads = attention.qk_norm in ("heads", "row")
    cuts = {
        "q_proj": rows(queries),
        "q_gate_proj": rows(queries),
        "k_proj": rows(keys),
        "v_proj": rows(keys),
        "o_proj": columns(place[0], queries),
        "q_norm": rows(queries) if has_norms_of_heads else WHOLE,
        "k_norm": rows(keys) if has_norms_of_heads else WHOLE,
        "sinks": rows(heads),
    }
    return replace(attention, head_count=heads[1], kv_head_count=groups[1]), cuts


def _latent_attention(attention: LatentAttentionConfig, place: Place) -> tuple[LatentAttentionConfig, Cuts]:
    """By heads. Each rank has all latents, which every head reads."""
    rank, size = place
    heads = even_runs(attention.head_count, size)[rank]
    queries = rows(times(heads, attention.plain_dim + attention.turned_dim))
    values = times(heads, attention.value_dim)
    cuts = {
        "q_proj": queries,
        "q_a_proj": WHOLE,
        "q_a_norm": WHOLE,
        "q_b_proj": queries,
        "kv_a_proj": WHOLE,
        "kv_a_norm": WHOLE,
        "k_b_proj": rows(times(heads, attention.latent_dim)),
        "v_b_proj": rows(values),
        "o_proj": columns(rank, values),
    }
    return replace(attention, head_count=heads[1]), cuts


# --- what keeps a state; None: it cannot be divided so ---------------------------------------------------------------


def _recurrent(mixer: Recurrent, place: Place) -> tuple[Recurrent, Cuts] | None:
    if isinstance(mixer, ShortConvConfig):
        return _short_conv(mixer, place)
    if isinstance(mixer, StateSpaceConfig):
        return _state_space(mixer, place)
    return _delta_net(mixer, place)


def _short_conv(conv: ShortConvConfig, place: Place) -> tuple[ShortConvConfig, Cuts] | None:
    """By channels: each rank has some of all three projections."""
    runs = wide_runs(conv.channel_count, place[1])
    if runs is None:
        return None
    run = runs[place[0]]
    cuts = {
        "in_proj": rows(*(times(run, 1, projection * conv.channel_count) for projection in range(3))),
        "conv": rows(run),
        "out_proj": columns(place[0], run),
    }
    return replace(conv, channel_count=run[1]), cuts


def _state_space(space: StateSpaceConfig, place: Place) -> tuple[StateSpaceConfig, Cuts] | None:
    """By groups of heads, and where nothing is normed by groups, by heads of a group, too."""
    found = [head_runs(space.head_count, space.group_count, rank, place[1]) for rank in range(place[1])]
    if found[0] is None or (space.norm != "none" and place[1] > space.group_count):
        return None
    shares = [replace(space, head_count=runs.heads[1], group_count=runs.groups[1]) for runs in found if runs]
    sizes = [share.convolved_size for share in shares]
    if space.convolved_size % CHANNELS_UNIT == 0 and any(size % CHANNELS_UNIT for size in sizes):
        return None
    runs = found[place[0]]
    assert runs is not None, "so are the first rank's"
    heads, groups = runs
    inner, vectors = times(heads, space.head_dim), space.group_count * space.vector_size
    # What is projected: z, and x, b and c, which are convolved, and time steps.
    of_b, of_c = (times(groups, space.vector_size, space.inner_size + start) for start in (0, vectors))
    convolved = (inner, of_b, of_c)
    behind_z = (times(run, 1, space.inner_size) for run in convolved)
    time_steps = times(heads, 1, space.inner_size + space.convolved_size)
    cuts = {
        "in_proj": rows(inner, *behind_z, time_steps),
        "conv": rows(*convolved),
        "out_proj": columns(place[0], inner),
        "gate_norm": rows(inner),
        **dict.fromkeys(("state.rates", "state.skips", "state.time_step_bias"), rows(heads)),
    }
    return shares[place[0]], cuts


def _delta_net(net: DeltaNetConfig, place: Place) -> tuple[DeltaNetConfig, Cuts] | None:
    """By groups: some of the keys, and the heads of values that share them."""
    runs, of_each = even_runs(net.group_count, place[1]), net.head_count // net.group_count
    if place[1] > net.group_count:
        return None
    if net.head_count % HEADS_UNIT == 0 and any(count * of_each % HEADS_UNIT for _, count in runs):
        return None
    first, count = groups = runs[place[0]]
    of_groups = np.arange(net.head_count).reshape(net.group_count, -1)
    if net.has_heads_in_turn:
        of_groups = np.arange(net.head_count).reshape(-1, net.group_count).T
    own = of_groups[first : first + count]
    heads = runs_of((own.T if net.has_heads_in_turn else own).reshape(-1).tolist())
    inner, keys = tuple(times(run, net.head_dim) for run in heads), net.group_count * net.vector_size
    convolved = (
        times(groups, net.vector_size),
        times(groups, net.vector_size, keys),
        *(times(run, 1, 2 * keys) for run in inner),
    )
    cuts = {
        "delta_gate": rows(*inner),
        "delta_qkv": rows(*convolved),
        "delta_decay": rows(*heads),
        "delta_share": rows(*heads),
        "conv": rows(*convolved),
        "out_proj": columns(place[0], *inner),
        "gate_norm": WHOLE,  # all heads have one
        **dict.fromkeys(("state.rates", "state.time_step_bias"), rows(*heads)),
    }
    return replace(net, head_count=own.size, group_count=count), cuts


# --- MLPs ------------------------------------------------------------------------------------------------------------


def _gated(prefix: str, rank: int, middle: Run) -> Cuts:
    return {
        f"{prefix}gate_proj": rows(middle),
        f"{prefix}up_proj": rows(middle),
        f"{prefix}down_proj": columns(rank, middle),
    }


def _plain_mlp(mlp: MlpConfig, place: Place) -> tuple[MlpConfig, Cuts] | None:
    """None: it is too narrow."""
    runs = wide_runs(mlp.intermediate_size, place[1])
    if runs is None:
        return None
    middle = runs[place[0]]
    return replace(mlp, intermediate_size=middle[1]), _gated("", place[0], middle)


def _experts_of(mlp: ExpertsConfig, place: Place) -> Run:
    if place[1] > mlp.expert_count:
        raise StartupError(
            f"{place[1]} ranks are to share a mixture of {mlp.expert_count} experts, and each needs one: take at most "
            f"{mlp.expert_count} ranks, or have each expert divided"
        )
    return even_runs(mlp.expert_count, place[1])[place[0]]


def _mixture(mlp: ExpertsConfig, place: Place, experts: Run | None) -> tuple[ExpertsConfig, Cuts] | None:
    """experts: those that are here as wholes; None: there is a part of each. None: experts are too narrow for that."""
    rank, size = place
    middle = (0, mlp.intermediate_size)
    if experts is None:
        runs = wide_runs(mlp.intermediate_size, size)
        if runs is None:
            return None
        middle = runs[rank]
    cuts: dict[str, Cut] = {"router": WHOLE, "router.score_bias": WHOLE}
    cuts |= _gated("experts.", 0 if experts else rank, middle)
    # What all tokens go through may be too narrow for every rank to have some of it.
    shared = (wide_runs(mlp.shared_size, size) or even_runs(mlp.shared_size, size, CHANNELS_UNIT))[rank]
    if shared[1]:
        cuts |= _gated("shared.", rank, shared)
        cuts["shared_gate"] = WHOLE
    return replace(
        mlp,
        intermediate_size=middle[1],
        shared_size=shared[1],
        has_shared_gate=mlp.has_shared_gate and shared[1] > 0,
    ), cuts
