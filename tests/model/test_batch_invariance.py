"""Tests that with batch_invariant, the logprobs of a request have equal bits alone and in any batch.

Each example is a history of the real core with a real runner (histories.py), drawn by hypothesis: arrivals and aborts
of other requests, chunk sizes, prefix hits, preemption and recomputation, responses that began at another engine, draft
tokens, overlapping steps, blocks anywhere in memory, one thread and two. Floats are compared exactly, for each token
and its 20 most probable alternatives.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from trioserve.contracts.errors import StartupError
from trioserve.model import loaded_models
from trioserve.model import runner as runner_module
from trioserve.model.runner import ModelRunner
from trioserve.model.settings import ModelSettings
from trioserve.model.torch_step import step_model as torch_step_model
from trioserve_kernels import reference_invariant
from trioserve_kernels.build import CannotBuild, build_library, supported_levels
from trioserve_kernels.native import Library, NoNativeKernels

pytestmark = pytest.mark.slow

LEVELS = supported_levels()
BLOCK_SIZE = 5  # This number divides no tile size.
BLOCK_COUNT = 200
VOCAB = range(5, 320)
TEXT = [random.Random(1).choice(VOCAB) for _ in range(150)]  # The prompts begin with these tokens.
# Each entry is a kind of model, its dtype, and its quantization or KV format.
TORCH = (
    ("llama-biased-64", "float32", "none"),
    ("qwen2-sliding", "bfloat16", "none"),
    ("mistral", "float16", "none"),
    ("qwen3", "bfloat16", "none"),
    ("gemma2", "bfloat16", "none"),
    ("gemma3n", "bfloat16", "none"),
    ("gemma4", "bfloat16", "none"),
    ("qwen2-moe", "bfloat16", "none"),
    ("gpt-oss", "bfloat16", "none"),
    ("deepseek-v3", "bfloat16", "none"),
    ("llama", "bfloat16", "KV int8"),
    ("llama4", "float32", "none"),
)
NATIVE = (
    ("llama", "float32", "none"),
    ("falcon-alibi", "bfloat16", "none"),
    ("kimi-linear", "bfloat16", "none"),
    ("laguna", "bfloat16", "none"),
    ("longcat-flash", "bfloat16", "none"),
    ("llama-biased-64", "bfloat16", "none"),
    ("mistral", "bfloat16", "none"),
    ("qwen2-sliding", "float32", "none"),
    ("qwen3", "bfloat16", "none"),
    ("llama", "bfloat16", "int8"),
    ("qwen2", "bfloat16", "int4"),
    ("llama-wide", "bfloat16", "Q4_0"),
    ("llama-wide", "bfloat16", "Q4_1"),
    ("llama-wide", "bfloat16", "Q4_K"),
    ("llama-wide", "bfloat16", "Q6_K"),
    ("llama-wide", "bfloat16", "Q5_0"),
    ("llama-wide", "bfloat16", "Q5_1"),
    ("llama-wide", "bfloat16", "Q5_K"),
    ("llama-wide", "bfloat16", "Q2_K"),
    ("llama-wide", "bfloat16", "Q3_K"),
    ("llama-wide", "bfloat16", "IQ4_NL"),
    ("llama-wide", "bfloat16", "IQ4_XS"),
    ("llama-wide", "bfloat16", "Q8_0"),
    ("llama-padded", "bfloat16", "none"),
    ("gemma2", "bfloat16", "none"),
    ("gemma3n", "bfloat16", "none"),
    ("gemma3n", "float32", "KV int8"),
    ("gemma3n-biased", "bfloat16", "int8"),
    ("gemma4", "bfloat16", "none"),
    ("gemma4-inputs", "float32", "KV int8"),
    ("gemma4-moe", "bfloat16", "int8"),
    ("hunyuan-moe", "bfloat16", "none"),
    ("mimo-v2-flash", "bfloat16", "none"),
    ("olmo2", "float32", "none"),
    ("cohere2", "bfloat16", "int8"),
    ("qwen2-moe", "bfloat16", "none"),
    ("qwen3-moe", "bfloat16", "int4"),
    ("gpt-oss", "bfloat16", "none"),
    ("gpt-oss", "bfloat16", "int8"),
    ("lfm2-biased", "float32", "none"),
    ("granite-hybrid", "bfloat16", "none"),
    ("granite-hybrid-moe", "bfloat16", "int8"),
    ("qwen3-next", "bfloat16", "int8"),
    ("qwen3.5", "float32", "none"),
    ("deepseek-v3", "bfloat16", "none"),
    ("minicpm3", "float32", "none"),
    ("deepseek-v2-lite", "bfloat16", "int8"),
    ("llama", "bfloat16", "KV int8"),
    ("qwen2-sliding", "float32", "KV fp8"),
    ("llama4", "bfloat16", "none"),
)


@pytest.fixture(scope="module")
def load(
    step_driver: ModuleType, tiny_checkpoint: Callable[..., Path], tiny_gguf: Callable[..., Path]
) -> Iterator[Callable[..., ModelRunner]]:
    """Function load(kind, dtype, quantization, level=None, threads=1, batch_invariant=True) that returns a runner, and
    the same runner for equal arguments. level is the instruction set of the native kernels, and None is plain torch.
    """
    made: dict[tuple[Any, ...], ModelRunner] = {}

    def runner(
        kind: str, dtype: str, quantization: str, *, level: str | None, threads: int = 1, batch_invariant: bool = True
    ) -> ModelRunner:
        key = (kind, dtype, quantization, level, threads, batch_invariant)
        if key not in made:
            kv_cache_dtype = quantization.partition("KV ")[2] or "auto"
            quantization = "none" if kv_cache_dtype != "auto" else quantization
            own = ("none", "int8", "int4")
            path = tiny_checkpoint(kind) if quantization in own else tiny_gguf(kind, quantization)
            with pytest.MonkeyPatch.context() as patch:
                if level is not None:
                    patch.setattr(loaded_models, "load_library", lambda **_: Library(build_library(level), level))
                made[key] = step_driver.load_runner(
                    path,
                    dtype=dtype,
                    block_size=BLOCK_SIZE,
                    block_count=BLOCK_COUNT,
                    cpu_kernels="torch" if level is None else "native",
                    threads=threads,
                    quantization=quantization if quantization in own else "file",
                    batch_invariant=batch_invariant,
                    kv_cache_dtype=kv_cache_dtype,
                )
            made[key].warm_up()
        return made[key]

    yield runner
    for one in made.values():
        one.close()


@st.composite
def requests(draw: st.DrawFn, histories: ModuleType, name: str) -> Any:
    common = draw(st.sampled_from((0, 0, 3, 40, 64, 130)))
    seed = draw(st.integers(0, 2**32))
    rng = random.Random(seed)
    own = [rng.choice(VOCAB) for _ in range(draw(st.sampled_from((1, 2, 17, 40))))]
    if draw(st.booleans()):  # The prompt repeats some text, so that draft tokens are proposed.
        own = (own[:4] * 9)[: len(own) + 8]
    return histories.request(
        name,
        TEXT[:common] + own,
        draw(st.sampled_from((1, 6, 14))),
        seed=seed,
        temperature=draw(st.sampled_from((0.0, 0.0, 0.9))),
        prompt_logprobs=draw(st.integers(0, 4)) == 0,
    )


@st.composite
def drawn_histories(draw: st.DrawFn, histories: ModuleType) -> Any:
    arrivals = []
    for number in range(draw(st.integers(2, 7))):
        step = draw(st.integers(0, 12))
        leaves = draw(st.integers(0, 5)) == 0
        aborted_at = step + draw(st.integers(1, 12)) if leaves else None
        known = draw(st.sampled_from((0, 0, 0, 5)))
        arrivals.append(histories.Arrival(draw(requests(histories, f"r{number}")), step, aborted_at, known))
    way = draw(st.sampled_from(("plain", "plain", "drafts", "overlap")))
    return histories.History(
        tuple(arrivals),
        step_tokens_max=draw(st.sampled_from((8, 13, 50, 512))),
        max_num_seqs=draw(st.sampled_from((2, 8))),
        # The longest request needs 200 tokens, so several requests preempt each other.
        block_count=draw(st.sampled_from((42, 60, BLOCK_COUNT))),
        enable_prefix_caching=draw(st.booleans()),
        overlap_steps=way == "overlap",
        draft_tokens_max=4 if way == "drafts" else 0,
        block_seed=draw(st.integers(0, 99)),
    )


def check(histories: ModuleType, history: Any, player: ModelRunner, lonely: ModelRunner, known: dict[Any, Any]) -> Any:
    """Play a history, and compare each response with the response of the request alone.

    `known` keeps the responses of requests alone between histories.
    """
    arrivals, all_wanted = [], {}
    for arrival in history.arrivals:
        request = arrival.request
        key = (id(lonely), request.prompt_token_ids, request.seed, request.output_tokens_max, request.sampling)
        if key not in known:
            known[key] = histories.alone(lonely, request)
        wanted = all_wanted[request.id] = known[key]
        begun = wanted.token_ids[: min(arrival.known, request.output_tokens_max - 1)]
        resumed = msgspec.structs.replace(request, resumed_output=begun)
        arrivals.append(msgspec.structs.replace(arrival, request=resumed))
    played = histories.play(player, msgspec.structs.replace(history, arrivals=tuple(arrivals)))
    for arrival in arrivals:
        request, wanted = arrival.request, all_wanted[arrival.request.id]
        got, first = played.responses[request.id], len(request.resumed_output)
        assert got.is_complete or arrival.aborted_at is not None
        end = first + len(got.token_ids)
        assert got.token_ids == wanted.token_ids[first:end], request.id
        assert got.logprobs == wanted.logprobs[first:end], request.id
        assert got.prompt_logprobs == wanted.prompt_logprobs[: len(got.prompt_logprobs)], request.id
    return played


def check_drawn(
    histories: ModuleType, load: Callable[..., ModelRunner], case: tuple[str, str, str], level: str | None, count: int
) -> None:
    known: dict[Any, Any] = {}

    @settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(drawn_histories(histories), st.sampled_from((1, 1, 2)))
    def run(history: Any, threads: int) -> None:
        if level is None:
            threads = 1  # torch's thread count applies to the whole process.
        check(histories, history, load(*case, level=level, threads=threads), load(*case, level=level), known)

    run()


def library_or_skip(level: str) -> None:
    try:
        Library(build_library(level), level)
    except (CannotBuild, NoNativeKernels) as error:
        pytest.skip(f"no native kernels for {level}: {error}")


@pytest.mark.parametrize("case", TORCH, ids="-".join)
def test_plain_torch_is_batch_invariant(
    case: tuple[str, str, str], histories: ModuleType, load: Callable[..., ModelRunner]
) -> None:
    check_drawn(histories, load, case, None, 4)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("case", NATIVE, ids="-".join)
def test_native_kernels_are_batch_invariant(
    case: tuple[str, str, str], level: str, histories: ModuleType, load: Callable[..., ModelRunner]
) -> None:
    library_or_skip(level)
    check_drawn(histories, load, case, level, 8)


def busy_history(histories: ModuleType, **settings: Any) -> Any:
    """Return a history of eight requests with prompts of all kinds, in small chunks."""
    rng = random.Random(3)
    arrivals = []
    for number in range(8):
        prompt = TEXT[: (0, 70, 33)[number % 3]] + [rng.choice(VOCAB) for _ in range((1, 20, 50)[number % 3])]
        arrivals.append(histories.Arrival(histories.request(f"r{number}", prompt, 12, seed=number), 2 * number))
    return histories.History(tuple(arrivals), **{"step_tokens_max": 40, **settings})


WAYS: tuple[dict[str, Any], ...] = (
    {"block_count": 24},
    {"overlap_steps": True, "block_seed": 1},
    {"draft_tokens_max": 4, "max_num_seqs": 3},
)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: next(iter(way)))
@pytest.mark.parametrize("level", (None, *LEVELS[:1]))
def test_random_histories_contain_the_events_that_they_are_made_for(
    way: dict[str, Any], level: str | None, histories: ModuleType, load: Callable[..., ModelRunner]
) -> None:
    """With two threads, blocks are preempted, prefixes are reused, steps overlap, and draft tokens are accepted."""
    if level is not None:
        library_or_skip(level)
    case = ("llama", "float32", "none")
    lonely = load(*case, level=level)
    history = busy_history(histories, **way)
    if "draft_tokens_max" in way:  # The core proposes repeated output of the model as draft tokens.
        said = histories.alone(lonely, histories.request("x", TEXT[:9], 60)).token_ids
        again = histories.request("again", (*TEXT[:9], *said[:40], *TEXT[:9], *said[:5]), 12)
        history = histories.History((*history.arrivals, histories.Arrival(again)), step_tokens_max=40, **way)
    player = load(*case, level=level, threads=2)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        played = check(histories, history, player, lonely, {})
    finally:
        torch.set_num_threads(threads)
    assert played.hit_tokens > 0
    assert played.largest_batch >= 3
    assert (played.preemptions > 0) == ("block_count" in way)
    assert (played.steps_ahead > 0) == ("overlap_steps" in way)
    assert (played.drafts > 0) == ("draft_tokens_max" in way)


@pytest.mark.parametrize(
    "kind", ("lfm2", "granite-hybrid", "falcon-h1", "mamba2", "jamba", "nemotron-h-moe", "olmo-hybrid", "qwen3-next")
)
@pytest.mark.parametrize("way", WAYS[:2], ids=lambda way: next(iter(way)))
def test_states_survive_preemption_and_prefix_hits(
    way: dict[str, Any], kind: str, histories: ModuleType, load: Callable[..., ModelRunner]
) -> None:
    library_or_skip(LEVELS[0])
    runner = load(kind, "float32", "none", level=LEVELS[0])
    played = check(histories, busy_history(histories, **way), runner, runner, {})
    assert played.hit_tokens > 0
    assert (played.preemptions > 0) == ("block_count" in way)
    assert (played.steps_ahead > 0) == ("overlap_steps" in way)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_native_kernels_report_where_they_are_always_batch_invariant(
    dtype: str, level: str, load: Callable[..., ModelRunner]
) -> None:
    library_or_skip(level)
    runner = load("qwen3", dtype, "none", level=level, batch_invariant=False)
    assert runner.is_batch_invariant == (level != "amx" or dtype == "float32")
    assert ("batch-invariant" in runner.computed_by) == runner.is_batch_invariant
    assert load("qwen3", dtype, "none", level=level).is_batch_invariant


@pytest.mark.parametrize("level", (None, *LEVELS))
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_output_logprobs_equal_logprobs_of_the_same_text_as_prompt(
    dtype: str, level: str | None, histories: ModuleType, load: Callable[..., ModelRunner]
) -> None:
    if level is not None:
        library_or_skip(level)
    runner = load("qwen3", dtype, "none", level=level)
    prompt = TEXT[:50]
    for temperature in (0.0, 1.0):
        answer = histories.alone(runner, histories.request("a", prompt, 25, temperature=temperature, seed=4))
        text = (*prompt, *answer.token_ids)
        again = histories.alone(runner, histories.request("b", text, 1, prompt_logprobs=True))
        assert again.prompt_logprobs[len(prompt) :] == answer.logprobs


def test_comparison_detects_differences_without_batch_invariant(
    histories: ModuleType, load: Callable[..., ModelRunner]
) -> None:
    """This test uses plain torch. Most native kernels are always batch-invariant. AMX is tested in
    tests/kernels/test_batch_invariance.py.
    """
    runner = load("llama", "bfloat16", "none", level=None, batch_invariant=False)
    with pytest.raises(AssertionError):
        check(histories, busy_history(histories), runner, runner, {})


@pytest.mark.skipif(len(LEVELS) < 2, reason="native kernels add in one order only here")
@pytest.mark.parametrize("case", (("llama", "bfloat16", "none"), ("llama-wide", "bfloat16", "Q4_K")), ids="-".join)
def test_comparison_detects_kernels_of_another_instruction_level(
    case: tuple[str, str, str], histories: ModuleType, load: Callable[..., ModelRunner]
) -> None:
    """Kernels of another level add in another order, like a step that would use other kernels for a large batch."""
    for level in (LEVELS[0], LEVELS[-1]):
        library_or_skip(level)
    player, lonely = (load(*case, level=level) for level in (LEVELS[0], LEVELS[-1]))
    with pytest.raises(AssertionError):
        check(histories, busy_history(histories), player, lonely, {})


def test_comparison_detects_a_product_that_depends_on_the_batch(
    histories: ModuleType, load: Callable[..., ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The product adds two halves of its depth if it has more than one row."""
    runner = load("llama-tied", "float32", "none", level=None)
    linear = runner._model._model._head  # type: ignore[union-attr]  # the fault is planted in one layer

    def planted(values: Tensor, weight: Tensor, bias: Tensor | None, product: Any) -> Tensor:
        if values.shape[0] == 1:
            return reference_invariant.linear(values, weight, bias, product)
        half = values.shape[1] // 2
        parts = torch.zeros_like(values), torch.zeros_like(values)
        parts[0][:, :half], parts[1][:, half:] = values[:, :half], values[:, half:]
        return sum(reference_invariant.linear(part, weight, bias, product) for part in parts)

    monkeypatch.setattr(linear, "_linear", planted)
    with pytest.raises(AssertionError):
        check(histories, busy_history(histories), runner, runner, {})


def test_batch_invariant_is_refused_where_it_is_impossible(
    tiny_checkpoint: Callable[..., Path], step_driver: ModuleType
) -> None:
    """The option is refused if a product depends on the row's index, as on some processors and in torch on a GPU."""
    runner = step_driver.load_runner(tiny_checkpoint("llama"), cpu_kernels="torch", batch_invariant=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_step_model, "differing_rows", lambda *_: [7])
        with pytest.raises(StartupError, match="in row 7 of 16"):
            runner.warm_up()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_step_model, "differing_attended_rows", lambda *_: [3])
        with pytest.raises(StartupError, match="attention of 4 heads of 16, in row 3 of 16"):
            runner.warm_up()
    with pytest.raises(StartupError, match="use gpu_kernels triton"):
        torch_step_model.TorchStepModel(
            runner.config,
            ModelSettings(batch_invariant=True, gpu_kernels="torch"),
            dtype="float32",
            device="cuda",
        )
    runner.close()


def test_products_that_depend_on_the_row_index_are_detected() -> None:
    def sums(tile: Tensor) -> Tensor:
        found = tile.cumsum(-1)[:, -1]
        found[5] += 1e-3
        return found

    assert reference_invariant.differing_rows(sums, 40, torch.float32) == [5]
    assert reference_invariant.differing_rows(lambda tile: tile.cumsum(-1), 40, torch.float32) == []


def test_attention_that_depends_on_the_row_index_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    product = torch.bmm

    def planted(left: Tensor, right: Tensor) -> Tensor:
        found = product(left, right)
        found[:, 5] += 1e-3
        return found

    assert reference_invariant.differing_attended_rows(2, 1, 32, torch.float32) == []
    monkeypatch.setattr(torch, "bmm", planted)
    assert reference_invariant.differing_attended_rows(2, 1, 32, torch.float32) == [5]


def test_kv_is_exchanged_only_between_engines_of_equal_arithmetic(
    tiny_checkpoint: Callable[..., Path], step_driver: ModuleType
) -> None:
    def name_of(**settings: Any) -> str:
        runner = step_driver.load_runner(tiny_checkpoint("llama"), cpu_kernels="torch", **settings)
        try:
            return str(runner.kv_pages("model").layout.model)
        finally:
            runner.close()

    assert name_of() == name_of(dtype="bfloat16") == "model"
    assert name_of(batch_invariant=True) == name_of(batch_invariant=True, threads=1)
    assert name_of(batch_invariant=True) not in ("model", name_of(batch_invariant=True, dtype="bfloat16"))
    ours = name_of(batch_invariant=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner_module, "VERSION", "0.0.1")  # The folder may contain KV files of such a version.
        assert name_of(batch_invariant=True) != ours
        assert name_of() == "model"
