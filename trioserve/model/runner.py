"""The executor: a StepPlan in, token ids out. What belongs to one request fails for that request alone."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Literal, cast

from trioserve.contracts.adapter import AdapterId
from trioserve.contracts.errors import StartupError
from trioserve.contracts.events import TokenLogprob
from trioserve.contracts.ids import RequestId
from trioserve.contracts.kv_transfer import KVLayout, KVPages
from trioserve.contracts.pooling import Pooled
from trioserve.contracts.step import IsAbandoned, ScheduledChunk, StepPlan, StepResult, never_abandoned
from trioserve.contracts.version import VERSION
from trioserve.model.adapter_weights import AdapterWeights
from trioserve.model.awaited_token import fill_in
from trioserve.model.begun_step import BegunStep
from trioserve.model.device import (
    DeviceType,
    attended_token_flops,
    cache_size,
    default_thread_count,
    has_torch,
    kv_block_bytes,
    pick_device,
    pick_dtype,
    pick_vision_dtype,
    set_torch_threads,
    takes_every_cpu,
    token_flops,
    torch_now,
    with_images,
)
from trioserve.model.drafts.draft_model import DraftModel
from trioserve.model.drafts.eagle_checkpoint import EagleCheckpoint
from trioserve.model.drafts.mtp_checkpoint import MtpCheckpoint
from trioserve.model.drafts.vocabulary import check_draft
from trioserve.model.kv_format import kv_format_of
from trioserve.model.kv_memory import KVMemory
from trioserve.model.kv_pages import make_kv_pages
from trioserve.model.kv_storage import KVStorage
from trioserve.model.loading.checkpoint import Checkpoint
from trioserve.model.model_config import ModelConfig
from trioserve.model.native_model import NativeModel, why_not_native
from trioserve.model.number_formats import Dtype, Float32Array
from trioserve.model.parallel.collectives import Collectives
from trioserve.model.parallel.rank_checkpoint import RankCheckpoint
from trioserve.model.parallel.stages import Handover, NoNeighbours
from trioserve.model.quantization import settle_quantization
from trioserve.model.samples import NOT_FINITE, ComputedStep, prompt_followers
from trioserve.model.settings import ModelSettings
from trioserve.model.state_storage import StateStorage
from trioserve.model.step_model import StepModel
from trioserve.model.warm_up_plans import first_step_plan, fused_kernel_plans, warm_up_plans
from trioserve.model.weights import Slot, fill_slots
from trioserve_kernels.native import NoNativeKernels, load_library

if TYPE_CHECKING:
    from trioserve.model.vision_tower import VisionTower

__all__ = ["FIXED_BY_IMAGES", "DraftSource", "ModelRunner", "load_vision"]

logger = logging.getLogger(__name__)

FIXED_BY_IMAGES = "it sees images, and what was made of these stays that of the old ones"


@dataclass(frozen=True, slots=True)
class DraftSource:
    """A draft model: its name for people, its checkpoint, how it is run, and how many tokens it proposes at most."""

    name: str
    checkpoint: Checkpoint | EagleCheckpoint | MtpCheckpoint
    settings: ModelSettings
    token_count: int

    @property
    def kind(self) -> Literal["model", "head"]:
        return "head" if isinstance(self.checkpoint, EagleCheckpoint | MtpCheckpoint) else "model"

    @property
    def context_tokens_max(self) -> int | None:
        """A head goes as far as its model, whatever it was trained on."""
        is_head = isinstance(self.checkpoint, EagleCheckpoint | MtpCheckpoint)
        return None if is_head else self.checkpoint.config.context_tokens_max


class ModelRunner:
    """One model with its KV cache; an Executor, and where the model launches steps, a LaunchingExecutor.

    load, then allocate_kv, then warm_up if the first request should not pay for it, then execute step after step, all
    in one thread: torch keeps a team of compute threads for every thread that uses it, and two teams slow each other.
    torch is imported only where it computes: on a GPU, or in the place of the native kernels.
    """

    def __init__(
        self,
        model: StepModel,
        settings: ModelSettings,
        draft: DraftModel | None = None,
        vision: VisionTower | None = None,
        handover: Handover | None = None,
    ) -> None:
        """draft: proposes tokens behind each step. vision: makes rows of images; None: nobody does. handover: of a
        model that is one of several stages. Raises StartupError if not even one KV block fits beside the models; they
        are the caller's to close, then."""
        self._model: StepModel | None = model
        self._draft = draft
        self.vision = vision
        self.config: ModelConfig = model.config
        self._is_alone = model.config.part is None or model.config.part.size == 1
        self._handover = handover
        assert (model.config.stage is None) == (handover is None), "who has some of the layers needs the others"
        self.device = model.device
        self.dtype = model.dtype
        self.block_size = settings.block_size
        self._context_tokens_max = min(
            model.config.context_tokens_max, settings.context_tokens_max or model.config.context_tokens_max
        )
        size = cache_size(
            model.config,
            settings,
            model.device,
            model.dtype,
            draft_block_bytes=0 if draft is None else draft.block_bytes,
            draft_block_count=0 if draft is None else draft.spare_block_count,
        )
        self.block_count = size.block_count
        """Blocks of the KV cache; before allocate_kv, how many fit."""
        self.state_slot_count, self.snapshot_slot_count = size.state_slot_count, size.snapshot_slot_count
        """Of layers that keep a state: slots for the sequences that run, and behind them slots for copies."""
        self.takes_every_cpu = takes_every_cpu(settings, model.device)
        """A step leaves no CPU to anybody else."""
        self._batch_invariant = settings.batch_invariant
        self._kv_format = kv_format_of(settings)
        self._before: BegunStep | None = None  # the step that was begun last
        self._tapped: dict[RequestId, Any] = {}  # what went into the tapped layers in the last step

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
        """Read the weights into the target number format, part by part; torch computes in the calling thread alone.

        progress(bytes_done, bytes_total) is called again and again, on_compile(sentence, seconds) every second while
        kernels are compiled; what they raise ends the loading. draft: a model that proposes tokens, loaded first.
        collectives: leads to the ranks that have the rest of the model, if the checkpoint is a RankCheckpoint. Each of
        them executes the same plans in the same order; the first alone may draft. The caller closes it. handover: leads
        to the stages before and behind this one, if the checkpoint is that of a stage. They execute the same plans,
        too, the last one alone has results, and none drafts.
        Raises ModelLoadError if the tensors are not those of the config, StartupError if the device is not there, or
        the draft model has another vocabulary.
        """
        draft_model = None
        if draft is not None:
            check_draft(checkpoint.config, draft.checkpoint.config, draft.name)
            if not isinstance(draft.checkpoint, EagleCheckpoint | MtpCheckpoint):
                draft_model = _loaded_draft(draft, draft.checkpoint, settings.block_size, progress, on_compile)
        try:
            model = _loaded_model(checkpoint, settings, progress, on_compile, collectives)
            try:
                if draft is not None and isinstance(draft.checkpoint, EagleCheckpoint):
                    whole = checkpoint.whole if isinstance(checkpoint, RankCheckpoint) else checkpoint
                    draft_model = _loaded_head(draft, draft.checkpoint, whole, model, settings.block_size)
                if draft is not None and isinstance(draft.checkpoint, MtpCheckpoint):
                    draft_model = _loaded_mtp(draft, draft.checkpoint, model, settings.block_size, progress, on_compile)
                # First: what it takes is not the KV cache's.
                vision = None if model.config.part else load_vision(checkpoint, settings, model.dtype, model.device)
                return cls(model, settings, draft_model, vision, handover)
            except BaseException:
                model.close()
                raise
        except BaseException:
            if draft_model is not None:
                draft_model.close()
            raise

    @property
    def computed_by(self) -> str:
        """What computes the steps, in a few words for people."""
        assert self._model is not None, "computed_by after close"
        return self._model.computed_by

    @property
    def arithmetic(self) -> str:
        """What decides about the bits of a result besides tokens and weights; see StepModel."""
        assert self._model is not None, "arithmetic after close"
        return with_images(self._model.arithmetic, self.dtype, None if self.vision is None else self.vision.dtype)

    @property
    def is_batch_invariant(self) -> bool:
        """See StepModel."""
        assert self._model is not None, "is_batch_invariant after close"
        return self._model.is_batch_invariant

    @property
    def kv_cache_bytes(self) -> int:
        """What block_count blocks take, in a draft model, too."""
        block_bytes = kv_block_bytes(self.config, self.block_size, self.dtype, self._kv_format)
        if self._draft is None:
            return self.block_count * block_bytes
        spare = self._draft.spare_block_count
        return self.block_count * block_bytes + (self.block_count + spare) * self._draft.block_bytes

    @property
    def kv_dtype(self) -> str:
        """Of keys and values in the KV cache: the dtype, int8 or fp8."""
        return self.dtype if self._kv_format == "plain" else self._kv_format

    @property
    def step_weight_bytes(self) -> int:
        """What a decode step has to read of the weights, however few tokens it has."""
        assert self._model is not None, "step_weight_bytes after close"
        return self._model.step_weight_bytes

    @property
    def token_flops(self) -> int:
        """What the layers' matrix products of one token take."""
        return token_flops(self.config)

    @property
    def attended_token_flops(self) -> int:
        """What attention takes for one token that another one sees, in all layers."""
        return attended_token_flops(self.config)

    @property
    def storage(self) -> KVStorage[Any] | None:
        """The KV buffers, for whoever carries blocks elsewhere; None before allocate_kv."""
        return None if self._model is None else self._model.storage

    @property
    def states(self) -> StateStorage[Any] | None:
        """What layers keep of sequences; None before allocate_kv, and of a model without such layers."""
        return None if self._model is None else self._model.states

    @property
    def why_fixed(self) -> str | None:
        """Why the weights cannot be replaced while it computes, as a sentence's end; None: they can."""
        assert self._model is not None, "why_fixed after close"
        if self.vision is not None:
            return FIXED_BY_IMAGES
        if any(slot.block_type is not None for slot in self._model.slots()):
            return (
                "they are kept in the blocks of a quantized file, which plain ones cannot become: open it with --dtype "
                "float32 or with --quantization none"
            )
        return None

    @property
    def loading_threads(self) -> int:
        """That may fill its slots at the same time."""
        assert self._model is not None, "loading_threads after close"
        return self._model.loading_threads

    def slots(self) -> Iterator[Slot]:
        """The places of the weights, to be filled in the thread that computes, between two steps."""
        assert self._model is not None, "slots after close"
        return self._model.slots()

    def check_open(self) -> None:
        """Asserts that it was not closed."""
        assert self._model is not None, "the model was closed"

    def kv_pages(self, model_name: str) -> KVPages:
        """The KV cache as bytes, after allocate_kv. model_name: engines exchange KV if it is the same for both. A
        batch-invariant model takes KV only of its like, since others would give other bits; so might other versions of
        its kernels, whose KV files may still be there."""
        assert self.storage is not None, "kv_pages before allocate_kv"
        return make_kv_pages(self.kv_layout(model_name), self.storage, self.device)

    def kv_layout(self, model_name: str) -> KVLayout:
        """Of kv_pages, which are those of layers that keep something."""
        like = f"{model_name} batch-invariant, {self.arithmetic}, trioserve {VERSION}"
        entry = self.config.kv_attention.kv_entry
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
        """Make the KV cache; what an earlier one held is gone. Its memory is claimed as blocks are first written,
        or ahead of that by claim_memory. memory: on a CPU, where it is to lie."""
        assert self._model is not None, "allocate_kv after close"
        assert block_count >= 1
        self.block_count = block_count
        self._model.allocate_kv(block_count, self.state_slot_count + self.snapshot_slot_count, memory)
        if self._draft is not None:
            self._draft.allocate_kv(block_count)

    @property
    def why_kept(self) -> str | None:
        """Why release_kv cannot be called, as the beginning of a sentence; None: it can."""
        if self._draft is not None:
            return "the draft model's KV cache cannot be given back alone"
        return None if self.device == "cpu" else "the KV cache of a GPU cannot be given back alone"

    def release_kv(self) -> None:
        """Let the KV cache go, and keep the weights; allocate_kv makes it anew. Nobody else may have it."""
        assert self._model is not None, "release_kv after close"
        assert self.why_kept is None, self.why_kept
        self._model.release_kv()

    def claim_memory(self) -> bool:
        """Claim a small piece of the KV cache's memory ahead of its use; for moments in which there is nothing to
        compute. False: nothing is left to be claimed."""
        assert self._model is not None, "claim_memory after close"
        return self._model.claim_memory() or (self._draft is not None and self._draft.model.claim_memory())

    def warm_up(self) -> None:
        """Have the model prepare what it can, and compute a few steps of the common shapes, so that libraries choose
        and cache their kernels; where kernels are compiled as they are first launched, of every shape that compiles
        one; and where none is chosen, one step of one token, which claims first memory. A stage does it without the
        others. Uses the KV blocks: call it before the first request."""
        handover = self._handover
        self._handover = None if handover is None else NoNeighbours()
        try:
            self._warm_up()
        finally:
            self._handover = handover

    def _warm_up(self) -> None:
        assert self._model is not None, "warm_up after close"
        self._model.warm_up()
        if self._draft is not None:
            self._draft.model.warm_up()
        context_max = min(self._context_tokens_max, self.block_count * self.block_size)
        limits = (context_max, self.block_count, self.config.vocab_size)
        has_states = self.config.state_bytes > 0
        # Ranks compute the same steps, and the first alone may draft.
        if not self._model.warms_by_shape and (self._draft is None or not self._is_alone):
            self.execute(first_step_plan(*limits[1:], has_states=has_states))
            return
        for plan in warm_up_plans(*limits, has_states=has_states):
            self.execute(plan)
        if self._model.launches:
            for plan in fused_kernel_plans(*limits):
                self.execute(plan)

    def add_adapter(self, id: AdapterId, weights: AdapterWeights) -> None:
        """From here on requests may have it. Raises MemoryError, and has kept nothing."""
        assert self._model is not None, "add_adapter after close"
        self._model.add_adapter(id, weights)

    def remove_adapter(self, id: AdapterId) -> None:
        """Let it go; nothing to do if it is not there."""
        if self._model is not None:
            self._model.remove_adapter(id)

    def close(self) -> None:
        """Let weights and KV cache go. The runner cannot be used afterwards."""
        model, self._model = self._model, None
        draft, self._draft = self._draft, None
        for made in (model, draft):
            if made is not None:
                made.close()
        self.vision = None

    @property
    def launches(self) -> bool:
        """Whether `launch` begins steps of the device, rather than leaving all of them to whoever waits."""
        assert self._model is not None, "launches after close"
        return self._model.launches

    def execute(self, plan: StepPlan, is_abandoned: IsAbandoned = never_abandoned) -> StepResult | None:
        """See Executor. A request with a token or a logit_bias id outside the vocabulary, or whose logits are not
        finite, gets an error; the rest of the plan is computed."""
        if self._draft is None:
            return self.launch(plan, is_abandoned)()
        started_at = time.perf_counter()
        result = self.launch(plan, is_abandoned)()
        if result is None:
            return None
        step_seconds = time.perf_counter() - started_at
        self._draft.take_tapped(self._tapped)
        return self._draft.propose(plan, result, step_seconds, is_abandoned)

    def launch(self, plan: StepPlan, is_abandoned: IsAbandoned = never_abandoned) -> Callable[[], StepResult | None]:
        """See LaunchingExecutor."""
        before = self._before
        begun = self._begin(plan, before, is_abandoned)
        if begun is None:
            begun = BegunStep(plan, lambda: self._compute(plan, before, is_abandoned))
        self._before = begun
        return begun.result

    def _begin(self, plan: StepPlan, before: BegunStep | None, is_abandoned: IsAbandoned) -> BegunStep | None:
        """Launch it; None if it has to be computed instead."""
        model = self._model
        assert model is not None, "launch after close"
        rows_before = {} if before is None else before.chosen_rows
        # Whether ranks abandon a step they agree on while they compute it, and one that is launched is not abandoned.
        is_left = self._is_alone and is_abandoned()
        if not model.launches or is_left or (plan.is_ahead and rows_before is None):
            return None
        rows_before = rows_before or {}
        known = (
            (index, chunk)
            for index, chunk in enumerate(plan.chunks)
            if not chunk.awaits_token or chunk.request.id in rows_before  # else it failed there, and is left out
        )
        step = _Step(plan, known, self.config.vocab_size, model.has_adapter)
        if not step.chunks:
            return None
        awaited = {
            place: rows_before[chunk.request.id] for place, chunk in enumerate(step.chunks) if chunk.awaits_token
        }
        read = model.launch(step.chunks, awaited, plan.masks)
        if read is None:
            return None
        sampled = (chunk.request.id for chunk in step.chunks if chunk.samples)
        return BegunStep(
            plan,
            lambda: step.result(ComputedStep(read()), before.missing() if plan.is_ahead and before else ()),
            {request_id: row for row, request_id in enumerate(sampled)},
        )

    def _compute(self, plan: StepPlan, before: BegunStep | None, is_abandoned: IsAbandoned) -> StepResult | None:
        model = self._model
        assert model is not None, "execute after close"
        if plan.is_ahead:
            assert before is not None, "a plan ahead of nothing"
            step = _Step(plan, fill_in(plan, before), self.config.vocab_size, model.has_adapter)
        else:
            step = _Step(plan, enumerate(plan.chunks), self.config.vocab_size, model.has_adapter)
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
        """None if it was abandoned: here, or in a stage before this one. The stage behind learns of it, and then only:
        each has taken as much from the one before as that has sent."""
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


def _loaded_model(
    checkpoint: Checkpoint,
    settings: ModelSettings,
    progress: Callable[[int, int], None] | None,
    on_compile: Callable[[str, float], None],
    collectives: Collectives | None = None,
) -> StepModel:
    device = pick_device(settings)
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
    except BaseException:
        model.close()
        raise
    return model


def _loaded_draft(
    draft: DraftSource,
    checkpoint: Checkpoint,
    block_size: int,
    progress: Callable[[int, int], None] | None,
    on_compile: Callable[[str, float], None],
) -> DraftModel:
    model = _loaded_model(checkpoint, draft.settings, progress, on_compile)
    block_bytes = kv_block_bytes(model.config, block_size, model.dtype, kv_format_of(draft.settings))
    return DraftModel(model, block_size=block_size, block_bytes=block_bytes, token_count_max=draft.token_count)


def _loaded_head(
    draft: DraftSource, eagle: EagleCheckpoint, checkpoint: Checkpoint, model: StepModel, block_size: int
) -> DraftModel:
    """The head has its own copy of the model's embedding: that one may be packed, or quantized."""
    torch = torch_now("an EAGLE-3 head")
    from trioserve.model.drafts.eagle import EagleHead
    from trioserve.model.torch_formats import TORCH_DTYPES

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
        take_tapped=head.take_tapped,
    )


def _loaded_mtp(
    draft: DraftSource,
    mtp: MtpCheckpoint,
    model: StepModel,
    block_size: int,
    progress: Callable[[int, int], None] | None,
    on_compile: Callable[[str, float], None],
) -> DraftModel:
    torch_now("a layer that predicts further tokens")
    from trioserve.model.drafts.mtp import MtpHead

    set_torch_threads(draft.settings)
    layer = _loaded_model(mtp.layer, draft.settings, progress, on_compile)
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
        take_tapped=head.take_tapped,
    )


class _Step:
    """What of a plan can be computed: chunks, and with their results the response to the plan."""

    def __init__(
        self,
        plan: StepPlan,
        chunks: Iterable[tuple[int, ScheduledChunk]],
        vocab_size: int,
        has_adapter: Callable[[AdapterId], bool],
    ) -> None:
        """chunks: each with its place in the plan. Where a fault shows, its request gets an error."""
        self._plan = plan
        self._errors: dict[RequestId, str] = {}
        self._indexes: list[int] = []  # in the plan
        self.chunks: list[ScheduledChunk] = []
        for index, chunk in chunks:
            # A token that is awaited is sampled here, and the rest has been looked at before.
            fault = None if plan.chunks[index].awaits_token else _fault(chunk, vocab_size)
            if chunk.request.adapter is not None and not has_adapter(chunk.request.adapter.id):
                fault = "the adapter of this request is not loaded here any more"
            if fault is None:
                self.chunks.append(chunk)
                self._indexes.append(index)
            else:
                self._errors[chunk.request.id] = fault

    def result(self, computed: ComputedStep, missing: Collection[RequestId] = ()) -> StepResult:
        """missing: requests whose chunks count for nothing."""
        chunks = self.chunks
        errors = {request_id: error for request_id, error in self._errors.items() if request_id not in missing}
        token_ids: list[int | None] = [None] * len(self._plan.chunks)
        logprobs: dict[RequestId, TokenLogprob] = {}
        prompt_logprobs: dict[RequestId, tuple[TokenLogprob, ...]] = {}
        draft_token_ids: dict[RequestId, tuple[int, ...]] = {}
        draft_logprobs: dict[RequestId, tuple[TokenLogprob, ...]] = {}
        for place, entries in computed.prompt_logprobs.items():
            request_id = chunks[place].request.id
            if entries is None:
                errors[request_id] = NOT_FINITE
            else:
                prompt_logprobs[request_id] = entries
        pooled: dict[RequestId, Pooled] = {}
        for place, vector in computed.pooled.items():
            request_id = chunks[place].request.id
            if vector is None:
                errors[request_id] = NOT_FINITE
            else:
                pooled[request_id] = vector
        next_row = 0
        for place, chunk in enumerate(chunks):
            if not chunk.samples:
                continue
            row, next_row = next_row, next_row + 1 + len(chunk.draft)
            request_id, samples = chunk.request.id, computed.samples
            assert samples is not None, "chunks sample, and their samples are not there"
            if request_id in errors or request_id in missing:
                continue
            token_ids[self._indexes[place]] = samples.token_ids[row]
            if row in samples.errors:
                errors[request_id] = samples.errors[row]
            if row in samples.logprobs:
                logprobs[request_id] = samples.logprobs[row]
            if chunk.draft:
                # What cannot be sampled behind a draft token is an error when its turn comes, if that token is right.
                after = tuple(takewhile(lambda token: token is not None, samples.token_ids[row + 1 : next_row]))
                draft_token_ids[request_id] = cast(tuple[int, ...], after)
                if row in samples.logprobs:
                    rows = range(row + 1, row + 1 + len(after))
                    draft_logprobs[request_id] = tuple(samples.logprobs[row] for row in rows)
        return StepResult(tuple(token_ids), logprobs, prompt_logprobs, errors, draft_token_ids, draft_logprobs, pooled)


def load_vision(
    checkpoint: Checkpoint, settings: ModelSettings, dtype: Dtype, device: DeviceType
) -> VisionTower | None:
    """What makes rows of images for a model that computes so; None: it sees none, or torch is not installed."""
    part = checkpoint.vision
    if part is None:
        return None
    if not has_torch():
        logger.warning(
            "images are not served: torch, which encodes them, is not installed: pip install 'trioserve[torch]'"
        )
        return None
    torch = torch_now()
    from trioserve.model.vision_tower import VisionTower

    set_torch_threads(settings)  # native kernels have their own, and leave torch's alone
    own_dtype = pick_vision_dtype(dtype, device)
    tower = VisionTower(part.config, part.processing, dtype=own_dtype, device=torch.device(device))
    fill_slots(
        (slot.for_values() for slot in tower.slots()),
        part.tensors(),
        bytes_total=part.weight_bytes,
        progress=None,
    )
    return tower


def _make_model(
    checkpoint: Checkpoint,
    settings: ModelSettings,
    dtype: Dtype,
    device: DeviceType,
    on_compile: Callable[[str, float], None],
    collectives: Collectives | None,
) -> StepModel:
    """The native kernels where they are wanted and can be had, else plain torch. Raises StartupError if they are
    demanded, for themselves or for quantized weights, and cannot be had."""
    config = checkpoint.config
    if kv_format_of(settings) != "plain" and any(entry and entry.part_count == 1 for entry in config.kv_entries):
        raise StartupError(
            f"kv_cache_dtype is {settings.kv_cache_dtype}, but the model keeps latents, which are not kept in 8 bits: "
            "take kv_cache_dtype auto"
        )
    for section in config.sections:
        if section < config.context_tokens_max and section % settings.block_size:
            raise StartupError(
                f"block_size is {settings.block_size}, but this model's attention is cut into sections of {section} "
                "tokens, which must be whole numbers of blocks: take a block_size that divides them"
            )
    reason: str | None = f"the device is {device}"
    block_types = {tensor.name: tensor.block_type for tensor in checkpoint.tensors() if tensor.block_type}
    if device == "cpu" and settings.cpu_kernels != "torch":
        reason = why_not_native(config, dtype)
        if reason is None:
            quantization = settle_quantization(settings.quantization, block_types, dtype=dtype)
            try:
                library = load_library(on_compile=on_compile)
                return NativeModel(
                    config,
                    library,
                    dtype=dtype,
                    block_size=settings.block_size,
                    thread_count=settings.threads or default_thread_count(),
                    quantization=quantization,
                    block_types=block_types,
                    batch_invariant=settings.batch_invariant,
                    kv_format=kv_format_of(settings),
                    collectives=collectives,
                )
            except NoNativeKernels as error:
                reason = str(error)
        if settings.cpu_kernels == "native":
            raise StartupError(f"cpu_kernels is native, but the native kernels cannot be used: {reason}")
        if not settings.demands_quantized and has_torch():
            logger.warning("plain torch computes, and more slowly than the native kernels: %s", reason)
    keeps_on_gpu = device == "cuda" and settings.quantization == "file" and settings.gpu_kernels == "triton"
    if settings.demands_quantized and not keeps_on_gpu:
        raise StartupError(
            f"quantization is {settings.quantization}, but the native kernels, which alone compute with quantized "
            f"weights, cannot be used: {reason}; take quantization none"
        )
    if not has_torch():
        raise StartupError(
            f"the native kernels cannot be used: {reason}. In their place torch computes, which is not installed: pip "
            "install 'trioserve[torch]'"
        )
    torch_now()
    from trioserve.model.torch_step_model import TorchStepModel

    return TorchStepModel(
        config, settings, dtype=dtype, device=device, block_types=block_types, collectives=collectives
    )


def _fault(chunk: ScheduledChunk, vocab_size: int) -> str | None:
    """Why this chunk cannot be computed, as a sentence for the client."""
    tokens = chunk.row_tokens
    if chunk.request.sampling.prompt_logprobs is not None:
        tokens = [*tokens, *prompt_followers(chunk)]
    for token in (min(tokens), max(tokens)):
        if not 0 <= token < vocab_size:
            return f"the prompt has token id {token}, but the model's vocabulary has ids 0 to {vocab_size - 1}"
    for token in chunk.request.sampling.logit_bias or ():
        if token >= vocab_size:
            return f"logit_bias names token id {token}, but the model's vocabulary has ids 0 to {vocab_size - 1}"
    return None
