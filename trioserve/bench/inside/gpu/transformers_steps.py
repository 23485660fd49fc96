"""Measures decode steps of the transformers library with its best methods, for a comparison with our steps.

The methods are a static cache with compiled steps, which `generate` records in CUDA graphs, and continuous batching if
the installed version has it.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.generation.streamers import BaseStreamer

from trioserve.model.device import DeviceType
from trioserve.model.model_config import ModelConfig
from trioserve.model.random_checkpoint import transformers_config
from trioserve.model.torch_step.formats import TORCH_DTYPES

__all__ = ["measure_transformers"]

TIMED_TOKENS = 32
# The first tokens of each response are not measured, since their steps compile kernels and capture graphs.
WARM_TOKENS = 8


class DecodeStep(Protocol):
    """Size of a decode step: sequences, and tokens of each."""

    @property
    def batch(self) -> int: ...
    @property
    def context(self) -> int: ...


Case = TypeVar("Case", bound=DecodeStep)


def measure_transformers(
    config: ModelConfig, cases: Sequence[Case], device: DeviceType, notice: Callable[[str], None]
) -> dict[str, dict[Case, float]]:
    """Measure decode steps of transformers.

    Args:
        config: shape of the model.
        cases: sizes of steps.
        device: where the model is computed.
        notice: gets a line per measurement, and per case that this version of transformers cannot compute.

    Returns:
        Seconds per step, by method and case.
    """
    ways = {"transformers static": _static_seconds, "transformers continuous": _continuous_seconds}
    measured: dict[str, dict[Case, float]] = {}
    model = _make_model(config, device)
    for way, seconds_of in ways.items():
        measured[way] = {}
        for case in cases:
            if case.context <= TIMED_TOKENS + WARM_TOKENS:
                notice(f"{way}, {case.batch} x {case.context}: contexts begin at {TIMED_TOKENS + WARM_TOKENS + 1}")
                continue
            try:
                measured[way][case] = seconds = seconds_of(model, case)
                notice(f"{way}, {case.batch} x {case.context}: {1e3 * seconds:.3f} ms")
            except Exception as error:  # An error in transformers must not prevent the figures of trioserve.
                notice(f"{way}, {case.batch} x {case.context}: {type(error).__name__}: {error}".splitlines()[0])
            torch.compiler.reset()
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
    return measured


def _make_model(config: ModelConfig, device: DeviceType) -> Any:
    made = AutoConfig.for_model(**transformers_config(config), bos_token_id=None, eos_token_id=None, pad_token_id=0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(made, dtype=TORCH_DTYPES[config.dtype_name]).eval()


def _generation(token_count: int, **more: Any) -> GenerationConfig:
    return GenerationConfig(
        max_new_tokens=token_count,
        min_new_tokens=token_count,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
        **more,
    )


class _Times(BaseStreamer):  # type: ignore[misc]  # the library is untyped here
    """Records the time of each step's tokens."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def put(self, value: object) -> None:
        self.seconds.append(time.perf_counter())

    def end(self) -> None:
        pass


def _prompts(model: Any, case: DecodeStep) -> torch.Tensor:
    """Return random prompts, so long that the last tokens are computed at about the context of the case."""
    shape = (case.batch, case.context - TIMED_TOKENS - WARM_TOKENS)
    return torch.randint(0, model.config.vocab_size, shape, device=model.device)


def _static_seconds(model: Any, case: DecodeStep) -> float:
    times = _Times()
    prompts = _prompts(model, case)
    config = _generation(TIMED_TOKENS + WARM_TOKENS, cache_implementation="static")
    for _ in range(2):  # The first run compiles, so only the second run counts.
        times.seconds.clear()
        model.generate(prompts, attention_mask=torch.ones_like(prompts), generation_config=config, streamer=times)
    return statistics.median(_differences(times.seconds[-TIMED_TOKENS:]))


def _continuous_seconds(model: Any, case: DecodeStep) -> float:
    if not hasattr(model, "generate_batch"):
        raise NotImplementedError("this version has no continuous batching")
    if model.device.type == "cpu":
        raise NotImplementedError("its cache would use most of this machine's memory, so it is only measured on a GPU")
    outputs = model.generate_batch(
        inputs=_prompts(model, case).tolist(),
        generation_config=_generation(TIMED_TOKENS + WARM_TOKENS),
        record_timestamps=True,
    )
    # The sequence whose first token comes last decodes together with all other sequences.
    last = max((output.timestamps for output in outputs.values()), key=lambda stamps: stamps[0])
    tail = last[-TIMED_TOKENS // 2 :]
    # Steps overlap, so a mean over several steps is more exact than a single difference.
    return float(tail[-1] - tail[0]) / (len(tail) - 1)


def _differences(stamps: Sequence[float]) -> list[float]:
    return [later - earlier for earlier, later in itertools.pairwise(stamps)]
