"""Tests of weights that reach a device through host buffers.

The stand-in for a device executes a copy only when the host waits for it. A buffer that is written too early is seen in
the weights.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from trioserve.contracts.errors import ModelLoadError
from trioserve.model import weights
from trioserve.model.loading.checkpoint import open_checkpoint
from trioserve.model.loading.stored_tensor import StoredTensor
from trioserve.model.torch_step import step_model as torch_step_model
from trioserve.model.torch_step.formats import PinnedStaging, TensorSlot
from trioserve.model.weights import Piece, StagedSlot, StagedWeight, copied, fill_slots

BUFFER_BYTES = 4_000


class LateDevice:
    """Staging whose device executes work in order, and no earlier than the host waits for it."""

    def __init__(self, buffer_count: int = 3, buffer_bytes: int = BUFFER_BYTES) -> None:
        self.buffers = [np.full(buffer_bytes, 0xFF, dtype=np.uint8) for _ in range(buffer_count)]
        self._work: deque[Callable[[], object]] = deque()

    def reserve(self, byte_count: int) -> Tensor:
        return torch.empty(byte_count, dtype=torch.uint8)

    def send(self, buffer: int, byte_count: int, to: Tensor, offset: int) -> Callable[[], object]:
        def copy() -> None:
            to[offset : offset + byte_count] = torch.from_numpy(self.buffers[buffer][:byte_count])

        self._work.append(copy)
        return lambda: self.finish(copy)

    def later(self, fill: Callable[[Tensor], object], memory: Tensor) -> None:
        self._work.append(lambda: fill(memory))

    def finish(self, last: Callable[[], object] | None = None) -> None:
        """Execute all work up to a copy. Do nothing if the copy was executed before."""
        while self._work and (last is None or last in self._work):
            self._work.popleft()()


def loaded(checkpoint: Any, staging: Any, dtype: torch.dtype, threads: int, progress: Any = None) -> dict[str, Tensor]:
    """Fill a slot for each tensor of a checkpoint. Without staging, each tensor is copied directly."""
    found: dict[str, Tensor] = {}

    def slot(tensor: StoredTensor) -> Any:
        def fill(values: Tensor) -> None:
            assert tensor.name not in found
            found[tensor.name] = values.clone()

        blocks = None if tensor.block_type is None else fill
        result = TensorSlot(tensor.name, tensor.shape, dtype, fill, tensor.block_type, blocks).for_values(staging)
        if result.staged is None or not isinstance(staging, LateDevice):
            return result
        _, fill_from, fill_blocks = result.staged
        late = None if fill_blocks is None else partial(staging.later, fill_blocks)
        return result._replace(staged=StagedSlot(staging, partial(staging.later, fill_from), late))

    tensors = [*checkpoint.tensors()]
    slots = map(slot, tensors)
    fill_slots(slots, tensors, bytes_total=checkpoint.weight_bytes, progress=progress, thread_count=threads)
    if isinstance(staging, LateDevice):
        staging.finish()
    return found


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Read rows in pieces of a buffer, and check that no thread outlives its test."""
    monkeypatch.setattr(weights, "BUFFER_BYTES", BUFFER_BYTES)
    monkeypatch.setattr(weights, "BUFFER_BYTES", BUFFER_BYTES)
    yield
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("trioserve-load")]


@pytest.mark.parametrize("threads, buffer_count", ((1, 1), (1, 3), (3, 1), (3, 5)))
@pytest.mark.parametrize("kind", ("llama", "qwen3-moe", "fp8", "awq", "gguf"))
def test_weights_through_buffers_equal_weights_that_are_copied_directly(
    kind: str,
    threads: int,
    buffer_count: int,
    tiny_checkpoint: Callable[..., Path],
    tiny_quantized: ModuleType,
    tiny_gguf: Callable[..., Path],
    tmp_path: Path,
) -> None:
    if kind == "gguf":
        path = tiny_gguf("llama", "Q8_0")
    elif kind in ("fp8", "awq"):
        path = tmp_path
        variant = next(name for name in tiny_quantized.VARIANTS if name.startswith(kind))
        tiny_quantized.write_quantized(tiny_checkpoint("llama"), path, variant)
    else:
        path = tiny_checkpoint(kind)
    checkpoint = open_checkpoint(path)
    reports: list[tuple[int, int]] = []
    wanted = loaded(checkpoint, None, torch.bfloat16, 1)
    staging = LateDevice(buffer_count)
    got = loaded(checkpoint, staging, torch.bfloat16, threads, lambda *report: reports.append(report))
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(got[name], tensor), name
    assert reports[0] == (0, checkpoint.weight_bytes)
    assert reports[-1] == (checkpoint.weight_bytes, checkpoint.weight_bytes)
    assert reports == sorted(reports)


def test_one_thread_fills_the_weights_in_the_order_of_the_checkpoint(tiny_checkpoint: Callable[..., Path]) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint("llama"))
    got = loaded(checkpoint, LateDevice(), torch.float32, 1)
    assert [*got] == [tensor.name for tensor in checkpoint.tensors()]


def test_staging_without_a_gpu_copies_at_once(tiny_checkpoint: Callable[..., Path]) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint("llama"))
    wanted = loaded(checkpoint, None, torch.float32, 1)
    got = loaded(checkpoint, PinnedStaging(torch.device("cpu")), torch.float32, 2)
    assert all(torch.equal(got[name], tensor) for name, tensor in wanted.items())


def test_models_of_a_gpu_are_loaded_and_replaced_through_buffers(
    tiny_checkpoint: Callable[..., Path], step_driver: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_step_model, "default_thread_count", lambda: 16)
    path = tiny_checkpoint("llama")
    runner = step_driver.load_runner(path, cpu_kernels="torch")
    assert runner.loading_threads == 1
    assert all(slot.staged is None for slot in runner.slots())
    driver = step_driver.StepDriver(runner)
    driver.add("a", [5, 6, 7])
    driver.generate(["a"], 6)
    runner._model.device = "cuda"  # The model's tensors remain on the CPU.
    assert runner.loading_threads == 8
    assert all(slot.staged is not None for slot in runner.slots())
    runner._model._model._head._weight.zero_()
    fill_slots(runner.slots(), open_checkpoint(path).tensors(), bytes_total=0, progress=None, thread_count=2)
    again = step_driver.StepDriver(runner, seed=1)
    again.add("a", [5, 6, 7])
    again.generate(["a"], 6)
    assert again.tokens == driver.tokens


def pieces(sizes: list[int], read: Callable[[int, int], np.ndarray]) -> list[StagedWeight]:
    return [
        StagedWeight([Piece(0, size, partial(read, index, size), size)], size, lambda memory: None)
        for index, size in enumerate(sizes)
    ]


def test_bytes_that_are_read_at_the_same_time_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading begins when a piece is given to a thread, and ends when its last buffer is sent."""
    monkeypatch.setattr(weights, "READ_BYTES_MAX", 10_000)
    sizes = [1_000, 3_000, 9_000, 500, 25_000, 100, 6_000, 6_000, 12, 4_000] * 3
    open_bytes, most = 0, 0
    lock = threading.Lock()

    def read(index: int, size: int) -> np.ndarray:
        nonlocal open_bytes, most
        with lock:
            open_bytes += size
            if open_bytes > 10_000:
                assert open_bytes == size  # A larger piece is read alone.
            most = max(most, open_bytes)
        return np.zeros(size, dtype=np.uint8)

    done = 0
    for byte_count in copied(pieces(sizes, read), LateDevice(), 4):
        with lock:
            open_bytes -= byte_count
        done += byte_count
    assert done == sum(sizes)
    assert most == 25_000


def test_cancelled_load_reads_no_more_weights(tiny_checkpoint: Callable[..., Path]) -> None:
    class Cancelled(Exception):
        pass

    reads: list[int] = []
    cancelled_at = 0

    def progress(bytes_done: int, bytes_total: int) -> None:
        nonlocal cancelled_at
        if bytes_done > 3_000:
            cancelled_at = len(reads)
            raise Cancelled

    def read(index: int, size: int) -> np.ndarray:
        reads.append(index)
        return np.zeros(size, dtype=np.uint8)

    def run() -> None:
        done = 0
        with contextlib.closing(copied(pieces([1_000] * 1_000, read), LateDevice(), 2)) as steps:
            for byte_count in steps:
                progress(done := done + byte_count, 0)

    with pytest.raises(Cancelled):
        run()
    assert len(reads) <= cancelled_at + 2  # Each thread may have begun one more piece.
    assert len(reads) < 20
    with pytest.raises(Cancelled):
        loaded(open_checkpoint(tiny_checkpoint("llama")), LateDevice(), torch.float32, 2, progress)


@pytest.mark.parametrize("kept_share", (0.0, 0.5))
def test_file_that_has_become_shorter_ends_the_load(
    kept_share: float, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    for file in tiny_checkpoint("llama").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    checkpoint = open_checkpoint(tmp_path)
    content = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[: int(len(content) * kept_share)])
    with pytest.raises(ModelLoadError, match=r"model.safetensors: the file has become shorter"):
        loaded(checkpoint, LateDevice(), torch.float32, 2)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"model.safetensors: No such file"):
        loaded(checkpoint, LateDevice(), torch.float32, 2)
