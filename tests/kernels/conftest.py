"""Fixtures: the native kernels at every instruction level of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from trioserve_kernels.build import build_library, supported_levels
from trioserve_kernels.native import Engine, Library, NoNativeKernels

LEVELS = supported_levels()
EMULATED_AMX = "amx, emulated"
CPUINFO = Path("/proc/cpuinfo")


def library_of(level: str) -> Library:
    try:
        if level == EMULATED_AMX:
            header = Path(__file__).with_name("emulated_amx.h")
            # Every CPU with AMX also has this feature.
            vbmi = ("-mavx512vbmi",) if "avx512vbmi" in CPUINFO.read_text() else ()
            # An emulated level only serves to check results. Less optimization halves the time to compile it.
            flags = ("-O1", "-include", str(header), *vbmi)
            return Library(build_library("avx512_bf16", more_flags=flags), level)
        return Library(build_library(level), level)
    except NoNativeKernels as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def library() -> Library:
    """Return the library of the best level."""
    if not LEVELS:
        pytest.skip("needs Linux on x86-64 with AVX2")
    return library_of(LEVELS[0])


@pytest.fixture(scope="module", params=(*LEVELS, *((EMULATED_AMX,) if "avx512_bf16" in LEVELS else ())) or ("none",))
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Return an engine with two threads, for each level."""
    if request.param == "none":
        pytest.skip("needs Linux on x86-64 with AVX2")
    engine = Engine(library_of(request.param), 2)
    yield engine
    engine.close()
