"""Tests that a token mask has the same effect as logits that make the forbidden tokens almost impossible.

The tests use torch, the native kernels at every available instruction level, and whole steps.
"""

from __future__ import annotations

import array
import math
import random
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from trioserve.contracts.guide import TokenMasks, mask_words
from trioserve.contracts.ids import RequestId
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.step import IsAbandoned, ScheduledChunk, StepPlan, StepResult
from trioserve.model.native.sampling import NativeSamplings
from trioserve.model.step_model import NOT_FINITE, NOTHING_ALLOWED, Samples, sampled_rows
from trioserve.model.step_rows import FilledMasks
from trioserve.model.torch_step import sampler
from trioserve.model.torch_step import step_model as torch_step_model
from trioserve.model.torch_step.device_sampler import DeviceSampler
from trioserve.model.torch_step.static_decode import StaticDecode
from trioserve_kernels import reference_fused
from trioserve_kernels.build import build_library, supported_levels
from trioserve_kernels.native import Engine, Library, NoNativeKernels
from trioserve_kernels.structs import StepStruct

Sample = Callable[[torch.Tensor, Sequence[ScheduledChunk], TokenMasks], Samples]
HAS_NATIVE = bool(supported_levels())
VOCAB_SIZE = 1_500
IMPOSSIBLE = -1e6
# Fractions of allowed tokens. The kernels check single tokens up to a fraction of a quarter.
SHARES = (0.0007, 0.01, 0.1, 0.24, 0.26, 0.5, 0.98, 1.0)
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "hot": {"temperature": 6.0},
    "top_k": {"top_k": 5, "temperature": 2.0},
    "top_p": {"top_p": 0.8, "temperature": 2.0},
    "min_p": {"min_p": 0.2},
    "all filters": {"min_p": 0.001, "top_k": 40, "top_p": 0.8, "temperature": 1.7},
    "repetition": {"repetition_penalty": 1.8, "temperature": 0.0},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.7, "temperature": 1.3},
    "bias": {"logit_bias": {7: 9.0, 9: 9.5, 1_499: 9.2}},
    "bias, greedy": {"logit_bias": {7: 90.0}, "temperature": 0.0},
    "min_tokens": {"min_tokens": 8, "max_tokens": 50},
    "logprobs": {"logprobs": 3, "top_k": 50},
    "greedy, logprobs": {"logprobs": 2, "temperature": 0.0},
}


def sample_on_device(
    logits: torch.Tensor, chunks: Sequence[ScheduledChunk], masks: TokenMasks | None = None
) -> Samples:
    """Sample rows of different requests with fused kernels, as the first step of their requests."""
    rows = [
        structs.replace(chunk, request=structs.replace(chunk.request, id=RequestId(f"r{row}")))
        for row, chunk in enumerate(chunks)
    ]
    kept_ids = torch.zeros(len(rows), dtype=torch.int64)
    inputs = torch.tensor([chunk.tokens[chunk.start + chunk.count - 1] for chunk in rows])
    launched = DeviceSampler(reference_fused, logits.shape[1], kept_ids).launch(logits, rows, lambda: inputs, masks)
    samples = launched()
    for row, token in enumerate(samples.token_ids):
        assert token is None or token == kept_ids[row]
    return samples


@pytest.fixture(scope="module", params=("torch", "fused", *supported_levels()))
def sample(request: pytest.FixtureRequest) -> Iterator[Sample]:
    if request.param == "torch":
        yield lambda logits, chunks, masks: sampler.sample(logits, chunks, masks=masks)
        return
    if request.param == "fused":
        yield sample_on_device
        return
    try:
        engine = Engine(Library(build_library(request.param), request.param), 3)
    except NoNativeKernels as error:
        pytest.skip(str(error))

    def sample_natively(logits: torch.Tensor, chunks: Sequence[ScheduledChunk], masks: TokenMasks) -> Samples:
        samplings = NativeSamplings(chunks, logits.shape[1], masks)
        step = StepStruct(sampled_count=len(chunks))
        samplings.put_into(step)
        before = logits.float().contiguous().numpy()
        engine.sample(step, after := before.copy())
        assert np.array_equal(before, after)
        return samplings.samples()

    yield sample_natively
    engine.close()


def row(
    sampling: SamplingParams,
    *,
    output: Sequence[int] = (),
    seed: int = 0,
    stops: Sequence[int] = (),
    mask_row: int | None,
) -> ScheduledChunk:
    prompt = (1, 2, 3)
    request = EngineRequest(
        id="r",
        prompt_token_ids=prompt,
        sampling=sampling,
        output_tokens_max=100,
        stop_token_ids=frozenset(stops),
        seed=seed,
    )
    tokens = (*prompt, *output)
    return ScheduledChunk(request, tokens, len(tokens) - 1, 1, range(100), True, mask_row=mask_row)


def random_logits(count: int, vocab_size: int = VOCAB_SIZE, *, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def random_allowed(count: int, vocab_size: int = VOCAB_SIZE, *, seed: int = 0) -> list[list[int]]:
    """Return `count` random sets of allowed tokens, whose shares of the vocabulary are those of SHARES in turn."""
    rng = random.Random(seed)
    return [
        rng.sample(range(vocab_size), max(1, round(SHARES[index % len(SHARES)] * vocab_size))) for index in range(count)
    ]


def next_to_impossible(logits: torch.Tensor, allowed: Sequence[Collection[int]]) -> torch.Tensor:
    changed = torch.full_like(logits, IMPOSSIBLE)
    for place, tokens in enumerate(allowed):
        changed[place, list(tokens)] = logits[place, list(tokens)]
    return changed


def wanted_tokens(logits: torch.Tensor, chunks: Sequence[ScheduledChunk], allowed: Any) -> list[int | None]:
    """Return the tokens that are sampled without a mask from logits that make all other tokens impossible."""
    plain = [structs.replace(chunk, mask_row=None) for chunk in chunks]
    return sampler.sample(next_to_impossible(logits, allowed), plain).token_ids


@pytest.mark.parametrize("name", SAMPLINGS)
def test_token_mask_acts_like_logits_that_make_forbidden_tokens_impossible(sample: Sample, name: str) -> None:
    count = 3 * len(SHARES)
    logits, allowed = random_logits(count, seed=1), random_allowed(count, seed=2)
    chunks = []
    for index, tokens in enumerate(allowed):
        best = sorted(tokens, key=lambda token: -float(logits[index, token]))
        # Tokens that penalties and min_tokens affect are among the most probable, and only some of them are allowed.
        output, stops = [*best[:3], best[0], 11], best[1:3]
        chunks.append(row(SamplingParams(**SAMPLINGS[name]), output=output, seed=index, stops=stops, mask_row=index))
    samples = sample(logits, chunks, FilledMasks(allowed, VOCAB_SIZE))
    assert samples.errors == {}
    assert all(token in tokens for token, tokens in zip(samples.token_ids, allowed, strict=True))
    assert samples.token_ids == wanted_tokens(logits, chunks, allowed)


@pytest.mark.parametrize("vocab_size", (1, 15, 31, 32, 33, 64, 512, 50_001))
def test_token_masks_work_for_any_vocabulary_size(sample: Sample, vocab_size: int) -> None:
    """The step also has rows without a mask, and masks that no row of the step uses."""
    logits, allowed = random_logits(16, vocab_size, seed=3), random_allowed(16, vocab_size, seed=4)
    samplings = [SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_p=0.9, top_k=40)]
    order = random.Random(5).sample(range(16), 16)
    chunks = [
        row(samplings[index % 3], seed=index, mask_row=None if index % 5 == 4 else order[index]) for index in range(16)
    ]
    tokens = [range(vocab_size) if chunk.mask_row is None else allowed[chunk.mask_row] for chunk in chunks]
    samples = sample(logits, chunks, FilledMasks(allowed, vocab_size))
    assert samples.token_ids == wanted_tokens(logits, chunks, tokens)


def test_lowest_allowed_token_id_is_chosen_among_equal_logits(sample: Sample) -> None:
    logits = torch.zeros(3, VOCAB_SIZE)
    chunks = [row(SamplingParams(temperature=0.0), mask_row=index) for index in range(3)]
    masks = FilledMasks(([900, 70, 1_499], range(5, VOCAB_SIZE), range(VOCAB_SIZE)), VOCAB_SIZE)
    assert sample(logits, chunks, masks).token_ids == [70, 5, 0]


def test_logprobs_ignore_token_masks(sample: Sample) -> None:
    logits = random_logits(2, seed=6)
    chunks = [row(SamplingParams(logprobs=4, temperature=temperature), mask_row=0) for temperature in (0.0, 1.0)]
    samples = sample(logits, chunks, FilledMasks(([3, 800],), VOCAB_SIZE))
    for place, wanted in enumerate(logits.log_softmax(-1)):
        entry = samples.logprobs[place]
        assert entry.token_id in (3, 800)
        assert entry.logprob == pytest.approx(float(wanted[entry.token_id]), abs=1e-5)
        assert [token for token, _ in entry.top] == wanted.topk(4).indices.tolist()


@pytest.mark.parametrize("parameters", ({"temperature": 0.0}, {}, {"logprobs": 1, "min_tokens": 3}))
def test_row_without_allowed_tokens_fails_only_its_own_request(sample: Sample, parameters: dict[str, Any]) -> None:
    logits = random_logits(4, seed=7)
    logits[3, 5] = math.nan
    chunks = [row(SamplingParams(**parameters), seed=index, mask_row=index, stops=(9,)) for index in range(4)]
    if sample.__name__ == "sample_natively":
        logits[3, 5] = 0.0  # Whole steps also check for finite numbers, which test_runner.py tests.
    samples = sample(logits, chunks, FilledMasks(([4, 5], (), range(VOCAB_SIZE), ()), VOCAB_SIZE))
    assert samples.errors.pop(3) in (NOT_FINITE, NOTHING_ALLOWED)
    assert samples.errors == {1: NOTHING_ALLOWED}
    assert set(samples.logprobs) <= {0, 2}
    assert [token is None for token in samples.token_ids] == [False, True, False, True]


@pytest.mark.parametrize("temperature", (0.0, 1.0))
def test_min_tokens_is_ignored_if_only_an_end_token_is_allowed(sample: Sample, temperature: float) -> None:
    """A complete response cannot continue. If another token is allowed, min_tokens applies."""
    sampling = SamplingParams(temperature=temperature, min_tokens=9)
    chunks = [row(sampling, stops=(9, 4, 70_000), output=(8,), mask_row=index) for index in range(2)]
    masks = FilledMasks(((9, 4), (9, 4, 6)), VOCAB_SIZE)
    samples = sample(random_logits(2), chunks, masks)
    assert samples.token_ids[0] in (9, 4)
    assert samples.token_ids[1] == 6


# --- masks that are still being filled --------------------------------------------------------------------------------


class LateMasks:
    """Masks that a thread fills after `begin`."""

    def __init__(self, allowed: Sequence[Collection[int]], vocab_size: int) -> None:
        filled = FilledMasks(allowed, vocab_size)
        self.row_count, self.words_per_row = filled.row_count, filled.words_per_row
        self._from, self._words = filled, np.zeros((filled.row_count, filled.words_per_row), dtype=np.uint32)
        self.address = int(self._words.ctypes.data)
        self._flag = np.zeros(1, dtype=np.int32)
        self.filled_address = int(self._flag.ctypes.data)
        self._is_filled, self._may_fill = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._fill)
        self._thread.start()

    def _fill(self) -> None:
        self._may_fill.wait()
        self._words[:] = self._from.words
        self._flag[0] = 1
        self._is_filled.set()

    def fill(self) -> None:
        self._may_fill.set()

    def wait(self) -> None:
        self._may_fill.set()
        self._is_filled.wait()

    def close(self) -> None:
        self._may_fill.set()
        self._thread.join()


def test_sampling_waits_for_masks(sample: Sample) -> None:
    logits, allowed = random_logits(8, seed=8), random_allowed(8, seed=9)
    chunks = [row(SamplingParams(), seed=index, mask_row=index) for index in range(8)]
    masks = LateMasks(allowed, VOCAB_SIZE)
    later = threading.Timer(0.005, masks.fill)
    later.start()
    assert sample(logits, chunks, masks).token_ids == wanted_tokens(logits, chunks, allowed)
    later.join()
    masks.close()


def test_waiting_for_masks_ends_if_the_step_is_abandoned(
    tiny_checkpoint: Callable[..., Path], step_driver: ModuleType
) -> None:
    """The masks are never filled."""
    runner = native_runner(tiny_checkpoint, step_driver)
    driver = step_driver.StepDriver(runner)
    driver.add("a", [5, 6, 7])
    masks = FilledMasks(([4],), runner.config.vocab_size)
    never = array.array("i", (0,))
    masks.filled_address = never.buffer_info()[0]
    is_abandoned = IsAbandoned(1)
    leaving = threading.Timer(0.005, lambda: is_abandoned.waited_for.__setitem__(0, 0))
    leaving.start()
    plan = StepPlan(0, (structs.replace(driver.chunk("a", 3), mask_row=0),), 3, masks=masks)
    assert runner.execute(plan, is_abandoned) is None
    leaving.join()
    never[0] = 1
    result = runner.execute(plan)
    assert result is not None
    assert result.token_ids == (4,)


# --- whole steps ------------------------------------------------------------------------------------------------------


def native_runner(tiny_checkpoint: Callable[..., Path], step_driver: ModuleType) -> Any:
    if not HAS_NATIVE:
        pytest.skip("no native kernels")
    return step_driver.load_runner(tiny_checkpoint("llama"), cpu_kernels="native", threads=2)


def masked_step(
    runner: Any, chunks: Sequence[ScheduledChunk], allowed: Sequence[Collection[int]], **fields: Any
) -> StepResult:
    """Compute a step in which row i of the masks belongs to the i-th sampled row."""
    masked, next_row = [], 0
    for chunk in chunks:
        masked.append(structs.replace(chunk, mask_row=next_row))
        next_row += 1 + len(chunk.draft)
    masks = FilledMasks(allowed, runner.config.vocab_size)
    token_count = sum(chunk.row_count for chunk in chunks)
    result = runner.execute(StepPlan(0, tuple(masked), token_count, masks=masks, **fields))
    assert result is not None
    return result


def test_rows_after_draft_tokens_have_their_own_masks(
    cpu_kernels: str, tiny_checkpoint: Callable[..., Path], step_driver: ModuleType
) -> None:
    runner = step_driver.load_runner(tiny_checkpoint("llama"), cpu_kernels=cpu_kernels)
    driver = step_driver.StepDriver(runner)
    for name, sampling in (("a", SamplingParams(temperature=0.0)), ("b", SamplingParams(temperature=0.9, top_p=0.95))):
        driver.add(name, [5, 6, 7], sampling, seed=4)
        driver.step({name: 3})
    chunks = [driver.chunk("a", 1, (20, 30)), driver.chunk("b", 1, (21, 31, 41))]
    result = masked_step(runner, chunks, [[20], [30], [77], [21], [31], (), [55]])
    assert result.errors == {}
    assert result.token_ids == (20, 21)
    # A forbidden token after a draft token ends the run of draft tokens. The rest of the run is ignored.
    assert result.draft_token_ids == {"a": (30, 77), "b": (31,)}
    assert masked_step(runner, [driver.chunk("a", 1), driver.chunk("b", 1)], [(), [9]]).errors == {"a": NOTHING_ALLOWED}


def test_chunks_of_draft_tokens_keep_their_mask_rows() -> None:
    chunk = row(SamplingParams(), mask_row=3)
    rows = sampled_rows(
        [structs.replace(chunk, draft=(5, 6)), structs.replace(chunk, mask_row=None, draft=(7,)), chunk]
    )
    assert [each.mask_row for each in rows] == [3, 4, 5, None, None, 3]


def test_masked_steps_of_all_kernels_agree(
    tiny_checkpoint: Callable[..., Path], step_driver: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels are plain torch, fused kernels in steps of fixed and of other shapes, and native kernels. Rows with
    and without masks are computed until each request ends.
    """
    static: list[int] = []
    launch = StaticDecode.launch

    def noted(self: StaticDecode, chunks: Any, awaited: Any) -> Any:
        static.append(len(chunks))
        return launch(self, chunks, awaited)

    monkeypatch.setattr(StaticDecode, "launch", noted)

    def tokens_of(**settings: Any) -> list[tuple[int | None, ...]]:
        runner = step_driver.load_runner(tiny_checkpoint("llama"), **settings)
        driver = step_driver.StepDriver(runner)
        rng = random.Random(1)
        names = [f"r{index}" for index in range(5)]
        for index, name in enumerate(names):
            sampling = (SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_k=9, logprobs=1))[
                index % 3
            ]
            driver.add(name, [5 + index, 6, 7], sampling, seed=index)
        found = []
        for number in range(12):
            here = names[: 2 + number % 4]  # The number of rows changes, and some steps have no masks.
            chunks = [driver.chunk(name, driver.left(name)) for name in here]
            if number % 3 != 2:
                chunks = [
                    structs.replace(chunk, mask_row=place) if place != 1 else chunk
                    for place, chunk in enumerate(chunks)
                ]
            allowed = [rng.sample(range(runner.config.vocab_size), rng.choice((1, 4, 150))) for _ in here]
            masks = FilledMasks(allowed, runner.config.vocab_size)
            result = runner.execute(StepPlan(number, tuple(chunks), len(chunks), masks=masks))
            for chunk, name, token in zip(chunks, here, result.token_ids, strict=True):
                assert chunk.mask_row is None or token in allowed[chunk.mask_row]
                driver.take(name, chunk, token)
            found.append(result.token_ids)
        runner.close()
        return found

    wanted = tokens_of(cpu_kernels="torch")
    if HAS_NATIVE:
        assert tokens_of(cpu_kernels="native", threads=2) == wanted
    assert static == []
    monkeypatch.setattr(torch_step_model, "pick_kernels", lambda *_, **__: reference_fused)
    for enforce_eager in (False, True):
        assert tokens_of(cpu_kernels="torch", enforce_eager=enforce_eager) == wanted
    assert static


def test_row_without_allowed_tokens_in_a_launched_step_fails_only_its_own_request(
    tiny_checkpoint: Callable[..., Path], step_driver: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_step_model, "pick_kernels", lambda *_, **__: reference_fused)
    runner = step_driver.load_runner(tiny_checkpoint("llama"), cpu_kernels="torch")
    driver = step_driver.StepDriver(runner)
    for name in "abc":
        driver.add(name, [5, 6, 7])
    driver.step(dict.fromkeys("abc", 2))
    result = masked_step(runner, [driver.chunk(name, 1) for name in "abc"], [[4], (), [6]])
    assert result.errors == {"b": NOTHING_ALLOWED}
    assert result.token_ids == (4, None, 6)


def test_awaited_token_keeps_its_mask_row(
    cpu_kernels: str, tiny_checkpoint: Callable[..., Path], step_driver: ModuleType
) -> None:
    runner = step_driver.load_runner(tiny_checkpoint("llama"), cpu_kernels=cpu_kernels)
    driver = step_driver.StepDriver(runner)
    driver.add("a", [5, 6, 7])
    first = runner.execute(StepPlan(0, (driver.chunk("a", 3),), 3))
    driver.take("a", driver.chunk("a", 3), None)
    ahead = driver.chunk("a", 1)
    assert ahead.awaits_token
    result = masked_step(runner, [ahead], [[33]], is_ahead=True)
    assert first.token_ids[0] is not None
    assert result.token_ids == (33,)


def test_mask_words_cover_the_vocabulary() -> None:
    assert [mask_words(size) for size in (1, 32, 33, 49_152)] == [1, 1, 2, 1_536]
