"""What every test process needs before torch and any test is imported, and which tests come first."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import pytest

# Threads of torch that wait for each other give a busy core back soon: on two cores with parallel work, tests would
# otherwise take several times as long. The server sets the same.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# How long an example takes, or is drawn, says how busy the machine is.
hypothesis.settings.register_profile(
    "untimed",
    hypothesis.settings.default,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("untimed")

# What is shared out among processes file by file begins with what takes longest, or one of them is busy with a single
# file while the others have nothing left.
FIRST = (
    "kernels/test_without_gpu.py",
    "sim/test_planted_bugs.py",
    "end_to_end",
    "page",
    "docs",
    "kernels",
    "model",
    "sim",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = f"{Path(__file__).parent.as_posix()}/"

    def rank(item: pytest.Item) -> int:
        place = item.path.as_posix().removeprefix(here)
        return next((rank for rank, name in enumerate(FIRST) if place.startswith(name)), len(FIRST))

    items.sort(key=rank)
