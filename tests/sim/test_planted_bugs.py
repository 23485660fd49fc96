"""Tests that the simulations find bugs: each planted bug must be found.

The folder `planted` has a folder for each simulation, with one file per bug. The file has the rule that the bug breaks,
and for each change the changed file, the old text and the new text. If an old text is no longer in the changed file,
the test fails, and the bug must be adapted. A bug that hardly any seed finds has a history in a file with the same name
and the suffix .history.

For each bug, a process that has already imported all modules forks, and the child replaces the code of the changed
functions. This is much faster than a new interpreter. A bug that changes more than function bodies gets a separate copy
of the package and a new interpreter.

found_by.txt has a seed for each bug, and this seed is tried first. If the simulation now draws other histories for the
seed, a few hundred seeds are tried, and a warning asks to update found_by.txt. The same seed must pass without the bug,
because otherwise the failure may have another cause.

    python tests/sim/test_planted_bugs.py        try thousands of seeds for all bugs, and write found_by.txt
"""

from __future__ import annotations

import ast
import gc
import inspect
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SEEDS_SEARCHED, SEEDS_SEARCHED_FOR_NOTES = 300, 4000
FOUND_BY = HERE / "planted" / "found_by.txt"
FILES = sorted((HERE / "planted").glob("*/*.txt"))
HISTORIES = sorted((HERE / "planted").glob("*/*.history"))
# The environment is read once, because pytest changes a variable for each test while other threads search for bugs.
ENVIRONMENT = dict(os.environ)
OTHERS = ("stack", "router", "routers", "pair", "lasting", "iterative", "images", "models", "ranks")
MODES = {"core": [], **{mode: [f"--{mode}"] for mode in OTHERS}}
CPU_SECONDS_MAX = 600  # limit of CPU time, since a planted bug may loop forever
NOT_SWAPPED = 99  # exit code of a child process whose bug changes more than function bodies


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
        assert old.strip(), f"{head[1]}: the old text of a change is empty"
        changes.append(Change(head[1], old.removesuffix("\n"), new.removesuffix("\n")))
    assert changes, "the file has no changes"
    return changes


def plant(changes: list[Change], folder: Path) -> Path:
    """Create a copy of the package with these changes in a folder, and return the folder."""
    copy = copy_package(folder, {change.file for change in changes})
    for file, source in planted_sources(changes).items():
        (copy / file).write_text(source, encoding="utf-8")
    return copy


def planted_sources(changes: list[Change]) -> dict[str, str]:
    """Return the new text of each changed file, by path. A change whose old text is not in the file is an error."""
    sources: dict[str, str] = {}
    for change in changes:
        source = sources.get(change.file) or (ROOT / change.file).read_text(encoding="utf-8")
        assert source.count(change.old) == 1, f"{change.file} holds this {source.count(change.old)} times: {change.old}"
        sources[change.file] = source.replace(change.old, change.new)
    for file, source in sources.items():
        ast.parse(source, filename=file)
    return sources


def simulate(copy: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command `simulate` with the changed copy of the package."""
    environment = {**ENVIRONMENT, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "trioserve", "simulate", "--no-shrink", *arguments]
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)


def copy_package(folder: Path, files: Collection[str] = ()) -> Path:
    """Copy the changed files of the package, and link all other files and their compiled code.

    Copying several hundred files for each bug would take longer than finding it.

    Returns:
        The folder of the copy.
    """
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
        """Return True for the compiled code of a changed file.

        Python would use it instead of the changed file if both files have the same size and second of change.
        """
        source = entry.relative_to(ROOT).parent.parent / f"{entry.name.partition('.')[0]}.py"
        return entry.parent.name == "__pycache__" and source in copies

    folder.mkdir(exist_ok=True)
    link(Path("trioserve"))
    return folder


class CannotSwap(Exception):
    """A change affects code that has already run, such as the code of a module, a class or a default value."""


def shape_of(code: CodeType) -> tuple[Any, ...]:
    """Return all parts of a code object that affect its behaviour. Line numbers are not included."""
    constants = tuple(
        shape_of(value) if isinstance(value, CodeType) else (type(value), value) for value in code.co_consts
    )
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    names = (code.co_names, code.co_varnames, code.co_cellvars, code.co_freevars)
    return (code.co_code, code.co_exceptiontable, counts, names, tuple(constants))


def changed_functions(old: CodeType, new: CodeType) -> Iterator[tuple[CodeType, CodeType]]:
    """Yield the old and the new code of each changed function of a module.

    Raises:
        CannotSwap: the code of the module itself or of a class has also changed.
    """
    if old.co_flags & inspect.CO_OPTIMIZED:  # a function
        if shape_of(old) == shape_of(new):
            return
        if old.co_freevars != new.co_freevars:
            raise CannotSwap
        yield old, new
    elif shape_of(old)[:4] != shape_of(new)[:4] or len(old.co_consts) != len(new.co_consts):
        raise CannotSwap
    for one, other in zip(old.co_consts, new.co_consts, strict=False):
        if isinstance(one, CodeType) and isinstance(other, CodeType):
            # A replaced function may contain other inner functions than before, so only equal names are compared.
            if one.co_qualname == other.co_qualname:
                yield from changed_functions(one, other)
        elif not old.co_flags & inspect.CO_OPTIMIZED and (type(one), one) != (type(other), other):
            raise CannotSwap


def loaded_functions() -> dict[tuple[str, str, int], list[FunctionType]]:
    """Return the functions of the package, by file, qualified name and first line."""
    found: dict[tuple[str, str, int], list[FunctionType]] = {}
    for value in gc.get_objects():
        if isinstance(value, FunctionType) and value.__code__.co_filename.startswith(f"{ROOT}/trioserve/"):
            found.setdefault(place_of(value.__code__), []).append(value)
    return found


def place_of(code: CodeType) -> tuple[str, str, int]:
    return code.co_filename, code.co_qualname, code.co_firstlineno


def swap(changes: list[Change], functions: dict[tuple[str, str, int], list[FunctionType]]) -> None:
    """Replace the code of the changed functions in this process.

    A function with a replaced code loses its protection from Ctrl-C. No simulation needs this protection.
    """
    for file, source in planted_sources(changes).items():
        path = str(ROOT / file)
        old, new = (
            compile(text, path, "exec", dont_inherit=True) for text in (Path(path).read_text(encoding="utf-8"), source)
        )
        swapped = False
        for one, other in changed_functions(old, new):
            for function in functions.get(place_of(one), ()):
                if shape_of(function.__code__) == shape_of(one):
                    function.__code__ = other
                    swapped = True
        if not swapped:  # The changed file is imported later or never.
            raise CannotSwap


def serve_forks() -> None:
    """Read one bug per line from stdin, simulate in a child process with the bug, and write the result as a line."""
    from trioserve.cli import main
    from trioserve.simulation.runs import runs_of

    for mode in MODES:
        runs_of(mode)
    functions = loaded_functions()
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        asked = json.loads(line)
        with tempfile.TemporaryFile() as output:
            child = os.fork()
            if child == 0:
                returncode = 1
                try:
                    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS_MAX, CPU_SECONDS_MAX))
                    for stream in (1, 2):
                        os.dup2(output.fileno(), stream)
                    swap([Change(**change) for change in asked["changes"]], functions)
                    returncode = main(["simulate", "--no-shrink", *asked["arguments"]])
                except CannotSwap:
                    returncode = NOT_SWAPPED
                except BaseException:
                    sys.excepthook(*sys.exc_info())
                finally:
                    with suppress(Exception):
                        sys.stdout.flush()
                        sys.stderr.flush()
                    os._exit(returncode)
            _, status = os.waitpid(child, 0)
            output.seek(0)
            shown = output.read().decode("utf-8", "replace")
        print(json.dumps({"returncode": os.waitstatus_to_exitcode(status), "shown": shown}), flush=True)


def seed_in(shown: str) -> int | None:
    """Return the seed that failed, or None."""
    found = re.search(r"^seed (\d+) failed: ", shown, flags=re.MULTILINE)
    return None if found is None else int(found[1])


class Forks:
    """One process that forks for each planted bug. Each thread has its own process."""

    def __init__(self) -> None:
        command = [sys.executable, __file__, "--serve-forks"]
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def simulate(self, changes: list[Change], *arguments: str) -> subprocess.CompletedProcess[str]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        asked = {"changes": [asdict(change) for change in changes], "arguments": arguments}
        self._process.stdin.write(f"{json.dumps(asked)}\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        return subprocess.CompletedProcess([], answer["returncode"], answer["shown"], "")

    def close(self) -> None:
        self._process.communicate("")


class Planter:
    """Runs simulations with planted bugs, in several threads.

    Args:
        seeds_searched: number of seeds to try if the noted seed does not find a bug.
    """

    def __init__(self, seeds_searched: int) -> None:
        self._seeds = noted_seeds()
        self._seeds_searched = seeds_searched
        self._holds: dict[tuple[str, int], bool] = {}
        self._of_thread = threading.local()
        self._all_forks: list[Forks] = []

    def run(self, file: Path, folder: Path) -> subprocess.CompletedProcess[str]:
        """Run simulations with one planted bug until a seed finds it.

        Args:
            file: file of the bug in the folder `planted`.
            folder: folder for a copy of the package, if the bug needs a copy. It is deleted afterwards.
        """
        changes = changes_in(file.read_text(encoding="utf-8"))
        history, mode = file.with_suffix(".history"), file.parent.name
        if history.exists():
            return self._simulate(changes, folder, "--replay", str(history), *MODES[mode])
        seed = self._seeds.get(name_of(file))
        if seed is not None:
            ran = self._simulate(changes, folder, "--seeds", f"{seed}:{seed + 1}", *MODES[mode])
            if ran.returncode == 1 and self._holds_unplanted(mode, seed):
                return ran
        begin = 0
        while begin < self._seeds_searched:
            ran = self._simulate(changes, folder, "--seeds", f"{begin}:{self._seeds_searched}", *MODES[mode])
            found = seed_in(ran.stdout)
            if found is None or self._holds_unplanted(mode, found):
                return ran
            begin = found + 1
        return ran

    def _holds_unplanted(self, mode: str, seed: int) -> bool:
        """Return whether the simulation of a seed passes without a planted bug."""
        if (mode, seed) not in self._holds:
            ran = self._forks().simulate([], "--seeds", f"{seed}:{seed + 1}", *MODES[mode])
            self._holds[mode, seed] = ran.returncode == 0
        return self._holds[mode, seed]

    def _simulate(self, changes: list[Change], folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        ran = self._forks().simulate(changes, *arguments)
        if ran.returncode != NOT_SWAPPED:
            return ran
        try:
            return simulate(plant(changes, folder), *arguments)
        finally:
            shutil.rmtree(folder)

    def _forks(self) -> Forks:
        """Return the forking process of this thread."""
        if not hasattr(self._of_thread, "forks"):
            self._of_thread.forks = Forks()
            self._all_forks.append(self._of_thread.forks)
        return self._of_thread.forks

    def close(self) -> None:
        for forks in self._all_forks:
            forks.close()


@contextmanager
def planted_runs_of(
    folders: dict[Path, Path], *, seeds_searched: int = SEEDS_SEARCHED
) -> Iterator[dict[Path, Future[subprocess.CompletedProcess[str]]]]:
    """Start simulations with these planted bugs, on all cores at the same time."""
    planter, pool = Planter(seeds_searched), ThreadPoolExecutor(os.cpu_count())
    try:
        yield {file: pool.submit(planter.run, file, folder) for file, folder in folders.items()}
    finally:
        pool.shutdown(cancel_futures=True)
        planter.close()


def name_of(file: Path) -> str:
    return f"{file.parent.name}/{file.stem}"


def noted_seeds() -> dict[str, int]:
    """Return the noted seed of each bug, by name of the bug."""
    lines = (line.split() for line in FOUND_BY.read_text(encoding="utf-8").splitlines())
    return {name: int(seed) for name, seed in lines}


def note_seeds() -> None:
    """Search for all bugs, and write the seeds that found them into found_by.txt."""
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        folders = {file: Path(folder, str(number)) for number, file in enumerate(FILES)}
        with planted_runs_of(folders, seeds_searched=SEEDS_SEARCHED_FOR_NOTES) as runs:
            for file, run in runs.items():
                ran = run.result()
                seed = seed_in(ran.stdout)
                if seed is not None:
                    lines.append(f"{name_of(file)} {seed}\n")
                elif not file.with_suffix(".history").exists():
                    print(f"{name_of(file)} was not found: {ran.returncode} {(ran.stdout + ran.stderr)[-2000:]}")
    FOUND_BY.write_text("".join(lines), encoding="utf-8")


@pytest.fixture(scope="module")
def planted_runs(request, tmp_path_factory):
    """Give the runs of the bugs that the selected tests need, by file."""
    chosen = [item.callspec.params["file"] for item in request.session.items if "planted_runs" in item.fixturenames]
    with planted_runs_of({file: tmp_path_factory.mktemp(file.stem) for file in chosen}) as runs:
        yield runs


@pytest.fixture(scope="module")
def forks():
    forks = Forks()
    yield forks
    forks.close()


@pytest.fixture
def copy(tmp_path):
    return copy_package(tmp_path)


def test_number_of_planted_bugs_is_at_least_20():
    assert len(FILES) >= 20


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_planted_bug_fits_the_code(file):
    assert planted_sources(changes_in(file.read_text(encoding="utf-8")))


@pytest.mark.slow
@pytest.mark.filterwarnings("default:.* is found by seed")
@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_planted_bug_is_found(file, planted_runs):
    ran = planted_runs[file].result()
    assert ran.returncode == 1, f"not found:\n{ran.stdout}{ran.stderr}"
    seed, noted = seed_in(ran.stdout), noted_seeds().get(name_of(file))
    if seed is None:
        assert re.search(r"^failed: ", ran.stdout, flags=re.MULTILINE), ran.stdout + ran.stderr
    elif seed != noted:
        warnings.warn(f"{name_of(file)} is found by seed {seed}, not by {noted}: note_seeds() is due", stacklevel=1)


@pytest.mark.parametrize("history", HISTORIES, ids=lambda history: history.stem)
def test_history_of_a_bug_passes_without_the_bug(history, forks):
    ran = forks.simulate([], "--replay", str(history), *MODES[history.parent.name])
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_simulations_without_a_planted_bug_pass(mode, copy):
    """This test uses few seeds. test_histories.py and test_pair.py check more seeds in one process."""
    ran = simulate(copy, *MODES[mode], "--seeds", "0:60" if mode == "lasting" else "0:10")
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_seed_that_also_fails_without_the_bug_does_not_count_as_a_find(tmp_path):
    file = HERE / "planted" / "core" / "wrong_victim.txt"
    seed = noted_seeds()[name_of(file)]
    planter = Planter(SEEDS_SEARCHED)
    planter._holds["core", seed] = False
    try:
        found = seed_in(planter.run(file, tmp_path / "copy").stdout)
    finally:
        planter.close()
    assert found not in (None, seed)


BEFORE = "X = 1\n\n\nclass A:\n    def f(self, a=1):\n        return a\n"


@pytest.mark.parametrize(
    "after",
    [
        BEFORE.replace("X = 1", "X = 2"),
        BEFORE.replace("a=1", "a=2"),
        BEFORE.replace("class A:", "class A:\n    x = 1"),
        BEFORE.replace("class A", "@print\nclass A"),
    ],
    ids=["a constant", "a default", "an attribute", "a decorator"],
)
def test_change_of_code_that_has_run_cannot_be_swapped(after):
    with pytest.raises(CannotSwap):
        list(changed_functions(compile(BEFORE, "a", "exec"), compile(after, "a", "exec")))


def test_function_changed_by_a_planted_bug_is_found_after_it_moved():
    after = "# more\n" + BEFORE.replace("return a", "return -a")
    pairs = changed_functions(compile(BEFORE, "a", "exec"), compile(after, "a", "exec"))
    assert [(old.co_qualname, new.co_qualname) for old, new in pairs] == [("A.f", "A.f")]


def test_bug_whose_old_text_is_gone_is_an_error(tmp_path):
    with pytest.raises(AssertionError, match="holds this 0 times"):
        plant([Change("trioserve/core/engine.py", "no such text", "")], tmp_path)


def test_bug_is_planted_only_in_the_copy(tmp_path):
    file, neighbour = "trioserve/core/engine.py", "trioserve/core/scheduler.py"
    before = (ROOT / file).read_bytes()
    plant([Change(file, "from __future__ import annotations", "planted = True")], tmp_path)
    assert (ROOT / file).read_bytes() == before
    assert "planted = True" in (tmp_path / file).read_text(encoding="utf-8")
    assert (tmp_path / neighbour).read_bytes() == (ROOT / neighbour).read_bytes()


if __name__ == "__main__":
    serve_forks() if "--serve-forks" in sys.argv else note_seeds()
