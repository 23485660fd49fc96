"""Computes steps with torch, operator by operator. With Triton kernels, most steps have a fixed shape."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from trioserve.contracts.errors import StartupError
from trioserve.contracts.events import TokenLogprob
from trioserve.contracts.guide import TokenMasks
from trioserve.contracts.pooling import Pooling, PoolingResult
from trioserve.contracts.step import IsAbandoned, ScheduledChunk
from trioserve.contracts.weights import AdapterId
from trioserve.model.device import DeviceType, default_thread_count, set_torch_threads, step_weight_bytes
from trioserve.model.kv_storage import KVMemory, KVStorage, StateStorage
from trioserve.model.layer_config import LatentAttentionConfig
from trioserve.model.loading.stored_tensor import FP8_ROWS, AdapterWeights
from trioserve.model.model_config import ModelConfig
from trioserve.model.number_formats import VALUE_BYTES, Dtype, Float32Array, kv_format_of
from trioserve.model.parallel.collectives import Collectives
from trioserve.model.settings import ModelSettings
from trioserve.model.step_model import (
    PROMPT_LOGPROB_ROWS,
    ComputedStep,
    ReadSamples,
    Samples,
    is_plain,
    needs_every_row,
    prompt_followers,
    sampled_indexes,
    sampled_rows,
    why_not_launched,
)
from trioserve.model.step_rows import needed_rows, pooled_vector
from trioserve.model.torch_step.adapters import AdapterColumns, TorchAdapter, adapter_rows
from trioserve.model.torch_step.decoder import Decoder
from trioserve.model.torch_step.device_sampler import DeviceSampler, reach_end
from trioserve.model.torch_step.formats import TORCH_DTYPES, PinnedStaging, Sending, TensorSlot
from trioserve.model.torch_step.sampler import finite_rows, largest_samples, sample, token_logprobs
from trioserve.model.torch_step.static_decode import RECORD_SECONDS_MAX, CudaGraphRecorder, StaticDecode
from trioserve.model.torch_step.step_tensors import (
    HeadShape,
    StepShape,
    StepTensors,
    attention_kinds,
    build_step_tensors,
)
from trioserve.model.weights import BUFFER_COUNT, Slot
from trioserve_kernels import Kernels, KernelsName, pick_kernels, why_not_triton
from trioserve_kernels.flash_prompts import FlashPrompts, pick_flash_prompts
from trioserve_kernels.four_bits import BLOCK_TYPES
from trioserve_kernels.fp8 import why_not_fp8
from trioserve_kernels.kv_format import CODED_DTYPES
from trioserve_kernels.reference import linear_by_head
from trioserve_kernels.reference_invariant import ROW_TILE, differing_attended_rows, differing_rows

__all__ = ["TorchStepModel"]

logger = logging.getLogger(__name__)


class TorchStepModel:
    """A Decoder with its KV cache. The thread count of the settings applies to the whole process.

    Args:
        config: model.
        settings: settings of the model.
        dtype: number format.
        device: device that computes.
        kernels: kernels that compute. None uses the kernels that the settings select.
        block_types: block types of the checkpoint's quantized matrices, by name. 4-bit matrices stay in 4 bits if the
            kernels can multiply with them, and FP8 matrices stay in FP8 if quantization is "file".
        collectives: connection to the other ranks, if config describes a shard. Each rank must compute the same steps.

    Raises:
        StartupError: the settings require a feature that is not available on this machine.
    """

    warms_by_shape = True

    def __init__(
        self,
        config: ModelConfig,
        settings: ModelSettings,
        *,
        dtype: Dtype,
        device: DeviceType,
        kernels: Kernels | None = None,
        block_types: Mapping[str, str] | None = None,
        collectives: Collectives | None = None,
    ) -> None:
        kernels = _kernels(config, settings, device) if kernels is None else kernels
        if config.state_bytes and settings.batch_invariant:
            raise StartupError(
                "batch_invariant is set, but in plain torch the sums of layers that keep a state depend on how a "
                "prompt is divided into chunks: use the native kernels, on a CPU"
            )
        place = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
        kept_types = _kept_types(settings, dtype, kernels, block_types or {}, place)
        set_torch_threads(settings)
        self.config = config
        self.dtype: Dtype = dtype
        self.device: DeviceType = device
        self.tapped_layers: tuple[int, ...] = ()
        self._keeps_weights = bool(kept_types)
        self._settings = settings
        self._storage: KVStorage[Tensor] | None = None
        self._states: StateStorage[Tensor] | None = None
        self._static: StaticDecode | None = None
        self._kept_ids: Tensor | None = None
        self._sampler: DeviceSampler | None = None  # Only with fused kernels.
        self._adapters: dict[AdapterId, TorchAdapter] = {}
        self._kernel_name = kernels.NAME
        self._model: Decoder | None = Decoder(
            config, kernels, dtype=TORCH_DTYPES[dtype], device=place, block_types=kept_types, collectives=collectives
        )
        self._is_alone = config.part is None or config.part.size == 1
        if config.has_latents and kernels.FUSED and settings.batch_invariant:
            raise StartupError(
                "batch_invariant is set, but plain torch multiplies the heads of the model's latent attention, also "
                "with the Triton kernels, and these products on a GPU depend on the batch: leave batch_invariant "
                "out, or use a CPU"
            )
        if config.is_sparse and settings.batch_invariant:
            raise StartupError(
                "batch_invariant is set, but the tokens that the model's indexer selects depend on the batch: leave "
                "batch_invariant out"
            )
        entries = [attention.kv_entry.size for attention in config.attentions]
        self._shape = StepShape(
            block_size=settings.block_size,
            hidden_size=config.hidden_size,
            token_kv_bytes=max(entries, default=0) * VALUE_BYTES[dtype],
            kinds=attention_kinds(config),
            sections=config.sections,
            dtype=TORCH_DTYPES[dtype],
            device=place,
            walks=kernels.WALKS and not config.is_sparse,
            flash=_flash(config, kernels, settings, TORCH_DTYPES[dtype], place),
            cross=config.cross,
        )

    def embeddings(self, token_ids: Tensor) -> Tensor:
        """Return rows of the embedding table, see `Decoder.embeddings`. Called in the compute thread.

        Args:
            token_ids: int64 [n].
        """
        assert self._model is not None, "embeddings after close"
        return self._model.embeddings(token_ids)

    @property
    def arithmetic(self) -> str:
        place = f"torch {torch.__version__}, {_processor(self._shape.device)}, {self.dtype}{self._formats_kept}"
        return f"Triton kernels, {place}" if self._kernel_name.startswith("triton") else place

    @property
    def is_batch_invariant(self) -> bool:
        return self._settings.batch_invariant

    @property
    def computed_by(self) -> str:
        invariant = ", batch-invariant" if self._settings.batch_invariant else ""
        if not self._kernel_name.startswith("triton"):
            return f"plain torch{self._formats_kept}{invariant}"
        return (
            f"Triton kernels, decodes in CUDA graphs{self._formats_kept}{invariant}"
            if self._has_static_steps
            else f"Triton kernels{self._formats_kept}{invariant}"
        )

    @property
    def _formats_kept(self) -> str:
        kv_format = kv_format_of(self._settings)
        weights = ", weights kept as file" if self._keeps_weights else ""
        return weights if kv_format == "plain" else f"{weights}, KV kept as {kv_format}"

    @property
    def step_weight_bytes(self) -> int:
        assert self._model is not None, "step_weight_bytes after close"
        return step_weight_bytes(self.config, self.dtype) - self._model.saved_bytes

    @property
    def launches(self) -> bool:
        assert self._model is not None, "launches after close"
        return self._model.kernels.FUSED and not self.tapped_layers and why_not_launched(self.config) is None

    @property
    def _has_static_steps(self) -> bool:
        """True if steps of fixed shape are used. This needs fused kernels, because the host defines all sizes of
        their launches. Sparse attention has contexts of variable shape.
        """
        return self.launches and not self._settings.enforce_eager and not self.config.is_sparse

    @property
    def loading_threads(self) -> int:
        if self.device == "cpu":
            return 1  # For a second computing thread, torch would create a second team of threads.
        return max(1, min(BUFFER_COUNT, default_thread_count() // self._settings.ranks_here))

    def slots(self) -> Iterator[Slot]:
        staging = PinnedStaging(self._shape.device) if self.device == "cuda" else None
        return (slot.for_values(staging) for slot in self.tensor_slots())

    def tensor_slots(self) -> Iterator[TensorSlot]:
        """Yield the loading slots for weights that are already torch tensors, possibly on the device."""
        assert self._model is not None, "tensor_slots after close"
        return self._model.slots()

    @property
    def storage(self) -> KVStorage[Tensor] | None:
        return self._storage

    @property
    def states(self) -> StateStorage[Tensor] | None:
        return self._states

    def release_kv(self) -> None:
        self._storage = self._states = self._static = self._kept_ids = self._sampler = None

    def limit_blocks(self, count: int) -> None:
        if self._storage is not None:
            self._storage.release_memory(count)

    def allocate_kv(self, block_count: int, state_slot_count: int = 0, memory: KVMemory | None = None) -> None:
        def make(shape: tuple[int, ...]) -> Tensor:
            dtype = CODED_DTYPES.get(kv_format_of(self._settings), self._shape.dtype)
            if memory is not None and 0 not in shape:
                return torch.from_numpy(memory.take(math.prod(shape) * dtype.itemsize)).view(dtype).view(shape)
            return torch.empty(shape, dtype=dtype, device=self._shape.device)

        model = self._model
        assert model is not None, "allocate_kv after close"
        is_static = self._has_static_steps
        self.release_kv()  # The old cache is freed first, because there may not be enough memory for both.
        self._storage = KVStorage(
            self.config,
            block_count=block_count,
            block_size=self._shape.block_size,
            make=make,
            has_spare=is_static,
            kv_format=kv_format_of(self._settings),
            is_joined=self.device == "cuda",
        )
        if state_slot_count:
            self._states = StateStorage(
                self.config,
                slot_count=state_slot_count + is_static,  # Padding rows write to the last slot.
                make=lambda shape: torch.empty(shape, dtype=torch.float32, device=self._shape.device),
            )
        kept_max = self._settings.sequences_max
        with torch.inference_mode():
            if is_static:
                self._static = StaticDecode(
                    model,
                    self._storage,
                    rows_max=kept_max * (1 + self._settings.draft_tokens),
                    kept_max=kept_max,
                    context_tokens_max=self._settings.context_tokens_max or self.config.context_tokens_max,
                    prompt_rows_max=self._settings.step_tokens_max if self._settings.mixed_graphs else 0,
                    states=self._states,
                    adapters=self._adapter_columns(model),
                    record=CudaGraphRecorder() if self.device == "cuda" else None,
                    record_seconds_max=RECORD_SECONDS_MAX if self._is_alone else None,
                )
                self._kept_ids = self._static.kept_ids
            else:
                self._kept_ids = torch.zeros(kept_max, dtype=torch.int64, device=self._shape.device)
            if model.kernels.FUSED:
                self._sampler = DeviceSampler(model.kernels, self.config.vocab_size, self._kept_ids)

    def _adapter_columns(self, model: Decoder) -> AdapterColumns | None:
        """Return columns for the adapters of steps of fixed shape. None if these steps have no adapters."""
        count = self._settings.max_lora_graph_rank
        # The order of a sum over all columns depends on the columns that an adapter has.
        if not count or self._settings.batch_invariant or not model.adapted:
            return None
        return AdapterColumns(model.adapted, self._adapters, count, dtype=model.dtype, device=self._shape.device)

    def claim_memory(self) -> bool:
        return False

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Capture CUDA graphs of the decode steps, if the model has static steps.

        Raises:
            StartupError: the model must be batch-invariant, but on this machine torch's products depend on the index of
                a row.
        """
        assert self._model is not None, "warm_up after close"
        if self._settings.batch_invariant and self.device == "cpu":
            _check_places(self._model)
        if self._static is not None:
            self._static.record_all()

    @torch.inference_mode()
    def compute(
        self,
        chunks: Sequence[ScheduledChunk],
        is_abandoned: IsAbandoned,
        masks: TokenMasks | None = None,
        begun: Float32Array | None = None,
    ) -> ComputedStep | None:
        model, storage, states = self._model, self._storage, self._states
        assert model is not None, "compute after close"
        assert storage is not None, "compute before allocate_kv"
        if self._is_alone and is_abandoned():  # Several ranks agree in their first sum.
            return None
        if (read := self.launch(chunks, {}, masks)) is not None:
            return ComputedStep(read())
        sending = Sending(self._shape.device)
        step = self._step_tensors(chunks, sending)
        sending.send()
        tapped: dict[int, Tensor] = {}
        hidden = model.forward(
            step,
            storage,
            is_abandoned,
            begun=None if begun is None else torch.from_numpy(begun).to(self._shape.device, self._shape.dtype),
            states=states,
            tapped=tapped,
            tapped_layers=self.tapped_layers,
        )
        if hidden is None:
            return None
        if not self.config.has_head:
            return ComputedStep(None, hidden=hidden.to("cpu", torch.float32).numpy())
        samples = None
        if rows := sampled_indexes(chunks, step.first_rows):
            samples = self._samples(_take_rows(hidden, rows), step.token_ids, rows, sampled_rows(chunks), masks)
        return ComputedStep(
            samples,
            {
                place: _prompt_logprobs(model, hidden[row : row + chunk.count], chunk)
                for place, (chunk, row) in enumerate(zip(chunks, step.first_rows, strict=True))
                if chunk.request.sampling.prompt_logprobs is not None
            },
            {
                place: _pooled(model, hidden[row : row + chunk.count], chunk.request.pooling)
                for place, (chunk, row) in enumerate(zip(chunks, step.first_rows, strict=True))
                if chunk.pools and chunk.request.pooling is not None
            },
            self._tapped(tapped, step.first_rows, chunks) if self.tapped_layers else None,
        )

    def _tapped(
        self, tapped: Mapping[int, Tensor], first_rows: Sequence[int], chunks: Sequence[ScheduledChunk]
    ) -> list[Tensor]:
        rows = torch.cat([tapped[layer] for layer in self.tapped_layers], -1)
        return [rows[first : first + chunk.row_count] for first, chunk in zip(first_rows, chunks, strict=True)]

    @torch.inference_mode()
    def launch(
        self, chunks: Sequence[ScheduledChunk], awaited: Mapping[int, int], masks: TokenMasks | None = None
    ) -> ReadSamples | None:
        model, storage, kept_ids = self._model, self._storage, self._kept_ids
        assert model is not None, "launch after close"
        assert storage is not None, "launch before allocate_kv"
        assert kept_ids is not None, "allocate_kv makes kept_ids"
        if not self.launches or any(map(needs_every_row, chunks)):
            return None
        sampled = sampled_rows(chunks)
        if len(sampled) > len(kept_ids) and not any(chunk.draft for chunk in chunks):
            return None  # The next step could not read all of the tokens.
        if self._static is not None and (launched := self._static.launch(chunks, awaited)) is not None:
            return self._launched(*launched, sampled, masks) if sampled else reach_end(launched[0])
        sending = Sending(self._shape.device)
        step = self._step_tensors(chunks, sending)
        indexes = sampled_indexes(chunks, step.first_rows)
        rows = sending.add(np.array(indexes, dtype=np.int64)) if indexes else None
        given = None
        if awaited:
            given = sending.add(np.array([[step.first_rows[place], row] for place, row in awaited.items()]).T.copy())
        sending.send()
        if given is not None:
            step.token_ids.index_copy_(0, given[0], kept_ids.index_select(0, given[1]))
        hidden = model.forward(step, storage, states=self._states)
        assert hidden is not None, "a launched step is never abandoned"
        if rows is None:
            return reach_end(hidden)
        return self._launched(
            hidden.index_select(0, rows), lambda: step.token_ids.index_select(0, rows), sampled, masks
        )

    def _launched(
        self, hidden: Tensor, inputs: Callable[[], Tensor], chunks: Sequence[ScheduledChunk], masks: TokenMasks | None
    ) -> ReadSamples:
        """Start to compute the logits of the sampled rows, and to choose their tokens.

        Args:
            hidden: [n, hidden_size], sampled rows after the last layer.
            inputs: see DeviceSampler.
            chunks: n chunks, one for each row.
        """
        assert self._model is not None, "a step after close"
        assert self._sampler is not None, "allocate_kv makes the sampler of fused kernels"
        return self._sampler.launch(self._model.logits(hidden), chunks, inputs, masks)

    def _samples(
        self,
        hidden: Tensor,
        token_ids: Tensor,
        rows: Sequence[int],
        chunks: Sequence[ScheduledChunk],
        masks: TokenMasks | None,
    ) -> Samples:
        """Sample rows, and wait for the result.

        Args:
            hidden: [n, hidden_size], sampled rows after the last layer.
            token_ids: int64 [T], input tokens of the step.
            rows: indexes of the n rows in the step.
            chunks: n chunks, one for each row.
        """
        model = self._model
        assert model is not None, "a step after close"
        if model.kernels.FUSED:
            return self._launched(hidden, lambda: _take_rows(token_ids, rows), chunks, masks)()
        if all(is_plain(chunk) for chunk in chunks):
            largest = model.largest(hidden)
            if largest is not None:
                return largest_samples(*largest)
        return sample(model.logits(hidden), chunks, masks)

    def _step_tensors(self, chunks: Sequence[ScheduledChunk], sending: Sending) -> StepTensors:
        assert self._model is not None, "a step after close"
        step = build_step_tensors(chunks, self._shape, sending)
        adapters = adapter_rows(chunks, step.first_rows, self._adapters, self._model.kernels, sending)
        return step if adapters is None else replace(step, adapters=adapters)

    def add_adapter(self, id: AdapterId, weights: AdapterWeights) -> None:
        self._adapters[id] = TorchAdapter.of(weights, self._shape.device)
        if 0 < self._settings.max_lora_graph_rank < weights.rank_max and self._has_static_steps:
            logger.warning(
                "an adapter has rank %d, and --max-lora-graph-rank is %d: steps with this adapter use no CUDA graphs",
                weights.rank_max,
                self._settings.max_lora_graph_rank,
            )

    @torch.inference_mode()
    def remove_adapter(self, id: AdapterId) -> None:
        self._adapters.pop(id, None)
        if self._static is not None:
            self._static.forget_adapter(id)

    def has_adapter(self, id: AdapterId) -> bool:
        return id in self._adapters

    def close(self) -> None:
        self._model = None
        self.release_kv()
        self._adapters.clear()
        if self.device == "cuda":
            torch.cuda.empty_cache()


def _kernels(config: ModelConfig, settings: ModelSettings, device: DeviceType) -> Kernels:
    """Return the kernels that the settings select.

    Raises:
        StartupError: the settings need Triton's kernels, and they cannot compute the model here.
    """
    name: KernelsName = "torch"
    is_needed = settings.gpu_kernels == "triton" or settings.batch_invariant or settings.quantization == "file"
    if device == "cuda" and settings.gpu_kernels == "torch" and settings.batch_invariant:
        raise StartupError(
            "batch_invariant is set and gpu_kernels is torch, whose products on a GPU depend on the batch: use "
            "gpu_kernels triton"
        )
    if device == "cuda" and settings.gpu_kernels != "torch":
        reason = (None if is_needed else why_not_launched(config)) or why_not_triton()
        if config.cross is not None:
            reason = "they do not compute cross attention"
        if reason is None:
            name = "triton"
        elif is_needed:
            raise StartupError(f"gpu_kernels is {settings.gpu_kernels}, but Triton's kernels cannot be used: {reason}")
        else:
            logger.warning("plain torch computes, more slowly than Triton's kernels in CUDA graphs: %s", reason)
    return pick_kernels(name, batch_invariant=settings.batch_invariant)


def _flash(
    config: ModelConfig, kernels: Kernels, settings: ModelSettings, dtype: torch.dtype, device: torch.device
) -> dict[HeadShape, FlashPrompts]:
    """Return torch's flash attention for prompts, by heads. The kernels compute the prompts of all other heads."""
    if device.type != "cuda" or not (kernels.WALKS and settings.flash_prompts) or settings.batch_invariant:
        return {}
    if config.has_latents or kv_format_of(settings) != "plain":
        return {}
    shapes = {heads for _, heads in attention_kinds(config)}
    found = {
        heads: pick_flash_prompts(heads.head_count, heads.kv_head_count, heads.head_dim, dtype, device)
        for heads in shapes
    }
    return {heads: flash for heads, flash in found.items() if flash is not None}


def _kept_types(
    settings: ModelSettings, dtype: Dtype, kernels: Kernels, block_types: Mapping[str, str], device: torch.device
) -> dict[str, str]:
    """Return the block types of matrices that stay in 4 bits or in FP8, by name.

    As with the native kernels, quantization "auto" keeps 4-bit matrices unless the dtype is float32. It dequantizes FP8
    matrices, because their products round the inputs to FP8, too.

    Raises:
        StartupError: quantization is "file", and the checkpoint has no weights that can be kept.
    """
    if not kernels.KEEPS_FOUR_BITS or settings.quantization == "none":
        return {}
    kept = {name: kind for name, kind in block_types.items() if kind in BLOCK_TYPES}
    if settings.quantization == "file":
        # FP8 experts are dequantized, because grouped products have no FP8.
        fp8 = {name: kind for name, kind in block_types.items() if kind == FP8_ROWS and ".experts." not in name}
        if fp8 and (reason := _why_no_fp8(settings, dtype, device)) is not None:
            raise StartupError(
                f"quantization is file, and FP8 weights cannot be kept: {reason}; use quantization none, which "
                "dequantizes them"
            )
        kept |= fp8
        if not kept:
            raise StartupError(
                "quantization is file, but the checkpoint has no weights of 4 bits that can be kept on a GPU, and none "
                "in FP8 with a scale for each matrix or row: use none, or an AWQ, GPTQ or compressed-tensors checkpoint"
            )
    return {} if settings.quantization == "auto" and dtype == "float32" else kept


def _why_no_fp8(settings: ModelSettings, dtype: Dtype, device: torch.device) -> str | None:
    """Return the reason why FP8 weights cannot be multiplied here, as a sentence. None: they can."""
    if dtype != "bfloat16":
        return f"their products are computed in bfloat16, and dtype is {dtype}"
    if settings.batch_invariant:
        return "batch_invariant is set, and torch's FP8 products depend on the batch"
    return why_not_fp8(device)


def _check_places(model: Decoder) -> None:
    """Check that torch's products of a row do not depend on the row's index in the step.

    Raises:
        StartupError: at least one product depends on the index.
    """
    attention, dtype = model.config.kv_attention, model.dtype
    found: dict[str, list[int]] = {}
    for inputs, product in model.products:
        found.setdefault(f"{inputs} numbers in {dtype}", []).extend(differing_rows(product, inputs, dtype))
    for shape in {shape for _, shape in attention_kinds(model.config)}:
        group = shape.head_count // shape.kv_head_count
        found[f"attention of {shape.head_count} heads of {shape.head_dim}"] = differing_attended_rows(
            shape.kv_head_count, group, shape.head_dim, dtype, shape.latent_dim
        )
    if isinstance(attention, LatentAttentionConfig):
        heads, inputs = attention.head_count, attention.plain_dim
        weight = torch.randn(heads, attention.latent_dim, inputs, generator=torch.Generator().manual_seed(2)).to(dtype)
        found[f"{inputs} numbers of each head in {dtype}"] = differing_rows(
            lambda tile: linear_by_head(tile.view(len(tile), heads, inputs), weight), heads * inputs, dtype
        )
    for what, rows in found.items():
        if rows:
            raise StartupError(
                f"batch_invariant is set, but torch's products on this processor depend on a row's place: {what}, in "
                f"row {rows[0]} of {ROW_TILE}; use another dtype, or the native kernels"
            )


def _processor(device: torch.device) -> str:
    """Return the processor's properties that determine which kernels torch's libraries choose."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return torch.backends.cpu.get_cpu_capability()


def _pooled(model: Decoder, hidden: Tensor, pooling: Pooling) -> PoolingResult | None:
    """Pool one prompt.

    Args:
        hidden: [count, hidden_size], rows of the chunk after the last layer.
    """
    if pooling.task == "labels":
        logits = model.logits(hidden[-1:])
        if not bool(finite_rows(logits).all()):
            return None
        return PoolingResult.of(logits[0].to(torch.float32).log_softmax(-1)[list(pooling.label_token_ids)].tolist())
    rows = model.normed(hidden[needed_rows(pooling)])
    return pooled_vector(rows.to("cpu", torch.float32).numpy(), pooling)


def _take_rows(hidden: Tensor, rows: Sequence[int]) -> Tensor:
    if list(rows) == list(range(hidden.shape[0])):
        return hidden
    return hidden.index_select(0, torch.tensor(rows).to(hidden.device, non_blocking=True))


def _prompt_logprobs(model: Decoder, hidden: Tensor, chunk: ScheduledChunk) -> tuple[TokenLogprob, ...] | None:
    """Return the logprobs of the prompt tokens that follow each row, or None if logits are not finite.

    Args:
        hidden: [count, hidden_size], rows of the chunk after the last layer.
    """
    top = chunk.request.sampling.prompt_logprobs or 0
    followers = prompt_followers(chunk)
    entries: list[TokenLogprob] = []
    for first in range(0, len(followers), PROMPT_LOGPROB_ROWS):
        targets = followers[first : first + PROMPT_LOGPROB_ROWS]
        logits = model.logits(hidden[first : first + len(targets)])
        if not bool(finite_rows(logits).all()):
            return None
        entries.extend(token_logprobs(logits, targets, [top] * len(targets)))
    return tuple(entries)
