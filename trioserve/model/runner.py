"""Model runner: the executor that computes a StepPlan and returns token ids. An invalid request ends only itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from trioserve.contracts.errors import StartupError
from trioserve.contracts.extras import VERSION
from trioserve.contracts.ids import RequestId
from trioserve.contracts.kv_transfer import KVLayout, KVPages
from trioserve.contracts.prompt import row_positions
from trioserve.contracts.step import IsAbandoned, ScheduledChunk, StepPlan, StepResult, never_abandoned
from trioserve.contracts.weights import AdapterId
from trioserve.model.begun_step import BegunStep, ComputableStep, fill_awaited_tokens
from trioserve.model.device import (
    STEP_TOKENS_GPU,
    attended_token_flops,
    cache_size,
    kv_block_bytes,
    lost_gpu,
    takes_every_cpu,
    token_flops,
    torch_now,
    with_device_defaults,
    with_images,
)
from trioserve.model.drafts.checkpoints import DraftSource, EagleCheckpoint, MtpCheckpoint, check_draft
from trioserve.model.drafts.draft_model import DraftModel
from trioserve.model.kv_storage import KVMemory, KVStorage, StateStorage, make_kv_pages
from trioserve.model.loaded_models import (
    load_draft,
    load_eagle_head,
    load_model,
    load_mtp_head,
    load_row_encoder,
    load_vision,
)
from trioserve.model.loading.checkpoint import Checkpoint
from trioserve.model.loading.stored_tensor import AdapterWeights
from trioserve.model.model_config import ModelConfig
from trioserve.model.number_formats import Float32Array, kv_format_of
from trioserve.model.parallel.collectives import Collectives
from trioserve.model.parallel.rank_checkpoint import RankCheckpoint
from trioserve.model.parallel.stages import Handover, NoNeighbours
from trioserve.model.settings import ModelSettings
from trioserve.model.step_model import ComputedStep, StepModel
from trioserve.model.warm_up_plans import first_step_plan, fused_kernel_plans, largest_step_plan, warm_up_plans
from trioserve.model.weights import Slot

if TYPE_CHECKING:
    from trioserve.model.row_encoder import RowEncoder
    from trioserve.model.vision.tower import VisionTower

__all__ = ["FIXED_BY_ENCODER", "ModelRunner"]

# The step that measures a GPU's memory has at most this many sequences if each of them needs memory for a state.
PROFILE_STATES = 8
# Its KV cache holds this many tokens, if a quarter of the free memory does. Longer contexts do not need larger buffers
# for the parts of a context.
PROFILE_CONTEXT_TOKENS = 4_096

FIXED_BY_ENCODER = "the model has an encoder, and what it encoded would remain that of the old weights"


class ModelRunner:
    """One model with its KV cache.

    The class is an Executor, and a LaunchingExecutor if the model launches steps. Call load, then allocate_kv, then
    optionally warm_up, then execute for each step. Make all calls in one thread: torch creates a team of compute
    threads for each calling thread, and two teams slow each other down. torch is imported only if it computes: on a
    GPU, or if the native kernels are not used.

    Args:
        model: model whose weights are loaded.
        settings: settings of the model.
        draft: draft model that proposes tokens after each step. None: no draft tokens.
        vision: encoder that converts images to embedding rows. None: images are not supported.
        row_encoder: encoder that converts sound or text to the rows that the decoder attends to. None: the model has no
            encoder.
        handover: connection to the previous and the next stage, if the model is a stage.

    Raises:
        StartupError: the remaining memory is too small for one KV block. The caller must then close the models.
    """

    def __init__(
        self,
        model: StepModel,
        settings: ModelSettings,
        draft: DraftModel | None = None,
        vision: VisionTower | None = None,
        handover: Handover | None = None,
        row_encoder: RowEncoder | None = None,
    ) -> None:
        self._model: StepModel | None = model
        self._draft = draft
        self.vision = vision
        self.row_encoder = row_encoder
        self.config: ModelConfig = model.config
        self._previous: BegunStep | None = None  # The step that was begun last.
        self._tapped: dict[RequestId, Any] = {}  # Inputs of the tapped layers in the last step.
        self._is_alone = model.config.part is None or model.config.part.size == 1
        self._handover = handover
        assert (model.config.stage is None) == (handover is None), "a stage needs its neighbours, a whole model none"
        self.device = model.device
        self.dtype = model.dtype
        self.block_size = settings.block_size
        self.max_num_seqs, self.step_tokens_max = settings.sequences_max, settings.step_tokens_max
        """Most sequences and tokens of a step."""
        self._context_tokens_max = min(
            model.config.context_tokens_max, settings.context_tokens_max or model.config.context_tokens_max
        )
        self._batch_invariant = settings.batch_invariant
        self._kv_format = kv_format_of(settings)
        cross = model.config.cross
        first = self._first_position = 0 if cross is None else row_positions(cross.rows_max, self.block_size)
        measures = model.device == "cuda" and settings.kv_cache_bytes is None
        size = cache_size(
            model.config,
            settings,
            model.device,
            model.dtype,
            draft_block_bytes=0 if draft is None else draft.block_bytes,
            draft_block_count=0 if draft is None else draft.spare_block_count,
            used_bytes=self._used_beside_cache() if measures else 0,
        )
        self.block_count = size.block_count
        """Blocks of the KV cache. Before allocate_kv: the number of blocks that fit."""
        if min(self._context_tokens_max, self.block_count * self.block_size) <= first:
            raise StartupError(
                f"the encoder's rows take {first} positions of each sequence, but the KV cache has "
                f"{self.block_count * self.block_size} tokens and the context {self._context_tokens_max}: raise "
                "--kv-cache-memory or --max-model-len"
            )
        self.state_slot_count, self.snapshot_slot_count = size.state_slot_count, size.snapshot_slot_count
        """State slots of running sequences, and after them slots for copies of states."""
        self.takes_every_cpu = takes_every_cpu(settings, model.device)
        """True if a step uses all CPUs of this process."""

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        settings: ModelSettings,
        *,
        draft: DraftSource | None = None,
        collectives: Collectives | None = None,
        handover: Handover | None = None,
        progress: Callable[[int, int], None] | None = None,
        on_compile: Callable[[str, float], None] = lambda sentence, seconds: None,
    ) -> ModelRunner:
        """Load the weights piece by piece, and convert them to the model's number format. The calling thread computes.

        Args:
            checkpoint: weights and config.
            settings: settings of the model.
            draft: draft model that is loaded before the model.
            collectives: connection to the other ranks, if the checkpoint is a RankCheckpoint. Every rank must execute
                the same plans in the same order, and only the first rank may use a draft model. The caller closes the
                connection.
            handover: connection to the previous and the next stage, if the checkpoint is a StageCheckpoint. Every stage
                must execute the same plans. Only the last stage has results, and no stage uses a draft model.
            progress: called repeatedly with bytes_done and bytes_total. An exception ends the loading.
            on_compile: called every second with a sentence and the elapsed seconds while kernels are compiled. An
                exception ends the loading.

        Raises:
            ModelLoadError: tensors and config do not match.
            StartupError: the device is missing, or the draft model has a different vocabulary.
        """
        settings = with_device_defaults(settings)
        draft_model = None
        if draft is not None:
            check_draft(checkpoint.config, draft.checkpoint.config, draft.name)
            if not isinstance(draft.checkpoint, EagleCheckpoint | MtpCheckpoint):
                draft_model = load_draft(draft, draft.checkpoint, settings.block_size, progress, on_compile)
        try:
            model = load_model(checkpoint, settings, progress, on_compile, collectives)
            try:
                if draft is not None and isinstance(draft.checkpoint, EagleCheckpoint):
                    whole = checkpoint.whole if isinstance(checkpoint, RankCheckpoint) else checkpoint
                    draft_model = load_eagle_head(draft, draft.checkpoint, whole, model, settings.block_size)
                if draft is not None and isinstance(draft.checkpoint, MtpCheckpoint):
                    draft_model = load_mtp_head(
                        draft, draft.checkpoint, model, settings.block_size, progress, on_compile
                    )
                # The vision encoder is loaded before the size of the KV cache is computed, because it needs memory.
                vision = None if model.config.part else load_vision(checkpoint, settings, model.dtype, model.device)
                row_encoder = load_row_encoder(checkpoint, settings, model)
                return cls(model, settings, draft_model, vision, handover, row_encoder)
            except BaseException:
                model.close()
                raise
        except BaseException:
            if draft_model is not None:
                draft_model.close()
            raise

    @property
    def computed_by(self) -> str:
        """Short description of the device and the kernels that compute, for users."""
        assert self._model is not None, "computed_by after close"
        return self._model.computed_by

    @property
    def arithmetic(self) -> str:
        """Description of the arithmetic that determines the bits of a result, see StepModel."""
        assert self._model is not None, "arithmetic after close"
        return with_images(self._model.arithmetic, self.dtype, None if self.vision is None else self.vision.dtype)

    @property
    def is_batch_invariant(self) -> bool:
        """True if the bits of a row depend only on its tokens and the weights, see StepModel."""
        assert self._model is not None, "is_batch_invariant after close"
        return self._model.is_batch_invariant

    @property
    def kv_cache_bytes(self) -> int:
        """Bytes of all KV blocks, including the draft model's blocks."""
        block_bytes = kv_block_bytes(self.config, self.block_size, self.dtype, self._kv_format)
        if self._draft is None:
            return self.block_count * block_bytes
        spare = self._draft.spare_block_count
        return self.block_count * block_bytes + (self.block_count + spare) * self._draft.block_bytes

    @property
    def kv_dtype(self) -> str:
        """Number format of keys and values in the KV cache: the dtype, int8 or fp8."""
        return self.dtype if self._kv_format == "plain" else self._kv_format

    @property
    def step_weight_bytes(self) -> int:
        """Bytes of weights that every decode step reads, independent of the number of tokens."""
        assert self._model is not None, "step_weight_bytes after close"
        return self._model.step_weight_bytes

    @property
    def token_flops(self) -> int:
        """Floating-point operations of the layers' matrix products for one token."""
        return token_flops(self.config)

    @property
    def attended_token_flops(self) -> int:
        """Floating-point operations of attention in all layers, for one token and one token that it attends to."""
        return attended_token_flops(self.config)

    @property
    def storage(self) -> KVStorage[Any] | None:
        """KV buffers, for code that moves blocks. None before allocate_kv."""
        return None if self._model is None else self._model.storage

    @property
    def states(self) -> StateStorage[Any] | None:
        """States of sequences in recurrent layers. None before allocate_kv, and without recurrent layers."""
        return None if self._model is None else self._model.states

    @property
    def why_fixed(self) -> str | None:
        """Reason why the weights cannot be replaced while the model runs, as the end of a sentence. None: they can."""
        assert self._model is not None, "why_fixed after close"
        if self.vision is not None or self.row_encoder is not None:
            return FIXED_BY_ENCODER
        if any(slot.block_type is not None for slot in self._model.slots()):
            return (
                "they are kept as blocks of a quantized file, and plain weights cannot become such blocks: open the "
                "model with --dtype float32 or with --quantization none"
            )
        return None

    @property
    def loading_threads(self) -> int:
        """Number of threads that may fill the model's loading slots at the same time."""
        assert self._model is not None, "loading_threads after close"
        return self._model.loading_threads

    def slots(self) -> Iterator[Slot]:
        """Yield the loading slot of each weight. Fill slots in the computing thread, between two steps."""
        assert self._model is not None, "slots after close"
        return self._model.slots()

    def check_open(self) -> None:
        """Assert that close was not called."""
        assert self._model is not None, "the model was closed"

    def kv_pages(self, model_name: str) -> KVPages:
        """Return an object that reads and writes the bytes of the KV cache. Call this method after allocate_kv.

        Args:
            model_name: name of the weights. Engines exchange KV only if they use equal names. For a batch-invariant
                model, the layout's name also contains the arithmetic and the program version, because KV of different
                arithmetic or kernels could change the bits of results.
        """
        assert self.storage is not None, "kv_pages before allocate_kv"
        return make_kv_pages(self.kv_layout(model_name), self.storage, self.device)

    def kv_layout(self, model_name: str) -> KVLayout:
        """Return the layout of kv_pages, which contains only layers with KV entries. Their entries must have one shape.

        Args:
            model_name: see kv_pages.
        """
        like = f"{model_name} batch-invariant, {self.arithmetic}, trioserve {VERSION}"
        entry = self.config.common_kv_entry
        assert entry is not None, "the KV entries of all layers have one shape"
        return KVLayout(
            model=like if self._batch_invariant else model_name,
            layer_count=sum(entry is not None for entry in self.config.kv_entries),
            block_size=self.block_size,
            part_count=entry.part_count,
            kv_head_count=entry.head_count,
            head_dim=entry.head_dim,
            dtype=self.kv_dtype,
        )

    def allocate_kv(self, block_count: int, memory: KVMemory | None = None) -> None:
        """Create the KV cache. The content of an earlier KV cache is lost.

        The operating system allocates memory when a block is first written, or earlier in claim_memory.

        Args:
            block_count: number of KV blocks.
            memory: buffers to use on a CPU. None allocates new buffers.
        """
        assert self._model is not None, "allocate_kv after close"
        assert block_count >= 1
        self.block_count = block_count
        self._model.allocate_kv(block_count, self.state_slot_count + self.snapshot_slot_count, memory)
        if self._draft is not None:
            self._draft.allocate_kv(block_count)

    def _used_beside_cache(self) -> int:
        """Return the bytes of the GPU that are in use beside the KV cache at the peak of the largest step.

        The step is computed once with a small KV cache. CUDA graphs are recorded before, because they keep memory. All
        ranks of a stage must compute the same step, and their GPUs may have different defaults of a step. So a rank
        computes a step of STEP_TOKENS_GPU tokens at most, and multiplies the result.

        Raises:
            StartupError: the GPU has too little memory for the step.
        """
        model, torch = self._model, torch_now()
        assert model is not None, "a runner begins with its model"
        cuda, has_states = torch.cuda, self.config.state_bytes > 0
        tokens = self.step_tokens_max if self._is_alone else min(self.step_tokens_max, STEP_TOKENS_GPU)
        sequences = min(self.max_num_seqs, tokens, PROFILE_STATES if has_states else tokens)
        context = max(self._context_tokens_max - 1, 1)
        first = self._first_position
        plan = largest_step_plan(tokens, sequences, context, self.config.vocab_size, has_states=has_states, first=first)
        self.block_count = 1  # kv_cache_bytes are then the bytes of one block.
        fitting = (
            cuda.mem_get_info()[0] // 4 // self.kv_cache_bytes * self.block_size if self.kv_cache_bytes else context
        )
        ends = (chunk.start + chunk.count for chunk in plan.chunks)
        kept_tokens = max(min(context, PROFILE_CONTEXT_TOKENS, fitting), *ends)
        self.block_count = -(-kept_tokens // self.block_size)
        self.state_slot_count, self.snapshot_slot_count = (sequences if has_states else 0), 0
        handover, self._handover = self._handover, None if self._handover is None else NoNeighbours()
        try:
            self.allocate_kv(self.block_count)
            self._model_and_draft_warm_up()
            cuda.synchronize()
            cuda.empty_cache()
            free, total = cuda.mem_get_info()
            allocated = cuda.memory_allocated()
            cuda.reset_peak_memory_stats()
            self.launch(plan)()
            cuda.synchronize()
            peak = cuda.max_memory_allocated() - allocated
        except torch.OutOfMemoryError as error:
            raise StartupError(
                f"the GPU has too little memory for a step of {tokens} tokens beside the weights: use a smaller model, "
                f"or lower --max-num-batched-tokens or --max-num-seqs ({error})"
            ) from error
        finally:
            self._handover, self._previous = handover, None
            self._tapped = {}
            model.release_kv()
            cuda.empty_cache()
        cache_bytes = self.kv_cache_bytes + self.state_slot_count * self.config.state_bytes
        return int(total - free - cache_bytes + peak * self.step_tokens_max / tokens)

    @property
    def why_kept(self) -> str | None:
        """Reason why release_kv cannot be called, as the beginning of a sentence. None if it can be called."""
        if self._draft is not None:
            return "the draft model's KV cache cannot be released alone"
        return None if self.device == "cpu" else "the KV cache of a GPU cannot be released alone"

    def release_kv(self) -> None:
        """Free the KV cache and keep the weights. Other code must not use the buffers any more. allocate_kv creates a
        new KV cache.
        """
        assert self._model is not None, "release_kv after close"
        assert self.why_kept is None, self.why_kept
        self._model.release_kv()

    def limit_blocks(self, count: int) -> None:
        """Return the memory of the KV blocks from `count` on to the operating system.

        The system provides it again when such a block is written.

        Args:
            count: number of blocks that keep their memory. The content of the others is lost.
        """
        assert self._model is not None, "limit_blocks after close"
        assert self.why_kept is None, self.why_kept
        self._model.limit_blocks(count)

    def claim_memory(self) -> bool:
        """Make the operating system allocate a small piece of the KV cache's memory before it is used.

        Call this method while there is nothing to compute.

        Returns:
            False if all memory is already allocated.
        """
        assert self._model is not None, "claim_memory after close"
        return self._model.claim_memory() or (self._draft is not None and self._draft.model.claim_memory())

    def warm_up(self) -> None:
        """Compute a few steps, so that libraries choose and cache their kernels before the first request.

        If kernels are compiled at their first launch, the steps have every shape for which a kernel is compiled.
        Otherwise, they have common shapes. If kernels are neither chosen nor compiled at run time, one step with one
        token is computed, so that the operating system allocates memory. A stage warms up without the other stages.

        The steps write KV blocks, so call this method before the first request.
        """
        handover = self._handover
        self._handover = None if handover is None else NoNeighbours()
        try:
            self._warm_up()
        finally:
            self._handover = handover

    def _model_and_draft_warm_up(self) -> None:
        assert self._model is not None, "warm_up after close"
        self._model.warm_up()
        if self._draft is not None:
            self._draft.model.warm_up()

    def _warm_up(self) -> None:
        assert self._model is not None, "warm_up after close"
        self._model_and_draft_warm_up()
        context_max = min(self._context_tokens_max, self.block_count * self.block_size)
        limits = (context_max, self.block_count, self.config.vocab_size)
        has_states = self.config.state_bytes > 0
        # All ranks must compute the same steps. Only the first rank may draft, so a draft must not change the steps of
        # a group.
        if not self._model.warms_by_shape and (self._draft is None or not self._is_alone):
            self.execute(first_step_plan(*limits[1:], has_states=has_states))
            return
        for plan in warm_up_plans(*limits, has_states=has_states, first=self._first_position):
            self.execute(plan)
        if self._model.launches:
            for plan in fused_kernel_plans(*limits):
                self.execute(plan)

    def add_adapter(self, id: AdapterId, weights: AdapterWeights) -> None:
        """Add an adapter that later requests may use.

        Args:
            id: name of the adapter.
            weights: matrices of the adapter, which are copied.

        Raises:
            MemoryError: there is not enough memory. The adapter was not added.
        """
        assert self._model is not None, "add_adapter after close"
        self._model.add_adapter(id, weights)

    def remove_adapter(self, id: AdapterId) -> None:
        """Free an adapter. Do nothing if it is not loaded.

        Args:
            id: name of the adapter.
        """
        if self._model is not None:
            self._model.remove_adapter(id)

    def close(self) -> None:
        """Free weights and KV cache. The runner cannot be used afterwards."""
        model, self._model = self._model, None
        draft, self._draft = self._draft, None
        for each in (model, draft):
            if each is not None:
                each.close()
        self.vision = self.row_encoder = None

    @property
    def launches(self) -> bool:
        """True if `launch` starts steps on the device. False: steps are computed when their result is requested."""
        assert self._model is not None, "launches after close"
        return self._model.launches

    @lost_gpu()
    def execute(self, plan: StepPlan, is_abandoned: IsAbandoned = never_abandoned) -> StepResult | None:
        """Compute a step, see Executor.

        A request gets an error if its token ids or logit_bias ids are outside the vocabulary, or if its logits are not
        finite. All other requests of the plan are computed.

        Args:
            plan: chunks to compute.
            is_abandoned: polled during the forward pass. True abandons the step.

        Returns:
            Results of the step, or None if the step was abandoned.
        """
        if self._draft is None:
            return self.launch(plan, is_abandoned)()
        started_at = time.perf_counter()
        result = self.launch(plan, is_abandoned)()
        if result is None:
            return None
        step_seconds = time.perf_counter() - started_at
        self._draft.pass_hidden_states(self._tapped)
        return self._draft.propose(plan, result, step_seconds, is_abandoned)

    @lost_gpu()
    def launch(self, plan: StepPlan, is_abandoned: IsAbandoned = never_abandoned) -> Callable[[], StepResult | None]:
        """Begin a step, see LaunchingExecutor.

        Args:
            plan: chunks to compute. plan.is_ahead means that the plan was made before the previous step had ended.
            is_abandoned: polled during the forward pass. True abandons the step.

        Returns:
            A function that waits for the step and returns what execute returns.
        """
        before = self._previous
        begun = self._begin(plan, before, is_abandoned)
        if begun is None:
            begun = BegunStep(plan, lambda: self._compute(plan, before, is_abandoned))
        self._previous = begun
        return lost_gpu()(begun.result)

    def _begin(self, plan: StepPlan, before: BegunStep | None, is_abandoned: IsAbandoned) -> BegunStep | None:
        """Launch a step on the device. Return None if the step must be computed instead."""
        model = self._model
        assert model is not None, "launch after close"
        rows_before = {} if before is None else before.chosen_rows
        # A single rank checks now if the step is abandoned, because a launched step is never abandoned. Several ranks
        # do not check now, because they must agree during the computation.
        is_abandoned_already = self._is_alone and is_abandoned()
        if not model.launches or is_abandoned_already or (plan.is_ahead and rows_before is None):
            return None
        rows_before = rows_before or {}
        known = (
            (index, chunk)
            for index, chunk in enumerate(plan.chunks)
            # Requests that failed in the previous step are omitted.
            if not chunk.awaits_token or chunk.request.id in rows_before
        )
        step = ComputableStep(plan, known, self.config.vocab_size, model.has_adapter)
        if not step.chunks:
            return None
        awaited = {
            place: rows_before[chunk.request.id] for place, chunk in enumerate(step.chunks) if chunk.awaits_token
        }
        read = model.launch(step.chunks, awaited, plan.masks)
        if read is None:
            return None
        chosen_rows = None
        if not any(chunk.draft for chunk in step.chunks):  # Else the last accepted token is not known in advance.
            sampled = (chunk.request.id for chunk in step.chunks if chunk.samples)
            chosen_rows = {request_id: row for row, request_id in enumerate(sampled)}
        return BegunStep(
            plan,
            lambda: step.result(ComputedStep(read()), before.failed_requests() if plan.is_ahead and before else ()),
            chosen_rows,
        )

    def _compute(self, plan: StepPlan, before: BegunStep | None, is_abandoned: IsAbandoned) -> StepResult | None:
        model = self._model
        assert model is not None, "execute after close"
        if plan.is_ahead:
            assert before is not None, "a plan ahead of its first step"
            step = ComputableStep(plan, fill_awaited_tokens(plan, before), self.config.vocab_size, model.has_adapter)
        else:
            step = ComputableStep(plan, enumerate(plan.chunks), self.config.vocab_size, model.has_adapter)
        if not step.chunks:
            return step.result(ComputedStep(None))
        computed = self._computed(step.chunks, is_abandoned, plan)
        if computed is None:
            return None
        if not self.config.has_head:
            return StepResult((None,) * len(plan.chunks))
        if computed.tapped is not None:
            self._tapped = {chunk.request.id: rows for chunk, rows in zip(step.chunks, computed.tapped, strict=True)}
        return step.result(computed)

    def _computed(
        self, chunks: Sequence[ScheduledChunk], is_abandoned: IsAbandoned, plan: StepPlan
    ) -> ComputedStep | None:
        """Compute chunks, and exchange hidden states with the previous and the next stage.

        Returns:
            Results, or None if this stage or an earlier stage abandoned the step. For an abandoned step, None is sent
            to the next stage, so a stage receives as many messages as the previous stage sends.
        """
        model, handover = self._model, self._handover
        assert model is not None, "execute after close"
        if handover is None:
            return model.compute(chunks, is_abandoned, plan.masks)
        begun: Float32Array | None = None
        computed: ComputedStep | None = None
        if not self.config.has_embedding:
            begun = handover.receive(sum(chunk.row_count for chunk in chunks), self.config.hidden_size)
        if self.config.has_embedding or begun is not None:
            computed = model.compute(chunks, is_abandoned, plan.masks, begun)
        if not self.config.has_head:
            handover.send(None if computed is None else computed.hidden)
        return computed
