"""Tests that torch is optional. The error of a feature that needs torch names the command that installs it."""

from __future__ import annotations

import importlib.util

import pytest

from trioserve.contracts.errors import StartupError
from trioserve.contracts.extras import install_command
from trioserve.model import device
from trioserve.model.settings import ModelSettings


@pytest.fixture(autouse=True)
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else find_spec(name))


def test_required_cuda_device_needs_torch() -> None:
    with pytest.raises(StartupError, match=r"device cuda needs torch.*pip install .*\[torch\]'"):
        device.pick_device(ModelSettings(device="cuda"))


def test_gpu_is_ignored_without_torch(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(device, "has_cuda_driver", lambda: True)
    assert device.pick_device(ModelSettings()) == "cpu"
    assert install_command("gpu") in caplog.text
