"""The version of this program, its optional dependencies, and the command that installs them."""

from __future__ import annotations

import sys
from importlib.metadata import Distribution, PackageNotFoundError, version
from typing import Any, Literal

import msgspec

__all__ = ["Extra", "VERSION", "install_command"]


Extra = Literal["asgi", "audio", "bench", "gpu", "hub", "image", "nixl", "otel", "ray", "top", "torch", "vision"]


def install_command(extra: Extra) -> str:
    """Return a shell command that adds an extra to the Python installation that runs this program.

    In a checkout, the command installs from the checkout, because a package index may have another version or none. In
    a virtual environment the command names its Python, so the environment need not be active.

    Args:
        extra: name of the extra in pyproject.toml.
    """
    pip = "pip" if sys.prefix == sys.base_prefix else f"{sys.executable} -m pip"
    checkout = _checkout()
    return f"{pip} install " + (f"'trioserve[{extra}]'" if checkout is None else f"-e '{checkout}[{extra}]'")


def _checkout() -> str | None:
    """Return the folder of the checkout that this program runs from. None if it runs from an installed copy."""
    checkout = __file__.rsplit("/", 3)[0]
    try:
        installed = Distribution.from_name("trioserve")
    except PackageNotFoundError:
        return checkout
    # The value is a pathlib.Path.
    beside: Any = installed.locate_file("pyproject.toml")
    if beside.is_file():
        return checkout  # setuptools leaves metadata in a source tree. They hide the metadata of the installation.
    origin = installed.read_text("direct_url.json")  # PEP 610 describes this file.
    is_editable = origin is not None and msgspec.json.decode(origin).get("dir_info", {}).get("editable", False)
    return checkout if is_editable else None


def _version() -> str:
    try:
        return version("trioserve")
    except PackageNotFoundError:  # The program runs from a source tree and is not installed.
        return "unknown"


VERSION = _version()
