"""`trioserve doctor`: checks this machine and lists missing software, or computes the memory that a model needs.

The command loads no weights. It imports torch only if an NVIDIA driver is here, to ask whether torch can use the GPU.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import socket
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import msgspec

from trioserve import __version__
from trioserve.commands.processor import processor_name
from trioserve.contracts.errors import ModelLoadError, StartupError
from trioserve.contracts.extras import Extra, install_command
from trioserve.model.device import free_host_bytes, has_torch, kv_block_bytes, pick_dtype
from trioserve.model.diffusion.directory import is_image_model
from trioserve.model.estimate import ModelEstimate, estimate_checkpoint, estimate_model, gpu_weight_bytes
from trioserve.model.gpu import driver_version, has_cuda_driver, why_no_gpu
from trioserve.model.loading.checkpoint import Checkpoint, open_checkpoint
from trioserve.model.loading.default_model import find_default_model
from trioserve.model.loading.encoder_directory import opened_encoder
from trioserve.model.settings import ModelSettings

__all__ = ["Finding", "findings", "model_findings", "run_doctor"]

PORT = 8000
MEMORY_BYTES_MIN = 2 * 2**30  # The bundled model with a small KV cache needs less than 1 GiB.
STREAM_TOKENS = 2_000  # tokens of the prompt and the response in docs/guides/sizing.md, rounded up
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


def run_doctor(*, as_json: bool, model: str | None = None) -> int:
    """Print the results of all checks.

    Args:
        as_json: True prints JSON instead of a table.
        model: model whose memory is computed. None checks the machine instead.

    Returns:
        1 if trioserve cannot serve because something is missing, or if the model does not fit, otherwise 0.

    Raises:
        ModelLoadError: the model is not on this machine, or is damaged.
    """
    found = list(findings() if model is None else model_findings(model))
    if as_json:
        print(msgspec.json.encode(found).decode())
    else:
        marks = {"ok": "ok     ", "absent": "-      ", "missing": "MISSING"}
        for finding in found:
            print(f"{marks[finding.state]}  {finding.name:<16} {finding.what}")
            if finding.mend is not None:
                print(f"{'':27}{finding.mend}")
    return any(finding.state == "missing" for finding in found)


def findings() -> Iterator[Finding]:
    yield Finding("trioserve", "ok", f"{__version__}, Python {platform.python_version()} on {sys.platform}")
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


def model_findings(name: str) -> Iterator[Finding]:
    """Compute the memory that a model needs on the CPU, from its configuration and the headers of its files.

    Args:
        name: packaged model, directory or .gguf file on this machine.

    Raises:
        ModelLoadError: the model is not on this machine, or is damaged.
    """
    path = find_default_model(name) or Path(name)
    if not path.exists():
        raise ModelLoadError(f"{name} is not on this machine: name a path that `trioserve models` or `pull` prints")
    if is_image_model(str(path)):
        raise ModelLoadError(f"{name} generates images and has no KV cache: name a model for text")
    settings, free_bytes = ModelSettings(device="cpu"), free_host_bytes()
    encoder = opened_encoder(path)
    if encoder is not None:
        estimate = estimate_model(path, settings)
        yield Finding("model", "ok", f"{name}: an encoder ({estimate.family}), without a KV cache")
        yield from _fixed_memory(estimate, free_bytes)
        return
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    estimate = estimate_checkpoint(checkpoint, settings, with_cache=False)
    context = f"{config.layer_count} layers, {config.context_tokens_max:,} tokens of context"
    yield Finding("model", "ok", f"{name}: {config.family}, {context}")
    yield from _fixed_memory(estimate, free_bytes)
    yield from _weights_on_gpu(checkpoint, settings)
    small = kv_block_bytes(config, 1, estimate.dtype, "int8")
    yield Finding(
        "KV cache",
        "ok",
        f"{_gib(1000 * estimate.kv_token_bytes)} per 1,000 tokens in {estimate.dtype}, {_gib(1000 * small)} with "
        "--kv-cache-dtype int8",
    )
    if config.state_bytes:
        yield Finding("states", "ok", f"{_gib(config.state_bytes)} per running stream, in the memory of the KV cache")
    yield _fitting("by default", checkpoint, settings)
    most = int((free_bytes - estimate.fixed_bytes) / 2**30)
    if most >= 1:
        largest = msgspec.structs.replace(settings, kv_cache_bytes=most * 2**30)
        yield _fitting("at most", checkpoint, largest, f", with --kv-cache-memory {most}")


def _weights_on_gpu(checkpoint: Checkpoint, settings: ModelSettings) -> Iterator[Finding]:
    """Say which quantized weights Triton's kernels keep on a GPU, with their bytes. No line if none are quantized."""
    tensors = list(checkpoint.tensors())
    if not has_torch() or all(tensor.block_type is None for tensor in tensors):
        return
    dtype = pick_dtype(checkpoint.config, settings, "cuda")
    kept, expanded = gpu_weight_bytes(tensors, dtype, settings)
    what = f"{_gib(kept)} stay in 4 bits with Triton, {_gib(expanded)} are expanded to {dtype}"
    yield Finding("weights on a GPU", "ok", what)


def _fixed_memory(estimate: ModelEstimate, free_bytes: int) -> Iterator[Finding]:
    fits = estimate.fixed_bytes < free_bytes
    advice = None if fits else f"{_gib(free_bytes)} are free: use a smaller model, or --quantization int8 or int4"
    how = f"in {estimate.dtype}" if estimate.quantization == "none" else "quantized as in the file"
    images = f", and {_gib(estimate.vision_bytes)} of the image encoder" if estimate.vision_bytes else ""
    yield Finding("weights", "ok" if fits else "missing", f"{_gib(estimate.weight_bytes)} {how}{images}", advice)
    overhead = _gib(estimate.overhead_bytes)
    yield Finding("workspace", "ok", f"{overhead} for the program, its tokenizer and the buffers of a step")


def _fitting(name: str, checkpoint: Checkpoint, settings: ModelSettings, option: str = "") -> Finding:
    """Return how many tokens and streams fit into the KV cache, whose size follows from the settings."""
    try:
        estimate = estimate_checkpoint(checkpoint, settings)
    except StartupError as error:
        return Finding(name, "missing", str(error))
    tokens, most = estimate.kv_tokens, estimate.stream_count_max
    streams = tokens // STREAM_TOKENS if most is None else min(tokens // STREAM_TOKENS, most)
    room = f"{tokens:,} tokens, or {streams:,} streams of {STREAM_TOKENS:,} tokens{option}"
    return Finding(name, "ok", f"{_gib(estimate.kv_bytes)} of KV cache: {room}")


def _gib(byte_count: int) -> str:
    return f"{byte_count / 2**30:.3g} GiB"


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
