"""Tests of the GPU measurement on a CPU: refusals, plans and bounds. Its figures need a GPU."""

from __future__ import annotations

import argparse
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from trioserve.bench.inside import gpu_bench
from trioserve.bench.inside.gpu_bench import Case, add_arguments, bound_seconds, run, table
from trioserve.contracts.step import StepPlan, StepResult
from trioserve.model.real_shapes import SHAPES
from trioserve.model.runner import ModelRunner
from trioserve.model.torch_step_model import TorchStepModel

TINY = ["--device", "cpu", "--shape", "tiny", "--batch", "1", "3", "--context", "50"]


def measured(words: list[str]) -> int:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args(words))


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests what happens without a CUDA device")
def test_gpu_bench_refuses_to_run_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert measured([]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("torch sees no CUDA device")
    assert "--device cpu --shape tiny" in said.err


@pytest.mark.parametrize(
    "arguments, sentence",
    (
        (["--device", "cpu"], "use --shape tiny, not llama-3.2-1b llama-3.1-8b qwen3-8b"),
        ([*TINY, "--ways", "torch", "graphs"], "--ways has graphs, but --device cpu has torch, static"),
        ([*TINY, "--context", "50000"], "--context has 50000, but these shapes allow up to 40960 tokens"),
    ),
)
def test_cases_that_cannot_be_measured_are_refused_with_a_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert measured(arguments) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", (["--batch", "0"], ["--context", "-1"], ["--shape", "gpt-2"], ["--device", "tpu"])
)
def test_values_out_of_range_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        measured(arguments)
    assert refused.value.code == 2


def test_shapes_have_the_number_of_weights_of_their_models() -> None:
    """A step reads 1.24, 8.03 and 8.19 billion weights. The embedding counts only if the model's head uses it."""
    read = {}
    for name, config in SHAPES.items():
        read[name] = bound_seconds(config, "bfloat16", Case(0, 1), bytes_per_second=2e9)
    assert read["llama-3.2-1b"] == pytest.approx(1.2358, abs=1e-3)
    assert read["llama-3.1-8b"] == pytest.approx(8.0303 - 0.5253, abs=1e-3)
    assert read["qwen3-8b"] == pytest.approx(8.1907 - 0.6223, abs=1e-3)


def test_bound_of_a_step_includes_the_kv_of_every_token() -> None:
    config = SHAPES["llama-3.1-8b"]
    weights, whole = (bound_seconds(config, "bfloat16", case, 1.0) for case in (Case(0, 1), Case(64, 1024)))
    assert whole - weights == 64 * 1024 * 2 * 32 * 8 * 128 * 2


def test_gpu_table_has_a_line_per_case_and_dashes_for_missing_values() -> None:
    one, many = Case(1, 256), Case(256, 4096)
    shown = table({one: 0.005, many: 0.050}, {"torch": {one: 0.020}, "graphs": {one: 0.00625, many: 0.0625}})
    head, first, second = (re.split(r"\s{2,}", line.strip()) for line in shown.splitlines())
    assert head == ["batch", "context", "bound, ms", "torch", "graphs"]
    assert first == ["1", "256", "5.000", "20.000 (25%)", "6.250 (80%)"]
    assert second == ["256", "4096", "50.000", "-", "62.500 (80%)"]


@pytest.mark.slow
def test_gpu_bench_runs_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert measured([*TINY, "--sampled"]) == 0
    said = capsys.readouterr().out
    rows = [line.split() for line in said.splitlines() if re.match(r"\s+[0-9]+\s", line)]
    assert [row[:2] for row in rows] == [["1", "50"], ["3", "50"]]
    assert all(len(re.findall(r"[0-9.]+ \([0-9]+%\)", " ".join(row))) == 3 for row in rows)
    assert "static, overlapped" in said


@pytest.mark.slow
def test_overlapped_steps_are_launched_before_the_last_tokens_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step is launched while only the one before it is unfinished, and returns a token for every row."""
    unfinished: list[StepPlan] = []
    results: list[StepResult | None] = []
    launch = ModelRunner.launch

    def watched(self: ModelRunner, plan: StepPlan) -> Callable[[], StepResult | None]:
        assert len(unfinished) == plan.is_ahead
        assert all(chunk.awaits_token == plan.is_ahead for chunk in plan.chunks)
        finish = launch(self, plan)
        unfinished.append(plan)

        def finished() -> StepResult | None:
            unfinished.pop(0)
            results.append(finish())
            return results[-1]

        return finished

    monkeypatch.setattr(ModelRunner, "launch", watched)
    monkeypatch.setattr(ModelRunner, "execute", lambda self, plan: launch(self, plan)())
    assert measured([*TINY, "--ways", "static"]) == 0
    assert not unfinished
    assert len(results) > 10
    for result in results:
        assert result is not None
        assert not result.errors
        assert None not in result.token_ids


@pytest.mark.slow
def test_kv_cache_of_a_runner_is_freed_before_the_next_runner_is_created(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its memory would count as in use."""
    pages: list[weakref.ref[torch.Tensor]] = []
    allocate, make = TorchStepModel.allocate_kv, gpu_bench._make_runner

    def noted(self: TorchStepModel, *sizes: Any) -> None:
        allocate(self, *sizes)
        assert self.storage is not None
        pages.extend(map(weakref.ref, self.storage.pages))

    def made(*arguments: Any) -> ModelRunner:
        assert [page() for page in pages] == [None] * len(pages)
        return make(*arguments)

    monkeypatch.setattr(TorchStepModel, "allocate_kv", noted)
    monkeypatch.setattr(gpu_bench, "_make_runner", made)
    assert measured(TINY) == 0
    assert pages


@pytest.mark.slow
def test_case_whose_kv_does_not_fit_is_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        measured(["--device", "cpu", "--shape", "tiny", "--batch", "1", "4000", "--context", "200", "--ways", "torch"])
        == 0
    )
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if re.match(r"\s+[0-9]+\s", line)]
    assert [row[-1] for row in rows][1] == "-"
    assert rows[0][-1] != "-"
