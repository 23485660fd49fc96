"""Tests of building the library: it is compiled once, never incomplete, and failures give a reason."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from trioserve_kernels import build
from trioserve_kernels.build import LEVELS, CannotBuild, build_library, supported_levels
from trioserve_kernels.native import NoNativeKernels, load_library


def write_compiler(folder: Path, *, fails: bool = False) -> Path:
    """Write a script that acts as a compiler: it counts its calls, and writes a file or fails."""
    path = folder / "compiler"
    last = "echo 'x.cpp:1: error: no such word' >&2; exit 1" if fails else 'echo made > "$out"'
    path.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = --version ]; then echo test 1; exit; fi\n'
        f"echo call >> {folder}/calls\n"
        'while [ $# -gt 0 ]; do [ "$1" = -o ] && out=$2; shift; done\n'
        f"{last}\n"
    )
    path.chmod(0o755)
    return path


def call_count(folder: Path) -> int:
    calls = folder / "calls"
    return len(calls.read_text().splitlines()) if calls.exists() else 0


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = write_compiler(tmp_path)
    monkeypatch.setenv("CXX", str(path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return path


def test_kernel_library_is_compiled_once(compiler: Path) -> None:
    said: list[str] = []

    def note(sentence: str, seconds: float) -> None:
        if not seconds:
            said.append(sentence)

    first = build_library("avx2", on_compile=note)
    assert first.read_text() == "made\n"
    assert first.parent == compiler.parent / "cache" / "trioserve"
    assert build_library("avx2", on_compile=note) == first
    assert call_count(compiler.parent) == 1
    assert len(said) == 1
    assert "avx2" in said[0]


def test_changed_flags_or_compiler_trigger_a_new_compilation(compiler: Path) -> None:
    libraries = {build_library("avx2"), build_library("avx512"), build_library("avx2", more_flags=("-g",))}
    compiler.write_text(compiler.read_text().replace("test 1", "test 2"))
    libraries.add(build_library("avx2"))
    assert len(libraries) == call_count(compiler.parent) == 4


def test_two_concurrent_builds_compile_the_library_once(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "WATCH_SECONDS", 0.01)
    together = threading.Barrier(4)
    libraries = []

    def build_one() -> None:
        together.wait()
        libraries.append(build_library("avx2"))

    threads = [threading.Thread(target=build_one) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(libraries)) == 1
    assert call_count(compiler.parent) == 1


class GivenUp(Exception):
    pass


def test_exception_of_the_progress_callback_ends_the_compiler(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The shell waits for a child process, as g++ does, and both keep the stderr pipe open. Like g++, the script writes
    # a temporary file, which it cannot remove when it is killed.
    with_child = "echo > $TMPDIR/x.s; sleep 600 >/dev/null & echo $! > " + f"{compiler.parent}/child; wait; "
    monkeypatch.setenv("TMPDIR", str(compiler.parent))
    compiler.write_text(compiler.read_text().replace("echo made", with_child + "echo made"))
    monkeypatch.setattr(build, "WATCH_SECONDS", 0.01)
    waited: list[float] = []

    def abandon(_sentence: str, seconds: float) -> None:
        waited.append(seconds)
        if (compiler.parent / "child").exists():
            raise GivenUp

    with pytest.raises(GivenUp):
        build_library("avx2", on_compile=abandon)
    assert waited[0] == 0
    assert waited == sorted(waited)
    assert not [path for path in compiler.parent.rglob("*") if path.suffix in (".so", ".s")]
    assert [path.suffix for path in (compiler.parent / "cache" / "trioserve").iterdir()] == [".lock"]


def test_compiler_ends_and_its_files_are_removed_if_our_process_is_killed(compiler: Path) -> None:
    # The compiler has a child process, as g++ does, and never ends. Both hold a pipe open until they end.
    pipe, cache = compiler.parent / "pipe", compiler.parent / "cache" / "trioserve"
    os.mkfifo(pipe)
    never_ends = f'exec 7>{pipe}; echo > "$TMPDIR/x.s"; echo begun >&7; sleep 600 & wait; '
    compiler.write_text(compiler.read_text().replace("echo made", never_ends + "echo made"))
    command = [sys.executable, "-m", "trioserve_kernels.build"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as building, pipe.open() as reports:
        assert reports.readline() == "begun\n"
        assert list(cache.glob("build-*/x.s"))
        building.kill()
        assert reports.read() == ""  # This call returns when no process holds the pipe open.
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_wait_for_the_compiler_of_another_process_can_be_ended(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "WATCH_SECONDS", 0.01)
    build_library("avx2")
    (library,) = (compiler.parent / "cache" / "trioserve").glob("*.so")
    library.unlink()

    def abandon(sentence: str, _seconds: float) -> None:
        assert "another process" in sentence
        raise GivenUp

    with library.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(GivenUp):
            build_library("avx2", on_compile=abandon)


def test_compiler_that_hangs_at_its_version_query_can_be_cancelled(
    compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "WATCH_SECONDS", 0.01)
    monkeypatch.setattr(build, "VERSION_SECONDS", 0.0)
    compiler.write_text(compiler.read_text().replace("echo test 1", "sleep 600"))

    def abandon(_sentence: str, _seconds: float) -> None:
        raise GivenUp

    with pytest.raises(GivenUp):
        build_library("avx2", on_compile=abandon)


def test_compiler_that_takes_too_long_is_killed(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler.write_text(compiler.read_text().replace("echo made", "sleep 600; echo made"))
    monkeypatch.setattr(build, "COMPILE_SECONDS_MAX", 0)
    monkeypatch.setattr(build, "WATCH_SECONDS", 0.01)
    with pytest.raises(CannotBuild, match="took longer than 0 seconds"):
        build_library("avx2")


def test_failed_compilation_gives_the_reason_and_leaves_no_files(compiler: Path) -> None:
    write_compiler(compiler.parent, fails=True)
    for _ in range(2):
        with pytest.raises(CannotBuild, match="no such word"):
            build_library("avx2")
    assert not list((compiler.parent / "cache").rglob("*.so"))
    assert call_count(compiler.parent) == 2


def test_build_error_names_a_missing_compiler(compiler: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(CannotBuild, match="no-such-compiler"):
        build_library("avx2")
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(compiler.parent / "nothing"))
    with pytest.raises(CannotBuild, match="no C\\+\\+ compiler"):
        build_library("avx2")


def test_unwritable_cache_of_libraries_is_reported(compiler: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotBuild, match="cannot be written"):
        build_library("avx2", cache=tmp_path / "file" / "cache")


def test_library_from_the_wheel_needs_no_compiler(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "prebuilt"
    monkeypatch.setattr(build, "PREBUILT", folder)
    build.prebuild(folder)
    assert call_count(compiler.parent) == len(LEVELS)
    monkeypatch.setenv("CXX", "no-such-compiler")
    libraries = {build_library(level) for level in LEVELS}
    assert len(libraries) == len(LEVELS)
    assert {library.parent for library in libraries} == {folder}


def test_prebuild_compiles_the_named_levels(compiler: Path, tmp_path: Path) -> None:
    build.prebuild(tmp_path / "prebuilt", ["avx512", "avx2"])
    assert sorted(path.name.split("-")[1] for path in (tmp_path / "prebuilt").iterdir()) == ["avx2", "avx512"]
    with pytest.raises(CannotBuild, match="there is no level avx3: choose from amx, "):
        build.prebuild(tmp_path / "prebuilt", ["avx3"])


def test_library_of_other_sources_is_ignored(compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, sources = tmp_path / "prebuilt", tmp_path / "cpu"
    shutil.copytree(build.SOURCES, sources)
    monkeypatch.setattr(build, "PREBUILT", folder)
    monkeypatch.setattr(build, "SOURCES", sources)
    build.prebuild(folder)
    (sources / "step.cpp").write_text("// other\n")
    assert build_library("avx2").parent != folder


def test_supported_levels_are_sorted_best_first(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    for features, levels in (
        ("sse2 avx", ()),
        ("sse2 avx avx2 fma f16c", ("avx2",)),
        (" ".join(LEVELS["avx512"]), ("avx512", "avx2")),
        (" ".join(LEVELS["avx512_vnni"]), ("avx512_vnni", "avx512", "avx2")),
        (" ".join(LEVELS["amx"]), ("amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2")),
    ):
        cpuinfo.write_text(f"processor\t: 0\nflags\t\t: {features}\n")
        found = supported_levels(cpuinfo)
        assert found == (levels if sys.platform == "linux" and os.uname().machine == "x86_64" else ())
    assert supported_levels(tmp_path / "nothing") == ()


def test_environment_variable_disables_the_native_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIOSERVE_NATIVE", "0")
    with pytest.raises(NoNativeKernels, match="TRIOSERVE_NATIVE"):
        load_library()


@pytest.mark.skipif(not supported_levels(), reason="needs Linux on x86-64 with AVX2")
def test_damaged_kernel_library_is_reported(compiler: Path) -> None:
    with pytest.raises(NoNativeKernels, match="cannot be loaded"):
        load_library()


@pytest.mark.parametrize("fails", (False, True))
def test_build_command_always_exits_with_0(compiler: Path, fails: bool) -> None:
    write_compiler(compiler.parent, fails=fails)
    response = subprocess.run(
        [sys.executable, "-m", "trioserve_kernels.build"], capture_output=True, text=True, check=False
    )
    assert response.returncode == 0
    assert "CPU kernels" in response.stderr
