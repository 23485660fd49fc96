"""The simulator can fail: bugs of every kind are planted in a copy of the package, and each must be found.

planted has a folder for each simulation, and in it a file a bug: what rule it breaks, and then, for each change, the
file, the old text and the new one. A text that is no longer there is an error: then the bug has to be planted anew.
Beside a bug that hardly any seed finds lies a history that does, with the same name and .history at its end.

found_by.txt has a seed that found each bug, which is tried before all others. Where the simulator draws other histories
now, all seeds are looked through, which takes up to a minute for a bug, and a warning says so:

    python tests/sim/test_planted_bugs.py        looks for all bugs, and writes the seeds down anew
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SEEDS = "0:2000"
FOUND_BY = HERE / "planted" / "found_by.txt"
FILES = sorted((HERE / "planted").glob("*/*.txt"))
HISTORIES = sorted((HERE / "planted").glob("*/*.history"))
# Taken once: pytest changes a variable for each test, and bugs are looked for in other threads meanwhile.
ENVIRONMENT = dict(os.environ)
OTHERS = ("stack", "router", "routers", "pair", "lasting", "iterative", "images", "ranks")
MODES = {"core": [], **{mode: [f"--{mode}"] for mode in OTHERS}}


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


def plant(changes: list[Change], folder: Path) -> Path:
    """Put a package with these changes into the folder, and return the folder."""
    copy = copy_package(folder, {change.file for change in changes})
    for file, source in planted_sources(changes).items():
        (copy / file).write_text(source, encoding="utf-8")
    return copy


def planted_sources(changes: list[Change]) -> dict[str, str]:
    """Return each changed file's new text, by its path. A change that does not fit the code of today is an error."""
    sources: dict[str, str] = {}
    for change in changes:
        source = sources.get(change.file) or (ROOT / change.file).read_text(encoding="utf-8")
        assert source.count(change.old) == 1, f"{change.file} holds this {source.count(change.old)} times: {change.old}"
        sources[change.file] = source.replace(change.old, change.new)
    for file, source in sources.items():
        ast.parse(source, filename=file)
    return sources


def simulate(copy: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """In the copy's folder, so that it is the copy that runs."""
    environment = {**ENVIRONMENT, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "trioserve", "simulate", "--no-shrink", *arguments]
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)


def copy_package(folder: Path, files: Collection[str] = ()) -> Path:
    """Of these files. All others are links, to what is compiled already, too: copying several hundred files for each
    bug would take longer than finding it. Returns the folder."""
    copies = {Path(file) for file in files}
    assert all((ROOT / file).is_file() for file in copies)
    parents = {parent for file in copies for parent in file.parents}

    def link(path: Path) -> None:
        if path in copies:
            shutil.copyfile(ROOT / path, folder / path)
        elif path in parents or (path.name == "__pycache__" and path.parent in parents):
            (folder / path).mkdir()
            for entry in (ROOT / path).iterdir():
                if not is_compiled(entry):
                    link(path / entry.name)
        else:
            (folder / path).symlink_to(ROOT / path)

    def is_compiled(entry: Path) -> bool:
        """From one of the copies: it would be taken for what the changed file says, if that has its size and second."""
        source = entry.relative_to(ROOT).parent.parent / f"{entry.name.partition('.')[0]}.py"
        return entry.parent.name == "__pycache__" and source in copies

    folder.mkdir(exist_ok=True)
    link(Path("trioserve"))
    return folder


def name_of(file: Path) -> str:
    return f"{file.parent.name}/{file.stem}"


def noted_seeds() -> dict[str, int]:
    """By the name of a bug."""
    lines = (line.split() for line in FOUND_BY.read_text(encoding="utf-8").splitlines())
    return {name: int(seed) for name, seed in lines}


def run_planted(file: Path, folder: Path, seed: int | None) -> subprocess.CompletedProcess[str]:
    """seed: the one to try first."""
    history, mode = file.with_suffix(".history"), MODES[file.parent.name]
    try:
        plant(changes_in(file.read_text(encoding="utf-8")), folder)
        if history.exists():
            return simulate(folder, "--replay", str(history), *mode)
        if seed is not None:
            ran = simulate(folder, "--seeds", f"{seed}:{seed + 1}", *mode)
            if ran.returncode == 1:
                return ran
        return simulate(folder, "--seeds", SEEDS, *mode)
    finally:
        shutil.rmtree(folder)


def note_seeds() -> None:
    """Look for all of them, and write down which seed found each."""

    def found(file: Path) -> str:
        with tempfile.TemporaryDirectory() as folder:
            ran = run_planted(file, Path(folder, "copy"), noted_seeds().get(name_of(file)))
        seed = re.search(r"^seed (\d+) failed: ", ran.stdout, flags=re.MULTILINE)
        return "" if seed is None else f"{name_of(file)} {seed[1]}\n"

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        FOUND_BY.write_text("".join(pool.map(found, FILES)), encoding="utf-8")


@pytest.fixture(scope="module")
def planted_runs(request, tmp_path_factory):
    """What becomes of each planted bug that is asked for. They are processes, as many at a time as there are cores."""
    chosen = [item.callspec.params["file"] for item in request.session.items if "planted_runs" in item.fixturenames]
    folders = {file: tmp_path_factory.mktemp(file.stem) for file in chosen}
    seeds = noted_seeds()
    pool = ThreadPoolExecutor(os.cpu_count())
    yield {file: pool.submit(run_planted, file, folder, seeds.get(name_of(file))) for file, folder in folders.items()}
    pool.shutdown(cancel_futures=True)


@pytest.fixture
def copy(tmp_path):
    return copy_package(tmp_path)


def test_there_are_enough_of_them():
    assert len(FILES) >= 20


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_a_planted_bug_fits_the_code_of_today(file):
    assert planted_sources(changes_in(file.read_text(encoding="utf-8")))


@pytest.mark.slow
@pytest.mark.filterwarnings("default:.* is found by seed")
@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_a_planted_bug_is_found(file, planted_runs):
    ran = planted_runs[file].result()
    assert ran.returncode == 1, f"not found:\n{ran.stdout}{ran.stderr}"
    found = re.search(r"^(seed (\d+) )?failed: ", ran.stdout, flags=re.MULTILINE)
    assert found is not None, ran.stdout + ran.stderr
    noted = noted_seeds().get(name_of(file))
    if found[2] is not None and int(found[2]) != noted:
        warnings.warn(f"{name_of(file)} is found by seed {found[2]}, not by {noted}: note_seeds() is due", stacklevel=1)


@pytest.mark.parametrize("history", HISTORIES, ids=lambda history: history.stem)
def test_a_history_holds_where_nothing_is_planted(history, copy):
    ran = simulate(copy, "--replay", str(history), *MODES[history.parent.name])
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_found_where_nothing_is_planted(mode, copy):
    """test_histories.py and test_pair.py take more seeds, in one process."""
    ran = simulate(copy, *MODES[mode], "--seeds", "0:60" if mode == "lasting" else "0:10")
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_a_bug_whose_place_is_gone_is_an_error(tmp_path):
    with pytest.raises(AssertionError, match="holds this 0 times"):
        plant([Change("trioserve/core/engine.py", "no such text", "")], tmp_path)


def test_what_is_planted_is_in_the_copy_alone(tmp_path):
    file, neighbour = "trioserve/core/engine.py", "trioserve/core/scheduler.py"
    before = (ROOT / file).read_bytes()
    plant([Change(file, "from __future__ import annotations", "planted = True")], tmp_path)
    assert (ROOT / file).read_bytes() == before
    assert "planted = True" in (tmp_path / file).read_text(encoding="utf-8")
    assert (tmp_path / neighbour).read_bytes() == (ROOT / neighbour).read_bytes()


if __name__ == "__main__":
    note_seeds()
