"""Executor that computes StepPlans with an encoder, and returns vectors or scores.

The executor has no KV cache, so a request has no state between two steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from trioserve.contracts.errors import StartupError
from trioserve.contracts.ids import RequestId
from trioserve.contracts.kv_transfer import KVPages
from trioserve.contracts.pooling import TOKEN_TASKS, Pooling, PoolingResult
from trioserve.contracts.step import IsAbandoned, ScheduledChunk, StepPlan, StepResult, never_abandoned
from trioserve.contracts.weights import AdapterId
from trioserve.model.device import (
    DeviceType,
    default_thread_count,
    lost_gpu,
    pick_encoder_dtype,
    set_torch_threads,
    takes_every_cpu,
    torch_now,
    with_device_defaults,
)
from trioserve.model.encoder_config import EncoderConfig
from trioserve.model.loading.encoder_directory import EncoderDirectory
from trioserve.model.loading.stored_tensor import AdapterWeights
from trioserve.model.number_formats import VALUE_BYTES, Dtype
from trioserve.model.settings import ModelSettings
from trioserve.model.step_model import NOT_FINITE
from trioserve.model.step_rows import needed_rows, pooled_vector, token_results
from trioserve.model.weights import fill_slots

if TYPE_CHECKING:
    from torch import Tensor

    from trioserve.model.encoder import EncodedText, Encoder

__all__ = ["EncoderRunner"]


class EncoderRunner:
    """An Executor with one encoder. Call every method in one thread, as with ModelRunner.

    The class also has the members of ModelRunner that describe the KV cache. They report a cache without blocks.
    """

    block_count = 0
    state_slot_count = snapshot_slot_count = 0
    kv_cache_bytes = 0
    launches = False
    is_batch_invariant = False

    def __init__(self, encoder: Encoder, settings: ModelSettings, *, device: str, dtype: Dtype) -> None:
        self._encoder: Encoder | None = encoder
        self.config: EncoderConfig = encoder.config
        self.device = device
        self.dtype: Dtype = dtype
        self.kv_dtype: str = dtype
        self.block_size = settings.block_size
        self.max_num_seqs, self.step_tokens_max = settings.sequences_max, settings.step_tokens_max
        self.takes_every_cpu = takes_every_cpu(settings, "cuda" if device == "cuda" else "cpu")

    @classmethod
    def load(
        cls, directory: EncoderDirectory, settings: ModelSettings, *, progress: Callable[[int, int], None] | None = None
    ) -> EncoderRunner:
        """Load an encoder, see ModelRunner.load.

        Args:
            directory: weights and config.
            settings: settings of the model.
            progress: called repeatedly with bytes_done and bytes_total.

        Raises:
            ModelLoadError: tensors and config do not match.
            StartupError: the settings require something that encoders do not support.
        """
        if settings.demands_quantized:
            raise StartupError(
                f"quantization is {settings.quantization}, but the weights of an encoder are not quantized: use auto"
            )
        if settings.cpu_kernels == "native":
            raise StartupError("cpu_kernels is native, but plain torch computes encoders: use auto")
        if settings.batch_invariant:
            raise StartupError("batch_invariant is for models that generate text, and this is an encoder: leave it out")
        config = directory.config
        settings = with_device_defaults(settings)
        device: DeviceType = "cuda" if settings.device == "cuda" else "cpu"
        dtype = pick_encoder_dtype(config, settings, device)
        torch = torch_now("an encoder")
        from trioserve.model.encoder import Encoder
        from trioserve.model.torch_step.formats import TORCH_DTYPES

        set_torch_threads(settings)
        place = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
        encoder = Encoder(config, dtype=TORCH_DTYPES[dtype], device=place)
        fill_slots(
            (slot.for_values() for slot in encoder.slots()),
            directory.tensors(),
            bytes_total=directory.weight_bytes,
            progress=progress,
        )
        return cls(encoder, settings, device=device, dtype=dtype)

    @property
    def computed_by(self) -> str:
        return f"plain torch ({default_thread_count()} threads)" if self.device == "cpu" else "plain torch"

    @property
    def arithmetic(self) -> str:
        return f"{self.computed_by}, {self.dtype}"

    @property
    def step_weight_bytes(self) -> int:
        """Bytes of weights that every step reads, independent of the number of tokens."""
        return self.config.layer_weight_count * VALUE_BYTES[self.dtype]

    @property
    def token_flops(self) -> int:
        return 2 * self.config.layer_weight_count

    @property
    def attended_token_flops(self) -> int:
        return 4 * self.config.layer_count * self.config.hidden_size

    def kv_pages(self, model_name: str) -> KVPages:
        """Raise StartupError, because an encoder has no KV cache.

        Args:
            model_name: ignored.
        """
        _refuse_kv()

    def allocate_kv(self, block_count: int) -> None:
        assert block_count == 0, "an encoder keeps no KV"

    def claim_memory(self) -> bool:
        return False

    def warm_up(self) -> None:
        """Compute texts of several lengths, so that libraries choose their kernels before the first request."""
        from trioserve.model.encoder import EncodedText

        assert self._encoder is not None, "warm_up after close"
        for count in (1, 16, min(128, self.config.context_tokens_max)):
            self._forward([EncodedText([0] * count)], never_abandoned)

    def add_adapter(self, id: AdapterId, weights: AdapterWeights) -> None:
        raise AssertionError("an encoder has no adapters, and reading one already fails")

    def remove_adapter(self, id: AdapterId) -> None:
        pass

    def close(self) -> None:
        """Free the weights."""
        self._encoder = None
        if self.device == "cuda":
            torch_now().cuda.empty_cache()

    def launch(self, plan: StepPlan, is_abandoned: IsAbandoned = never_abandoned) -> Callable[[], StepResult | None]:
        return lambda: self.execute(plan, is_abandoned)

    @lost_gpu()
    def execute(self, plan: StepPlan, is_abandoned: IsAbandoned = never_abandoned) -> StepResult | None:
        """Compute a step, see Executor.

        A request gets an error if its token ids are outside the vocabulary, or if its results are not finite. All other
        requests of the plan are computed.

        Args:
            plan: chunks to compute.
            is_abandoned: polled before each layer. True abandons the step.

        Returns:
            Results of the step, or None if the step was abandoned.
        """
        from trioserve.model.encoder import EncodedText

        errors: dict[RequestId, str] = {}
        chunks: list[ScheduledChunk] = []
        for chunk in plan.chunks:
            fault = self._fault(chunk)
            if fault is None:
                chunks.append(chunk)
            else:
                errors[chunk.request.id] = fault
        pooled: dict[RequestId, PoolingResult] = {}
        if chunks:
            texts = [EncodedText(chunk.request.prompt_token_ids, _segment(chunk)) for chunk in chunks]
            hidden = self._forward(texts, is_abandoned)
            if hidden is None:
                return None
            pooled = self._pooled(chunks, hidden, errors)
        return StepResult((None,) * len(plan.chunks), errors=errors, pooled=pooled)

    def _forward(self, texts: list[EncodedText], is_abandoned: IsAbandoned) -> Tensor | None:
        assert self._encoder is not None, "execute after close"
        with torch_now().inference_mode():
            return self._encoder.forward(texts, is_abandoned)

    def _pooled(
        self, chunks: list[ScheduledChunk], hidden: Tensor, errors: dict[RequestId, str]
    ) -> dict[RequestId, PoolingResult]:
        torch, encoder = torch_now(), self._encoder
        assert encoder is not None, "execute after close"
        firsts, row = [], 0
        for chunk in chunks:
            firsts.append(row)
            row += chunk.count
        scored = [place for place, chunk in enumerate(chunks) if _pooling(chunk).task == "score"]
        scores: dict[int, float] = {}
        if scored:
            with torch.inference_mode():
                rows = [hidden[firsts[place] : firsts[place] + chunks[place].count] for place in scored]
                scores = dict(zip(scored, encoder.scores(rows).tolist(), strict=True))
        numbers = hidden.to("cpu", torch.float32).numpy()
        found: dict[RequestId, PoolingResult] = {}
        for place, chunk in enumerate(chunks):
            pooling, own = _pooling(chunk), slice(firsts[place], firsts[place] + chunk.count)
            if place in scores:
                one = PoolingResult.of([scores[place]]) if scores[place] == scores[place] else None
            elif pooling.task in TOKEN_TASKS:
                rows_of_text = numbers[own]
                if pooling.task == "token_classify":
                    with torch.inference_mode():
                        rows_of_text = encoder.labels(hidden[own]).cpu().numpy()
                one = token_results(rows_of_text, pooling)
            else:
                one = pooled_vector(numbers[own][needed_rows(pooling)], pooling)
            if one is None:
                errors[chunk.request.id] = NOT_FINITE
            else:
                found[chunk.request.id] = one
        return found

    def _fault(self, chunk: ScheduledChunk) -> str | None:
        tokens = chunk.request.prompt_token_ids
        for token in (min(tokens), max(tokens)):
            if not 0 <= token < self.config.vocab_size:
                return (
                    f"the prompt has token id {token}, but the model's vocabulary has ids 0 to "
                    f"{self.config.vocab_size - 1}"
                )
        return None


def _pooling(chunk: ScheduledChunk) -> Pooling:
    pooling = chunk.request.pooling
    assert pooling is not None, "a request of an encoder without pooling"
    assert chunk.pools, "an encoder got a part of a prompt"
    return pooling


def _segment(chunk: ScheduledChunk) -> int | None:
    return _pooling(chunk).first_segment_tokens


def _refuse_kv() -> NoReturn:
    raise StartupError("an encoder keeps no KV that could be exchanged: leave out --kv-transfer-config")
