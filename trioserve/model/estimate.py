"""Computes how a model would run on this machine, and its memory, before any weight is read.

Only configs and the headers of files are read. torch is imported only if an NVIDIA driver is here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from trioserve.model.device import (
    CacheSize,
    DeviceType,
    cache_size,
    has_torch,
    kv_block_bytes,
    pick_dtype,
    pick_encoder_dtype,
    pick_vision_dtype,
    with_device_defaults,
)
from trioserve.model.diffusion.directory import ImageDirectory, is_image_model
from trioserve.model.drafts.checkpoints import DraftSource, EagleCheckpoint, MtpCheckpoint
from trioserve.model.drafts.draft_model import spare_block_count
from trioserve.model.loaded_models import check_kv_settings, check_torch
from trioserve.model.loading.checkpoint import Checkpoint, open_checkpoint
from trioserve.model.loading.encoder_directory import EncoderDirectory, opened_encoder
from trioserve.model.loading.encoder_part import encoder_shapes
from trioserve.model.loading.safetensors import stored_tensors
from trioserve.model.loading.stored_tensor import FP8_ROWS, STORAGE_BYTES, StoredTensor
from trioserve.model.model_config import ModelConfig
from trioserve.model.native.model import why_not_native
from trioserve.model.native.packed_weights import packed_bytes, packed_names, settle_quantization
from trioserve.model.number_formats import VALUE_BYTES, Dtype, kv_format_of
from trioserve.model.settings import ModelSettings
from trioserve.model.step_model import why_not_launched
from trioserve_kernels.structs import BLOCK_FORMATS

__all__ = ["ModelEstimate", "cpu_weight_bytes", "estimate_checkpoint", "estimate_model", "gpu_weight_bytes"]

# Memory of the program, the tokenizer and small buffers: 105 to 227 MiB in docs/benchmarks/startup.md.
PROGRAM_BYTES = 256 * 2**20


class ModelEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """How a model would run on this machine, and its memory.

    Attributes:
        family: family of the model, such as llama.
        device: device that computes.
        path: implementation that computes.
        why_slower: reason why no faster implementation computes. None if the fastest one computes.
        dtype: number format of activations and of weights that are not quantized.
        quantization: quantization of the weights in memory, see settle_quantization. "none" dequantizes the file's.
        context_tokens_max: longest sequence in tokens. 0 for an encoder of images or an image model.
        weight_bytes: weights in memory.
        draft_bytes: weights and buffers of the draft model. 0 if there is none.
        vision_bytes: weights of the image or audio encoder. 0 if the model is served without images and sound.
        kv_token_bytes: KV of one token in all layers, including those of the draft model.
        state_bytes: states of one running sequence. 0 if no layer keeps a state.
        kv_bytes: the whole KV cache, with the states of running sequences and copies of states.
        kv_tokens: tokens that fit into the KV cache.
        stream_count_max: sequences that can run at the same time, as far as states limit them. None: no limit.
        overhead_bytes: program, tokenizer and the buffers of a step.
    """

    family: str
    device: DeviceType
    path: Literal["native", "torch", "triton"]
    why_slower: str | None = None
    dtype: Dtype
    quantization: Literal["none", "file", "int8", "int4"] = "none"
    context_tokens_max: int = 0
    weight_bytes: int
    vision_bytes: int = 0
    draft_bytes: int = 0
    kv_token_bytes: int = 0
    state_bytes: int = 0
    kv_bytes: int = 0
    kv_tokens: int = 0
    stream_count_max: int | None = None
    overhead_bytes: int = PROGRAM_BYTES

    @property
    def fixed_bytes(self) -> int:
        """Memory of everything but the KV cache, in bytes."""
        return self.weight_bytes + self.vision_bytes + self.draft_bytes + self.overhead_bytes

    @property
    def total_bytes(self) -> int:
        """Memory of the loaded model in bytes."""
        return self.fixed_bytes + self.kv_bytes


def estimate_model(
    path: Path, settings: ModelSettings, open_draft: Callable[[Checkpoint], DraftSource | None] = lambda target: None
) -> ModelEstimate:
    """Estimate the memory of a model: for text, an encoder, or an image model.

    Args:
        path: directory or .gguf file, see resolve_model.
        settings: settings of the model, as for ModelRunner.load.
        open_draft: returns the draft model of a model for text.

    Raises:
        ModelLoadError: the model is not supported, or damaged.
        StartupError: the model cannot run with these settings, or the KV cache does not fit.
    """
    settings = with_device_defaults(settings)
    if is_image_model(path):
        return _of_image_model(path, settings)
    encoder = opened_encoder(path)
    if encoder is not None:
        return _of_encoder(encoder, settings)
    checkpoint = open_checkpoint(path, context_tokens=settings.context_tokens_max, uses_further_layers=True)
    return estimate_checkpoint(checkpoint, settings, draft=open_draft(checkpoint))


def estimate_checkpoint(
    checkpoint: Checkpoint, settings: ModelSettings, *, draft: DraftSource | None = None, with_cache: bool = True
) -> ModelEstimate:
    """Estimate the memory of an opened checkpoint.

    Args:
        checkpoint: the model.
        settings: settings of the model.
        draft: draft model.
        with_cache: False: the result has no KV cache, so it is no error if none fits.

    Raises:
        StartupError: see estimate_model.
    """
    settings = with_device_defaults(settings)
    device: DeviceType = "cuda" if settings.device == "cuda" else "cpu"
    config, tensors = checkpoint.config, list(checkpoint.tensors())
    dtype = pick_dtype(config, settings, device)
    settings.check_context(config.context_tokens_max)
    check_kv_settings(config, settings)
    path, reason = _path(config, settings, device, dtype)
    quantization: Literal["none", "file", "int8", "int4"] = "none"
    if path == "native":
        quantization = settle_quantization(settings.quantization, _native_types(tensors), dtype=dtype)
        weight_bytes = cpu_weight_bytes(config, tensors, settings, dtype)
    else:
        check_torch(settings, device, reason or "")
        kept, expanded = gpu_weight_bytes(tensors, dtype, settings) if path == "triton" else (0, 0)
        quantization = "file" if kept else "none"
        plain = (tensor for tensor in tensors if tensor.block_type is None or path == "torch")
        weight_bytes = kept + expanded + _plain_bytes(plain, dtype)
    vision_bytes = 0
    if checkpoint.vision is not None and has_torch():
        values = sum(map(math.prod, checkpoint.vision.config.shapes().values()))
        vision_bytes = values * VALUE_BYTES[pick_vision_dtype(dtype, device)]
    if checkpoint.encoder is not None:
        values = sum(map(math.prod, encoder_shapes(checkpoint.encoder.config).values()))
        vision_bytes = values * VALUE_BYTES[pick_vision_dtype(dtype, device)]
    logit_bytes = settings.sequences_max * config.vocab_size * VALUE_BYTES["float32"]
    draft_bytes, draft_block_bytes = (0, 0) if draft is None else _draft_bytes(draft, dtype)
    spare_count = 0 if draft is None else spare_block_count(draft.token_count, settings.block_size)
    fixed_bytes = weight_bytes + vision_bytes + draft_bytes + PROGRAM_BYTES + logit_bytes
    size = CacheSize(0, 0, 0)
    if with_cache:
        size = cache_size(
            config,
            settings,
            device,
            dtype,
            draft_block_bytes=draft_block_bytes,
            draft_block_count=spare_count,
            used_bytes=fixed_bytes,
        )
    block_bytes = kv_block_bytes(config, settings.block_size, dtype, kv_format_of(settings)) + draft_block_bytes
    spare_bytes = spare_count * draft_block_bytes if with_cache else 0
    state_bytes = (size.state_slot_count + size.snapshot_slot_count) * config.state_bytes
    return ModelEstimate(
        family=config.family,
        device=device,
        path=path,
        why_slower=reason,
        dtype=dtype,
        quantization=quantization,
        context_tokens_max=settings.context_tokens_max or config.context_tokens_max,
        weight_bytes=weight_bytes,
        vision_bytes=vision_bytes,
        draft_bytes=draft_bytes,
        kv_token_bytes=block_bytes // settings.block_size,
        state_bytes=config.state_bytes,
        kv_bytes=size.block_count * block_bytes + spare_bytes + state_bytes,
        kv_tokens=size.block_count * settings.block_size,
        stream_count_max=size.state_slot_count if config.state_bytes else None,
        overhead_bytes=PROGRAM_BYTES + logit_bytes,
    )


def _draft_bytes(draft: DraftSource, dtype: Dtype) -> tuple[int, int]:
    """Return the memory of a draft model without its KV cache, and of one block of its KV cache.

    Args:
        draft: the draft model.
        dtype: number format of the target model.
    """
    checkpoint, settings = draft.checkpoint, draft.settings
    head_values = 0  # Values of a head in the format of the target model, with its copy of the embedding.
    if isinstance(checkpoint, EagleCheckpoint):
        tensors = stored_tensors(checkpoint.path.parent, tuple(STORAGE_BYTES)).values()
        head_values = sum(math.prod(tensor.shape) for tensor in tensors)
        head_values += checkpoint.config.vocab_size * checkpoint.config.hidden_size
        block_bytes = kv_block_bytes(checkpoint.config, settings.block_size, dtype, "plain")
        return head_values * VALUE_BYTES[dtype], block_bytes
    if isinstance(checkpoint, MtpCheckpoint):
        size, checkpoint = checkpoint.config.hidden_size, checkpoint.layer
        head_values = 2 * size * (size + draft.checkpoint.config.vocab_size)
    estimate = estimate_checkpoint(checkpoint, settings, with_cache=False)
    own_bytes = estimate.fixed_bytes - PROGRAM_BYTES + head_values * VALUE_BYTES[dtype]
    return own_bytes, estimate.kv_token_bytes * settings.block_size


def cpu_weight_bytes(
    config: ModelConfig, tensors: Iterable[StoredTensor], settings: ModelSettings, dtype: Dtype
) -> int:
    """Return the memory of the weights with the native kernels, in bytes.

    Args:
        config: model.
        tensors: tensors of the checkpoint.
        settings: contains the quantization.
        dtype: number format of the model.
    """
    tensors = list(tensors)
    types = _native_types(tensors)
    quantization = settle_quantization(settings.quantization, types, dtype=dtype)
    packed = packed_names(config)
    # The embedding table keeps the model's format. Norms, biases and similar vectors are float32.
    others = (tensor for tensor in tensors if tensor.name not in packed)
    other_bytes = sum(
        math.prod(tensor.shape) * VALUE_BYTES[dtype if tensor.name == "embed.weight" else "float32"]
        for tensor in others
    )
    return packed_bytes(config, dtype, quantization, types) + other_bytes


def gpu_weight_bytes(tensors: Iterable[StoredTensor], dtype: Dtype, settings: ModelSettings) -> tuple[int, int]:
    """Return the bytes of quantized matrices with Triton's kernels: of those that stay packed, and of the others.

    torch must be installed.

    Args:
        tensors: tensors of the checkpoint. Tensors that are not quantized are not counted.
        dtype: number format of the model.
        settings: contains the quantization.
    """
    from trioserve_kernels.four_bits import kept_bytes

    is_kept = settings.quantization != "none" and (settings.quantization == "file" or dtype != "float32")
    kept = expanded = 0
    for tensor in tensors:
        if tensor.block_type is None:
            continue
        count = math.prod(tensor.shape)
        packed = kept_bytes(tensor.block_type, count) if is_kept else None
        if tensor.block_type == FP8_ROWS and settings.quantization == "file" and ".experts." not in tensor.name:
            packed = count
        if packed is None:
            expanded += count * VALUE_BYTES[dtype]
        else:
            kept += packed
    return kept, expanded


def _path(
    config: ModelConfig, settings: ModelSettings, device: DeviceType, dtype: Dtype
) -> tuple[Literal["native", "torch", "triton"], str | None]:
    """Return the implementation that computes, and the reason why no faster one does."""
    from trioserve_kernels.build import CannotBuild, brought_library, find_compiler, supported_levels

    if device == "cuda":
        if settings.gpu_kernels == "torch":
            return "torch", "gpu_kernels is torch"
        reason = None if settings.gpu_kernels == "triton" else why_not_launched(config)
        return ("triton", None) if reason is None else ("torch", reason)
    if settings.cpu_kernels == "torch":
        return "torch", "cpu_kernels is torch"
    if (reason := why_not_native(config, dtype)) is not None:
        return "torch", reason
    levels = supported_levels()
    if not levels:
        return "torch", "the native kernels need x86-64 with AVX2"
    if brought_library(levels[0]) is None:
        try:
            find_compiler()
        except CannotBuild as error:
            return "torch", str(error)
    return "native", None


def _native_types(tensors: Iterable[StoredTensor]) -> Mapping[str, str]:
    return {tensor.name: tensor.block_type for tensor in tensors if tensor.block_type in BLOCK_FORMATS}


def _plain_bytes(tensors: Iterable[StoredTensor], dtype: Dtype) -> int:
    return sum(math.prod(tensor.shape) for tensor in tensors) * VALUE_BYTES[dtype]


def _of_encoder(encoder: EncoderDirectory, settings: ModelSettings) -> ModelEstimate:
    config = encoder.config
    device: DeviceType = "cuda" if settings.device == "cuda" else "cpu"
    dtype = pick_encoder_dtype(config, settings, device)
    return ModelEstimate(
        family=config.family,
        device=device,
        path="torch",
        dtype=dtype,
        context_tokens_max=config.context_tokens_max,
        weight_bytes=_plain_bytes(encoder.tensors(), dtype),
    )


def _of_image_model(path: Path, settings: ModelSettings) -> ModelEstimate:
    directory = ImageDirectory(path)
    device: DeviceType = "cuda" if settings.device == "cuda" else "cpu"
    components = [name for name in directory.pipeline.classes if not name.startswith("tokenizer")]
    count = sum(math.prod(shape) for name in components for shape in directory.stored_shapes(name))
    dtype = directory.pick_dtype(settings.dtype, device)
    return ModelEstimate(
        family=directory.pipeline.family,
        device=device,
        path="torch",
        dtype=dtype,
        weight_bytes=count * VALUE_BYTES[dtype],
    )
