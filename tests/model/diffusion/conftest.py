"""Fixtures: tiny random models, written once per session, and the helper modules of these tests."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from trioserve.model.diffusion.runner import DiffusionRunner


def _neighbour(name: str) -> ModuleType:
    # pytest's importlib mode does not change sys.path, so a helper module is loaded by its path.
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    """Return the module tiny_pipelines."""
    return _neighbour("tiny_pipelines")


@pytest.fixture(scope="session")
def driver() -> ModuleType:
    """Return the module image_driver: load, request, Driver, latents."""
    return _neighbour("image_driver")


@pytest.fixture(scope="session")
def checkpoint(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return checkpoint(family), which writes a directory. Tests share it, so copy it before changing it."""
    made: dict[str, Path] = {}

    def write(family: str) -> Path:
        if family not in made:
            made[family] = tiny.SAVES[family](tmp_path_factory.mktemp("models") / family)
        return made[family]

    return write


@pytest.fixture(scope="session")
def runner(driver: ModuleType, checkpoint: Callable[[str], Path]) -> Callable[[str], DiffusionRunner]:
    """Return runner(family), in float32 on the CPU. Tests share it, and each may overwrite all slots."""
    loaded: dict[str, DiffusionRunner] = {}

    def load(family: str) -> DiffusionRunner:
        if family not in loaded:
            loaded[family] = driver.load(checkpoint(family))
        return loaded[family]

    return load
