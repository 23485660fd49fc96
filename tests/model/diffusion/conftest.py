"""Tiny random models, written once a session, and the two helpers that these tests share."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from trioserve.model.diffusion.runner import DiffusionRunner


def _neighbour(name: str) -> ModuleType:
    # pytest's importlib mode leaves sys.path alone, so a neighbouring helper is loaded by its path.
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    """The module tiny_pipelines itself."""
    return _neighbour("tiny_pipelines")


@pytest.fixture(scope="session")
def driver() -> ModuleType:
    """The module picture_driver itself: load, request, Driver, latents."""
    return _neighbour("picture_driver")


@pytest.fixture(scope="session")
def checkpoint(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """checkpoint(family) -> directory. It is shared: copy it before changing it."""
    made: dict[str, Path] = {}

    def write(family: str) -> Path:
        if family not in made:
            made[family] = tiny.SAVES[family](tmp_path_factory.mktemp("models") / family)
        return made[family]

    return write


@pytest.fixture(scope="session")
def runner(driver: ModuleType, checkpoint: Callable[[str], Path]) -> Callable[[str], DiffusionRunner]:
    """runner(family), in float32 on the CPU. It is shared, and its slots are whoever's uses them."""
    loaded: dict[str, DiffusionRunner] = {}

    def load(family: str) -> DiffusionRunner:
        if family not in loaded:
            loaded[family] = driver.load(checkpoint(family))
        return loaded[family]

    return load
