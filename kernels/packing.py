"""How a wheel of this project is made: with the kernels compiled where TRIOSERVE_PREBUILD asks for that, and otherwise
for any machine, compiled at the first start. Run by setuptools, and by nothing else.

TRIOSERVE_PREBUILD=1 takes every level, TRIOSERVE_PREBUILD=avx2,avx512 these.
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


class BuildKernels(build_py):  # type: ignore[misc]  # setuptools brings no types
    """Copies the packages, and compiles the kernels beside them."""

    def run(self) -> None:
        super().run()
        if IS_PREBUILT and not self.editable_mode:
            levels = None if WANTED == ALL_LEVELS else WANTED.split(",")
            _build().prebuild(Path(self.build_lib, "trioserve_kernels", "prebuilt"), levels)


class KernelsWheel(bdist_wheel):  # type: ignore[misc]  # nor here
    """The libraries need a machine of a kind, and no particular Python: they are called through ctypes."""

    def finalize_options(self) -> None:
        if IS_PREBUILT:
            self.distribution.has_ext_modules = lambda: True  # so that all of it is placed as what needs a machine
        super().finalize_options()

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        return ("py3", "none", platform) if IS_PREBUILT else (python, abi, platform)


def _build() -> ModuleType:
    """build.py, by its path: nothing of this project can be imported while it is being built."""
    spec = importlib.util.spec_from_file_location("trioserve_kernels_build", Path(__file__).with_name("build.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
