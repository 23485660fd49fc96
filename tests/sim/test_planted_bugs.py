"""The simulator can fail: bugs of every kind are planted in a copy of the package, and each must be found.

planted has a folder for each simulation, and in it a file a bug: what rule it breaks, and then, for each change, the
file, the old text and the new one. A text that is no longer there is an error: then the bug has to be planted anew.
Beside a bug that hardly any seed finds lies a history that does, with the same name and .history at its end.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SEEDS = "0:2000"
FILES = sorted((HERE / "planted").glob("*/*.txt"))
HISTORIES = sorted((HERE / "planted").glob("*/*.history"))
MODES = {"core": [], "stack": ["--stack"], "router": ["--router"], "pair": ["--pair"], "lasting": ["--lasting"]}


@dataclass(frozen=True)
class Change:
    file: str
    old: str
    new: str


def changes_in(text: str) -> list[Change]:
    heads = list(re.finditer(r"^=== (\S+)\n--- old\n", text, flags=re.MULTILINE))
    changes = []
    for index, head in enumerate(heads):
        end = heads[index + 1].start() if index + 1 < len(heads) else len(text)
        old, found, new = text[head.end() : end].partition("--- new\n")
        assert found, f"{head[1]}: a change has an old text and a new one"
        assert old.strip(), f"{head[1]}: what is it to be instead of?"
        changes.append(Change(head[1], old.removesuffix("\n"), new.removesuffix("\n")))
    assert changes, "nothing is changed"
    return changes


def plant(changes: list[Change], copy: Path) -> None:
    for change in changes:
        source = (copy / change.file).read_text(encoding="utf-8")
        assert source.count(change.old) == 1, f"{change.file} holds this {source.count(change.old)} times: {change.old}"
        (copy / change.file).write_text(source.replace(change.old, change.new), encoding="utf-8")


def simulate(copy: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """In the copy's folder, so that it is the copy that runs."""
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "trioserve", "simulate", "--no-shrink", *arguments]
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)


def copy_package(folder: Path) -> Path:
    """With what is compiled already: only what is changed has to be compiled again."""
    shutil.copytree(ROOT / "trioserve", folder / "trioserve")
    return folder


def run_planted(file: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    history = file.with_suffix(".history")
    chosen = ("--replay", str(history)) if history.exists() else ("--seeds", SEEDS)
    try:
        plant(changes_in(file.read_text(encoding="utf-8")), copy_package(folder))
        return simulate(folder, *chosen, *MODES[file.parent.name])
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def planted_runs(request, tmp_path_factory):
    """What becomes of each planted bug that is asked for. They are processes, as many at a time as there are cores."""
    chosen = [item.callspec.params["file"] for item in request.session.items if "planted_runs" in item.fixturenames]
    folders = {file: tmp_path_factory.mktemp(file.stem) for file in chosen}
    pool = ThreadPoolExecutor(os.cpu_count())
    yield {file: pool.submit(run_planted, file, folder) for file, folder in folders.items()}
    pool.shutdown(cancel_futures=True)


@pytest.fixture
def copy(tmp_path):
    return copy_package(tmp_path)


def test_there_are_enough_of_them():
    assert len(FILES) >= 20


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_a_planted_bug_is_found(file, planted_runs):
    ran = planted_runs[file].result()
    assert ran.returncode == 1, f"not found:\n{ran.stdout}{ran.stderr}"
    assert re.search(r"^(seed \d+ )?failed: ", ran.stdout, flags=re.MULTILINE), ran.stdout + ran.stderr


@pytest.mark.parametrize("history", HISTORIES, ids=lambda history: history.stem)
def test_a_history_holds_where_nothing_is_planted(history, copy):
    ran = simulate(copy, "--replay", str(history), *MODES[history.parent.name])
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode",
    [
        ["--seeds", "0:1000"],
        ["--stack", "--seeds", "0:150"],
        ["--router", "--seeds", "0:300"],
        ["--pair", "--seeds", "0:150"],
        ["--lasting", "--seeds", "0:60"],
    ],
    ids=list(MODES),
)
def test_nothing_is_found_where_nothing_is_planted(mode, copy):
    ran = simulate(copy, *mode, "--jobs", "2")
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_a_bug_whose_place_is_gone_is_an_error(copy):
    with pytest.raises(AssertionError, match="holds this 0 times"):
        plant([Change("trioserve/core/engine.py", "no such text", "")], copy)
