"""Options of the connector `host`: limits for memory and files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from trioserve.contracts.errors import StartupError
from trioserve.contracts.kv_transfer import KVLayout

__all__ = ["HostSettings", "host_settings_from"]

GIB = 2**30
FILE_OVERHEAD_BYTES_MAX = 4096  # upper limit for head and checksum of a file, without its tokens
OPTIONS = ("memory_gib", "memory_bytes", "directory", "directory_gib", "directory_bytes")


class HostSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the host store.

    Attributes:
        memory_bytes: Limit for blocks in memory, including blocks that are being copied.
        directory: Directory for files. None stores no files.
        directory_bytes: Limit for all files in the directory, including files of other models and earlier starts.
    """

    memory_bytes: int
    directory: Path | None = None
    directory_bytes: int = 0


def host_settings_from(options: Mapping[str, Any], layout: KVLayout) -> HostSettings:
    """Check the options of the connector `host`.

    Args:
        options: Content of kv_connector_extra_config.
        layout: KV layout of the engine.

    Raises:
        StartupError: an option is unknown or not allowed, or a limit is smaller than one block.
    """
    unknown = sorted(str(name) for name in options if name not in OPTIONS)
    if unknown:
        raise StartupError(f"the host connector has no option {unknown[0]!r}: it has {', '.join(OPTIONS)}")
    memory_bytes = _size(options, "memory")
    if memory_bytes is None:
        raise StartupError("the host connector needs a limit for its memory: give memory_gib or memory_bytes")
    _check_holds_a_block("memory", memory_bytes, layout)
    directory, directory_bytes = options.get("directory"), _size(options, "directory")
    if directory is None:
        if directory_bytes is not None:
            raise StartupError("the host connector got a limit for a directory, but no directory: give both or none")
        return HostSettings(memory_bytes=memory_bytes)
    if not isinstance(directory, str) or not directory or "\0" in directory:
        raise StartupError(f"directory of the host connector is {directory!r}: give the path of a directory")
    if directory_bytes is None:
        raise StartupError("the host connector needs a limit for its directory: give directory_gib or directory_bytes")
    _check_holds_a_block("directory", directory_bytes, layout)
    return HostSettings(memory_bytes=memory_bytes, directory=Path(directory), directory_bytes=directory_bytes)


def _size(options: Mapping[str, Any], what: str) -> int | None:
    in_gib, in_bytes = options.get(f"{what}_gib"), options.get(f"{what}_bytes")
    if in_gib is not None and in_bytes is not None:
        raise StartupError(f"the host connector got {what}_gib and {what}_bytes: give one of them")
    name, value = (f"{what}_gib", in_gib) if in_gib is not None else (f"{what}_bytes", in_bytes)
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value <= 0:
        raise StartupError(f"{name} of the host connector is {value!r}: it must be a number above 0")
    return int(value * GIB) if in_gib is not None else int(value)


def _check_holds_a_block(what: str, byte_count: int, layout: KVLayout) -> None:
    needed = layout.layer_count * layout.block_size * layout.token_bytes
    if what == "directory":
        needed += FILE_OVERHEAD_BYTES_MAX + 4 * layout.block_size
    if byte_count < needed:
        raise StartupError(
            f"the host connector may use {byte_count} bytes of {what}, and one block of {layout.model} needs {needed}"
        )
