"""Optional parts of the installation, called extras, and the command that installs one."""

from __future__ import annotations

import sys
from importlib.metadata import Distribution, PackageNotFoundError
from typing import Literal

import msgspec

__all__ = ["Extra", "install_command"]

Extra = Literal["asgi", "bench", "gpu", "hub", "image", "nixl", "otel", "ray", "top", "torch", "vision"]


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
    try:
        origin = Distribution.from_name("trioserve").read_text("direct_url.json")  # see PEP 610
    except PackageNotFoundError:
        return __file__.rsplit("/", 3)[0]  # never installed, so this file is in a source tree
    if origin is None:
        return None
    url = msgspec.json.decode(origin)
    is_editable = url.get("dir_info", {}).get("editable", False)
    return __file__.rsplit("/", 3)[0] if is_editable else None
