"""Fixtures: tiny checkpoints, and groups of real rank processes."""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from trioserve.model.settings import ModelSettings
from trioserve.ranks.group import RankGroup, open_ranks
from trioserve.ranks.host import host_ranks
from trioserve.ranks.messages import Progress, RankSetup

BLOCK_SIZE = 4


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that writes a tiny float32 checkpoint of a kind and returns its directory."""
    path = Path(__file__).parent.parent / "model" / "tiny_checkpoints.py"
    spec = importlib.util.spec_from_file_location("tiny_checkpoints", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made: dict[str, Path] = {}

    def model(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            module.write_checkpoint(made[kind], kind, dtype="float32", sharded=False)
        return made[kind]

    return model


@dataclass
class RealRanks:
    group: RankGroup
    progress: list[Progress] = field(default_factory=list)
    on_progress: Callable[[], None] = lambda: None


OpenRealRanks = Callable[..., Any]


@pytest.fixture
def real_ranks() -> OpenRealRanks:
    """Return a context manager that opens a group of real processes for a checkpoint.

    With the argument `paths`, some ranks load another checkpoint.
    """

    @asynccontextmanager
    async def opened(
        path: Path,
        size: int = 2,
        answer_seconds_max: float | None = None,
        meeting_port: int = 0,
        paths: Mapping[int, Path] = MappingProxyType({}),
    ) -> AsyncIterator[RealRanks]:
        setups = [
            RankSetup(
                rank=rank,
                size=size,
                path=str(paths.get(rank, path)),
                settings=ModelSettings(device="cpu", block_size=BLOCK_SIZE, kv_cache_bytes=2**22, threads=1),
                context_tokens=None,
                uses_further_layers=False,
                expert_parallel=False,
                meeting_port=meeting_port,
            )
            for rank in range(size)
        ]
        found: list[RealRanks] = []

        def note(progress: Progress) -> None:
            found[0].progress.append(progress)
            found[0].on_progress()

        with host_ranks(size, elsewhere={}, shows_kv=False) as ranks:
            async with open_ranks(
                setups,
                ranks.make_links,
                answer_seconds_max=answer_seconds_max,
                find_missing=ranks.find_missing,
                on_progress=note,
            ) as group:
                found.append(RealRanks(group))
                yield found[0]

    return opened


@pytest.fixture
def rank_pids() -> Callable[[], list[int]]:
    """Return a function that lists the process ids of this process's ranks."""
    return children


@pytest.fixture(autouse=True)
def no_child_is_left() -> Any:
    """Fail a test that leaves rank processes behind."""
    before = set(children())
    yield
    left = set(children()) - before
    assert not left, f"processes are left: {left}"


def children() -> list[int]:
    """Return the ids of this process's rank processes, including dead ones that nobody has waited for."""
    found: list[int] = []
    for thread in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):  # The thread has ended in the meantime.
            found += map(int, (thread / "children").read_text(encoding="ascii").split())
    return [pid for pid in found if Path(f"/proc/{pid}").exists() and "rank_process" in _command(pid)]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8") or "rank_process, ended"
    except OSError:
        return ""
