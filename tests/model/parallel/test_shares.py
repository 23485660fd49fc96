"""Tests of the division of models among ranks: heads, widths, and refused numbers of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from trioserve.contracts.errors import StartupError
from trioserve.model.layer_config import (
    AttentionConfig,
    DeltaNetConfig,
    ExpertsConfig,
    LatentAttentionConfig,
    MlpConfig,
    StateSpaceConfig,
)
from trioserve.model.loading.checkpoint import open_checkpoint
from trioserve.model.loading.hf_config import model_config_from
from trioserve.model.model_config import ModelConfig
from trioserve.model.parallel.shares import divide, even_runs, head_runs, share_of, wide_runs

Checkpoints = Callable[..., Path]

SMOLLM2: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49_152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def config_of(tiny_checkpoint: Checkpoints, kind: str) -> ModelConfig:
    return open_checkpoint(tiny_checkpoint(kind)).config


def shares(config: ModelConfig, size: int, **options: bool) -> list[ModelConfig]:
    return [share_of(config, rank, size, **options) for rank in range(size)]


@pytest.mark.parametrize(
    ("heads", "groups", "size", "expect"),
    [
        (9, 3, 2, "0-5/0-1 6-8/2-2"),
        (9, 3, 3, "0-2/0-0 3-5/1-1 6-8/2-2"),
        (9, 3, 4, "0-1/0-0 2-2/0-0 3-5/1-1 6-8/2-2"),
        (9, 3, 9, "0-0/0-0 1-1/0-0 2-2/0-0 3-3/1-1 4-4/1-1 5-5/1-1 6-6/2-2 7-7/2-2 8-8/2-2"),
        (4, 2, 3, "0-0/0-0 1-1/0-0 2-3/1-1"),
        (8, 1, 2, "0-3/0-0 4-7/0-0"),
    ],
)
def test_query_heads_follow_kv_heads_which_may_be_copied(heads: int, groups: int, size: int, expect: str) -> None:
    found = [head_runs(heads, groups, rank, size) for rank in range(size)]
    shown = [f"{runs.heads[0]}-{sum(runs.heads) - 1}/{runs.groups[0]}-{sum(runs.groups) - 1}" for runs in found if runs]
    assert " ".join(shown) == expect


def test_more_ranks_than_heads_are_refused() -> None:
    assert head_runs(9, 3, 0, 10) is None


@pytest.mark.parametrize(
    ("middle", "size", "counts"),
    [
        (1536, 2, (768, 768)),  # multiples of 256
        (4864, 2, (2560, 2304)),  # The parts are uneven, to keep the blocks of K quants whole.
        (1536, 4, (384, 384, 384, 384)),  # In multiples of 256, two ranks would have a third more than the average.
        (2880, 2, (1440, 1440)),  # multiples of 32
        (80, 3, (32, 32, 16)),
        (50, 3, (17, 17, 16)),
        (32, 3, None),
    ],
)
def test_mlp_widths_are_divided_in_blocks_if_nearly_even(
    middle: int, size: int, counts: tuple[int, ...] | None
) -> None:
    runs = wide_runs(middle, size)
    assert (None if runs is None else tuple(count for _, count in runs)) == counts


@pytest.mark.parametrize("count", [1, 7, 320, 1000])
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_even_division_covers_all_items_and_no_part_exceeds_the_first(count: int, size: int) -> None:
    runs = even_runs(count, size, 16)
    assert [index for first, length in runs for index in range(first, first + length)] == list(range(count))
    assert max(length for _, length in runs) == runs[0][1]


def test_heads_of_the_default_model_are_divided_unevenly() -> None:
    config = model_config_from(SMOLLM2, {}, dtype_name="bfloat16")
    first, second = shares(config, 2)
    assert [(share.heads.head_count, share.heads.kv_head_count) for share in (first, second)] == [(6, 2), (3, 1)]
    for share in (first, second):
        assert share.layer_count == 30
        assert share.hidden_size == 576
        assert share.vocab_size == 49_152
        assert share.vocab_count == 24_576
        assert isinstance(share.layers[0].mlp, MlpConfig)
        assert share.layers[0].mlp.intermediate_size == 768
        assert share.part is not None
        assert all(part.sums_attention and part.sums_mlp for part in share.part.layers)
    assert second.part is not None
    assert (second.part.rank, second.part.size, second.part.vocab_first) == (1, 2, 24_576)


def test_single_rank_has_the_whole_model_and_sums_nothing() -> None:
    config = model_config_from(SMOLLM2, {}, dtype_name="bfloat16")
    share = share_of(config, 0, 1)
    assert replace(share, part=None) == config
    assert share.part is not None
    assert not any(part.sums_attention or part.sums_mlp for part in share.part.layers)


def test_ranks_divide_heads_but_each_rank_has_the_latents(tiny_checkpoint: Checkpoints) -> None:
    config = config_of(tiny_checkpoint, "deepseek-v3")
    for share, heads in zip(shares(config, 3), (2, 1, 1), strict=True):
        attention = share.kv_attention
        assert isinstance(attention, LatentAttentionConfig)
        assert attention.head_count == heads
        assert share.kv_entries == config.kv_entries


def test_rank_has_parts_of_all_experts_or_some_whole_experts(tiny_checkpoint: Checkpoints) -> None:
    config = config_of(tiny_checkpoint, "mixtral")
    for share in shares(config, 2):
        mlp = share.layers[0].mlp
        assert isinstance(mlp, ExpertsConfig)
        assert (mlp.expert_count, mlp.intermediate_size) == (4, 48)
        assert share.experts_of(0) == range(4)
    for rank, share in enumerate(shares(config, 3, expert_parallel=True)):
        mlp = share.layers[0].mlp
        assert isinstance(mlp, ExpertsConfig)
        assert (mlp.expert_count, mlp.intermediate_size) == (4, 96)
        assert share.experts_of(0) == (range(2), range(2, 3), range(3, 4))[rank]


def test_shared_experts_may_be_in_some_ranks_only(tiny_checkpoint: Checkpoints) -> None:
    config = config_of(tiny_checkpoint, "qwen2-moe")  # shared experts of 48, with a gate
    found = [share.layers[0].mlp for share in shares(config, 4, expert_parallel=True)]
    assert [(mlp.shared_size, mlp.has_shared_gate) for mlp in found if isinstance(mlp, ExpertsConfig)] == [
        (16, True),
        (16, True),
        (16, True),
        (0, False),
    ]


@pytest.mark.parametrize(
    ("kind", "size", "expect"),
    [
        ("olmo2", 2, "mlp mlp"),  # models with norms over all heads of a row
        ("gemma3n", 2, "attention attention attention+mlp attention+mlp attention attention+mlp"),  # gate cutoff
        ("falcon-h1", 3, "mlp mlp"),  # norms over two groups, and attention is in the same sum
        ("falcon-h1-unnormed", 3, "attention+mlp attention+mlp"),
        ("mamba2", 2, "attention attention attention"),
        ("mamba2", 3, "- - -"),
        ("jamba", 2, "mlp attention+mlp mlp attention+mlp"),
        ("olmo-hybrid-unturned", 4, "mlp mlp mlp"),  # norms over all heads, and each rank would have 4 of 16 heads
        ("nemotron-h", 2, "mlp attention attention mlp mlp"),
        ("qwen2-moe", 3, "attention attention+mlp attention"),  # experts of 32
        ("qwen3.5", 2, "mlp attention+mlp mlp"),  # each rank would have 8 of 16 heads
    ],
)
def test_each_rank_has_the_whole_of_layers_that_cannot_be_divided(
    tiny_checkpoint: Checkpoints, kind: str, size: int, expect: str
) -> None:
    for share in shares(config_of(tiny_checkpoint, kind), size):
        assert share.part is not None
        parts = [("attention", part.sums_attention, "mlp", part.sums_mlp) for part in share.part.layers]
        shown = ["+".join(name for name, sums in ((a, is_a), (b, is_b)) if sums) or "-" for a, is_a, b, is_b in parts]
        assert " ".join(shown) == expect


def test_all_ranks_sum_the_outputs_of_the_same_layers(tiny_checkpoint: Checkpoints) -> None:
    for kind in ("falcon-h1-unnormed", "bamba", "qwen3-next", "gemma3n-biased", "granite-hybrid-moe"):
        for size in (2, 3, 4):
            found = [share.part for share in shares(config_of(tiny_checkpoint, kind), size)]
            sums = {tuple((p.sums_attention, p.sums_mlp) for p in part.layers) for part in found if part is not None}
            assert len(sums) == 1


def test_delta_rules_are_divided_by_key_heads(tiny_checkpoint: Checkpoints) -> None:
    config = config_of(tiny_checkpoint, "qwen3.5")
    net = config.layers[0].attention
    assert isinstance(net, DeltaNetConfig)
    wide = replace(net, head_count=32)  # four value heads for each key head
    for has_heads_in_turn, heads in ((False, ((16, 16),)), (True, tuple((8 * index + 4, 4) for index in range(4)))):
        layers = (replace(config.layers[0], attention=replace(wide, has_heads_in_turn=has_heads_in_turn)),)
        share = divide(replace(config, layers=(*layers, *config.layers[1:])), 1, 2)
        mixer = share.config.layers[0].attention
        assert isinstance(mixer, DeltaNetConfig)
        assert (mixer.head_count, mixer.group_count) == (16, 4)
        assert share.layers[0]["delta_decay"].rows == heads


def test_state_spaces_are_divided_by_groups(tiny_checkpoint: Checkpoints) -> None:
    share = divide(config_of(tiny_checkpoint, "mamba2"), 1, 2)
    space = share.config.layers[0].attention
    assert isinstance(space, StateSpaceConfig)
    assert (space.head_count, space.group_count) == (3, 1)
    # 6 heads of 32, and 2 groups of 16: z, x, b, c and time steps.
    assert share.layers[0]["in_proj"].rows == ((96, 96), (288, 96), (400, 16), (432, 16), (451, 3))


@pytest.mark.parametrize(
    ("kind", "size", "options", "sentence"),
    [
        ("llama-padded", 4, {}, "4 ranks cannot share attention of 3 heads, because each needs one: use at most 3"),
        ("mamba2", 21, {}, "21 ranks cannot share a vocabulary of 320 tokens in multiples of 16: use at most 20"),
        ("mixtral", 5, {"expert_parallel": True}, "5 ranks cannot share attention of 4 heads"),
        (
            "minimax-m2",
            9,
            {"expert_parallel": True},
            "9 ranks cannot share a mixture of 8 experts, because",
        ),
    ],
)
def test_too_many_ranks_for_a_model_are_refused(
    tiny_checkpoint: Checkpoints, kind: str, size: int, options: dict[str, bool], sentence: str
) -> None:
    with pytest.raises(StartupError, match=sentence):
        share_of(config_of(tiny_checkpoint, kind), 0, size, **options)


def test_narrow_mlp_beside_attention_is_refused(tiny_checkpoint: Checkpoints) -> None:
    config = config_of(tiny_checkpoint, "cohere")
    mlp = config.layers[0].mlp
    assert isinstance(mlp, MlpConfig)
    narrow = replace(config.layers[0], mlp=replace(mlp, intermediate_size=32))
    with pytest.raises(StartupError, match="3 ranks cannot share MLPs with an intermediate size of 32"):
        share_of(replace(config, layers=(narrow, *config.layers[1:])), 0, 3)


def test_model_whose_layers_have_different_head_shapes_is_refused_by_ranks(tiny_checkpoint: Checkpoints) -> None:
    for kind in ("gemma3n", "llama4", "falcon-h1", "minimax-m2"):
        for share in shares(config_of(tiny_checkpoint, kind), 3):
            mixers = [layer.attention for layer in share.layers]
            shapes = {(mixer.head_count, mixer.kv_head_count) for mixer in mixers if isinstance(mixer, AttentionConfig)}
            assert len(shapes) == 1
