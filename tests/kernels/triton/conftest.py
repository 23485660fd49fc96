"""Fixtures of the Triton tests, which run on a CUDA device or in Triton's interpreter.

TRITON_INTERPRET=1 must be set before anything imports triton. So without a GPU these tests run in a separate process,
which ../test_without_gpu.py starts. In other processes they are not collected.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy
import pytest
import torch
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_TRITON = importlib.util.find_spec("triton") is not None

collect_ignore_glob = [] if HAS_TRITON and (INTERPRETED or torch.cuda.is_available()) else ["test_*.py"]

# Tolerance against the float64 reference on the same inputs, relative to numbers above 1. In float32 only the order of
# sums differs. In 16 bits, the result is rounded once: up to 2 ** -8 of its size in bfloat16, 2 ** -11 in float16. The
# interpreter truncates bfloat16, which gives up to 2 ** -7. Attention also rounds the weights of the values.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not INTERPRETED and item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def device() -> str:
    return "cpu" if INTERPRETED else "cuda"


class _InOrder:
    """numpy with a matmul that sums in the order of the terms. The interpreter computes tl.dot with matmul.

    On some processors, numpy sums the rows of one product in different orders. A GPU's tile has one order for all rows.
    """

    def __getattr__(self, name: str) -> object:
        return getattr(numpy, name)

    @staticmethod
    def matmul(left: numpy.ndarray, right: numpy.ndarray, dtype: numpy.dtype) -> numpy.ndarray:
        return (left.astype(dtype)[..., None] * right.astype(dtype)[..., None, :, :]).sum(axis=-2, dtype=dtype)


@pytest.fixture(scope="session", autouse=True)
def _products_in_order() -> Iterator[None]:
    if not INTERPRETED:
        yield
        return
    from triton.runtime import interpreter

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "np", _InOrder())
        yield


@pytest.fixture(params=(torch.float32, torch.float16, torch.bfloat16), ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """Skip bfloat16 in the interpreter, where tl.dot gives wrong results for it."""
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("the interpreter cannot multiply matrices in bfloat16")
    return dtype


@pytest.fixture(scope="session")
def numbers(device: str) -> Callable[..., Tensor]:
    """Return numbers(*shape, dtype=float32, seed=0), which makes normally distributed tensors."""

    def make(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)

    return make


@pytest.fixture(scope="session")
def check_close() -> Callable[[Tensor, Tensor], None]:
    """Return check_close(got, wanted), where `wanted` is float64."""

    def check(got: Tensor, wanted: Tensor) -> None:
        assert wanted.dtype == torch.float64
        assert got.shape == wanted.shape
        error = (got.double() - wanted).abs() / wanted.abs().clamp(min=1.0)
        assert error.max() < TOLERANCES[got.dtype]

    return check


def _helper_of_the_model_tests(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[2] / "model" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tiny_checkpoints() -> ModuleType:
    pytest.importorskip("transformers", reason="transformers, which writes the models, is not installed")
    return _helper_of_the_model_tests("tiny_checkpoints")


@pytest.fixture(scope="session")
def step_driver() -> ModuleType:
    return _helper_of_the_model_tests("step_driver")


@pytest.fixture(scope="session")
def histories() -> ModuleType:
    return _helper_of_the_model_tests("histories")
