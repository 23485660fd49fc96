"""Tests of --kv-cache-dtype int8 and fp8: logprobs, blocks and capacity, in native kernels and in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np
import pytest

from trioserve.contracts.errors import StartupError
from trioserve.contracts.ids import BlockIndex
from trioserve.contracts.sampling import SamplingParams
from trioserve.model.device import kv_block_bytes
from trioserve.model.loading.checkpoint import open_checkpoint
from trioserve.model.runner import ModelRunner
from trioserve.model.settings import ModelSettings
from trioserve_kernels.native import NoNativeKernels, load_library

# limits of the root mean square error. Rounding steps are 1 / 254 of the largest number, or 1 / 16 of a number.
LARGEST_ERROR = {"int8": 0.04, "fp8": 0.12}
PROMPT = [(7 * index + 11) % 300 + 5 for index in range(70)]
SHOWN = SamplingParams(temperature=0.0, prompt_logprobs=1)
BOTH = pytest.mark.parametrize("cpu_kernels", ("native", "torch"))
FORMATS = pytest.mark.parametrize("kv_cache_dtype", ("int8", "fp8"))

Load = Callable[..., ModelRunner]


@pytest.fixture(scope="module", autouse=True)
def library() -> None:
    try:
        load_library()
    except NoNativeKernels as error:
        pytest.skip(f"no native kernels: {error}")


@pytest.fixture
def load(step_driver: ModuleType, tiny_checkpoint: Callable[..., Path]) -> Any:
    """Function load(kind, kv_cache_dtype, cpu_kernels=..., ...) that returns a runner, which is closed at the end."""
    made: list[ModelRunner] = []

    def runner(kind: str, kv_cache_dtype: str, **settings: Any) -> ModelRunner:
        made.append(step_driver.load_runner(tiny_checkpoint(kind), kv_cache_dtype=kv_cache_dtype, **settings))
        return made[-1]

    yield runner
    for one in made:
        one.close()


def played(step_driver: ModuleType, runner: ModelRunner, counts: list[int]) -> tuple[Any, list[float]]:
    """Compute a prompt in chunks of given lengths, and a few further tokens. Return the driver and the prompt's
    logprobs.
    """
    driver = step_driver.StepDriver(runner)
    driver.add("a", PROMPT, SHOWN)
    entries: list[float] = []
    for count in counts:
        result = driver.step({"a": count})
        assert not result.errors
        entries.extend(entry.logprob for entry in result.prompt_logprobs["a"])
    driver.generate(["a"], 5)
    return driver, entries


def kept(driver: Any, runner: ModelRunner) -> list[bytes]:
    """Return the content of the prompt's full blocks, layer by layer."""
    pages = runner.kv_pages("m")
    table = driver._tables["a"][: len(PROMPT) // runner.block_size]
    return [bytes(pages.read(layer, BlockIndex(block))) for layer in range(2) for block in table]


@BOTH
@FORMATS
@pytest.mark.parametrize("kind", ("llama", "qwen3", "mistral", "gemma2", "llama-biased-64"))
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_logprobs_with_eight_bit_kv_are_close_to_those_without_rounding(
    load: Load, step_driver: ModuleType, kind: str, dtype: str, kv_cache_dtype: str, cpu_kernels: str
) -> None:
    _, exact = played(step_driver, load(kind, "auto", dtype="float32", cpu_kernels="torch"), [70])
    _, found = played(step_driver, load(kind, kv_cache_dtype, dtype=dtype, cpu_kernels=cpu_kernels), [70])
    error = np.sqrt(np.square(np.array(found) - np.array(exact)).mean())
    assert 0 < error < LARGEST_ERROR[kv_cache_dtype]


@FORMATS
@pytest.mark.parametrize("kind", ("gemma3", "gemma4", "gemma4-unified"))
def test_eight_bit_kv_changes_logprobs_of_sensitive_models_as_bfloat16_does(
    load: Load, step_driver: ModuleType, kind: str, kv_cache_dtype: str
) -> None:
    """Random models of these families amplify every rounding. The error of bfloat16 without 8 bits is the scale."""
    _, exact = played(step_driver, load(kind, "auto", dtype="float32", cpu_kernels="torch"), [70])
    _, half = played(step_driver, load(kind, "auto", dtype="bfloat16", cpu_kernels="torch"), [70])
    _, found = played(step_driver, load(kind, kv_cache_dtype, dtype="float32", cpu_kernels="torch"), [70])
    of_half, own = (np.sqrt(np.square(np.array(each) - np.array(exact)).mean()) for each in (half, found))
    assert 0 < own < {"int8": 1.5, "fp8": 6.0}[kv_cache_dtype] * of_half


@FORMATS
@pytest.mark.parametrize("kind", ("llama", "qwen3", "gemma2", "gemma4-unified", "mimo-v2-flash", "bloom"))
def test_native_kernels_and_torch_round_kv_equally(
    load: Load, step_driver: ModuleType, kind: str, kv_cache_dtype: str
) -> None:
    """Only a few float32 numbers in the middle between two values may be rounded differently."""
    found = [
        np.array(played(step_driver, load(kind, kv_cache_dtype, cpu_kernels=kernels), [70])[1])
        for kernels in ("native", "torch")
    ]
    assert np.abs(found[0] - found[1]).max() < 0.02


@BOTH
@FORMATS
@pytest.mark.parametrize("kind", ("llama", "qwen2-sliding"))
def test_eight_bit_kv_blocks_have_equal_bits_for_any_chunks_of_a_prompt(
    load: Load, step_driver: ModuleType, kind: str, kv_cache_dtype: str, cpu_kernels: str
) -> None:
    """The prompt is also computed in a batch. A number that differs by one bit before it is rounded to 8 bits may
    differ by a whole step afterwards.
    """
    runner = load(kind, kv_cache_dtype, cpu_kernels=cpu_kernels, batch_invariant=True)
    whole, logprobs = played(step_driver, runner, [70])
    blocks = kept(whole, runner)
    driver = step_driver.StepDriver(runner, seed=3)
    driver.add("a", PROMPT, SHOWN)
    driver.add("b", PROMPT[::-1])
    entries: list[float] = []
    for count in (1, 2, 30, 7, 30):
        result = driver.step({"b": 3, "a": count})
        entries.extend(entry.logprob for entry in result.prompt_logprobs["a"])
    assert kept(driver, runner) == blocks
    assert entries == logprobs


@BOTH
@FORMATS
def test_copied_eight_bit_kv_block_works_in_another_engine(
    load: Load, step_driver: ModuleType, kv_cache_dtype: str, cpu_kernels: str
) -> None:
    """Copy a block with its scales as bytes into another engine's cache, as connectors do."""
    first, second = (load("llama", kv_cache_dtype, cpu_kernels=cpu_kernels, batch_invariant=True) for _ in range(2))
    here, _ = played(step_driver, first, [70])
    there = step_driver.StepDriver(second, seed=9)
    there.add("a", PROMPT)
    there.skip("a", 68)
    source, target = first.kv_pages("m"), second.kv_pages("m")
    assert source.layout == target.layout
    assert source.layout.dtype == kv_cache_dtype
    for layer in range(source.layout.layer_count):
        for one, other in zip(here._tables["a"], there._tables["a"], strict=False):
            target.write(layer, BlockIndex(other), 0, source.read(layer, BlockIndex(one)))
    there.generate(["a"], 6)
    assert there.tokens["a"][:76] == here.tokens["a"][:76]


@FORMATS
def test_almost_twice_as_many_eight_bit_kv_blocks_fit_into_memory(
    tiny_checkpoint: Callable[..., Path], kv_cache_dtype: Any
) -> None:
    config = open_checkpoint(tiny_checkpoint("llama")).config
    wide, narrow = (kv_block_bytes(config, 16, "bfloat16", kind) for kind in ("plain", kv_cache_dtype))
    head_dim = config.heads.head_dim
    assert narrow / wide == (head_dim + 2) / (2 * head_dim)


@BOTH
@FORMATS
def test_eight_bit_kv_format_is_reported_in_log_and_fingerprint(
    load: Load, kv_cache_dtype: str, cpu_kernels: str
) -> None:
    runner, plain = (load("llama", kind, cpu_kernels=cpu_kernels) for kind in (kv_cache_dtype, "auto"))
    assert f"KV kept as {kv_cache_dtype}" in runner.computed_by
    # The fingerprint contains the format, so no stream resumes with another format.
    assert runner.arithmetic != plain.arithmetic
    assert (runner.kv_dtype, plain.kv_dtype) == (kv_cache_dtype, "float32")
    assert runner.kv_cache_bytes < plain.kv_cache_bytes / 2
    storage = runner.storage
    assert storage is not None
    assert sum(pages.nbytes for pages in storage.pages) == runner.kv_cache_bytes


def test_nan_in_eight_bit_kv_fails_only_its_request(load: Load, step_driver: ModuleType) -> None:
    runner = load("llama", "int8", cpu_kernels="native")
    driver = step_driver.StepDriver(runner)
    driver.add("a", PROMPT)
    driver.add("b", PROMPT[5:])
    driver.step({"a": 60, "b": 40})
    pages = runner.kv_pages("m")
    pages.write(0, BlockIndex(driver._tables["a"][3]), 0, memoryview(b"\xff" * pages.layout.token_bytes))
    result = driver.step({"a": 10, "b": 25})
    assert list(result.errors) == ["a"]


def test_unknown_kv_cache_dtype_is_refused() -> None:
    with pytest.raises(StartupError, match="kv_cache_dtype is 'int4', allowed is one of auto, int8, fp8"):
        ModelSettings(kv_cache_dtype=cast(Any, "int4"))


def test_latents_in_eight_bits_are_refused(tiny_checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(StartupError, match="keeps latents, which cannot be stored in 8 bits: use kv_cache_dtype auto"):
        ModelRunner.load(open_checkpoint(tiny_checkpoint("deepseek-v3")), ModelSettings(kv_cache_dtype="int8"))
