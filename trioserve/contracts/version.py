"""The version of this program."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

__all__ = ["VERSION"]


def _version() -> str:
    try:
        return version("trioserve")
    except PackageNotFoundError:  # The program runs from a source tree and is not installed.
        return "unknown"


VERSION = _version()
