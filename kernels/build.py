"""Compiles cpu/ for this machine's instructions, and keeps the library in the user's cache folder.

`python -m trioserve_kernels.build` compiles before the first start. The name of a library contains a hash of sources,
compiler and flags, so an outdated library is never used.

A wheel may contain compiled libraries for all levels (see `prebuild`), which need no compiler. Their names contain a
hash of the sources. They are ignored if it does not match.
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

# If a compiler fused products and sums in some places only, the same row could have other bits in another batch.
COMMON_FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-ffp-contract=off", "-shared", "-fPIC", "-pthread")
# The C++ library is linked statically and unused parts are dropped, since they would require a newer glibc. Its symbols
# are hidden, because torch loads another C++ library into the same process.
PREBUILT_FLAGS = ("-static-libstdc++", "-static-libgcc", "-s", "-Wl,--gc-sections", "-Wl,--exclude-libs,ALL")
COMPILERS = ("g++", "clang++", "c++")
COMPILE_SECONDS_MAX = 600  # it takes about ten on a quiet machine
WATCH_SECONDS = 1.0

_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq")
_AVX512_VNNI = (*_AVX512, "avx512_vnni")
_AVX512_BF16 = (*_AVX512_VNNI, "avx512_bf16")  # every CPU with bf16 has vnni
LEVELS: dict[str, tuple[str, ...]] = {
    "amx": (*_AVX512_BF16, "avx512vbmi", "amx_tile", "amx_bf16"),
    "avx512_bf16": _AVX512_BF16,
    "avx512_vnni": _AVX512_VNNI,
    "avx512": _AVX512,
    "avx2": _AVX2,
}
"""CPU features that a library of each level uses, best level first. The names are those of /proc/cpuinfo."""


class CannotBuild(Exception):
    """No library can be built here. The text says why."""


def supported_levels(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, ...]:
    """Return the LEVELS that this machine supports, best first. Only Linux on x86-64 has any.

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

    A lock keeps two processes from compiling the same library.

    Args:
        level: a name in LEVELS.
        cache: folder for compiled libraries. None is the user's cache folder.
        more_flags: further compiler flags. A library from the wheel is then not used.
        on_compile: called with a sentence and the seconds so far, before the compiler runs and then every second.
            An exception ends the compiler.

    Raises:
        CannotBuild: there is no compiler, or it fails.
    """
    brought = brought_library(level)
    if brought is not None and not more_flags:
        return brought
    compiler = find_compiler()
    flags = (*_flags(level), *more_flags)
    folder = _cache_folder() if cache is None else cache
    library = folder / f"cpu-{level}-{_fingerprint(compiler, flags)}.so"
    if library.is_file():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(library.with_suffix(".lock")):
            if not library.is_file():
                sentence = f"compiling the CPU kernels for {level} (once, some ten seconds)"
                _compile(compiler, flags, library, lambda seconds: on_compile(sentence, seconds))
    except OSError as error:
        raise CannotBuild(f"{folder} cannot be written: {error.strerror}") from None
    return library


def brought_library(level: str) -> Path | None:
    """Return the library that came with the package, or None if there is none for the present sources.

    Args:
        level: a name in LEVELS.
    """
    library = PREBUILT / _prebuilt_name(level)
    return library if library.is_file() else None


def prebuild(folder: Path, levels: Iterable[str] | None = None) -> None:
    """Compile libraries for a wheel. They only need libc and libm of the system.

    Args:
        folder: destination.
        levels: names in LEVELS. None is all.

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
    """Return the path of the C++ compiler: CXX of the environment, or the first one of COMPILERS.

    Raises:
        CannotBuild: there is none.
    """
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else COMPILERS:
        path = shutil.which(name)
        if path is not None:
            return path
    raise CannotBuild(
        "there is no C++ compiler (g++ or clang++)" if not wanted else f"CXX is {wanted}, which cannot be found"
    )


def _fingerprint(compiler: str, flags: tuple[str, ...]) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, check=False).stdout
    return hashlib.sha256(repr((compiler, version, flags, _sources_digest())).encode()).hexdigest()[:16]


def _sources_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        if path.suffix in (".h", ".cpp"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock file. The system releases the lock if the process dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(
    compiler: str, flags: tuple[str, ...], library: Path, watch: Callable[[float], None] = lambda seconds: None
) -> None:
    """Compile the library in a temporary folder, then move it into place in one step.

    The folder also holds the compiler's temporary files, which a killed compiler does not remove.
    """
    with tempfile.TemporaryDirectory(prefix="build-", dir=library.parent, ignore_cleanup_errors=True) as folder:
        made = Path(folder) / library.name
        sources = [str(path) for path in sorted(SOURCES.glob("*.cpp"))]
        exit_code, stderr = _run([compiler, *flags, "-o", str(made), *sources], watch, folder)
        if exit_code != 0:
            first = next((line for line in stderr.splitlines() if "error" in line.lower()), "no reason given")
            raise CannotBuild(f"{compiler} failed: {first.strip()[:300]}")
        made.chmod(0o755)
        made.rename(library)


def _run(command: list[str], watch: Callable[[float], None], temporary_folder: str) -> tuple[int, str]:
    """Run a compiler. When this function ends, all of its processes have ended.

    Returns:
        Exit code, and what the compiler wrote to stderr.
    """
    started_at = time.monotonic()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, "TMPDIR": temporary_folder},
        process_group=0,  # g++ starts further processes, which must end with it
    )
    try:
        seconds = 0.0
        while True:
            watch(seconds)
            if seconds > COMPILE_SECONDS_MAX:
                raise CannotBuild(f"{command[0]} took longer than {COMPILE_SECONDS_MAX} seconds")
            with contextlib.suppress(subprocess.TimeoutExpired):
                _, stderr = process.communicate(timeout=WATCH_SECONDS)
                return process.returncode, stderr
            seconds = time.monotonic() - started_at
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def main() -> int:
    """Compile the best library for this machine.

    Returns:
        0 in every case, because without a library plain torch computes.
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
    """Print the sentence, then a line from time to time. trioserve's progress bar is not imported here on purpose."""
    if not seconds:
        print(sentence, file=sys.stderr, flush=True)
    elif int(seconds) % 10 == 0:
        print(f"still compiling after {seconds:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
