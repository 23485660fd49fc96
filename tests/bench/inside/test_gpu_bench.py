"""Tests of the GPU measurement on a CPU: refusals, plans and bounds. Its figures need a GPU."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trioserve.bench.inside.gpu import command, kernel_checks, steps
from trioserve.bench.inside.gpu.command import add_arguments, run
from trioserve.bench.inside.gpu.machine import Part
from trioserve.bench.inside.gpu.steps import Case, bound_seconds, table
from trioserve.contracts.step import StepPlan, StepResult
from trioserve.model.real_shapes import SHAPES
from trioserve.model.runner import ModelRunner
from trioserve.model.torch_step.step_model import TorchStepModel
from trioserve_kernels import reference_fused

ON_CPU = ["--device", "cpu", "--shape", "tiny"]
TINY = [*ON_CPU, "--parts", "decodes", "--batch", "1", "3", "--context", "50"]


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
        (["--device", "cpu"], "use --shape tiny, not llama-3.1-8b llama-3.2-1b qwen3-30b-a3b"),
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
    "arguments", (["--parts", "all"], ["--batch", "0"], ["--context", "-1"], ["--shape", "gpt-2"], ["--device", "tpu"])
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
def test_decodes_have_a_table_for_each_sampling(capsys: pytest.CaptureFixture[str]) -> None:
    assert measured(TINY) == 0
    said = capsys.readouterr().out
    rows = [line.split() for line in said.splitlines() if re.match(r"\s+[0-9]+\s", line)]
    assert [row[:2] for row in rows] == [["1", "50"], ["3", "50"]] * len(steps.SAMPLINGS)
    assert [len(re.findall(r"[0-9.]+ \([0-9]+%\)", " ".join(row))) for row in rows] == [3, 3, *[2, 2] * 4]
    assert "static, overlapped" in said


@pytest.mark.slow
def test_every_part_runs_on_a_cpu_and_stores_its_figures(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Every part runs in a process of its own, the server included. Decodes have their own test."""
    parts = [name for name in command.PARTS_SECONDS if name != "decodes"]
    assert measured([*ON_CPU, "--seconds", "3000", "--out", str(tmp_path), "--parts", *parts]) == 0
    said = capfd.readouterr().out
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert list(dict.fromkeys(row["part"] for row in rows)) == parts
    for name in parts:
        assert f"=== {name}: complete" in said
    assert "=== served" in (tmp_path / "log.txt").read_text()
    assert (tmp_path / "served.log").stat().st_size
    verdicts = [row["verdict"] for row in rows if "verdict" in row]
    assert len(verdicts) > 20
    assert set(verdicts) == {"right"}
    (left,) = (row for row in rows if row["what"] == "tiny, half of the clients leave")
    assert (left["completed"], left["aborted"], left["failed"]) == (2, 2, 0)
    (freed,) = (row for row in rows if row["what"] == "trioserve:cancel_to_free_steps")
    assert freed["count"] in (1, 2), "a response may end before its client leaves"


@pytest.mark.parametrize("wrong", ("too large", "no number"))
def test_wrong_result_of_a_kernel_is_reported_with_exit_code_1(
    wrong: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class WrongKernels:
        def __getattr__(self, name: str) -> object:
            return getattr(reference_fused, name)

        def activate_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
            result = reference_fused.activate_and_mul(gate_up)
            result[-1, -1] += 0.5 if wrong == "too large" else float("nan")
            return result

    monkeypatch.setattr(kernel_checks, "kernels_of", lambda _part: WrongKernels())
    assert measured([*ON_CPU, "--parts", "checks"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert {line.split(",")[0] for line in lines if "WRONG" in line} == {"activate_and_mul"}
    assert any("verdict right" in line for line in lines)


def test_part_without_time_is_cut_off_with_exit_code_3(capsys: pytest.CaptureFixture[str]) -> None:
    assert measured([*ON_CPU, "--parts", "kernels", "--seconds", "0"]) == 3
    assert "time is over" in capsys.readouterr().out


def test_failed_part_does_not_end_the_other_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Exit codes: 3 if only time was missing, 1 if one part crashed."""
    codes = {"machine": 0, "checks": 3, "kernels": -9}
    began: list[str] = []

    def child(words: list[str], **_options: object) -> subprocess.CompletedProcess[str]:
        name = words[words.index("--parts") + 1]
        began.append(name)
        return subprocess.CompletedProcess(words, codes[name], f"figures of {name}\n")

    monkeypatch.setattr(subprocess, "run", child)
    assert measured([*ON_CPU, "--parts", "machine", "kernels", "checks", "--out", str(tmp_path)]) == 1
    assert began == ["machine", "kernels", "checks"]
    assert "figures of kernels" in (tmp_path / "log.txt").read_text()
    assert measured([*ON_CPU, "--parts", "machine", "checks"]) == 3
    assert measured([*ON_CPU, "--parts", "machine", "machine"]) == 0


def test_part_that_hangs_is_killed_and_keeps_its_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def hang(words: list[str], *, timeout: float, **_options: object) -> None:
        raise subprocess.TimeoutExpired(words, timeout, b"one figure\n")

    monkeypatch.setattr(subprocess, "run", hang)
    assert measured([*ON_CPU, "--parts", "machine", "checks"]) == 3
    said = capsys.readouterr().out
    assert said.count("one figure\nthe process was killed\n") == 2


def test_kernel_times_count_the_bytes_of_every_number() -> None:
    """A decode reads the keys and values of its context once, and the queries and results of its rows."""
    gpu = Part("attention", "cpu", 60.0)
    gpu.device = "cuda"  # Only names and sizes are made; no kernel is launched.
    timed = {one.name: one for one in kernel_checks._attention_kernels(gpu, 32, 8)}
    decode = timed["paged_decode_, heads of 128, 64 x 4096, captured for 131072"]
    assert decode.moved_bytes == 64 * (4_096 * 2 * 8 * 128 + 2 * 32 * 128) * 2
    chunk = timed["paged_chunks_, heads of 128, 1 x 8192 of 8192"]
    assert chunk.operations == 4 * 32 * 128 * 8_192 * 4_096


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
    """If the old cache were not freed, the new runner would count its memory as in use."""
    pages: list[weakref.ref[torch.Tensor]] = []
    allocate, make = TorchStepModel.allocate_kv, steps.make_runner

    def noted(self: TorchStepModel, *sizes: Any) -> None:
        allocate(self, *sizes)
        assert self.storage is not None
        pages.extend(map(weakref.ref, self.storage.pages))

    def made(*arguments: Any) -> ModelRunner:
        assert [page() for page in pages] == [None] * len(pages)
        return make(*arguments)

    monkeypatch.setattr(TorchStepModel, "allocate_kv", noted)
    monkeypatch.setattr(steps, "make_runner", made)
    assert measured(TINY) == 0
    assert pages


@pytest.mark.slow
def test_case_whose_kv_does_not_fit_is_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    assert measured([*ON_CPU, "--parts", "decodes", "--batch", "1", "4000", "--context", "200", "--ways", "torch"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if re.match(r"\s+[0-9]+\s", line)]
    assert [row[-1] == "-" for row in rows] == [False, True] * len(steps.SAMPLINGS)
