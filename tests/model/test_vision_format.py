"""Tests of the number format of the image encoder."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from trioserve.model.runner import ModelRunner


@pytest.fixture(scope="module")
def seeing(tiny_vision: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("seeing")
    tiny_vision.write_checkpoint(path, "smolvlm", dtype="bfloat16")
    return path


def rows(runner: ModelRunner) -> np.ndarray[Any, Any]:
    assert runner.vision is not None
    plan = runner.vision.processing.plan(5, 5)
    shape = (plan.tile_count, plan.tile_height, plan.tile_width, 3)
    tiles = np.random.default_rng(1).integers(0, 256, shape).astype(np.uint8)
    encoding = runner.vision.begin(tiles, plan)
    while not encoding.advance():
        pass
    return encoding.rows


@pytest.mark.parametrize("multiplies", [False, True])
def test_image_encoder_of_a_bfloat16_model_uses_a_format_that_the_cpu_multiplies(
    multiplies: bool, cpu_kernels: str, seeing: Path, step_driver: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trioserve.model.device.multiplies_bfloat16", lambda root: multiplies)
    exact = step_driver.load_runner(seeing, cpu_kernels=cpu_kernels)
    rounded = step_driver.load_runner(seeing, cpu_kernels=cpu_kernels, dtype="bfloat16")
    assert rounded.dtype == "bfloat16"
    assert exact.vision.dtype == "float32"
    assert rounded.vision.dtype == ("bfloat16" if multiplies else "float32")
    assert np.array_equal(rows(rounded), rows(exact)) is not multiplies
    # This text decides if a stream may resume at another engine, and if batch-invariant engines exchange KV.
    assert ("images in float32" in rounded.arithmetic) is not multiplies
    assert "images" not in exact.arithmetic
    for runner in (exact, rounded):
        runner.close()
