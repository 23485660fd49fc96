"""Sets up test processes before torch and tests are imported, orders tests, and selects a fraction of slow tests."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# Torch threads that wait for each other release their core soon. Otherwise tests with parallel work on two cores would
# take several times as long. The server sets this variable to the same value.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# Generated examples have no time limits, because their time depends on how busy the machine is.
hypothesis.settings.register_profile(
    "untimed",
    hypothesis.settings.default,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("untimed")

HERE = Path(__file__).parent

# Files and folders that take longest run first. Each test process takes one file at a time, so a long file at the end
# would keep one process busy while the other processes have no work.
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


@pytest.fixture(scope="session", autouse=True)
def kv_key_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Put the KV key, which all engines of a machine share, into a temporary folder instead of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIOSERVE_KV_KEY_DIRECTORY", str(tmp_path_factory.mktemp("kv-key")))
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slow-share",
        type=int,
        default=1,
        metavar="N",
        help="run one Nth of the slow tests, chosen by the commit, and all other tests (default: 1, all tests)",
    )


def pytest_report_header(config: pytest.Config) -> str | None:
    share = config.getoption("slow_share")
    return None if share == 1 else f"slow tests: one of {share}, chosen by commit {_commit()}; make test-all runs all"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def rank(item: pytest.Item) -> int:
        place = item.path.relative_to(HERE).as_posix()
        return next((rank for rank, name in enumerate(FIRST) if place.startswith(name)), len(FIRST))

    assert all((HERE / name).exists() for name in FIRST), "FIRST names a file that was moved"
    items.sort(key=rank)
    share = config.getoption("slow_share")
    if share > 1:
        commit = _commit()
        left_out = [item for item in items if item.get_closest_marker("slow") and not _is_chosen(item, share, commit)]
        names = {item.nodeid for item in left_out}
        items[:] = [item for item in items if item.nodeid not in names]
        config.hook.pytest_deselected(items=left_out)


def _commit() -> str:
    """Return the commit under test. Without git, return "", so that every run chooses the same tests."""
    try:
        found = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=HERE, capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return found.stdout.strip()


def _is_chosen(item: pytest.Item, share: int, commit: str) -> bool:
    """Return True if a slow test belongs to the fraction of slow tests that runs.

    Cases of a parametrized test are chosen one by one. All other tests of a file are chosen together, because they
    share servers and models.

    Args:
        item: a slow test.
        share: N, to run one Nth of the slow tests.
        commit: decides which tests are chosen.
    """
    name = item.nodeid if "[" in item.name else item.nodeid.partition("::")[0]
    return int.from_bytes(hashlib.blake2b(f"{commit} {name}".encode(), digest_size=8).digest()) % share == 0
