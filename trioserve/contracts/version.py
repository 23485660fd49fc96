"""Which version of this program runs."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

__all__ = ["VERSION"]


def _version() -> str:
    try:
        return version("trioserve")
    except PackageNotFoundError:  # run from a source tree
        return "unknown"


VERSION = _version()
