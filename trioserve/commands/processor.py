"""Name of the processor for status messages."""

from __future__ import annotations

import os
import platform
from pathlib import Path

__all__ = ["processor_name"]


def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the name of the processor and the number of cores that this process may use.

    Args:
        cpuinfo: file to read, with the format of /proc/cpuinfo. If it does not exist, the name of the architecture is
            returned.
    """
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    name = " ".join(next(names, platform.machine() or "unknown").split())
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return f"{name}, {count} core{'s' if count > 1 else ''}"
