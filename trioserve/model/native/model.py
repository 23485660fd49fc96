"""Computes models of all families with the native CPU kernels. One call without the GIL computes a whole step.

Each weight is packed as soon as it is read, so no weight is in memory twice. Like decoder.py, the kernels compute the
model that ModelConfig describes. Only roundings differ: numbers between two products stay in float32. For a product
with a quantized weight, inputs are rounded to 8 bits. With AMX and at least 5 rows, the weight is rounded to bfloat16
instead. A batch-invariant model does this for every number of rows.
"""

from __future__ import annotations

import ctypes
import functools
import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, cast

import numpy as np
import numpy.typing as npt

from trioserve.contracts.events import TokenLogprob
from trioserve.contracts.guide import TokenMasks
from trioserve.contracts.pooling import PoolingResult
from trioserve.contracts.step import IsAbandoned, ScheduledChunk
from trioserve.contracts.weights import AdapterId
from trioserve.model.device import DeviceType
from trioserve.model.kv_storage import KVMemory, KVStorage, StateStorage
from trioserve.model.layer_config import (
    AttentionConfig,
    KVAttention,
    LatentAttentionConfig,
    Temperature,
)
from trioserve.model.loading.stored_tensor import AdapterWeights
from trioserve.model.model_config import ModelConfig
from trioserve.model.native.adapters import NativeAdapter
from trioserve.model.native.layer import (
    NativeLayer,
    intermediate_sizes,
    norm_slots,
    norm_values,
    padded_zeros,
)
from trioserve.model.native.packed_weights import HEAD, PackedWeights, Quantization
from trioserve.model.native.recurrent import (
    NativeStreams,
    float32_slot,
    why_not_recurrent,
    why_not_streams,
)
from trioserve.model.native.sampling import NativeSamplings, token_logprob
from trioserve.model.number_formats import (
    VALUE_BYTES,
    Dtype,
    Float32Array,
    KvFormat,
    Values,
    convert,
    empty_values,
    values_of,
)
from trioserve.model.parallel.collectives import Collectives, NativeCallbacks
from trioserve.model.step_model import PROMPT_LOGPROB_ROWS, ComputedStep, ReadSamples, prompt_followers, sampled_rows
from trioserve.model.step_rows import (
    StepRows,
    given_rows,
    needed_rows,
    normed,
    pooled_vector,
    rotary_positions,
    row_ends,
)
from trioserve.model.torch_step.rotary import rotary_frequencies
from trioserve.model.weights import RowsTarget, Slot
from trioserve_kernels.native import Engine, Library, address, empty_array, int32_array, start_of
from trioserve_kernels.structs import (
    BLOCK_OUTPUTS,
    DTYPES,
    HEAD_DIM_MAX,
    KV_FORMATS,
    NORM_KINDS,
    LayerStruct,
    ModelStruct,
    RowsKind,
    StepStruct,
)

__all__ = ["NativeModel", "why_not_native"]

# Inputs of a product are padded to multiples of this number. Layers with heads of different sizes share buffers of
# queries and results without padding.
DEPTH_UNIT = 32
# Size of a large page. Allocating a page takes 0.2 ms, or 6 ms if a virtual machine must request it from its host.
CLAIMED_BYTES = 1 << 21


def why_not_native(config: ModelConfig, dtype: Dtype) -> str | None:
    """Return the reason why the native kernels cannot compute a model, as a phrase, or None if they can compute it.

    Args:
        config: model.
        dtype: number format.
    """
    if dtype not in DTYPES:
        return f"they do not compute {dtype}"
    if config.cross is not None:
        return "they do not compute cross attention"
    if len(config.temperatures) > 1:
        return "the temperature differs from layer to layer"
    sizes = [("hidden_size", config.hidden_size)]
    for layer in config.layers:
        if layer.shortcut is not None and layer.shortcut.activation != getattr(layer.mlp, "activation", None):
            return "experts beside an MLP have another activation"
        limits = (getattr(layer.mlp, name, None) for name in ("limit", "shared_limit"))
        if any(limit is not None for limit in limits):
            return "activations have a limit"
        if layer.sums is not None:
            return "sums with the hidden state are weighted"
        if layer.block is not None:
            return "layers share a transformer block"
        if isinstance(layer.attention, LatentAttentionConfig) and (indexer := layer.attention.indexer) is not None:
            return f"an indexer selects tokens in contexts of more than {indexer.token_count} tokens (--max-model-len)"
        if isinstance(layer.attention, KVAttention):
            sizes.extend(_attention_sizes(layer.attention))
        if layer.recurrent is not None and (reason := why_not_recurrent(layer.recurrent)):
            return reason
        sizes.extend(("intermediate_size", size) for size in intermediate_sizes(layer))
    if reason := why_not_streams(config):
        return reason
    for name, size in sizes:
        if size % BLOCK_OUTPUTS:
            return f"{name} is {size}, which is no multiple of {BLOCK_OUTPUTS}"
    turned_dim = max((attention.turned_dim for attention in config.attentions), default=0)
    if turned_dim > HEAD_DIM_MAX:
        return f"head_dim is {turned_dim}, above {HEAD_DIM_MAX}"
    heads = {
        (attention.head_dim, attention.attended_size)
        for attention in config.attentions
        if isinstance(attention, AttentionConfig)
    }
    if len(heads) > 1 and any(size % DEPTH_UNIT for sizes in heads for size in sizes):
        return f"heads differ from layer to layer, and their sizes are no multiples of {DEPTH_UNIT}"
    return None


def _attention_sizes(attention: AttentionConfig | LatentAttentionConfig) -> tuple[tuple[str, int], ...]:
    if isinstance(attention, AttentionConfig):
        return (("head_dim", attention.head_dim), ("v_head_dim", attention.value_dim))
    return (
        ("q_lora_rank", attention.query_rank or 0),
        ("kv_lora_rank", attention.latent_dim),
        ("qk_nope_head_dim", attention.plain_dim),
        ("qk_rope_head_dim", attention.turned_dim),
        ("v_head_dim", attention.value_dim),
    )


class NativeModel:
    """A StepModel with packed weights and its own threads. `close` ends the threads.

    Args:
        config: model.
        library: compiled kernels.
        dtype: number format of weights that are not quantized, and of KV.
        block_size: tokens in one KV block.
        thread_count: threads that compute.
        quantization: quantization of weights in memory.
        block_types: block types of the checkpoint's quantized matrices, by name.
        batch_invariant: the bits of a row's logits depend only on its tokens and the weights, not on other rows.
            Without AMX, models are always batch-invariant.
        kv_format: number format of the KV cache.
        collectives: connection to the other ranks, if config describes a shard. The model uses the connection, and the
            caller closes it. All ranks compute the same steps.
    """

    def __init__(
        self,
        config: ModelConfig,
        library: Library,
        *,
        dtype: Dtype,
        block_size: int,
        thread_count: int,
        quantization: Quantization,
        block_types: Mapping[str, str],
        batch_invariant: bool = False,
        kv_format: KvFormat = "plain",
        collectives: Collectives | None = None,
    ) -> None:
        self.config = config
        part = config.part
        self._is_alone = part is None or part.size == 1
        self._collectives = None if self._is_alone else collectives
        assert self._is_alone or collectives is not None, "a rank with a part of a model needs the other ranks"
        self._callbacks: NativeCallbacks | None = None
        if self._collectives is not None and self._collectives.native is None:
            self._callbacks = NativeCallbacks(self._collectives)
        self.dtype = dtype
        self.device: DeviceType = "cpu"
        kept = "" if quantization == "none" else f", weights kept as {quantization}"
        kept += "" if kv_format == "plain" else f", KV kept as {kv_format}"
        self.is_batch_invariant = batch_invariant or library.level != "amx" or dtype == "float32"
        invariant = ", batch-invariant" if self.is_batch_invariant else ""
        self.arithmetic = f"native kernels, {library.level}, {dtype}{kept}"
        self.computed_by = f"native kernels ({library.level}, {thread_count} threads{kept}{invariant})"
        self._library = library
        self._block_size = block_size
        self.tapped_layers: tuple[int, ...] = ()
        self._kv_format: KvFormat = kv_format
        self._storage: KVStorage[Values] | None = None
        # Address and size of each piece of the KV cache for which Linux has not allocated memory yet.
        self._unclaimed: Iterator[tuple[int, int]] = iter(())
        self._block_limit: int | None = None  # Number of blocks that get memory before their first write.
        self._page_addresses = (ctypes.c_void_p * config.layer_count)()
        self._weights = PackedWeights(config, library, dtype, quantization, block_types)
        self.step_weight_bytes: int = self._weights.step_byte_count
        self._states: StateStorage[Values] | None = None
        self._state_addresses = (ctypes.c_void_p * config.layer_count)()
        self._layers = [NativeLayer(index, config) for index in range(config.layer_count)]
        self._streams: NativeStreams | None = None
        if config.streams is not None:
            table_scale = _rounded(config.streams.input_size**0.5, dtype)
            self._streams = NativeStreams(config, config.streams, self._weights, table_scale)
        self._norm = norm_values(config.hidden_size, config.norm)
        has_head_bias = config.has_head and config.has_head_bias
        self._head_bias = padded_zeros(config.vocab_count) if has_head_bias else None
        self._embedding: Values | None = None
        self._positions: Values | None = None
        if config.position_rows:
            self._positions = empty_array((config.position_rows, config.hidden_size), dtype)
        self._embedding_norm: Float32Array | None = None
        if config.has_embedding and config.has_embedding_norm:
            self._embedding_norm = norm_values(config.hidden_size, config.norm)
        if config.has_embedding and not config.tie_word_embeddings:
            self._embedding = empty_array((config.vocab_count, config.hidden_size), dtype)
        attention, rotaries = (config.kv_attention if config.has_attention else None), config.rotaries
        turned_dim = max((dim for _, dim in rotaries), default=0)
        # Each table has the size of the largest heads. Kernels read only the pairs of a layer's own heads.
        tables = [
            [np.pad(part, (0, (turned_dim - dim) // 2)) for part in rotary_frequencies(rotary, dim)]
            for rotary, dim in rotaries or ((None, turned_dim),)
        ]
        temperature = (*config.temperatures, Temperature(scale=0.0, interval=1))[0]
        self._frequencies, self._magnitudes = (np.concatenate(part) for part in zip(*tables, strict=True))
        self._axes: npt.NDArray[np.int32] | None = None
        found = [(rotary.axes if rotary is not None else None) or () for rotary, _ in rotaries]
        if any(found):
            axes = [own + (0,) * (turned_dim // 2 - len(own)) for own in found]
            self._axes = np.array(axes, dtype=np.int32)
        self._layer_structs = (LayerStruct * config.layer_count)(
            *(layer.struct(f"layers.{index}", self._weights, rotaries) for index, layer in enumerate(self._layers))
        )
        self._struct = ModelStruct(
            dtype=DTYPES[dtype],
            layer_count=config.layer_count,
            hidden_size=config.hidden_size,
            intermediate_size=max((size for layer in config.layers for size in intermediate_sizes(layer)), default=0),
            turned_dim=turned_dim,
            latent_dim=attention.latent_dim if isinstance(attention, LatentAttentionConfig) else 0,
            vocab_size=config.vocab_size,
            vocab_first=0 if part is None else part.vocab_first,
            vocab_count=config.vocab_count,
            collectives=self._native_collectives,
            page_tokens=block_size,
            batch_invariant=batch_invariant,
            norm_kind=NORM_KINDS[config.norm],
            rotary_count=len(rotaries),
            kv_format=KV_FORMATS[kv_format],
            temperature_interval=temperature.interval,
            temperature_first=temperature.first,
            temperature_scale=temperature.scale,
            norm_eps=config.norm_eps,
            embedding_scale=_rounded(config.embedding_scale, dtype),
            logit_scale=config.logit_scale,
            logit_cap=config.logit_cap or 0.0,
            frequencies=address(self._frequencies),
            magnitudes=address(self._magnitudes),
            axes=None if self._axes is None else address(self._axes),
            layers=ctypes.addressof(self._layer_structs),
            embedding=None if self._embedding is None else address(self._embedding),
            head=self._weights.matrix(HEAD),
            norm=address(self._norm),
            positions=None if self._positions is None else address(self._positions),
            position_first=config.position_first or 0,
            embedding_norm=None if self._embedding_norm is None else address(self._embedding_norm),
            head_bias=None if self._head_bias is None else address(self._head_bias),
            streams=None if self._streams is None else ctypes.addressof(self._streams.struct),
        )
        self._adapters: dict[AdapterId, NativeAdapter] = {}
        self._engine: Engine | None = Engine(library, thread_count)

    @property
    def _native_collectives(self) -> int | None:
        if self._callbacks is not None:
            return self._callbacks.native
        return None if self._collectives is None else self._collectives.native

    @property
    def loading_threads(self) -> int:
        assert self._engine is not None, "loading_threads after close"
        return self._engine.thread_count  # Reading and packing run without the GIL.

    def slots(self) -> Iterator[Slot]:
        yield from self._weights.slots()
        if self._embedding is not None:
            yield _copied_slot("embed.weight", self._embedding, self.dtype, self._library)
        if self._positions is not None:
            yield _copied_slot("positions.weight", self._positions, self.dtype, self._library)
        if self._embedding_norm is not None:
            yield from norm_slots("embed_norm", self._embedding_norm, self.config.norm)
        for index, layer in enumerate(self._layers):
            yield from layer.slots(f"layers.{index}")
        if self._streams is not None:
            yield from self._streams.slots()
        if self.config.has_head:
            yield from norm_slots("norm", self._norm, self.config.norm)
        if self._head_bias is not None:
            yield float32_slot("lm_head.bias", self._head_bias[: self.config.vocab_count])

    @property
    def storage(self) -> KVStorage[Values] | None:
        return self._storage

    @property
    def states(self) -> StateStorage[Values] | None:
        return self._states

    def allocate_kv(self, block_count: int, state_slot_count: int = 0, memory: KVMemory | None = None) -> None:
        def made(shape: tuple[int, ...], dtype: str) -> Values:
            values: Values = empty_array(shape, dtype)
            self._library.use_large_pages(values)
            return values

        def made_for_kv(shape: tuple[int, ...]) -> Values:
            dtype: Dtype | Literal["uint8"] = self.dtype if self._kv_format == "plain" else "uint8"
            if memory is None or 0 in shape:
                return made(shape, dtype)
            content = memory.take(math.prod(shape) * (1 if dtype == "uint8" else VALUE_BYTES[dtype]))
            typed = cast(Values, content) if dtype == "uint8" else values_of(content, dtype)
            return typed.reshape(shape)

        self.release_kv()  # The old cache is freed first, because there may not be enough memory for both.
        if state_slot_count:
            make_states = functools.partial(made, dtype="float32")
            self._states = StateStorage(self.config, slot_count=state_slot_count, make=make_states)
            for index, buffer in enumerate(self._states.buffers):
                self._state_addresses[index] = None if buffer is None else address(buffer)
        self._storage = KVStorage(
            self.config,
            block_count=block_count,
            block_size=self._block_size,
            make=made_for_kv,
            kv_format=self._kv_format,
        )
        for index, kv_layer in enumerate(self.config.kv_layers):
            self._page_addresses[index] = address(self._storage.pages[kv_layer])
        self._begin_claims(self._storage)

    def _begin_claims(self, storage: KVStorage[Values]) -> None:
        self._unclaimed = _pieces([pages[: self._block_limit] for pages in storage.pages if pages.nbytes])

    def release_kv(self) -> None:
        self._storage, self._states, self._unclaimed = None, None, iter(())

    def limit_blocks(self, count: int) -> None:
        self._block_limit = count
        if self._storage is not None:
            self._storage.release_memory(count)
            self._begin_claims(self._storage)

    def claim_memory(self) -> bool:
        piece = next(self._unclaimed, None)
        return piece is not None and bool(self._library.claim(*piece))

    def warm_up(self) -> None:
        """Do nothing, because weights are already packed when they are read."""

    def compute(
        self,
        chunks: Sequence[ScheduledChunk],
        is_abandoned: IsAbandoned,
        masks: TokenMasks | None = None,
        begun: Float32Array | None = None,
    ) -> ComputedStep | None:
        assert self._engine is not None, "compute after close"
        assert self._storage is not None, "compute before allocate_kv"
        if self._is_alone and is_abandoned():  # Several ranks agree on this later.
            return None
        assert all(chunk.states for chunk in chunks) or self._states is None, "a model with states needs them in chunks"
        has_head = self.config.has_head
        arrays = _StepArrays(chunks, self._block_size, samples=has_head)
        samplings = NativeSamplings(sampled_rows(chunks) if has_head else [], self.config.vocab_size, masks)
        with_logprobs = [
            place
            for place, chunk in enumerate(chunks)
            if chunk.request.sampling.prompt_logprobs is not None and has_head
        ]
        pooling = [place for place, chunk in enumerate(chunks) if chunk.pools and has_head]
        last = self.config.layer_count
        needs_hidden = bool(with_logprobs or pooling) or last in self.tapped_layers or not has_head
        hidden = np.empty((arrays.row_count if needs_hidden else 0, self.config.hidden_size), dtype=np.float32)
        if begun is None:
            given = given_rows(chunks, arrays.first_rows)
        else:
            given = StepRows(np.arange(arrays.row_count, dtype=np.int32), begun)
        positions = None if self._axes is None else _grid_positions(chunks)
        ends = _row_ends(chunks)
        step = StepStruct(
            row_ends=None if ends is None else address(ends),
            row_count=arrays.row_count,
            given_count=0 if given is None else len(given.rows),
            given_width=0 if given is None else given.values.shape[1],
            given_rows=None if given is None else address(given.rows),
            given_values=None if given is None else address(given.values),
            positions=None if positions is None else address(positions),
            chunk_count=len(chunks),
            sampled_count=len(arrays.sampled_rows),
            token_ids=start_of(arrays.token_ids),
            chunk_starts=start_of(arrays.chunk_starts),
            chunk_counts=start_of(arrays.chunk_counts),
            table_firsts=start_of(arrays.table_firsts),
            tables=start_of(arrays.tables),
            pages=ctypes.addressof(self._page_addresses),
            sampled_rows=start_of(arrays.sampled_rows),
            hidden=address(hidden) if needs_hidden else None,
            waited_for=is_abandoned.address,
            states=ctypes.addressof(self._state_addresses),
            span_firsts=start_of(arrays.span_firsts),
            spans=start_of(arrays.spans),
        )
        tapped = np.empty((len(self.tapped_layers), arrays.row_count, self.config.hidden_size), dtype=np.float32)
        tapped_addresses = (ctypes.c_void_p * last)()
        if self.tapped_layers:
            for place, layer in enumerate(self.tapped_layers):
                if layer < last:
                    tapped_addresses[layer] = address(tapped[place])
            step.tapped = ctypes.addressof(tapped_addresses)
        adapters = self._adapters_of(chunks)
        if adapters is not None:
            step.adapters = ctypes.addressof(adapters)
        samplings.put_into(step)
        is_finished = self._engine.step(self._struct, step)
        self._check_callbacks()
        if not is_finished:
            return None
        if last in self.tapped_layers:
            tapped[self.tapped_layers.index(last)] = hidden
        return ComputedStep(
            samplings.samples() if len(arrays.sampled_rows) else None,
            {
                place: self._prompt_logprobs(hidden[arrays.first_rows[place] :][: chunks[place].count], chunks[place])
                for place in with_logprobs
            },
            {
                place: self._pooled(hidden[arrays.first_rows[place] :][: chunks[place].count], chunks[place])
                for place in pooling
            },
            _tapped(tapped, arrays.first_rows, chunks) if self.tapped_layers else None,
            None if has_head else hidden,
        )

    def _check_callbacks(self) -> None:
        """Raise the exception of a callback that communicates with other ranks, if there was one."""
        if self._callbacks is not None:
            self._callbacks.check()

    def _adapters_of(self, chunks: Sequence[ScheduledChunk]) -> ctypes.Array[ctypes.c_void_p] | None:
        """Return the address of each chunk's adapter, or None if no chunk has an adapter."""
        used = [chunk.request.adapter for chunk in chunks]
        if not any(used):
            return None
        layers = (None if adapter is None else self._adapters[adapter.id].layers for adapter in used)
        return (ctypes.c_void_p * len(used))(*layers)

    def add_adapter(self, id: AdapterId, weights: AdapterWeights) -> None:
        self._adapters[id] = NativeAdapter(weights, self.config, self._library, self.dtype)

    def remove_adapter(self, id: AdapterId) -> None:
        adapter = self._adapters.pop(id, None)
        if adapter is not None:
            adapter.close()

    def has_adapter(self, id: AdapterId) -> bool:
        return id in self._adapters

    def _pooled(self, hidden: Float32Array, chunk: ScheduledChunk) -> PoolingResult | None:
        pooling = chunk.request.pooling
        assert pooling is not None, "a chunk without pooling"
        assert self._engine is not None, "compute after close"
        if pooling.task == "labels":
            targets = np.array(pooling.label_token_ids, dtype=np.int32)
            rows = np.repeat(hidden[-1:], len(targets), axis=0)
            found = self._engine.logprobs(self._struct, rows, targets, 0)
            self._check_callbacks()
            return None if found is None else PoolingResult(found[0][:, 0].astype("<f4").tobytes())
        rows = normed(self.config.norm, hidden[needed_rows(pooling)], self._norm, self.config.norm_eps)
        return pooled_vector(rows, pooling)

    def _prompt_logprobs(self, hidden: Float32Array, chunk: ScheduledChunk) -> tuple[TokenLogprob, ...] | None:
        assert self._engine is not None, "compute after close"
        followers = prompt_followers(chunk)
        top = min(chunk.request.sampling.prompt_logprobs or 0, self.config.vocab_size)
        entries: list[TokenLogprob] = []
        for first in range(0, len(followers), PROMPT_LOGPROB_ROWS):
            targets = np.array(followers[first : first + PROMPT_LOGPROB_ROWS], dtype=np.int32)
            found = self._engine.logprobs(self._struct, hidden[first : first + len(targets)], targets, top)
            self._check_callbacks()
            if found is None:
                return None
            entries.extend(map(token_logprob, targets.tolist(), *(array.tolist() for array in found)))
        return tuple(entries)

    launches = False
    warms_by_shape = False

    def launch(
        self, chunks: Sequence[ScheduledChunk], awaited: Mapping[int, int], masks: TokenMasks | None = None
    ) -> ReadSamples | None:
        return None

    def close(self) -> None:
        """End the threads, and free weights and KV cache. A second call does nothing."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()
            self._weights.close()
            for id in [*self._adapters]:
                self.remove_adapter(id)
        self._layers, self._storage, self._states, self._embedding, self._unclaimed = [], None, None, None, iter(())


def _grid_positions(chunks: Sequence[ScheduledChunk]) -> npt.NDArray[np.int32] | None:
    """Return the three rotary positions of each row, int32 [rows, 3]. None if no request has images."""
    if not any(chunk.request.given for chunk in chunks):
        return None
    by_row = [np.broadcast_to(own, (3, own.shape[-1])) for own in map(rotary_positions, chunks)]
    return np.ascontiguousarray(np.concatenate(by_row, axis=1).T, dtype=np.int32)


def _row_ends(chunks: Sequence[ScheduledChunk]) -> npt.NDArray[np.int32] | None:
    """Return the position after the last token that each row of a step attends to. None if that is its own token."""
    ends = [row_ends(chunk) for chunk in chunks]
    if all(of_chunk is None for of_chunk in ends):
        return None
    own = (np.arange(chunk.start + 1, chunk.start + chunk.row_count + 1, dtype=np.int32) for chunk in chunks)
    return np.concatenate([found if found is not None else causal for found, causal in zip(ends, own, strict=True)])


def _tapped(tapped: Float32Array, first_rows: Sequence[int], chunks: Sequence[ScheduledChunk]) -> list[Float32Array]:
    rows = tapped.transpose(1, 0, 2).reshape(tapped.shape[1], -1)
    return [rows[first : first + chunk.row_count] for first, chunk in zip(first_rows, chunks, strict=True)]


def _pieces(pages: Sequence[Values]) -> Iterator[tuple[int, int]]:
    """Yield address and size of each piece of memory, in the order in which blocks are first used.

    The function first yields the first piece of every layer's buffer, then the second piece of every buffer.
    """
    for start in range(0, max((buffer.nbytes for buffer in pages), default=0), CLAIMED_BYTES):
        for buffer in pages:
            yield address(buffer) + start, min(CLAIMED_BYTES, buffer.nbytes - start)


def _rounded(number: float, dtype: Dtype) -> float:
    """Round a number to the dtype. The reference implementations round a factor before they multiply with it."""
    rounded = empty_values((1,), dtype)
    convert(np.array([number], dtype=np.float32), rounded)
    single = np.empty(1, dtype=np.float32)
    convert(rounded, single)
    return float(single[0])


def _copied_slot(name: str, place: Values, dtype: Dtype, library: Library) -> Slot:
    def rows_of(first_row: int, row_count: int) -> Slot:
        return _copied_slot(name, place[first_row : first_row + row_count], dtype, library)

    target = RowsTarget(library, RowsKind.COPIED, DTYPES[dtype], address(place))
    return Slot(name, place.shape, dtype, functools.partial(_copy, place), part=rows_of, target=target)


def _copy(place: Values, values: Values) -> None:
    convert(values.reshape(place.shape), place)


class _StepArrays:
    """A step's chunks as arrays that the kernels read. Rows are in the order of the chunks.

    Args:
        samples: True if this process samples tokens. False for a stage without the head.
    """

    def __init__(self, chunks: Sequence[ScheduledChunk], block_size: int, *, samples: bool) -> None:
        token_ids: list[int] = []
        tables: list[int] = []
        table_firsts: list[int] = []
        rows: list[int] = []
        self.first_rows: list[int] = []
        for chunk in chunks:
            end = chunk.start + chunk.row_count
            self.first_rows.append(len(token_ids))
            token_ids.extend(chunk.row_tokens)
            table_firsts.append(len(tables))
            tables.extend(chunk.block_table[: -(-end // block_size)])
            if chunk.samples and samples:
                rows.extend(range(len(token_ids) - 1 - len(chunk.draft), len(token_ids)))
        self.row_count = len(token_ids)
        self.token_ids = int32_array(token_ids)
        self.tables = int32_array(tables)
        self.table_firsts = int32_array(table_firsts)
        self.chunk_starts = int32_array([chunk.start for chunk in chunks])
        self.chunk_counts = int32_array([chunk.row_count for chunk in chunks])
        self.sampled_rows = int32_array(rows)
        self.span_firsts, self.spans = _spans(chunks, self.first_rows)


def _spans(chunks: Sequence[ScheduledChunk], first_rows: Sequence[int]) -> tuple[array[int], array[int]]:
    """Return the state spans of a step.

    Returns:
        Two arrays. The first has the index of each chunk's first span, then the number of all spans. The second has
        four numbers for each span: first row, number of rows, slot to read (-1: none), slot to write.
    """
    firsts: list[int] = [0]
    spans: list[int] = []
    for chunk, row in zip(chunks, first_rows, strict=True):
        for span in chunk.states:
            spans += (row, span.count, -1 if span.reads is None else span.reads, span.writes)
            row += span.count
        firsts.append(len(spans) // 4)
    return int32_array(firsts), int32_array(spans)
