"""Fixtures of the tests of trioserve.model. Checkpoints are written once per session."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from trioserve.model.loading.checkpoint import Checkpoint
from trioserve.model.torch_step.formats import as_tensor


def _neighbour(name: str) -> ModuleType:
    # pytest's importlib mode does not change sys.path, so a neighbouring helper is loaded by its path.
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def tiny_checkpoints() -> ModuleType:
    """The module tiny_checkpoints, with KINDS, GGUF_QUANT_TYPES, write_checkpoint and write_gguf."""
    return _neighbour("tiny_checkpoints")


@pytest.fixture(scope="session")
def tiny_vision() -> ModuleType:
    """The module tiny_vision, with write_checkpoint, processor and image_file."""
    return _neighbour("tiny_vision")


@pytest.fixture(scope="session")
def tiny_qwen_vl() -> ModuleType:
    """The module tiny_qwen_vl, with KINDS, write_checkpoint and processor."""
    return _neighbour("tiny_qwen_vl")


@pytest.fixture(scope="session")
def tiny_whisper() -> ModuleType:
    """The module tiny_whisper, with write_checkpoint and features."""
    return _neighbour("tiny_whisper")


@pytest.fixture(scope="session")
def tiny_encoder_decoders() -> ModuleType:
    """The module tiny_encoder_decoders, with KINDS, write_checkpoint and model_of."""
    return _neighbour("tiny_encoder_decoders")


@pytest.fixture(scope="session")
def tiny_encoders() -> ModuleType:
    """The module tiny_encoders, with KINDS and write_encoder."""
    return _neighbour("tiny_encoders")


@pytest.fixture(scope="session")
def tiny_quantized() -> ModuleType:
    """The module tiny_quantized, with VARIANTS, write_quantized, write_dense and change_files."""
    return _neighbour("tiny_quantized")


@pytest.fixture(scope="session")
def tiny_checkpoint(tiny_checkpoints: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Function tiny_checkpoint(kind, dtype="float32", sharded=False) that returns a directory. Tests share it: copy it
    before changing it.
    """
    made: dict[tuple[str, str, bool], Path] = {}

    def checkpoint(kind: str, *, dtype: str = "float32", sharded: bool = False) -> Path:
        key = (kind, dtype, sharded)
        if key not in made:
            directory = tmp_path_factory.mktemp(kind)
            tiny_checkpoints.write_checkpoint(directory, kind, dtype=dtype, sharded=sharded)
            made[key] = directory
        return made[key]

    return checkpoint


@pytest.fixture(scope="session")
def tiny_gguf(
    tiny_checkpoints: ModuleType, tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """Function tiny_gguf(kind, quant_type="F32") that returns a .gguf file, made from tiny_checkpoint(kind). Tests
    share it.
    """
    made: dict[tuple[str, str], Path] = {}

    def file(kind: str, quant_type: str = "F32") -> Path:
        key = (kind, quant_type)
        if key not in made:
            path = tmp_path_factory.mktemp(kind) / f"{kind}.{quant_type}.gguf"
            tiny_checkpoints.write_gguf(tiny_checkpoint(kind), path, quant_type=quant_type)
            made[key] = path
        return made[key]

    return file


@pytest.fixture(scope="session")
def tensors_of() -> Callable[[Checkpoint], dict[str, torch.Tensor]]:
    """Function tensors_of(checkpoint) that returns every tensor by name, read in its own format."""
    return lambda checkpoint: {tensor.name: as_tensor(tensor.read(tensor.dtype)) for tensor in checkpoint.tensors()}


@pytest.fixture(scope="session")
def step_driver() -> ModuleType:
    """The module step_driver, with StepDriver and load_runner."""
    return _neighbour("step_driver")


@pytest.fixture(scope="session")
def draft_driver() -> ModuleType:
    """The module draft_driver, with Driver, opened, add_all, check_equal and SAMPLINGS."""
    return _neighbour("draft_driver")


@pytest.fixture(scope="session")
def tiny_eagle() -> ModuleType:
    """The module tiny_eagle, with write_eagle and PlainHead."""
    return _neighbour("tiny_eagle")


@pytest.fixture(scope="session")
def tiny_mtp() -> ModuleType:
    """The module tiny_mtp, with write_mtp and PlainMtp."""
    return _neighbour("tiny_mtp")


@pytest.fixture(scope="session")
def histories() -> ModuleType:
    """The module histories, with History, play and alone."""
    return _neighbour("histories")


@pytest.fixture(scope="session", params=("torch", "native"))
def cpu_kernels(request: pytest.FixtureRequest) -> str:
    """Each value of ModelSettings.cpu_kernels. Unavailable kernels are skipped."""
    if request.param == "native":
        from trioserve_kernels.native import NoNativeKernels, load_library

        try:
            load_library()
        except NoNativeKernels as error:
            pytest.skip(f"no native kernels: {error}")
    return str(request.param)
