"""The GPUs of this machine: whether torch can use one, which GPU a rank takes, and the limits that fit a GPU."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from trioserve.contracts.errors import GpuLost, StartupError
from trioserve.contracts.extras import install_command
from trioserve.model.device import DeviceType, has_torch, torch_now
from trioserve.model.settings import MAX_NUM_SEQS_GPU, ModelSettings

if TYPE_CHECKING:
    import torch

__all__ = [
    "STEP_TOKENS_GPU",
    "driver_version",
    "has_cuda_driver",
    "lost_gpu",
    "new_event",
    "pick_device",
    "take_gpu",
    "why_no_gpu",
    "with_device_defaults",
]

logger = logging.getLogger(__name__)

# A prompt chunk of 2,048 tokens uses the matrix units of a GPU well. More tokens per step need more memory for
# activations, which large GPUs have.
STEP_TOKENS_GPU, STEP_TOKENS_LARGE_GPU = 2_048, 8_192
LARGE_GPU_BYTES = 70 * 2**30

CUDA_ERROR_NO_DEVICE = 100
# Errors of the CUDA runtime after which every call of the same process fails, from NVIDIA's description of cudaError.
STICKY_CODES = frozenset((214, 220, 226, 700, 702, 709, 710, *range(714, 720), 721))
# The same errors as text, because Triton and NCCL raise errors without a code.
STICKY_TEXTS = (
    "illegal memory access",
    "illegal instruction",
    "illegal address",
    "misaligned address",
    "device-side assert",
    "unspecified launch failure",
    "uncorrectable ECC",
    "uncorrectable NVLink",
    "hardware stack error",
    "invalid program counter",
    "operation not supported on global/shared address space",
    "launch timed out and was terminated",
)
# With fewer cores, a thread that spins while the GPU computes takes a core that the event loop needs. Blocking instead
# costs some microseconds at the end of a step.
SPINNING_CORES_MIN = 4


def pick_device(settings: ModelSettings) -> DeviceType:
    """Return the device that the settings select.

    With "auto", a GPU that torch cannot use is logged once as a warning, and the CPU computes.

    Args:
        settings: settings of the model.

    Raises:
        StartupError: device is cuda, and torch cannot use a GPU.
    """
    if settings.device == "cuda":
        torch_now("device cuda")
        if (reason := why_no_gpu()) is not None:
            raise StartupError(f"device is cuda, but torch cannot use a GPU here: {reason}; or use device cpu or auto")
        return "cuda"
    if settings.device == "cpu" or not has_cuda_driver():
        return "cpu"
    if not has_torch():
        _warn_once(f"to use it, {install_command('gpu')}")
        return "cpu"
    if (reason := why_no_gpu()) is None:
        return "cuda"
    if _driver_status() != CUDA_ERROR_NO_DEVICE:
        _warn_once(reason)
    return "cpu"


def take_gpu(settings: ModelSettings, index: int) -> ModelSettings:
    """Select a separate GPU for each rank if the device is CUDA. Call this function in the thread that computes.

    Args:
        settings: settings of the model.
        index: number of the rank among the ranks of this machine.

    Returns:
        The settings with the device that the rank uses.

    Raises:
        StartupError: there are fewer GPUs than ranks on this machine.
    """
    device = pick_device(settings)
    if device == "cuda":
        cuda = torch_now().cuda
        if index >= (count := cuda.device_count()):
            raise StartupError(
                f"device is {settings.device}, and each rank needs a GPU of its own, but torch sees {count} here for "
                f"{index + 1} ranks or more: use fewer ranks, or device cpu"
            )
        cuda.set_device(index)
    return msgspec.structs.replace(settings, device=device)


def with_device_defaults(settings: ModelSettings) -> ModelSettings:
    """Return settings in which the device, the sequences and the tokens of a step are chosen.

    On a GPU, MAX_NUM_SEQS_GPU sequences run at a time, and a step computes STEP_TOKENS_GPU tokens, or
    STEP_TOKENS_LARGE_GPU if the GPU has at least LARGE_GPU_BYTES of memory. Given values are kept.

    Args:
        settings: settings of the model.

    Raises:
        StartupError: device is cuda, and torch cannot use a GPU.
    """
    device = pick_device(settings)
    sequences, tokens = settings.max_num_seqs, settings.max_num_batched_tokens
    if device == "cuda":
        if tokens is None:
            is_large = torch_now().cuda.mem_get_info()[1] >= LARGE_GPU_BYTES
            tokens = max(STEP_TOKENS_LARGE_GPU if is_large else STEP_TOKENS_GPU, sequences or 0)
        if sequences is None:
            sequences = min(MAX_NUM_SEQS_GPU, tokens)
    return msgspec.structs.replace(
        settings,
        device=device,
        max_num_seqs=sequences or settings.sequences_max,
        max_num_batched_tokens=tokens or settings.step_tokens_max,
    )


def has_cuda_driver() -> bool:
    """Return True if the CUDA driver's library is present. Without this library, torch finds no CUDA device.

    The check does not import torch, which takes seconds.
    """
    return _libcuda() is not None


def driver_version(root: Path = Path("/")) -> str:
    """Describe the NVIDIA driver: its version, and the highest CUDA version that it supports.

    Args:
        root: root of the file system to read.
    """
    try:
        text = (root / "proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found = re.search(r"\b\d+\.\d+(?:\.\d+)?\b", text)
    cuda = _driver_cuda()
    supported = "an unknown CUDA version" if cuda is None else f"CUDA up to {cuda[0]}.{cuda[1]}"
    return f"driver {'of unknown version' if found is None else found[0]}, for {supported}"


def why_no_gpu(root: Path = Path("/")) -> str | None:
    """Return the reason why torch cannot use a GPU, and what to do. None if torch can use one. Torch is imported.

    Args:
        root: root of the file system to read.
    """
    torch = torch_now()
    if torch.cuda.is_available():
        return None
    wanted = torch.version.cuda
    versions = f"torch {torch.__version__} is built for {'CUDA ' + wanted if wanted else 'CPUs only'}"
    if not has_cuda_driver():
        return f"{versions}, and the library libcuda.so.1 of NVIDIA's driver is not here: install the driver"
    versions = f"{versions}, {driver_version(root)}"
    supported = _driver_cuda()
    if wanted is None:
        return f"{versions}: {install_command('gpu')}, from an index with CUDA builds of torch"
    # A driver supports all versions of CUDA with its own major version.
    if supported is not None and supported[0] < int(wanted.partition(".")[0]):
        newer = " (580 or newer for CUDA 13)" if wanted.startswith("13.") else ""
        return f"{versions}: install a newer driver{newer}, or a torch that is built for CUDA {supported[0]}"
    status = _driver_status()
    if status == CUDA_ERROR_NO_DEVICE:
        return f"{versions}, and the driver shows no GPU to this process: check CUDA_VISIBLE_DEVICES and nvidia-smi"
    return (
        f"{versions}, and the driver reports error {status}: check nvidia-smi, and that this user may open /dev/nvidia*"
    )


@contextmanager
def lost_gpu() -> Iterator[None]:
    """Replace an error after which this process can no longer use its GPU. Also a decorator.

    Raises:
        GpuLost: torch, Triton or NCCL raised such an error. All other errors are unchanged.
    """
    try:
        yield
    except RuntimeError as error:
        code = getattr(error, "error_code", None)
        if code not in STICKY_CODES and not any(text in str(error) for text in STICKY_TEXTS):
            raise
        raise GpuLost(f"this process can no longer use its GPU: {str(error).partition(chr(10))[0]}") from error


def new_event() -> torch.cuda.Event:
    """Return an event of the current GPU. A thread that waits for it spins, or blocks if there are few cores."""
    make: Any = torch_now().cuda.Event
    event: torch.cuda.Event = make(blocking=_core_count() < SPINNING_CORES_MIN)
    return event


def _core_count() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def _warn_once(reason: str) -> None:
    logger.warning("a GPU may be present but is not used: %s", reason)


def _libcuda() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _driver_cuda() -> tuple[int, int] | None:
    """Return the highest CUDA version that the driver supports. None if the driver does not report it."""
    library, version = _libcuda(), ctypes.c_int()
    if library is None or library.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return version.value // 1000, version.value % 1000 // 10


def _driver_status() -> int | None:
    """Return the result of the driver's start, a CUresult. 0 is success. None without a driver."""
    library = _libcuda()
    return None if library is None else int(library.cuInit(0))
