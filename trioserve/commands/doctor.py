"""`trioserve doctor`: checks this machine and lists missing software.

The command imports torch only if an NVIDIA driver is here, to ask whether torch can use the GPU.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import socket
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import msgspec

from trioserve.contracts.extras import VERSION, Extra, install_command
from trioserve.model.device import driver_version, has_cuda_driver, has_torch, why_no_gpu
from trioserve.model.loading.default_model import find_default_model

__all__ = ["Finding", "findings", "print_findings", "processor_name", "run_doctor"]

PORT = 8000
MEMORY_BYTES_MIN = 2 * 2**30  # The bundled model with a small KV cache needs less than 1 GiB.
EXTRAS: dict[str, tuple[str, Extra]] = {
    "huggingface_hub": ("models by their hub names", "hub"),
    "hypercorn": ("the front end hypercorn, and mounting as ASGI", "asgi"),
    "triton": ("triton kernels on a GPU", "gpu"),
    "nixl": ("KV transfer over NIXL", "nixl"),
    "rich": ("the terminal view `top`", "top"),
}


class Finding(msgspec.Struct, frozen=True):
    """Result of one check.

    Attributes:
        name: name of the checked requirement.
        state: "missing" if trioserve cannot serve without the requirement, "absent" if the requirement is optional.
        what: description of the result.
        mend: command or advice to fulfil the requirement. None if the user need not do anything.
    """

    name: str
    state: Literal["ok", "absent", "missing"]
    what: str
    mend: str | None = None


def run_doctor(*, as_json: bool) -> int:
    """Print the results of all checks of this machine.

    Args:
        as_json: True prints JSON instead of a table.

    Returns:
        1 if trioserve cannot serve because something is missing, otherwise 0.
    """
    found = list(findings())
    if as_json:
        print(msgspec.json.encode(found).decode())
    else:
        print_findings(found)
    return any(finding.state == "missing" for finding in found)


def print_findings(found: Iterable[Finding]) -> None:
    """Print one line for each finding, and a second line for advice.

    Args:
        found: the findings.
    """
    marks = {"ok": "ok     ", "absent": "-      ", "missing": "MISSING"}
    for finding in found:
        print(f"{marks[finding.state]}  {finding.name:<16} {finding.what}")
        if finding.mend is not None:
            print(f"{'':27}{finding.mend}")


def findings() -> Iterator[Finding]:
    yield Finding("trioserve", "ok", f"{VERSION}, Python {platform.python_version()} on {sys.platform}")
    yield _processor()
    yield _kernels()
    yield _torch()
    yield _memory()
    yield _gpu()
    yield _model()
    for package, (what, extra) in EXTRAS.items():
        found = _version(package)
        if found is None:
            yield Finding(package, "absent", f"for {what}", install_command(extra))
        else:
            yield Finding(package, "ok", f"{found}: {what}")
    yield _port()


def _processor() -> Finding:
    from trioserve_kernels.build import supported_levels

    levels = supported_levels()
    if levels:
        return Finding("processor", "ok", f"{processor_name()}; best supported instructions: {levels[0]}")
    return Finding(
        "processor", "absent", f"{processor_name()}; no native kernels for it", "native kernels need x86-64 with AVX2"
    )


def _kernels() -> Finding:
    from trioserve_kernels.build import CannotBuild, brought_library, find_compiler, supported_levels

    levels = supported_levels()
    if levels and brought_library(levels[0]) is not None:
        return Finding("native kernels", "ok", f"came with the package, compiled for {levels[0]}")
    try:
        return Finding("compiler", "ok", f"{find_compiler()}, for the native kernels")
    except CannotBuild as error:
        if levels and _version("torch") is None:
            return Finding("compiler", "missing", f"{error}, and no torch: models cannot run", "apt install g++")
        return Finding("compiler", "absent", f"{error}: torch runs models, which is much slower", "apt install g++")


def _torch() -> Finding:
    found = _version("torch")
    if found is None:
        return Finding("torch", "absent", "models run only with native kernels", install_command("torch"))
    return Finding("torch", "ok", found)


def _memory() -> Finding:
    total, free = (os.sysconf(name) * os.sysconf("SC_PAGE_SIZE") for name in ("SC_PHYS_PAGES", "SC_AVPHYS_PAGES"))
    what = f"{total / 2**30:.1f} GiB, {free / 2**30:.1f} free"
    if total >= MEMORY_BYTES_MIN:
        return Finding("memory", "ok", what)
    advice = "limit the KV cache with --kv-cache-memory; --kv-cache-dtype int8 doubles the tokens that fit"
    return Finding("memory", "absent", what, advice)


def _gpu() -> Finding:
    card_count = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    cards = f"{card_count} from NVIDIA" if card_count else "NVIDIA's driver"
    if not has_cuda_driver():
        missing = f"{cards}, but libcuda.so.1 is missing, as in a container without --gpus"
        return Finding("gpu", "absent", f"{missing if card_count else 'none from NVIDIA'}: models run on the CPU")
    if not has_torch():
        return Finding("gpu", "absent", f"{cards}, not used without torch", install_command("gpu"))
    if (reason := why_no_gpu()) is not None:
        return Finding("gpu", "absent", f"{cards}, not used, models run on the CPU", reason)
    return Finding("gpu", "ok", f"{cards}, {driver_version()}; torch can use it")


def _model() -> Finding:
    path = find_default_model("smollm2")
    if path is not None:
        return Finding("bundled model", "ok", f"smollm2, {path.stat().st_size / 1e6:.0f} MB")
    return Finding("bundled model", "absent", "smollm2 is downloaded at its first start", "trioserve pull smollm2")


def _version(package: str) -> str | None:
    if importlib.util.find_spec(package) is None:
        return None
    try:
        return version(package)
    except PackageNotFoundError:
        return "of unknown version"


def _port() -> Finding:
    with socket.socket() as asking:
        asking.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            asking.bind(("127.0.0.1", PORT))
        except OSError as error:
            return Finding("port", "absent", f"{PORT} cannot be used: {error.strerror}", "use another port: --port N")
    return Finding("port", "ok", f"{PORT} is free")


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
