"""Compiles cpu/ for this machine's instructions, and keeps the library in the user's cache folder.

`python -m trioserve_kernels.build` compiles before the first start. The name of a library contains a hash of sources,
compiler and flags, so an outdated library is never used.

A wheel may contain compiled libraries for all levels (see `prebuild`), which need no compiler. The name of such a
library contains a hash of the sources. If the hash does not match the present sources, the library is ignored.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

__all__ = [
    "LEVELS",
    "SOURCES",
    "CannotBuild",
    "brought_library",
    "build_library",
    "find_compiler",
    "prebuild",
    "supported_levels",
]

SOURCES = Path(__file__).parent / "cpu"
"""The folder of the C++ files."""

PREBUILT = Path(__file__).parent / "prebuilt"
"""Folder of libraries that came with a wheel. It is missing in an installation from sources."""

# -ffp-contract=off: if the compiler fused only some products with sums, the bits of a row could depend on the batch.
COMMON_FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-ffp-contract=off", "-shared", "-fPIC", "-pthread")
# The C++ library is linked statically. Its unused code is dropped, because that code would require a newer glibc. Its
# symbols are hidden, because torch loads a different C++ library into the same process.
PREBUILT_FLAGS = ("-static-libstdc++", "-static-libgcc", "-s", "-Wl,--gc-sections", "-Wl,--exclude-libs,ALL")
COMPILERS = ("g++", "clang++", "c++")
COMPILE_SECONDS_MAX = 600  # On an idle machine, compiling takes about ten seconds.
VERSION_SECONDS = 0.5  # Usually, a compiler prints its version in some milliseconds.
WATCH_SECONDS = 1.0

_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq")
_AVX512_VNNI = (*_AVX512, "avx512_vnni")
_AVX512_BF16 = (*_AVX512_VNNI, "avx512_bf16")  # Every CPU that has bf16 also has vnni.
LEVELS: dict[str, tuple[str, ...]] = {
    "amx": (*_AVX512_BF16, "avx512vbmi", "amx_tile", "amx_bf16"),
    "avx512_bf16": _AVX512_BF16,
    "avx512_vnni": _AVX512_VNNI,
    "avx512": _AVX512,
    "avx2": _AVX2,
}
"""CPU features that a library of each level uses, best level first. The names are those of /proc/cpuinfo."""


class CannotBuild(Exception):
    """No library can be built on this machine. The message contains the reason."""


def supported_levels(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, ...]:
    """Return the LEVELS that this machine supports, best first. The result is empty unless it runs Linux on x86-64.

    Args:
        cpuinfo: file with the CPU's features.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return ()
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ()
    features = next((set(line.split()) for line in lines if line.startswith("flags")), set())
    return tuple(level for level in LEVELS if features.issuperset(LEVELS[level]))


def build_library(
    level: str,
    *,
    cache: Path | None = None,
    more_flags: tuple[str, ...] = (),
    on_compile: Callable[[str, float], None] = lambda sentence, seconds: None,
) -> Path:
    """Return the library for a level: from the wheel, from the cache, or compiled now.

    A lock prevents two processes from compiling the same library. If this process ends for any reason, the compiler
    also ends.

    Args:
        level: a name in LEVELS.
        cache: folder for compiled libraries. None is the user's cache folder.
        more_flags: additional compiler flags. A library from the wheel is then not used.
        on_compile: called with a sentence and the seconds so far. It is called before the compiler starts and then
            every second, also while another process compiles the same library. An exception ends the compiler.

    Raises:
        CannotBuild: there is no compiler, or the compiler fails.
    """
    brought = brought_library(level)
    if brought is not None and not more_flags:
        return brought
    compiler = find_compiler()
    flags = (*_flags(level), *more_flags)
    folder = _cache_folder() if cache is None else cache

    def watch(sentence: str) -> Callable[[float], None]:
        return lambda seconds: on_compile(sentence, seconds)

    library = folder / f"cpu-{level}-{_fingerprint(compiler, flags, watch('asking the C++ compiler its version'))}.so"
    if library.is_file():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(library.with_suffix(".lock"), watch("waiting for another process that compiles the CPU kernels")):
            if not library.is_file():
                _compile(compiler, flags, library, watch(f"compiling the CPU kernels for {level} (once)"))
    except OSError as error:
        raise CannotBuild(f"{folder} cannot be written: {error.strerror}") from None
    return library


def brought_library(level: str) -> Path | None:
    """Return the library that the installed package contains. None if it has no library for the present sources.

    Args:
        level: a name in LEVELS.
    """
    library = PREBUILT / _prebuilt_name(level)
    return library if library.is_file() else None


def prebuild(folder: Path, levels: Iterable[str] | None = None) -> None:
    """Compile libraries for a wheel. The libraries need only the system's libc and libm.

    Args:
        folder: destination.
        levels: names in LEVELS. None compiles all levels.

    Raises:
        CannotBuild: a level is unknown, or the compiler fails.
    """
    unknown = set(levels or ()) - set(LEVELS)
    if unknown:
        raise CannotBuild(f"there is no level {', '.join(sorted(unknown))}: choose from {', '.join(LEVELS)}")
    compiler = find_compiler()
    folder.mkdir(parents=True, exist_ok=True)
    for level in LEVELS if levels is None else levels:
        _compile(compiler, (*_flags(level), *PREBUILT_FLAGS), folder / _prebuilt_name(level))


def _prebuilt_name(level: str) -> str:
    return f"cpu-{level}-{_sources_digest()}.so"


def _flags(level: str) -> tuple[str, ...]:
    return (*COMMON_FLAGS, *(_flag(feature) for feature in LEVELS[level]))


def _flag(feature: str) -> str:
    """Return the compiler's flag for a CPU feature."""
    return f"-m{feature.replace('_', '' if feature.startswith('avx512') else '-')}"


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "trioserve"


def find_compiler() -> str:
    """Return the path of the C++ compiler: CXX of the environment, or the first compiler in COMPILERS that exists.

    Raises:
        CannotBuild: there is no compiler.
    """
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else COMPILERS:
        path = shutil.which(name)
        if path is not None:
            return path
    raise CannotBuild(
        "there is no C++ compiler (g++ or clang++)" if not wanted else f"CXX is {wanted}, which cannot be found"
    )


def _fingerprint(compiler: str, flags: tuple[str, ...], watch: Callable[[float], None]) -> str:
    # Every start runs this command. Progress is reported only if the compiler needs unusually long.
    _, version, _ = _run([compiler, "--version"], lambda seconds: watch(seconds) if seconds > VERSION_SECONDS else None)
    return hashlib.sha256(repr((compiler, version, flags, _sources_digest())).encode()).hexdigest()[:16]


def _sources_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in (".h", ".cpp"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def _locked(path: Path, watch: Callable[[float], None]) -> Iterator[None]:
    """Hold the lock of a lock file. The system releases the lock if the process ends.

    Args:
        path: lock file, which is not deleted.
        watch: called every second with the seconds of waiting. An exception ends the waiting.
    """
    started_at = time.monotonic()
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                watch(time.monotonic() - started_at)
                time.sleep(WATCH_SECONDS)
        yield


def _compile(
    compiler: str, flags: tuple[str, ...], library: Path, watch: Callable[[float], None] = lambda seconds: None
) -> None:
    """Compile the library in a temporary folder, then move it into place in one step.

    The folder also contains the compiler's temporary files, which a killed compiler does not delete.
    """
    with tempfile.TemporaryDirectory(prefix="build-", dir=library.parent, ignore_cleanup_errors=True) as folder:
        made = Path(folder) / library.name
        sources = [str(path) for path in sorted(SOURCES.glob("*.cpp"))]
        exit_code, _, stderr = _run([compiler, *flags, "-o", str(made), *sources], watch, folder)
        if exit_code != 0:
            first = next((line for line in stderr.splitlines() if "error" in line.lower()), "no reason given")
            raise CannotBuild(f"{compiler} failed: {first.strip()[:300]}")
        made.chmod(0o755)
        made.rename(library)


# This program starts a guard process, then replaces itself by the compiler. The guard waits for the end of stdin, which
# occurs when the parent process ends, for example by a signal. The guard then deletes the temporary folder and kills
# the process group.
_WITH_GUARD = """
exec 3<&0 </dev/null
(read -r _ <&3; test -z "$0" || rm -rf "$0"; kill -KILL 0) >/dev/null 2>&1 &
exec 3<&-
exec "$@"
"""


def _run(command: list[str], watch: Callable[[float], None], temporary_folder: str = "") -> tuple[int, str, str]:
    """Run a compiler. All processes of the compiler end before this function returns, and also if this process ends.

    Args:
        command: path and arguments of the compiler.
        watch: called immediately and then every second with the seconds so far. An exception ends the compiler.
        temporary_folder: folder of the compiler's temporary files. Empty: the system's default folder.

    Returns:
        Exit code, and the compiler's output to stdout and stderr.
    """
    started_at = time.monotonic()
    environment = {**os.environ, **({"TMPDIR": temporary_folder} if temporary_folder else {})}
    guard, lifeline = os.pipe()  # Child processes do not inherit the write end, so only this process keeps it open.
    try:
        process = subprocess.Popen(
            ["/bin/sh", "-c", _WITH_GUARD, temporary_folder, *command],
            stdin=guard,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=environment,
            process_group=0,  # g++ starts other processes, which must end when g++ ends.
        )
        try:
            seconds = 0.0
            while True:
                watch(seconds)
                if seconds > COMPILE_SECONDS_MAX:
                    raise CannotBuild(f"{command[0]} took longer than {COMPILE_SECONDS_MAX} seconds")
                with contextlib.suppress(subprocess.TimeoutExpired):
                    stdout, stderr = process.communicate(timeout=WATCH_SECONDS)
                    return process.returncode, stdout, stderr
                seconds = time.monotonic() - started_at
        finally:
            # The guard still runs, so the process group exists and its number is not reused.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    finally:
        os.close(guard)
        os.close(lifeline)


def main() -> int:
    """Compile the best library for this machine.

    Returns:
        0 in every case, because torch computes if there is no library.
    """
    levels = supported_levels()
    if not levels:
        print("CPU kernels: none for this machine; plain torch computes", file=sys.stderr)
        return 0
    started_at = time.perf_counter()
    try:
        library = build_library(levels[0], on_compile=_print_progress)
    except CannotBuild as error:
        print(f"CPU kernels: not compiled, plain torch computes: {error}", file=sys.stderr)
        return 0
    print(f"CPU kernels: {library} ({time.perf_counter() - started_at:.1f} s)", file=sys.stderr)
    return 0


def _print_progress(sentence: str, seconds: float) -> None:
    """Print the sentence, then a line from time to time. This package must not import trioserve's progress bar."""
    if not seconds:
        print(sentence, file=sys.stderr, flush=True)
    elif int(seconds) % 10 == 0:
        print(f"still compiling after {seconds:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
