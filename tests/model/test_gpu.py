"""Tests which GPU a rank takes, and which defaults a GPU changes. Fakes replace torch.cuda and NVIDIA's driver."""

from __future__ import annotations

import logging
import subprocess
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from trioserve.contracts.errors import GpuLost, StartupError
from trioserve.contracts.step import ScheduledChunk
from trioserve.model import device as device_module
from trioserve.model.device import lost_gpu, new_event, pick_device, take_gpu, why_no_gpu, with_device_defaults
from trioserve.model.loading.checkpoint import open_checkpoint
from trioserve.model.runner import ModelRunner
from trioserve.model.settings import ModelSettings
from trioserve.model.torch_step import step_model as torch_step_model
from trioserve.model.warm_up_plans import warm_up_plans
from trioserve_kernels import reference, reference_fused, why_not_triton

GIB = 2**30


class Driver:
    """Stand-in for libcuda.

    Args:
        version: what cuDriverGetVersion reports, such as 12040.
        status: what cuInit returns.
    """

    def __init__(self, version: int, status: int = 0) -> None:
        self._version, self._status = version, status

    def cuDriverGetVersion(self, address: Any) -> int:
        address._obj.value = self._version
        return 0

    def cuInit(self, flags: int) -> int:
        assert flags == 0
        return self._status


class Machine:
    """A machine whose torch and driver answer as a test says."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self.taken: list[int] = []
        patch.setattr(torch.cuda, "set_device", self.taken.append)
        device_module._warn_once.cache_clear()
        self.set()

    def set(
        self,
        *,
        usable: bool = True,
        count: int = 1,
        memory_gib: int = 24,
        built_for: str | None = "13.0",
        driver: Driver | None = None,
    ) -> None:
        patch = self._patch
        patch.setattr(torch.cuda, "is_available", lambda: usable)
        patch.setattr(torch.cuda, "device_count", lambda: count)
        patch.setattr(torch.cuda, "mem_get_info", lambda: (memory_gib * GIB, memory_gib * GIB))
        patch.setattr(torch.version, "cuda", built_for)
        patch.setattr(device_module, "_libcuda", lambda: driver)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


@pytest.mark.parametrize("device", ("auto", "cuda"))
def test_each_rank_takes_its_own_gpu(device: Any, machine: Machine) -> None:
    machine.set(count=2, driver=Driver(13000))
    for rank in (0, 1):
        assert take_gpu(ModelSettings(device=device), rank).device == "cuda"
    with pytest.raises(StartupError, match="torch sees 2 here for 3 ranks"):
        take_gpu(ModelSettings(device=device), 2)
    assert machine.taken == [0, 1]


@pytest.mark.parametrize("device", ("auto", "cpu"))
def test_ranks_on_a_cpu_take_no_gpu(device: Any, machine: Machine) -> None:
    machine.set(usable=device == "cpu")
    assert take_gpu(ModelSettings(device=device), 1).device == "cpu"
    assert machine.taken == []


UNUSABLE = [
    pytest.param({"built_for": None, "driver": Driver(13000)}, "is built for CPUs only.*CUDA builds", id="build"),
    pytest.param(
        {"driver": Driver(12040)},
        r"built for CUDA 13\.0, driver .*CUDA up to 12\.4: install a newer driver \(580 or newer.*for CUDA 12",
        id="driver",
    ),
    pytest.param({"driver": Driver(13000, 999)}, "driver reports error 999.*may open /dev/nvidia", id="permission"),
]


@pytest.mark.parametrize("facts, reason", UNUSABLE)
def test_gpu_that_torch_cannot_use_is_an_error_or_one_warning(
    facts: dict[str, Any], reason: str, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.set(usable=False, **facts)
    with pytest.raises(StartupError, match=f"^device is cuda, .*torch {torch.__version__[:4]}.*{reason}"):
        pick_device(ModelSettings(device="cuda"))
    assert caplog.records == []
    for _ in range(3):
        assert pick_device(ModelSettings()) == "cpu"
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "a GPU may be present but is not used" in record.getMessage()


def test_driver_without_a_gpu_is_no_warning(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    machine.set(usable=False, driver=Driver(13000, device_module.CUDA_ERROR_NO_DEVICE))
    assert pick_device(ModelSettings()) == "cpu"
    assert caplog.records == []
    with pytest.raises(StartupError, match="shows no GPU to this process: check CUDA_VISIBLE_DEVICES"):
        pick_device(ModelSettings(device="cuda"))


def test_machine_without_a_driver_computes_on_the_cpu(machine: Machine) -> None:
    machine.set(usable=False)
    assert pick_device(ModelSettings()) == "cpu"
    with pytest.raises(StartupError, match=r"libcuda\.so\.1 of NVIDIA's driver is not here"):
        pick_device(ModelSettings(device="cuda"))


def test_driver_description_combines_the_version_file_and_the_driver_library(machine: Machine, tmp_path: Path) -> None:
    machine.set(usable=False, driver=Driver(12080))
    assert device_module.driver_version(tmp_path) == "driver of unknown version, for CUDA up to 12.8"
    file = tmp_path / "proc/driver/nvidia/version"
    file.parent.mkdir(parents=True)
    file.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n")
    assert device_module.driver_version(tmp_path) == "driver 570.86.15, for CUDA up to 12.8"
    assert "570.86.15" in (why_no_gpu(tmp_path) or "")


@pytest.mark.parametrize(
    "memory_gib, given, expected",
    (
        (24, {}, (256, 2048)),
        (69, {}, (256, 2048)),
        (80, {}, (256, 8192)),
        (80, {"max_num_seqs": 32}, (32, 8192)),
        (24, {"max_num_seqs": 3000}, (3000, 3000)),
        (24, {"max_num_batched_tokens": 100}, (100, 100)),
        (24, {"max_num_seqs": 8, "max_num_batched_tokens": 100}, (8, 100)),
    ),
)
def test_limits_of_a_step_on_a_gpu(
    memory_gib: int, given: dict[str, Any], expected: tuple[int, int], machine: Machine
) -> None:
    machine.set(memory_gib=memory_gib, driver=Driver(13000))
    settings = with_device_defaults(ModelSettings(**given))
    assert (settings.device, settings.max_num_seqs, settings.max_num_batched_tokens) == ("cuda", *expected)
    assert with_device_defaults(settings) == settings


def test_limits_of_a_step_on_a_cpu(machine: Machine) -> None:
    machine.set(usable=False)
    settings = with_device_defaults(ModelSettings())
    assert (settings.device, settings.max_num_seqs, settings.max_num_batched_tokens) == ("cpu", 64, 512)


# --- kernels ---


CONFIG = SimpleNamespace(stage=None, cross=None)


def picked(
    settings: ModelSettings, patch: pytest.MonkeyPatch, *, reason: str | None = None, config: Any = CONFIG
) -> str:
    """Return the name of the kernels that a model on a GPU gets."""
    kernels: dict[str, ModuleType] = {"triton": reference_fused, "torch": reference}
    patch.setattr(torch_step_model, "why_not_triton", lambda: reason)
    patch.setattr(torch_step_model, "pick_kernels", lambda name, *, batch_invariant: kernels[name])
    found = torch_step_model._kernels(config, settings, "cuda")
    return next(name for name, module in kernels.items() if module is found)


def test_triton_kernels_compute_on_a_gpu_by_default(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert picked(ModelSettings(), monkeypatch) == "triton"
    assert picked(ModelSettings(kv_cache_dtype="fp8"), monkeypatch) == "triton"
    assert picked(ModelSettings(gpu_kernels="torch"), monkeypatch, reason="broken") == "torch"
    assert caplog.records == []


@pytest.mark.parametrize(
    "changed, reason",
    (
        ({}, "no compiler"),
        ({"stage": 1}, None),
    ),
)
def test_torch_computes_with_a_warning_where_triton_cannot_launch(
    changed: dict[str, Any],
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = SimpleNamespace(**{**vars(CONFIG), **changed})
    assert picked(ModelSettings(), monkeypatch, reason=reason, config=config) == "torch"
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "plain torch computes" in record.getMessage()
    assert (reason or "") in record.getMessage()


@pytest.mark.parametrize("needs", ({"gpu_kernels": "triton"}, {"batch_invariant": True}, {"quantization": "file"}))
def test_missing_triton_is_an_error_if_the_settings_need_it(
    needs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StartupError, match="Triton's kernels cannot be used: no compiler"):
        picked(ModelSettings(**needs), monkeypatch, reason="no compiler")
    config = SimpleNamespace(stage=1, cross=None)
    assert picked(ModelSettings(**needs), monkeypatch, config=config) == "triton"


def test_reason_against_triton_names_the_missing_header(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Active:
        error: BaseException | None = None

        def get_current_device(self) -> int:
            if self.error is not None:
                raise self.error
            return 0

    active = Active()
    monkeypatch.setattr("triton.runtime.driver", SimpleNamespace(active=active))
    assert why_not_triton() is None
    active.error = subprocess.CalledProcessError(1, ["gcc"])
    monkeypatch.setattr(sysconfig, "get_path", lambda _name: str(tmp_path))
    assert "Python.h: apt install python3-dev" in (why_not_triton() or "")
    (tmp_path / "Python.h").touch()
    assert "cannot be compiled: Command" in (why_not_triton() or "")
    active.error = RuntimeError("Failed to find C compiler.")
    assert "Failed to find C compiler." in (why_not_triton() or "")
    assert "apt install gcc" in (why_not_triton() or "")


# --- memory ---


class MeasuredGpu:
    """Memory of a GPU, as torch.cuda reports it for a model that really computes on the CPU.

    Args:
        model: model whose KV cache is in this memory.
        weights: bytes of weights and of the CUDA context.
        token_bytes: bytes that a step needs for each token.
        graph_bytes: bytes that CUDA graphs keep while the KV cache exists.
    """

    def __init__(
        self, patch: pytest.MonkeyPatch, model: Any, *, weights: int, token_bytes: int, graph_bytes: int
    ) -> None:
        self._model, self._weights, self._token_bytes, self._graphs = model, weights, token_bytes, graph_bytes
        self._cached = 3 * GIB
        self._peak = 0
        self._has_graphs = False
        self.steps: list[list[int]] = []
        self.is_full = False
        compute = model.compute

        def computed(chunks: Sequence[ScheduledChunk], *rest: Any) -> object:
            if self.is_full:
                raise torch.OutOfMemoryError("CUDA out of memory")
            self.steps.append([chunk.count for chunk in chunks])
            self._peak = self.allocated() + self._token_bytes * sum(chunk.count for chunk in chunks)
            return compute(chunks, *rest)

        patch.setattr(model, "device", "cuda")
        patch.setattr(model, "compute", computed)
        patch.setattr(model, "warm_up", lambda: setattr(self, "_has_graphs", True))
        for name, answer in {
            "mem_get_info": lambda: (24 * GIB - self.allocated() - self._cached, 24 * GIB),
            "memory_allocated": self.allocated,
            "max_memory_allocated": lambda: self._peak,
            "reset_peak_memory_stats": lambda: None,
            "synchronize": lambda: None,
            "empty_cache": lambda: setattr(self, "_cached", 0),
        }.items():
            patch.setattr(torch.cuda, name, answer)

    def allocated(self) -> int:
        storage = self._model.storage
        if storage is None:
            return self._weights
        return self._weights + sum(pages.nbytes for pages in storage.pages) + self._graphs * self._has_graphs


@pytest.mark.parametrize("sequences, tokens, counts", ((4, 40, [37, 1, 1, 1]), (2, 300, [127, 127])))
def test_kv_cache_gets_the_memory_that_weights_graphs_and_the_largest_step_leave_free(
    sequences: int,
    tokens: int,
    counts: list[int],
    tiny_checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint("llama"))
    settings = ModelSettings(
        device="cpu", max_num_seqs=sequences, max_num_batched_tokens=tokens, context_tokens_max=128
    )
    loading = msgspec.structs.replace(settings, cpu_kernels="torch", dtype="float32", kv_cache_bytes=2**20)
    model = ModelRunner.load(checkpoint, loading)._model
    assert model is not None
    gpu_memory = MeasuredGpu(monkeypatch, model, weights=10 * GIB, token_bytes=2**24, graph_bytes=GIB)
    runner = ModelRunner(model, settings)
    assert gpu_memory.steps == [counts]
    assert model.storage is None
    left = int(0.9 * 24 * GIB) - 11 * GIB - 2**24 * sum(counts)
    assert 0 <= left - runner.kv_cache_bytes < runner.kv_cache_bytes // runner.block_count

    gpu_memory.is_full = True
    with pytest.raises(StartupError, match=f"too little memory for a step of {tokens} tokens.*max-num-batched-tokens"):
        ModelRunner(model, settings)


# --- errors ---


class Coded(RuntimeError):
    """An error of torch with the error code of CUDA."""

    def __init__(self, code: int) -> None:
        super().__init__("CUDA error: words that may change")
        self.error_code = code


STICKY = (
    Coded(700),
    Coded(214),
    Coded(719),
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be ..."),
    torch.AcceleratorError("CUDA error: device-side assert triggered"),
    torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"),
    RuntimeError("Triton Error [CUDA]: unspecified launch failure"),
)
HARMLESS = (Coded(2), Coded(1), torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("shapes differ"))


@pytest.mark.parametrize("error", STICKY, ids=str)
def test_error_that_makes_the_gpu_unusable_is_reported_by_name(error: Exception) -> None:
    @lost_gpu()
    def compute() -> None:
        raise error

    with pytest.raises(GpuLost, match=r"can no longer use its GPU: (CUDA|Triton) [^\n]*$") as caught:
        compute()
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", HARMLESS, ids=str)
def test_other_errors_of_a_step_are_unchanged(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, lost_gpu():
        raise error
    assert caught.value is error


@pytest.mark.parametrize("is_read_late", (False, True))
def test_step_on_a_lost_gpu_raises_gpu_lost(
    is_read_late: bool, tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ModelSettings(device="cpu", cpu_kernels="torch", dtype="float32", kv_cache_bytes=2**20)
    runner = ModelRunner.load(open_checkpoint(tiny_checkpoint("llama")), settings)
    runner.allocate_kv(runner.block_count)

    def fail(*_arguments: object) -> object:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    assert runner._model is not None
    monkeypatch.setattr(runner._model, "compute", fail)
    plan = next(iter(warm_up_plans(8, runner.block_count, 100)))
    finish = runner.launch(plan) if is_read_late else lambda: runner.execute(plan)
    with pytest.raises(GpuLost, match="device-side assert"):
        finish()
    runner.close()


@pytest.mark.parametrize("cores, blocks", ((1, True), (3, True), (4, False), (64, False)))
def test_waits_for_the_gpu_block_where_cores_are_few(cores: int, blocks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bool] = []
    monkeypatch.setattr("os.sched_getaffinity", lambda _process: set(range(cores)))
    monkeypatch.setattr(torch.cuda, "Event", lambda *, blocking: made.append(blocking))
    new_event()
    assert made == [blocks]
