"""Tests of the image measurement with a tiny model: leaving clients release all resources, and images are equal."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from trioserve.assemble_images import open_image_engine
from trioserve.bench.inside.command import run_inside
from trioserve.bench.inside.image_bench import ImageRequester
from trioserve.contracts.errors import ModelLoadError
from trioserve.contracts.image_generation import RGBImage


@pytest.fixture
def tiny_model(tmp_path: Path) -> Path:
    place = Path(__file__).parents[2] / "model" / "diffusion" / "tiny_pipelines.py"
    spec = importlib.util.spec_from_file_location("tiny_pipelines", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.save_dit(tmp_path / "dit")
    return tmp_path / "dit"


@pytest.mark.slow
def test_image_bench_has_clients_that_leave_in_every_phase_and_every_case_generates_images(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_engine(*_arguments: Any, **_options: Any) -> None:
        raise AssertionError("no engine of texts is needed")

    flags = ["--model", str(tiny_model), "--batch", "3", "--steps", "6", "--rounds", "1", "--leavers", "2"]
    assert run_inside(["images", *flags], open_engine=no_engine, open_image_engine=open_image_engine) == 0
    *table, line = capsys.readouterr().out.splitlines()
    figures = json.loads(line)
    cases = [(figure["phase"], figure["others"]) for figure in figures["leaving"]]
    slotted = [(phase, others) for phase in ("encode", "denoise", "decode", "send") for others in (0, 2)]
    assert cases == [("queued", 3), *slotted]
    for figure in figures["leaving"]:
        assert figure["count"] == 2
        assert figure["median_ms"] <= figure["most_ms"]
        # The slot is free before the response is sent.
        assert (figure["median_ms"] < 0) == (figure["phase"] == "send"), figure
    assert 0 <= figures["pipeline"]["steps"] <= 6 - 6 // 2 - 1
    (only,) = figures["rounds"]
    assert min(only.values()) > 0
    assert len(table) > len(cases)


def test_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="name a directory written by diffusers' save_pretrained"):
        run_inside(
            ["images", "--model", str(tmp_path)], open_engine=open_image_engine, open_image_engine=open_image_engine
        )


class _SomeEngine:
    class limits:
        steps_max = 9

    class model:
        classes = ("a", "b")


def test_image_of_the_pipeline_may_differ_only_by_rounding() -> None:
    asked = ImageRequester(_SomeEngine(), steps=4, guidance=1.0)  # type: ignore[arg-type]
    made = RGBImage(1, 1, bytes((10, 20, 30)))
    asked.note(5, made)
    asked.note(5, made)
    asked.compare([5], [RGBImage(1, 1, bytes((12, 19, 30)))])
    with pytest.raises(AssertionError, match="seed 5: the pipeline's image differs by 3 levels"):
        asked.compare([5], [RGBImage(1, 1, bytes((13, 20, 30)))])
    with pytest.raises(AssertionError, match="seed 5 gave two different images"):
        asked.note(5, RGBImage(1, 1, bytes((10, 20, 31))))
    assert [asked.prompt(seed) for seed in range(3)] == ["a", "b", "a"]
