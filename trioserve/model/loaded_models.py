"""Loads the models that a runner computes: the model itself, its draft model, and its vision encoder."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from trioserve.contracts.errors import StartupError
from trioserve.contracts.extras import install_command
from trioserve.contracts.media import SoundProcessing
from trioserve.model.device import (
    DeviceType,
    default_thread_count,
    has_torch,
    kv_block_bytes,
    pick_dtype,
    pick_vision_dtype,
    set_torch_threads,
    torch_now,
    with_device_defaults,
)
from trioserve.model.drafts.checkpoints import DraftSource, EagleCheckpoint, MtpCheckpoint
from trioserve.model.drafts.draft_model import DraftModel
from trioserve.model.loading.checkpoint import Checkpoint
from trioserve.model.model_config import ModelConfig
from trioserve.model.native.model import NativeModel, why_not_native
from trioserve.model.native.packed_weights import settle_quantization
from trioserve.model.number_formats import Dtype, kv_format_of
from trioserve.model.parallel.collectives import Collectives
from trioserve.model.settings import ModelSettings
from trioserve.model.step_model import StepModel
from trioserve.model.weights import fill_slots
from trioserve_kernels.native import NoNativeKernels, load_library
from trioserve_kernels.structs import BLOCK_FORMATS

if TYPE_CHECKING:
    from trioserve.model.row_encoder import RowEncoder
    from trioserve.model.vision.tower import VisionTower

__all__ = [
    "check_kv_settings",
    "check_torch",
    "load_row_encoder",
    "load_draft",
    "load_eagle_head",
    "load_model",
    "load_mtp_head",
    "load_vision",
]

logger = logging.getLogger(__name__)


def load_model(
    checkpoint: Checkpoint,
    settings: ModelSettings,
    progress: Callable[[int, int], None] | None,
    on_compile: Callable[[str, float], None],
    collectives: Collectives | None = None,
) -> StepModel:
    """Create a model for the device of the settings, and fill it with the weights of a checkpoint.

    Args:
        checkpoint: weights and config.
        settings: settings of the model.
        progress: see ModelRunner.load.
        on_compile: see ModelRunner.load.
        collectives: connection to the other ranks, if the model is the part of a rank.

    Raises:
        ModelLoadError: tensors and config do not match.
        StartupError: the model cannot be computed with these settings.
    """
    settings = with_device_defaults(settings)
    device: DeviceType = "cuda" if settings.device == "cuda" else "cpu"
    dtype = pick_dtype(checkpoint.config, settings, device)
    model = _make_model(checkpoint, settings, dtype, device, on_compile, collectives)
    try:
        fill_slots(
            model.slots(),
            checkpoint.tensors(),
            bytes_total=checkpoint.weight_bytes,
            progress=progress,
            thread_count=model.loading_threads,
        )
        if device == "cuda":  # Weights were converted in memory that torch keeps for later allocations.
            torch_now().cuda.empty_cache()
    except BaseException:
        model.close()
        raise
    return model


def load_draft(
    draft: DraftSource,
    checkpoint: Checkpoint,
    block_size: int,
    progress: Callable[[int, int], None] | None,
    on_compile: Callable[[str, float], None],
) -> DraftModel:
    """Load a draft model that is a whole model.

    Args:
        draft: settings of the draft model.
        checkpoint: checkpoint of the draft model.
        block_size: tokens per KV block.
        progress: see ModelRunner.load.
        on_compile: see ModelRunner.load.
    """
    model = load_model(checkpoint, draft.settings, progress, on_compile)
    block_bytes = kv_block_bytes(model.config, block_size, model.dtype, kv_format_of(draft.settings))
    return DraftModel(model, block_size=block_size, block_bytes=block_bytes, token_count_max=draft.token_count)


def load_eagle_head(
    draft: DraftSource, eagle: EagleCheckpoint, checkpoint: Checkpoint, model: StepModel, block_size: int
) -> DraftModel:
    """Load an EAGLE-3 head. The head gets a copy of the model's embedding, because the model may pack or quantize its
    embedding.

    Args:
        draft: settings of the head.
        eagle: checkpoint of the head.
        checkpoint: checkpoint of the whole model.
        model: the model, which then returns the inputs of the tapped layers.
        block_size: tokens per KV block.
    """
    torch = torch_now("an EAGLE-3 head")
    from trioserve.model.drafts.heads import EagleHead
    from trioserve.model.torch_step.formats import TORCH_DTYPES

    set_torch_threads(draft.settings)
    model.tapped_layers = eagle.tapped_of(model.config.layer_count)
    stored = next(tensor for tensor in checkpoint.tensors() if tensor.name == "embed.weight")
    embedding = torch.from_numpy(stored.read("float32")).to(model.device, TORCH_DTYPES[model.dtype])
    head = EagleHead(
        eagle,
        model.config,
        embedding,
        dtype=model.dtype,
        device=torch.device(model.device),
        block_size=block_size,
    )
    return DraftModel(
        head,
        block_size=block_size,
        block_bytes=head.block_bytes,
        token_count_max=draft.token_count,
        pass_hidden_states=head.pass_hidden_states,
    )


def load_mtp_head(
    draft: DraftSource,
    mtp: MtpCheckpoint,
    model: StepModel,
    block_size: int,
    progress: Callable[[int, int], None] | None,
    on_compile: Callable[[str, float], None],
) -> DraftModel:
    """Load the layer after the model's layers that predicts further tokens.

    Args:
        draft: settings of the layer.
        mtp: checkpoint of the layer.
        model: the model, which then returns the input of that layer.
        block_size: tokens per KV block.
        progress: see ModelRunner.load.
        on_compile: see ModelRunner.load.
    """
    torch_now("a layer that predicts further tokens")
    from trioserve.model.drafts.heads import MtpHead

    set_torch_threads(draft.settings)
    layer = load_model(mtp.layer, draft.settings, progress, on_compile)
    try:
        head = MtpHead(mtp, layer)
    except BaseException:
        layer.close()
        raise
    model.tapped_layers = (model.config.layer_count,)
    return DraftModel(
        head,
        block_size=block_size,
        block_bytes=kv_block_bytes(layer.config, block_size, layer.dtype, kv_format_of(draft.settings)),
        token_count_max=draft.token_count,
        pass_hidden_states=head.pass_hidden_states,
    )


def load_vision(
    checkpoint: Checkpoint, settings: ModelSettings, dtype: Dtype, device: DeviceType
) -> VisionTower | None:
    """Load the encoder of a model's images or sounds.

    Args:
        checkpoint: model whose encoder is loaded.
        settings: threads of torch.
        dtype: number format of the model.
        device: device of the encoder.

    Returns:
        The encoder. None if the model has none, or torch is not installed.
    """
    part = checkpoint.vision
    if part is None:
        return None
    if not has_torch():
        media = "sounds" if isinstance(part.processing, SoundProcessing) else "images"
        logger.warning(
            "%s are not served: torch, which encodes them, is not installed: %s", media, install_command("torch")
        )
        return None
    torch = torch_now()
    from trioserve.model.vision.towers import tower_class

    set_torch_threads(settings)  # Native kernels have their own threads, and do not set torch's number of threads.
    own_dtype = pick_vision_dtype(dtype, device)
    tower = tower_class(part.config)(part.config, part.processing, dtype=own_dtype, device=torch.device(device))
    fill_slots(
        (slot.for_values() for slot in tower.slots()),
        part.tensors(),
        bytes_total=part.weight_bytes,
        progress=None,
    )
    return tower


def load_row_encoder(checkpoint: Checkpoint, settings: ModelSettings, model: StepModel) -> RowEncoder | None:
    """Load the encoder to whose rows a model's decoder attends. Return None if the model has none.

    Args:
        checkpoint: model whose encoder is loaded.
        settings: threads of torch.
        model: the decoder.
    """
    part = checkpoint.encoder
    if part is None:
        return None
    torch = torch_now("a model with an encoder")
    from trioserve.model.row_encoder import RowEncoder
    from trioserve.model.torch_step.step_model import TorchStepModel

    assert isinstance(model, TorchStepModel), "only torch computes cross attention"
    set_torch_threads(settings)
    dtype = pick_vision_dtype(model.dtype, model.device)
    encoder = RowEncoder(part.config, model.embeddings, dtype=dtype, device=torch.device(model.device))
    fill_slots(
        (slot.for_values() for slot in encoder.slots()),
        part.tensors(),
        bytes_total=part.weight_bytes,
        progress=None,
    )
    return encoder


def _make_model(
    checkpoint: Checkpoint,
    settings: ModelSettings,
    dtype: Dtype,
    device: DeviceType,
    on_compile: Callable[[str, float], None],
    collectives: Collectives | None,
) -> StepModel:
    """Create a model with native kernels if they are allowed and available, otherwise with torch.

    Raises:
        StartupError: native kernels are not available, and the settings or quantized weights require them.
    """
    config = checkpoint.config
    check_kv_settings(config, settings)
    reason: str | None = f"the device is {device}"
    block_types = {tensor.name: tensor.block_type for tensor in checkpoint.tensors() if tensor.block_type}
    if device == "cpu" and settings.cpu_kernels != "torch":
        reason = why_not_native(config, dtype)
        if reason is None:
            native_types = {name: kind for name, kind in block_types.items() if kind in BLOCK_FORMATS}
            quantization = settle_quantization(settings.quantization, native_types, dtype=dtype)
            try:
                library = load_library(on_compile=on_compile)
                return NativeModel(
                    config,
                    library,
                    dtype=dtype,
                    block_size=settings.block_size,
                    thread_count=settings.threads or default_thread_count(),
                    quantization=quantization,
                    block_types=native_types,
                    batch_invariant=settings.batch_invariant,
                    kv_format=kv_format_of(settings),
                    collectives=collectives,
                )
            except NoNativeKernels as error:
                reason = str(error)
        check_torch(settings, device, reason)
        logger.warning("torch computes, more slowly than the native kernels, which are unavailable: %s", reason)
    check_torch(settings, device, reason)
    torch_now()
    from trioserve.model.torch_step.step_model import TorchStepModel

    return TorchStepModel(
        config, settings, dtype=dtype, device=device, block_types=block_types, collectives=collectives
    )


def check_kv_settings(config: ModelConfig, settings: ModelSettings) -> None:
    """Check that the KV cache of a model can have the format and the blocks of the settings.

    Args:
        config: model.
        settings: settings of the model.

    Raises:
        StartupError: it cannot.
    """
    if kv_format_of(settings) != "plain" and any(entry and entry.part_count == 1 for entry in config.kv_entries):
        raise StartupError(
            f"kv_cache_dtype is {settings.kv_cache_dtype}, but the model keeps latents, which cannot be stored in 8 "
            "bits: use kv_cache_dtype auto"
        )
    for section in config.sections:
        if section < config.context_tokens_max and section % settings.block_size:
            raise StartupError(
                f"block_size is {settings.block_size}, but this model's attention has sections of {section} tokens, "
                "which must be whole numbers of blocks: use a block_size that divides them"
            )


def check_torch(settings: ModelSettings, device: DeviceType, reason: str | None) -> None:
    """Check that torch may compute a model that the native kernels do not compute.

    Args:
        settings: settings of the model.
        device: device that computes.
        reason: reason why the native kernels do not compute.

    Raises:
        StartupError: the settings require the native kernels, or torch is not installed.
    """
    if device == "cpu" and settings.cpu_kernels == "native":
        raise StartupError(f"cpu_kernels is native, but the native kernels cannot be used: {reason}")
    keeps_on_gpu = device == "cuda" and settings.quantization == "file" and settings.gpu_kernels != "torch"
    if settings.demands_quantized and not keeps_on_gpu:
        raise StartupError(
            f"quantization is {settings.quantization}, but only the native kernels compute with quantized weights, "
            f"and they cannot be used: {reason}; use quantization none"
        )
    if not has_torch():
        raise StartupError(
            f"the native kernels cannot be used: {reason}. torch, which would compute instead, is not installed: "
            + install_command("torch")
        )
