"""Tests of tensor parallelism: ranks compute the tokens and logprobs of one process, for every model family."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from trioserve.contracts.events import TokenLogprob
from trioserve.contracts.pooling import Pooling
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.step import IsAbandoned, StepPlan, StepResult
from trioserve.contracts.weights import AdapterId, AdapterRef
from trioserve.model.loading.checkpoint import open_checkpoint
from trioserve.model.loading.names import tensor_shapes
from trioserve.model.loading.stored_tensor import AdapterMatrix, AdapterWeights
from trioserve.model.native.model import why_not_native
from trioserve.model.parallel.rank_checkpoint import RankCheckpoint, rank_adapter
from trioserve.model.parallel.shares import share_of
from trioserve.model.runner import ModelRunner
from trioserve.model.settings import ModelSettings
from trioserve.model.step_model import NOT_FINITE
from trioserve.model.torch_step import step_model as torch_step_model
from trioserve.testing.automaton_guide import AutomatonGuide
from trioserve_kernels import reference_fused

pytestmark = pytest.mark.slow

Checkpoints = Callable[..., Path]


def _kinds() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "tiny_checkpoints_of_ranks", Path(__file__).parents[1] / "tiny_checkpoints.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_TINY = _kinds()
ALL_KINDS = tuple({**_TINY.KINDS, **_TINY.FAMILY_KINDS})
MIXTURES = tuple(
    kind
    for kind in ALL_KINDS
    if any(field in str(_TINY.FAMILY_KINDS.get(kind)) for field in ("num_experts", "num_local_experts", "n_routed"))
    and kind != "granite-hybrid"
)
BRANCHES = (((11, 0), (200, 1), (31, 1)), ((7, 0), (300, 0), (12, 2)), ((40, 0), (41, 1), (319, 2)))


def settings(kernels: str = "torch", dtype: str = "float32", quantization: str = "none") -> ModelSettings:
    return ModelSettings(
        dtype=dtype,
        device="cpu",
        block_size=4,
        kv_cache_bytes=2**24,
        cpu_kernels=kernels,
        quantization=quantization,
        threads=1,
        max_num_seqs=8,
    )


@pytest.fixture(scope="module")
def play(draft_driver: ModuleType) -> Callable[..., list[StepResult]]:
    """Return a function that computes a few dozen steps with a runner and returns their results.

    The steps have prompt chunks, all sampling options, masks, logprobs, requests that hit the prefix cache, and finally
    greedy requests alone.
    """

    def play(runner: Any) -> list[StepResult]:
        changes = {"state_slot_count": 8, "snapshot_slot_count": 16} if runner.config.state_bytes else {}
        driver = draft_driver.Driver(runner, source=None, step_tokens_max=24, **changes)
        draft_driver.add_all(driver)
        guided = SamplingParams(temperature=0.9)
        driver.add("guided", draft_driver.prompt_of(9, 90), guided, guide=AutomatonGuide(BRANCHES))
        driver.run()
        hit_tokens = driver.core.stats().prefix_hit_tokens_total
        for number, (name, sampling) in enumerate(draft_driver.SAMPLINGS.items()):
            prompt = draft_driver.prompt_of(5 + 11 * number, number)
            driver.add(f"{name} again", [*prompt, 9, 8, 7], replace(sampling, prompt_logprobs=None), tokens=6)
        driver.run()
        assert driver.core.stats().prefix_hit_tokens_total > hit_tokens
        for number in (1, 2):  # Every request is greedy, so no rank needs all logits.
            driver.add(f"plain {number}", draft_driver.prompt_of(9, number), SamplingParams(temperature=0.0), tokens=12)
        driver.run()
        assert len(driver.results) > 48
        return list(driver.results)

    return play


@pytest.fixture(scope="module")
def expected(play: Callable[..., list[StepResult]]) -> Callable[..., list[StepResult]]:
    """Return a function that computes the results of a single process, once for each model and kernels."""
    found: dict[tuple[Path, str], list[StepResult]] = {}

    def of(path: Path, settings: ModelSettings) -> list[StepResult]:
        key = (path, settings.cpu_kernels)
        if key not in found:
            runner = ModelRunner.load(open_checkpoint(path), settings)
            runner.allocate_kv(200)
            found[key] = play(runner)
            runner.close()
        return found[key]

    return of


def check_alike(found: list[StepResult], expected: list[StepResult]) -> None:
    assert len(found) == len(expected)
    for mine, other in zip(found, expected, strict=True):
        assert mine.token_ids == other.token_ids
        assert mine.errors == other.errors == {}
        for own, others in ((mine.logprobs, other.logprobs), (mine.prompt_logprobs, other.prompt_logprobs)):
            assert own.keys() == others.keys()
            for name, entries in own.items():
                check_logprobs(entries, others[name])


def check_logprobs(mine: Any, other: Any) -> None:
    pairs = [(mine, other)] if isinstance(mine, TokenLogprob) else zip(mine, other, strict=True)
    for entry, expected in pairs:
        assert entry.token_id == expected.token_id
        assert entry.logprob == pytest.approx(expected.logprob, abs=1e-3)
        assert [value for _, value in entry.top] == pytest.approx([value for _, value in expected.top], abs=1e-3)


@pytest.fixture(scope="module")
def check(
    thread_ranks: ModuleType, play: Callable[..., list[StepResult]], expected: Callable[..., list[StepResult]]
) -> Callable[..., None]:
    """Return a function that checks that ranks have the results of a single process."""

    def check(path: Path, size: int, kernels: str, *, expert_parallel: bool = False) -> None:
        group = thread_ranks.RankGroup(path, size, settings(kernels), expert_parallel=expert_parallel)
        try:
            assert all((kernels == "native") == ("native" in runner.computed_by) for runner in group.runners)
            check_alike(play(group), expected(path, settings(kernels)))
        finally:
            group.close()
        assert size == 1 or group.collectives[0].calls["gather"] > 48

    return check


def computed(path: Path, kernels: str) -> Path:
    """Return the path of a checkpoint. Skip the test if the kernels do not compute the model."""
    reason = why_not_native(open_checkpoint(path).config, "float32") if kernels == "native" else None
    if reason is not None:
        known = ("indexer", "share a transformer block", "are weighted", "have a limit")
        assert any(part in reason for part in known)
        pytest.skip(reason)
    return path


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_ranks_give_the_same_tokens_as_one_process_for_every_family(
    tiny_checkpoint: Checkpoints, check: Callable[..., None], cpu_kernels: str, kind: str, size: int
) -> None:
    check(computed(tiny_checkpoint(kind), cpu_kernels), size, cpu_kernels)


@pytest.mark.parametrize("kind", MIXTURES)
def test_ranks_with_whole_experts_give_the_same_tokens(
    tiny_checkpoint: Checkpoints, check: Callable[..., None], cpu_kernels: str, kind: str
) -> None:
    check(computed(tiny_checkpoint(kind), cpu_kernels), 3, cpu_kernels, expert_parallel=True)


@pytest.mark.parametrize("kind", ["llama", "qwen2-moe", "deepseek-v3", "falcon-h1-unnormed", "lfm2"])
@pytest.mark.parametrize("size", [1, 4])
def test_any_number_of_ranks_gives_the_same_tokens(
    tiny_checkpoint: Checkpoints, check: Callable[..., None], cpu_kernels: str, kind: str, size: int
) -> None:
    check(tiny_checkpoint(kind), size, cpu_kernels)


def written(tiny_checkpoints: ModuleType, directory: Path, kind: str, **changes: Any) -> Path:
    """Write a checkpoint of a kind, with some fields changed."""
    model_type, fields = {**tiny_checkpoints.KINDS, **tiny_checkpoints.FAMILY_KINDS}[kind]
    tiny_checkpoints.KINDS["changed"] = (model_type, {**fields, **changes})
    try:
        tiny_checkpoints.write_checkpoint(directory, "changed")
    finally:
        del tiny_checkpoints.KINDS["changed"]
    return directory


@pytest.fixture(scope="module")
def nine_heads(tiny_checkpoints: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a checkpoint in the default model's shape: 9 query heads and 3 KV heads."""
    shape = {"hidden_size": 144, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
    return written(tiny_checkpoints, tmp_path_factory.mktemp("nine-heads"), "llama", **shape)


@pytest.mark.parametrize("size", [2, 3, 4, 9])
def test_unevenly_divided_heads_give_the_same_tokens(
    nine_heads: Path, check: Callable[..., None], cpu_kernels: str, size: int
) -> None:
    check(nine_heads, size, cpu_kernels)


def test_divided_delta_rules_give_the_same_tokens(
    tiny_checkpoints: ModuleType, check: Callable[..., None], cpu_kernels: str, tmp_path: Path
) -> None:
    (tmp_path / "wide").mkdir()
    # The heads suffice to give each of two ranks 16.
    wide = written(tiny_checkpoints, tmp_path / "wide", "qwen3.5", linear_num_value_heads=32)
    in_turn = tmp_path / "in-turn.gguf"  # llama.cpp's converter interleaves the value heads
    tiny_checkpoints.write_family_gguf(wide, in_turn)
    for path in (wide, in_turn):
        share = share_of(open_checkpoint(path).config, 0, 2)
        assert share.part is not None
        assert all(part.sums_attention for part in share.part.layers)
        check(path, 2, cpu_kernels)


@pytest.mark.parametrize("quant_type", ["Q8_0", "Q4_0", "Q4_K", "Q6_K", "IQ4_XS"])
def test_ranks_give_the_same_tokens_for_quantized_files(
    tiny_gguf: Checkpoints, check: Callable[..., None], cpu_kernels: str, quant_type: str
) -> None:
    check(tiny_gguf("llama-wide", quant_type), 3, cpu_kernels)


@pytest.mark.parametrize("cpu_kernels", ["native"], indirect=True)  # torch dequantizes blocks on a CPU
@pytest.mark.parametrize("quant_type", ["Q8_0", "Q4_0", "Q4_K", "Q6_K", "IQ4_XS"])
def test_ranks_with_kept_quantized_blocks_give_the_same_results(
    tiny_checkpoints: ModuleType,
    thread_ranks: ModuleType,
    step_driver: ModuleType,
    cpu_kernels: str,
    tmp_path: Path,
    quant_type: str,
) -> None:
    (tmp_path / "wide").mkdir()
    # The heads are so wide that no cut goes through a block of 256.
    wide = written(tiny_checkpoints, tmp_path / "wide", "llama-wide", head_dim=128)
    path = tmp_path / "wide.gguf"
    tiny_checkpoints.write_gguf(wide, path, quant_type=quant_type)
    kept = settings(cpu_kernels, "bfloat16", "file")
    whole = ModelRunner.load(open_checkpoint(path), kept)
    whole.allocate_kv(100)
    group = thread_ranks.RankGroup(path, 2, kept)
    results = []
    for runner in (whole, group):
        driver = step_driver.StepDriver(runner)
        driver.add("a", range(5, 65), SamplingParams(temperature=0.0, prompt_logprobs=1))
        results.append(runner.execute(StepPlan(0, (driver.chunk("a", 60),), 60)).prompt_logprobs["a"])
    one, several = ([entry.logprob for entry in entries] for entries in results)
    assert len(one) == 59
    # Keys and values are rounded to bfloat16, so the last bit of a sum may change a number by 1/256. Logprobs of these
    # weights are about 5, and a wrong column changes them by about 1.
    assert several == pytest.approx(one, abs=0.05)
    assert all("weights kept as file" in runner.computed_by for runner in group.runners)
    group.close()
    whole.close()


# --- one step at a time ----------------------------------------------------------------------------------------------


def plan_of(step_driver: ModuleType, runner: Any, sampling: SamplingParams, pooling: Pooling | None = None) -> StepPlan:
    driver = step_driver.StepDriver(runner)
    driver.add("a", [5, 6, 7, 8, 9], sampling, pooling=pooling)
    return StepPlan(0, (driver.chunk("a", 5),), 1)


@pytest.fixture(scope="module")
def llama_group(tiny_checkpoint: Checkpoints, thread_ranks: ModuleType, cpu_kernels: str) -> Iterator[Any]:
    group = thread_ranks.RankGroup(tiny_checkpoint("llama"), 2, settings(cpu_kernels))
    yield group
    group.close()


def test_ranks_give_the_same_pooling_results_as_one_process(
    llama_group: Any, step_driver: ModuleType, tiny_checkpoint: Checkpoints
) -> None:
    runner = ModelRunner.load(open_checkpoint(tiny_checkpoint("llama")), settings())
    runner.allocate_kv(200)
    labels = Pooling(task="labels", method="last", normalize=False, label_token_ids=(3, 200, 319))
    for pooling in (labels, Pooling(task="embed", method="mean", normalize=True, is_whole=True)):
        plan = plan_of(step_driver, runner, step_driver.GREEDY, pooling)
        mine, other = llama_group.execute(plan).pooled["a"], runner.execute(plan).pooled["a"]
        assert torch.frombuffer(bytearray(mine.data), dtype=torch.float32).tolist() == pytest.approx(
            torch.frombuffer(bytearray(other.data), dtype=torch.float32).tolist(), abs=1e-4
        )
    runner.close()


# Ranks divide the attention of llama. Each rank has the whole attention of olmo2.
@pytest.mark.parametrize("kind", ["llama", "olmo2"])
def test_ranks_divide_adapters_like_their_matrices(
    tiny_checkpoint: Checkpoints, thread_ranks: ModuleType, step_driver: ModuleType, cpu_kernels: str, kind: str
) -> None:
    path = tiny_checkpoint(kind)
    whole = open_checkpoint(path)
    random = np.random.default_rng(1)
    matrices = {}
    for name, shape in tensor_shapes(whole.config).items():
        if name.startswith("layers.") and len(shape) == 2:
            a, b = (random.normal(0.0, 0.2, size).astype(np.float32) for size in ((4, shape[1]), (shape[0], 4)))
            matrices[name.removesuffix(".weight")] = AdapterMatrix(a, b)
    weights, reference = AdapterWeights("digest", "float32", matrices), AdapterRef(AdapterId(1), "digest")
    group = thread_ranks.RankGroup(path, 3, settings(cpu_kernels))
    for rank, runner in enumerate(group.runners):
        runner.add_adapter(reference.id, rank_adapter(weights, RankCheckpoint(whole, rank, 3)))
    one = ModelRunner.load(whole, settings(cpu_kernels))
    one.allocate_kv(200)
    one.add_adapter(reference.id, weights)
    found = []
    for runner in (one, group):
        driver = step_driver.StepDriver(runner)
        for name in ("with", "without"):
            driver.add(name, range(5, 25), adapter=reference if name == "with" else None)
        driver.generate(["with", "without"], 24)
        found.append({name: tokens[20:] for name, tokens in driver.tokens.items()})
    assert found[0] == found[1]
    assert found[0]["with"] != found[0]["without"]
    group.close()
    one.close()


@pytest.mark.parametrize("leaver", [0, 1])
def test_step_abandoned_by_one_rank_is_abandoned_by_all(llama_group: Any, step_driver: ModuleType, leaver: int) -> None:
    plan = plan_of(step_driver, llama_group, step_driver.GREEDY)
    votes = [IsAbandoned(0 if rank == leaver else 1) for rank in range(2)]
    sums = llama_group.collectives[0].calls["sum"]
    assert llama_group.execute_with_votes(plan, votes) is None
    # Only the embedding was summed, because all ranks stopped after its sum.
    assert llama_group.collectives[0].calls["sum"] == sums + 1
    assert llama_group.execute_with_votes(plan, [IsAbandoned(1)] * 2) is not None


def test_launched_steps_of_ranks_give_the_same_tokens(
    tiny_checkpoint: Checkpoints,
    thread_ranks: ModuleType,
    step_driver: ModuleType,
    play: Callable[..., list[StepResult]],
    expected: Callable[..., list[StepResult]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Reference kernels stand in for fused ones, so that decodes are launched as steps of fixed shape."""
    path = tiny_checkpoint("llama")
    with monkeypatch.context() as patch:
        patch.setattr(torch_step_model, "pick_kernels", lambda *_, **__: reference_fused)
        group = thread_ranks.RankGroup(path, 2, settings())
    assert all(runner.launches for runner in group.runners)
    check_alike(play(group), expected(path, settings()))
    # A launched step cannot be stopped, so a rank that abandons it still computes it.
    driver = step_driver.StepDriver(group)
    driver.add("a", [5, 6, 7], step_driver.GREEDY)
    plan = StepPlan(0, (driver.chunk("a", 3),), 3)
    assert group.execute_with_votes(plan, [IsAbandoned(0), IsAbandoned(1)]) is not None
    group.close()


def test_ranks_find_the_largest_logit_without_gathering_all_logits(
    llama_group: Any, step_driver: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []  # bytes
    gather = llama_group.collectives[0].gather
    monkeypatch.setattr(
        llama_group.collectives[0],
        "gather",
        lambda own: (sent.append(math.prod(own.shape) * own.itemsize), gather(own))[1],
    )
    llama_group.execute(plan_of(step_driver, llama_group, step_driver.GREEDY))
    assert sum(sent) <= 24
    llama_group.execute(plan_of(step_driver, llama_group, SamplingParams(temperature=0.5)))
    assert sum(sent) >= 4 * 160


def test_first_token_of_equal_logits_is_chosen_across_ranks(
    tiny_checkpoint: Checkpoints, thread_ranks: ModuleType, step_driver: ModuleType, cpu_kernels: str, tmp_path: Path
) -> None:
    path = _changed_head(tiny_checkpoint("llama"), tmp_path, lambda head: head.mul_(0.0))
    group = thread_ranks.RankGroup(path, 3, settings(cpu_kernels))
    assert group.execute(plan_of(step_driver, group, step_driver.GREEDY)).token_ids == (0,)
    group.close()


def test_nan_in_one_rank_is_an_error_in_all_ranks(
    tiny_checkpoint: Checkpoints, thread_ranks: ModuleType, step_driver: ModuleType, cpu_kernels: str, tmp_path: Path
) -> None:
    path = _changed_head(tiny_checkpoint("llama"), tmp_path, lambda head: head[300].fill_(float("nan")))
    group = thread_ranks.RankGroup(path, 2, settings(cpu_kernels))
    for sampling in (step_driver.GREEDY, SamplingParams(temperature=0.5)):
        result = group.execute(plan_of(step_driver, group, sampling))
        assert result.errors == {"a": NOT_FINITE}
        assert result.token_ids == (None,)
    group.close()


def _changed_head(checkpoint: Path, directory: Path, change: Callable[[torch.Tensor], object]) -> Path:
    from safetensors.torch import load_file, save_file

    for file in checkpoint.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    tensors = load_file(checkpoint / "model.safetensors")
    change(tensors["lm_head.weight"])
    save_file(tensors, directory / "model.safetensors")
    return directory


def test_each_rank_has_only_its_part_of_weights_and_kv(
    llama_group: Any, tiny_checkpoint: Checkpoints, cpu_kernels: str
) -> None:
    whole = ModelRunner.load(open_checkpoint(tiny_checkpoint("llama")), settings(cpu_kernels))
    whole.allocate_kv(llama_group.block_count)
    for runner in llama_group.runners:
        assert runner.kv_cache_bytes * 2 == whole.kv_cache_bytes
        # Native kernels pad some matrices with zeros.
        assert runner.step_weight_bytes * 2 == pytest.approx(whole.step_weight_bytes, rel=0.1)
    whole.close()


def test_sums_in_bfloat16_are_equal_in_all_ranks(
    tiny_checkpoint: Checkpoints, thread_ranks: ModuleType, play: Callable[..., list[StepResult]], cpu_kernels: str
) -> None:
    group = thread_ranks.RankGroup(tiny_checkpoint("llama"), 3, settings(cpu_kernels, "bfloat16"))
    assert play(group)  # the group compares the results of its ranks
    group.close()
