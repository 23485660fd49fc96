"""Tensor parallelism: divides a model among ranks.

The shard of a rank is a config with fewer heads and narrower MLPs, and some rows or columns of each tensor. Each rank
has:
- attention: some KV heads, and the query heads that use these KV heads.
- MLP: some of the intermediate channels.
- mixture of experts: some of the intermediate channels of each expert, or some whole experts.
- embedding and head: the rows of some tokens.

The following layers are not divided. Every rank has all their weights:
- norms, routers, streams and LAuReL, because they are small.
- attention with a norm over all heads of a row, MLPs with a gate cutoff from mean and deviation of the row, and state
  spaces with a norm over more heads than a rank would have. Dividing them would need an additional sum in each layer.
- MLPs that are too narrow, and delta rules that would leave a rank without a multiple of 16 heads. Native kernels need
  such a multiple.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeAlias

import numpy as np
from msgspec.structs import replace

from trioserve.contracts.errors import StartupError
from trioserve.model.layer_config import (
    XIELU_NUMBERS,
    AttentionConfig,
    DeltaNetConfig,
    ExpertsConfig,
    KVAttention,
    LatentAttentionConfig,
    LayerConfig,
    LightningConfig,
    MlpConfig,
    Recurrent,
    SelectiveScanConfig,
    ShortConvConfig,
    StateSpaceConfig,
)
from trioserve.model.model_config import LayerPart, ModelConfig, RankPart

__all__ = [
    "WHOLE",
    "Cut",
    "HeadRuns",
    "Run",
    "Runs",
    "columns",
    "even_runs",
    "head_runs",
    "rows",
    "runs_of",
    "times",
    "wide_runs",
    "Cuts",
    "Share",
    "divide",
    "share_of",
    "vocab_runs",
]

Run: TypeAlias = tuple[int, int]
"""Index of the first item, and number of items."""
Runs: TypeAlias = tuple[Run, ...]

UNITS = (256, 32, 16)
"""Units in which MLPs are divided: the blocks of ggml's K quants, the blocks of its other formats, and the unit of the
native kernels. A tensor that is cut within a block is stored without blocks."""
# If a larger unit is used, the width of the widest shard may exceed the average width by at most this fraction.
UNEVENNESS_MAX = 1 / 8


class Cut(NamedTuple):
    """Rows or columns of a module's tensors that a rank has.

    Attributes:
        rows: rows of the weight and of the bias. None: all rows.
        columns: columns of the weight. None: all columns. With some columns, the ranks' products are partial sums, so
            only one rank may add the bias.
        has_bias: True if this rank adds the bias. False: another rank adds the bias, and this rank has zeros.
    """

    rows: Runs | None = None
    columns: Runs | None = None
    has_bias: bool = True


WHOLE = Cut()


def rows(*runs: Run) -> Cut:
    return Cut(rows=runs)


def columns(rank: int, *runs: Run) -> Cut:
    return Cut(columns=runs, has_bias=rank == 0)


def times(run: Run, size: int, start: int = 0) -> Run:
    """Convert a run of items, such as heads, to a run of rows.

    Args:
        run: the items.
        size: number of rows of each item.
        start: first row of item 0.
    """
    return start + run[0] * size, run[1] * size


def runs_of(indices: Iterable[int]) -> Runs:
    """Combine indices into runs. Consecutive indices become one run.

    Args:
        indices: indices of items, in order.
    """
    found: list[Run] = []
    for index in indices:
        if found and index == sum(found[-1]):
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((index, 1))
    return tuple(found)


def even_runs(count: int, size: int, unit: int = 1) -> Runs:
    """Divide a number of items evenly among ranks. No rank gets more items than the first rank.

    Args:
        count: number of items to divide.
        size: number of ranks.
        unit: the length of each run, except the last one, is a multiple of this number.

    Returns:
        One run for each rank. Some are empty if there are fewer units than ranks.
    """
    units = -(-count // unit)
    ends = [min(count, (units * rank + size - 1) // size * unit) for rank in range(size + 1)]
    return tuple((first, end - first) for first, end in itertools.pairwise(ends))


def wide_runs(count: int, size: int) -> Runs | None:
    """Divide the width of an MLP among ranks, in multiples of a unit that blocks and kernels need.

    The unit is the largest number in UNITS that divides the width, unless the widest shard would exceed the average by
    more than UNEVENNESS_MAX. If the width is not a multiple of 16, there is no unit.

    Args:
        count: the width.
        size: number of ranks.

    Returns:
        One run for each rank. None: there are fewer units than ranks.
    """
    units = [unit for unit in UNITS if count % unit == 0] or [1]
    for unit in units:
        widest = -(-count // unit // size) * unit
        if count // unit >= size and widest * size <= count * (1 + UNEVENNESS_MAX):
            return even_runs(count, size, unit)
    return even_runs(count, size, units[-1]) if count // units[-1] >= size else None


class HeadRuns(NamedTuple):
    """The heads of a rank, and the groups of these heads."""

    heads: Run
    groups: Run


def head_runs(head_count: int, group_count: int, rank: int, size: int) -> HeadRuns | None:
    """Select the heads of a rank and their groups. In attention, a group is a KV head and the query heads that use it.

    Each rank gets whole groups, as evenly as possible. If there are more ranks than groups, several ranks have copies
    of the same group, and each of them gets some of the group's heads.

    Args:
        head_count: number of heads of the whole model.
        group_count: number of groups of the whole model.
        rank: number of the rank.
        size: number of ranks.

    Returns:
        The rank's heads and groups. None: there are more ranks than heads.
    """
    each = head_count // group_count
    if size > head_count:
        return None
    if size <= group_count:
        groups = even_runs(group_count, size)[rank]
        return HeadRuns(times(groups, each), groups)
    first, ranks = next(run for run in even_runs(size, group_count) if run[0] <= rank < sum(run))
    group = even_runs(size, group_count).index((first, ranks))
    begin, count = even_runs(each, ranks)[rank - first]
    return HeadRuns((group * each + begin, count), (group, 1))


VOCAB_UNIT = 16  # Native kernels compute 16 rows of the head together.
HEADS_UNIT = 16  # In delta rules, native kernels need a multiple of 16 heads.
CHANNELS_UNIT = 16  # In convolutions, native kernels need a multiple of 16 channels.

Cuts: TypeAlias = Mapping[str, Cut]
"""Cut of each tensor by name. Names have no numbers of layers, experts or streams, and no ".weight" or ".bias".
The rank does not have tensors that are missing."""
Place: TypeAlias = tuple[int, int]
"""Number of a rank, and number of ranks."""
ALONE: Place = (0, 1)

OUTSIDE_LAYERS = (
    *("positions", "embed_norm", "layer_inputs.embed", "layer_inputs.proj", "layer_inputs.norm"),
    *("streams.in_proj", "streams.out_proj"),
)
WHOLE_OF_LAYERS = (
    "attention_norm",
    "attention_output_norm",
    "mlp_norm",
    "mlp_output_norm",
    "laurel_norm",
    *(f"xielu.{number}" for number in XIELU_NUMBERS),
    "laurel_in",
    "laurel_out",
    "stream_router_norm",
    "stream_router",
    "stream_prediction",
    "stream_correction",
    "streams.scale",
    "layer.scale",
    *("router_norm", "experts_norm", "experts_output_norm", "shared_output_norm", "router.expert_scale"),
    "input_gate",
    "input_proj",
    "input_norm",
)


class Share(NamedTuple):
    """The shard of a rank.

    Attributes:
        config: the rank's config, with its `part`.
        cuts: cuts of tensors outside of layers.
        layers: cuts of the tensors of each layer.
    """

    config: ModelConfig
    cuts: Cuts
    layers: tuple[Cuts, ...]


def share_of(config: ModelConfig, rank: int, size: int, *, expert_parallel: bool = False) -> ModelConfig:
    """Return the config of a rank's shard.

    Args:
        config: the whole model.
        rank: number of the rank.
        size: number of ranks.
        expert_parallel: True if a rank has whole experts of a mixture, False if it has a shard of each expert.

    Raises:
        StartupError: the model cannot be divided among so many ranks. The message contains the largest possible number.
    """
    return divide(config, rank, size, expert_parallel=expert_parallel).config


def vocab_runs(vocab_size: int, size: int) -> tuple[Run, ...]:
    """Return the tokens of each rank. A rank has the rows of these tokens in the embedding and the head.

    Args:
        vocab_size: tokens of the whole vocabulary.
        size: number of ranks.
    """
    return even_runs(vocab_size, size, VOCAB_UNIT)


def divide(config: ModelConfig, rank: int, size: int, *, expert_parallel: bool = False) -> Share:
    """Return a rank's shard: its config, and the cut of each tensor.

    Args:
        config: the whole model.
        rank: number of the rank.
        size: number of ranks.
        expert_parallel: see share_of.

    Raises:
        StartupError: the model cannot be divided among so many ranks.
    """
    assert config.part is None, "the config is a share already"
    assert 0 <= rank < size, f"rank {rank} of {size}"
    vocab_first, vocab_count = vocab_runs(config.vocab_size, size)[rank]
    if size > -(-config.vocab_size // VOCAB_UNIT):
        raise StartupError(
            f"{size} ranks cannot share a vocabulary of {config.vocab_size} tokens in multiples of {VOCAB_UNIT}: use "
            f"at most {-(-config.vocab_size // VOCAB_UNIT)} ranks"
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
    # The rank needs no row_factors, because whole tensors are multiplied by the factors before they are cut.
    share = replace(config, layers=tuple(layer for layer, _, _ in layers), row_factors=(), part=part)
    return Share(share, cuts, tuple(of_layer for _, _, of_layer in layers))


def _has_row_norms(config: ModelConfig) -> bool:
    mixers = (layer.attention for layer in config.layers)
    return any(isinstance(mixer, AttentionConfig) and mixer.qk_norm in ("row", "each") for mixer in mixers)


class _Divider:
    def __init__(self, config: ModelConfig, place: Place, expert_parallel: bool) -> None:
        self._place, self._expert_parallel = place, expert_parallel
        besides = [layer.beside for layer in config.layers if layer.beside is not None]
        # Attention is divided in all layers or in none. A state space beside attention is added in the same sum, so it
        # is divided if attention is divided.
        self._divides_attention = not _has_row_norms(config) and all(
            _state_space(beside, place) is not None for beside in besides
        )
        size = place[1]
        heads = min((attention.head_count for attention in config.attentions), default=size)
        if self._divides_attention and size > heads:
            raise StartupError(
                f"{size} ranks cannot share attention of {heads} heads, because each needs one: use at most {heads} "
                "ranks"
            )

    def layer(self, layer: LayerConfig) -> tuple[LayerConfig, LayerPart, Cuts]:
        if layer.block is not None:  # Each rank has whole layers with shared blocks.
            return layer, LayerPart(sums_attention=False, sums_mlp=False), defaultdict(lambda: WHOLE)
        mixer, divides_mixer = layer.attention, self._divides_attention
        if not isinstance(mixer, KVAttention):
            divides_mixer = mixer is not None and _recurrent(mixer, self._place) is not None
        place = self._place if divides_mixer else ALONE
        smaller = (None, {}) if mixer is None else _mixer(mixer, place)
        cuts: dict[str, Cut] = {**dict.fromkeys(WHOLE_OF_LAYERS, WHOLE), **smaller[1]}
        beside = layer.beside
        if beside is not None:
            divided = _state_space(beside, place)
            assert divided is not None, "checked in __init__"
            beside, of_beside = divided
            cuts |= of_beside
        mlp, of_mlp, sums_mlp, experts = self._mlp(layer, divides_mixer)
        cuts |= of_mlp
        shortcut = layer.shortcut
        if shortcut is not None:
            # The next layer adds the shortcut's result to that of its MLP, which is as wide as this layer's MLP.
            # Therefore, both are divided or none is. If experts are too narrow, each rank has whole experts.
            place = self._place if sums_mlp else ALONE
            found = None if self._expert_parallel else _mixture(shortcut, place, None)
            if found is None:
                experts = _experts_of(shortcut, place)
                found = _mixture(shortcut, place, experts)
                assert found is not None, "whole experts are always possible"
            shortcut, of_shortcut = found
            cuts |= of_shortcut
        is_shared = self._place[1] > 1
        part = LayerPart(
            sums_attention=is_shared and divides_mixer,
            sums_mlp=is_shared and sums_mlp,
            first_expert=0 if experts is None else experts[0],
            expert_count=None if experts is None else experts[1],
        )
        return replace(layer, attention=smaller[0], beside=beside, mlp=mlp, shortcut=shortcut), part, cuts

    def _cannot_share(self, intermediate_size: int) -> StartupError:
        return StartupError(
            f"{self._place[1]} ranks cannot share MLPs with an intermediate size of {intermediate_size}, which must "
            "be divided like the attention beside them, in multiples of 16: use fewer ranks"
        )

    def _mlp(
        self, layer: LayerConfig, divides_mixer: bool
    ) -> tuple[MlpConfig | ExpertsConfig | None, Cuts, bool, Run | None]:
        """Return four values: an MLP's shard, its cuts, True if the MLP is divided, and the rank's whole experts."""
        mlp, place = layer.mlp, self._place
        if mlp is None:
            return None, {}, False, None
        if isinstance(mlp, ExpertsConfig):
            # In a parallel layer, MLP and attention are added in the same sum, so either both or none are divided.
            divides = (divides_mixer or not layer.is_parallel) and not mlp.has_own_norms
            experts = _experts_of(mlp, place) if self._expert_parallel and divides else None
            found = _mixture(mlp, place, experts) if divides else None
            if found is not None:
                return *found, True, experts
            if divides and layer.is_parallel:
                raise self._cannot_share(mlp.intermediate_size)
            whole = _mixture(mlp, ALONE, None)
            assert whole is not None, "an undivided mixture is always possible"
            return *whole, False, None
        divides = divides_mixer if layer.is_parallel else mlp.cutoff is None
        divided = _plain_mlp(mlp, place if divides else ALONE)
        if divided is not None:
            return *divided, divides, None
        if layer.is_parallel:
            raise self._cannot_share(mlp.intermediate_size)
        whole_mlp = _plain_mlp(mlp, ALONE)
        assert whole_mlp is not None, "an undivided MLP is always possible"
        return *whole_mlp, False, None


def _mixer(
    mixer: AttentionConfig | LatentAttentionConfig | Recurrent, place: Place
) -> tuple[AttentionConfig | LatentAttentionConfig | Recurrent, Cuts]:
    if isinstance(mixer, AttentionConfig):
        return _attention(mixer, place)
    if isinstance(mixer, LatentAttentionConfig):
        return _latent_attention(mixer, place)
    found = _recurrent(mixer, place)
    assert found is not None, "the caller has checked that it can be divided"
    return found


def _attention(attention: AttentionConfig, place: Place) -> tuple[AttentionConfig, Cuts]:
    found = head_runs(attention.head_count, attention.kv_head_count, *place)
    assert found is not None, "_Divider.__init__ has checked the number of heads"
    heads, groups = found
    queries, keys = times(heads, attention.head_dim), times(groups, attention.head_dim)
    attended, values = times(heads, attention.value_dim), times(groups, attention.value_dim)
    has_norms_of_heads = attention.qk_norm in ("heads", "row")
    cuts = {
        "q_proj": rows(queries),
        "q_gate_proj": rows(heads if attention.has_gate_of_heads else attended),
        "k_proj": rows(keys),
        "v_proj": rows(values),
        "o_proj": columns(place[0], attended),
        "q_norm": rows(queries) if has_norms_of_heads else WHOLE,
        "k_norm": rows(keys) if has_norms_of_heads else WHOLE,
        **dict.fromkeys(("heads.q_norm", "heads.k_norm"), WHOLE),  # Such attention is not divided.
        "sinks": rows(heads),
    }
    slopes = None if attention.slopes is None else attention.slopes[heads[0] : sum(heads)]
    return replace(attention, head_count=heads[1], kv_head_count=groups[1], slopes=slopes), cuts


def _latent_attention(attention: LatentAttentionConfig, place: Place) -> tuple[LatentAttentionConfig, Cuts]:
    """Divide latent attention by heads. Each rank has all latents and the whole indexer, because every head reads the
    latents that it selects.
    """
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
        **dict.fromkeys(("index_q_proj", "index_k_proj", "index_k_norm", "index_weight_proj"), WHOLE),
    }
    return replace(attention, head_count=heads[1]), cuts


# --- recurrent layers. These functions return None for a layer that cannot be divided among so many ranks ------------


def _recurrent(mixer: Recurrent, place: Place) -> tuple[Recurrent, Cuts] | None:
    if isinstance(mixer, ShortConvConfig):
        return _short_conv(mixer, place)
    if isinstance(mixer, StateSpaceConfig):
        return _state_space(mixer, place)
    if isinstance(mixer, SelectiveScanConfig):
        return _selective_scan(mixer, place)
    if isinstance(mixer, LightningConfig):  # One norm is computed over all heads.
        modules = ("lightning_qkv", "lightning_gate", "out_proj", "gate_norm")
        return None if place[1] > 1 else (mixer, dict.fromkeys(modules, WHOLE))
    return _delta_net(mixer, place)


def _short_conv(conv: ShortConvConfig, place: Place) -> tuple[ShortConvConfig, Cuts] | None:
    """Divide a short convolution by channels. Each rank has the rows of some channels in all three projections."""
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
    """Divide a state space by groups of heads. Without a norm, several ranks may divide the heads of one group."""
    found = [head_runs(space.head_count, space.group_count, rank, place[1]) for rank in range(place[1])]
    if found[0] is None or (space.norm != "none" and place[1] > space.group_count):
        return None
    shares = [replace(space, head_count=runs.heads[1], group_count=runs.groups[1]) for runs in found if runs]
    sizes = [share.convolved_size for share in shares]
    if space.convolved_size % CHANNELS_UNIT == 0 and any(size % CHANNELS_UNIT for size in sizes):
        return None
    runs = found[place[0]]
    assert runs is not None, "head_runs succeeds for all ranks or none"
    heads, groups = runs
    inner, vectors = times(heads, space.head_dim), space.group_count * space.vector_size
    # The rows of in_proj are ordered: z, then x, b and c, which are convolved, then time steps.
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


def _selective_scan(scan: SelectiveScanConfig, place: Place) -> tuple[SelectiveScanConfig, Cuts] | None:
    """Give each rank the whole layer. A division would need a sum over all channels in the middle of the layer."""
    if place[1] > 1:
        return None
    state = ("state.rates", "state.skips", "state.time_step_bias", "time_step_norm", "b_norm", "c_norm")
    modules = ("in_proj", "conv", "selection_proj", "time_step_proj", "out_proj", *state)
    return scan, dict.fromkeys(modules, WHOLE)


def _delta_net(net: DeltaNetConfig, place: Place) -> tuple[DeltaNetConfig, Cuts] | None:
    """Divide a delta rule by groups. A group is a key head and the value heads that use it."""
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
    keys_of_rank, values = rows(convolved[0]), rows(*inner)
    cuts = {
        **dict.fromkeys(("delta_gate", "delta_gate_b"), values),
        **dict.fromkeys(("delta_gate_a", "delta_decay_a"), WHOLE),
        "delta_decay_b": keys_of_rank,
        "delta_qkv": rows(*convolved),
        **dict.fromkeys(("delta_q", "delta_k", "conv_q", "conv_k"), keys_of_rank),
        **dict.fromkeys(("delta_v", "conv_v"), values),
        "delta_decay": rows(*heads),
        "delta_share": rows(*heads),
        "conv": rows(*convolved),
        "out_proj": columns(place[0], *inner),
        "gate_norm": WHOLE,  # All heads share the weights of one norm.
        "state.rates": rows(*heads),
        "state.time_step_bias": keys_of_rank if net.rank else rows(*heads),
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
    """Divide an MLP. Return None if the MLP is too narrow."""
    runs = wide_runs(mlp.intermediate_size, place[1])
    if runs is None:
        return None
    middle = runs[place[0]]
    return replace(mlp, intermediate_size=middle[1]), _gated("", place[0], middle)


def _experts_of(mlp: ExpertsConfig, place: Place) -> Run:
    if place[1] > mlp.expert_count:
        raise StartupError(
            f"{place[1]} ranks cannot share a mixture of {mlp.expert_count} experts, because each needs one: use at "
            f"most {mlp.expert_count} ranks, or leave out --enable-expert-parallel to divide each expert"
        )
    return even_runs(mlp.expert_count, place[1])[place[0]]


def _mixture(mlp: ExpertsConfig, place: Place, experts: Run | None) -> tuple[ExpertsConfig, Cuts] | None:
    """Divide a mixture of experts.

    Args:
        mlp: the whole mixture.
        place: number of the rank, and number of ranks.
        experts: the rank's whole experts. None: the rank has a shard of each expert.

    Returns:
        The shard and its cuts. None: the experts are too narrow to be divided.
    """
    rank, size = place
    middle = (0, mlp.intermediate_size)
    if experts is None:
        runs = wide_runs(mlp.intermediate_size, size)
        if runs is None:
            return None
        middle = runs[rank]
    cuts: dict[str, Cut] = {"router": WHOLE, "router.score_bias": WHOLE}
    cuts |= _gated("experts.", 0 if experts else rank, middle)
    # If shared experts are too narrow, some ranks have no shard of them.
    shared = (wide_runs(mlp.shared_size, size) or even_runs(mlp.shared_size, size, CHANNELS_UNIT))[rank]
    if shared[1]:
        cuts |= _gated("shared.", rank, shared)
        cuts["shared_gate"] = WHOLE
    return replace(
        mlp,
        intermediate_size=middle[1],
        shared_size=shared[1],
        has_shared_gate=mlp.has_shared_gate and shared[1] > 0,
        has_identity_results=rank == 0,
    ), cuts
