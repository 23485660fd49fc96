"""Tests that the runner gives the same responses with the Triton kernels and with the plain ones.

The tests cover chunks and decodes in one step, windows, normalized heads, prompts in pieces and longer than a tile,
drafts after decodes, and a cache full of NaN. Decodes of fixed shape are replayed from a recording: a CUDA graph, or
its replacement in the interpreter.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from trioserve.contracts.sampling import SamplingParams
from trioserve.model.torch_step import step_model as torch_step_model
from trioserve.model.torch_step.static_decode import Replay, StaticDecode
from trioserve_kernels import reference, triton
from trioserve_kernels.paged import SPLIT_TOKENS
from trioserve_kernels.triton.norm import rms_norm_kernel

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Operators that make the host wait for a number of the device. If gradients are disabled, torch does not decompose the
# outer operators.
READS = (
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.item.default,
    torch.ops.aten.is_nonzero.default,
)
PROMPTS = {"a": 36, "b": 2, "c": 9, "d": 8}


def responses(
    kernels: Any,
    path: Path,
    device: str,
    step_driver: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    kv_cache_dtype: str = "auto",
) -> Any:
    """Return the tokens, and the log-probabilities of prompts and responses."""
    monkeypatch.setattr(torch_step_model, "pick_kernels", lambda *_, **__: kernels)
    runner = step_driver.load_runner(path, device=device, cpu_kernels="torch", kv_cache_dtype=kv_cache_dtype)
    driver = step_driver.StepDriver(runner)
    for index, (name, length) in enumerate(PROMPTS.items()):
        sampling = SamplingParams(temperature=index % 2, top_p=0.9, logprobs=0, prompt_logprobs=0)
        driver.add(name, [(7 * length + 3 * position) % 320 for position in range(length)], sampling, seed=index)
    entries = []
    for counts in ({"a": 34, "b": 2}, {"a": 2, "b": 1, "c": 5, "d": 8}, {"a": 1, "b": 1, "c": 4, "d": 1}):
        result = driver.step(counts)
        assert not result.errors
        for found in (result.logprobs, *result.prompt_logprobs.values()):
            entries.extend(found.values() if isinstance(found, dict) else found)
    result = driver.step(dict.fromkeys(PROMPTS, 1), {"a": (5, 6, 7), "c": (9,), "d": tuple(range(40, 60))})
    assert not result.errors
    for found in result.draft_logprobs.values():
        entries.extend(found)
    return {**driver.tokens, **result.draft_token_ids}, [entry.logprob for entry in entries]


@pytest.mark.parametrize("kind", ("llama", "qwen2-sliding", "qwen3", "gpt-oss", "llama4", "gemma3n"))
def test_responses_equal_those_of_the_plain_kernels(
    kind: str,
    tiny_checkpoints: ModuleType,
    step_driver: ModuleType,
    device: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compare in float32, up to the order of sums."""
    tiny_checkpoints.write_checkpoint(tmp_path, kind, dtype="float32", sharded=False)
    tokens, logprobs = responses(triton, tmp_path, device, step_driver, monkeypatch)
    plain_tokens, plain_logprobs = responses(reference, tmp_path, "cpu", step_driver, monkeypatch)
    assert tokens == plain_tokens
    assert logprobs == pytest.approx(plain_logprobs, abs=2e-4)


def test_responses_with_kv_in_8_bits_equal_those_of_the_plain_kernels(
    tiny_checkpoints: ModuleType, step_driver: ModuleType, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key that differs in its last bit may get the next code. So the tolerance is larger than without 8 bits."""
    tiny_checkpoints.write_checkpoint(tmp_path, "llama", dtype="float32", sharded=False)
    tokens, logprobs = responses(triton, tmp_path, device, step_driver, monkeypatch, "int8")
    plain_tokens, plain_logprobs = responses(reference, tmp_path, "cpu", step_driver, monkeypatch, "int8")
    assert tokens == plain_tokens
    assert logprobs == pytest.approx(plain_logprobs, abs=1e-3)


class RecordedOperators(TorchDispatchMode):
    """Replacement of a CUDA graph without a GPU.

    It records every operator and every kernel launch with its tensors and numbers, and runs them again. As in a graph,
    decisions of the host are frozen.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]] = []
        from triton.runtime.interpreter import GridExecutor

        launch = GridExecutor.__call__

        def recorded(executor: Any, *arguments: Any, **options: Any) -> None:
            with _disable_current_modes():
                launch(executor, *arguments, **options)
            if _is_recording(self):
                self.calls.append((launch, (executor, *arguments), options, None))

        monkeypatch.setattr(GridExecutor, "__call__", recorded)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in READS, "the host reads a number while it is recorded"
        output = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, output))
        return output

    def replay(self) -> None:
        for call, arguments, options, output in self.calls:
            again = call(*arguments, **options)
            for old, new in zip(_tensors(output), _tensors(again), strict=True):
                if old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                    old.copy_(new)


def _is_recording(mode: TorchDispatchMode) -> bool:
    return mode in torch.utils._python_dispatch._get_current_dispatch_mode_stack()


def _tensors(output: Any) -> list[Tensor]:
    parts = output if isinstance(output, tuple | list) else (output,)
    return [part for part in parts if isinstance(part, Tensor)]


def test_responses_of_replayed_decodes_equal_those_of_the_plain_kernels(
    tiny_checkpoints: ModuleType,
    step_driver: ModuleType,
    device: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Use 1 row, and 3 rows in a recording of size 4, which grow into new blocks, greedy and drawn.

    Compare in float32, up to the order of sums.
    """
    tiny_checkpoints.write_checkpoint(tmp_path, "qwen3", dtype="float32", sharded=False)
    replayed: list[int] = []

    def record(compute: Callable[[], Any]) -> Replay:
        operators = RecordedOperators(monkeypatch)
        with operators:
            rows = len(compute())

        def replay() -> None:
            replayed.append(rows)
            operators.replay()

        return replay

    def generate(kernels: Any, place: str) -> Any:
        monkeypatch.setattr(torch_step_model, "pick_kernels", lambda *_, **__: kernels)
        runner = step_driver.load_runner(
            tmp_path, device=place, cpu_kernels="torch", max_num_seqs=4, max_num_batched_tokens=64
        )
        runner.warm_up()
        del replayed[:]
        driver = step_driver.StepDriver(runner)
        for index, (name, length) in enumerate({"a": 31, "b": 2, "c": 9}.items()):
            sampling = SamplingParams(temperature=index % 2, top_p=0.9)
            driver.add(name, [(7 * length + 3 * position) % 320 for position in range(length)], sampling, seed=index)
        driver.generate("a", 2)
        driver.generate("abc", 3)
        return driver.tokens

    prepare = StaticDecode.__init__
    with monkeypatch.context() as patch:
        if device == "cpu":
            patch.setattr(
                StaticDecode, "__init__", lambda self, *args, **kw: prepare(self, *args, **kw | {"record": record})
            )
        tokens = generate(triton, device)
        if device == "cpu":
            assert replayed == [64, 1, 64, 4, 4]
    assert tokens == generate(reference, "cpu")


class WatchedCopies(TorchDispatchMode):
    """Counts transfers between host and device on any device. It fails for a transfer that the host waits for.

    It does not look into kernels, because the interpreter runs them with such transfers.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.copies = 0
        if triton_kernels_are_interpreted():
            from triton.runtime.interpreter import GridExecutor

            launch = GridExecutor.__call__

            def unwatched(executor: Any, *arguments: Any, **options: Any) -> None:
                with _disable_current_modes():
                    launch(executor, *arguments, **options)

            monkeypatch.setattr(GridExecutor, "__call__", unwatched)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        assert func not in READS, "the host waits for a number"
        assert func is not aten.lift_fresh.default, "a number is sent by itself"
        if func is aten.to.dtype_layout:  # numpy() also calls this operator.
            assert (kwargs or {}).get("device") in (None, args[0].device), "something is sent by itself"
        if func is aten._to_copy.default:
            assert "device" not in (kwargs or {}), "something is sent by itself"
        if func is aten.copy_.default and len(args) == 3:
            self.copies += args[2]  # This argument is non_blocking.
        return func(*args, **(kwargs or {}))


def triton_kernels_are_interpreted() -> bool:
    return not torch.cuda.is_available()


# torch warns when the mode is first set. If the warning were an error, it would leave the mode unchanged.
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature:UserWarning")
@pytest.mark.parametrize("enforce_eager", (False, True), ids=("static", "eager"))
def test_host_never_waits_between_steps_and_each_step_makes_three_copies(
    enforce_eager: bool,
    tiny_checkpoints: ModuleType,
    step_driver: ModuleType,
    device: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Use prompts with decodes, decodes alone, greedy and drawn, with penalties and logprobs.

    One copy sends the inputs of the layers, one copy what the rows sample with, and one returns the results. The result
    of a step is read after the launch of the next step, which reads the tokens on the device.
    """
    tiny_checkpoints.write_checkpoint(tmp_path, "llama", dtype="float32", sharded=False, layers=1)
    steps = ({"a": 9, "b": 20}, {"a": 1, "b": 11}, {"a": 1, "b": 1}, {"b": 1}, {"b": 1, "a": 1, "c": 5})

    def make_driver(kernels: Any, place: str) -> Any:
        monkeypatch.setattr(torch_step_model, "pick_kernels", lambda *_, **__: kernels)
        runner = step_driver.load_runner(
            tmp_path,
            device=place,
            cpu_kernels="torch",
            max_num_seqs=4,
            max_num_batched_tokens=64,
            enforce_eager=enforce_eager,
        )
        runner.warm_up()
        driver = step_driver.StepDriver(runner)
        for index, (name, length) in enumerate({"a": 9, "b": 31, "c": 5}.items()):
            more = ({}, {"repetition_penalty": 1.2, "logprobs": 2}, {"logit_bias": {7: 2.0}, "min_tokens": 3})[index]
            sampling = SamplingParams(temperature=index % 2, top_p=0.9, **more)
            driver.add(name, [(7 * length + 3 * position) % 320 for position in range(length)], sampling, seed=index)
        return driver

    driver = make_driver(triton, device)
    finish = None
    for counts in steps:
        watched = WatchedCopies(monkeypatch)
        try:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("error")
            with watched:
                launched = driver.launch(counts)
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
        assert watched.copies == 3
        if finish is not None:
            assert not finish().errors
        finish = launched
    assert finish is not None
    assert not finish().errors
    plain = make_driver(reference, "cpu")
    for counts in steps:
        plain.step(counts)
    assert driver.tokens == plain.tokens


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> set[tuple[Any, ...]]:
    """Return what Triton compiles for the launches of this test: kernel, constants, dtypes and integer classes."""
    found: set[tuple[Any, ...]] = set()
    kernel_type: Any = type(rms_norm_kernel)
    run = kernel_type.run

    def variant(kernel: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Iterator[Any]:
        yield kernel.fn.__name__
        unspecialized = (kernel.kwargs if INTERPRETED else vars(kernel))["do_not_specialize"] or ()
        for name, value in (*zip(kernel.arg_names, arguments, strict=False), *sorted(options.items())):
            if isinstance(value, Tensor):
                yield name, value.dtype, value.data_ptr() % 16 == 0
            elif isinstance(value, float):
                yield name
            elif name in options:  # The values are constants of the kernel and options of the launch.
                yield name, value
            else:
                yield name, value.bit_length() > 31, name not in unspecialized and (value == 1, value % 16 == 0)

    def noted(kernel: Any, *arguments: Any, **options: Any) -> Any:
        rest = {name: value for name, value in options.items() if name not in ("grid", "warmup")}
        found.add(tuple(variant(kernel, arguments, rest)))
        return run(kernel, *arguments, **options)

    monkeypatch.setattr(kernel_type, "run", noted)
    return found


# One layer of each kind.
@pytest.mark.parametrize(
    "kind, layers, enforce_eager", (("qwen3", 1, False), ("qwen2-sliding", 2, True)), ids=("static", "eager")
)
def test_warm_up_compiles_everything_that_steps_launch(
    kind: str,
    layers: int,
    enforce_eager: bool,
    compiled: set[tuple[Any, ...]],
    tiny_checkpoints: ModuleType,
    step_driver: ModuleType,
    device: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Use prompts and their pieces, decodes of one and two parts in the same step and alone, all sampling options, and
    drafts.

    Run in float16, because scores that sampling options change are float32 for every dtype of the model.
    """
    tiny_checkpoints.write_checkpoint(tmp_path, kind, dtype="float32", sharded=False, layers=layers)
    monkeypatch.setattr(torch_step_model, "pick_kernels", lambda *_, **__: triton)
    runner = step_driver.load_runner(
        tmp_path,
        dtype="float16",
        device=device,
        cpu_kernels="torch",
        max_num_seqs=4,
        max_num_batched_tokens=64,
        enforce_eager=enforce_eager,
    )
    runner.warm_up()
    assert {name for name, *_ in compiled} == {
        "best_parts_kernel",
        "choose_kernel",
        "chunks_kernel",
        "decode_kernel",
        "rms_norm_kernel",
        "rotary_store_kernel",
        "activate_mul_kernel",
    }
    before = frozenset(compiled)
    driver = step_driver.StepDriver(runner)
    driver.add("a", [5, 6], SamplingParams(temperature=0.0))
    driver.add("b", [index % 320 for index in range(SPLIT_TOKENS + 9)], SamplingParams(temperature=1.0, top_p=0.9))
    driver.add("c", [7] * 20, SamplingParams(temperature=0.0, logit_bias={5: 1.0}, logprobs=1, prompt_logprobs=1))
    driver.add("d", [8] * 9, SamplingParams(temperature=1.0, repetition_penalty=1.1, min_tokens=9), stop_token_ids=[9])
    for name in "efg":
        driver.add(name, [3, 4], SamplingParams(temperature=0.0))
    for counts, drafts in (
        ({"a": 2}, {}),
        ({"a": 1}, {}),
        ({"a": 1, "b": SPLIT_TOKENS + 8}, {}),
        ({"a": 1, "b": 1}, {}),
        ({"a": 1, "b": 1, "c": 15}, {}),
        ({"a": 1, "c": 5, "d": 9}, {}),
        ({"a": 1, "b": 1, "c": 1, "d": 1}, {}),
        ({"a": 1, "b": 1, "c": 1, "d": 1}, {"b": (5, 6)}),
        ({"a": 1, "e": 2, "f": 2, "g": 2}, {}),
        ({"a": 1, "e": 1}, {"a": (5,)}),
        ({"b": 1}, {}),
    ):
        driver.step(counts, drafts)
        assert compiled == before, counts
