"""setuptools commands that build this project's wheel.

By default, the wheel contains no compiled kernels and can be installed on any machine. The kernels are then compiled at
first start. TRIOSERVE_PREBUILD=1 adds compiled kernels for all levels. TRIOSERVE_PREBUILD=avx2,avx512 adds compiled
kernels for the named levels.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType

from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

__all__ = ["BuildKernels", "KernelsWheel"]

VARIABLE = "TRIOSERVE_PREBUILD"
ALL_LEVELS = "1"
WANTED = os.environ.get(VARIABLE, "")
IS_PREBUILT = WANTED not in ("", "0")


class BuildKernels(build_py):  # type: ignore[misc]  # setuptools has no types
    """Copies the packages and adds compiled kernels."""

    def run(self) -> None:
        super().run()
        if IS_PREBUILT and not self.editable_mode:
            levels = None if WANTED == ALL_LEVELS else WANTED.split(",")
            _build().prebuild(Path(self.build_lib, "trioserve_kernels", "prebuilt"), levels)


class KernelsWheel(bdist_wheel):  # type: ignore[misc]  # setuptools has no types
    """Tags a wheel with compiled kernels for its platform and any Python 3, because ctypes loads the libraries."""

    def finalize_options(self) -> None:
        if IS_PREBUILT:
            # With this, setuptools treats the wheel as platform-specific.
            self.distribution.has_ext_modules = lambda: True
        super().finalize_options()

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        return ("py3", "none", platform) if IS_PREBUILT else (python, abi, platform)


def _build() -> ModuleType:
    """Load build.py by its path, because the project's packages cannot be imported while the wheel is built."""
    spec = importlib.util.spec_from_file_location("trioserve_kernels_build", Path(__file__).with_name("build.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
