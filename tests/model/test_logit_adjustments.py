"""Bias, hidden end tokens and penalties on the device equal those that each step computes from the whole history."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from trioserve.contracts.ids import RequestId
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.step import ScheduledChunk
from trioserve.model.step_model import sampled_rows
from trioserve.model.torch_step.device_sampler import DeviceSampler
from trioserve.model.torch_step.formats import Sending
from trioserve.model.torch_step.sampler import sample
from trioserve_kernels import reference_fused

VOCAB_SIZE = 60
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {},
    {"repetition_penalty": 1.7},
    {"presence_penalty": 0.8, "frequency_penalty": -0.6},
    {"repetition_penalty": 0.7, "frequency_penalty": 1.1, "logprobs": 2},
    {"logit_bias": {3: 2.5, 7: -90.0}},
    {"min_tokens": 6},
    {"min_tokens": 9, "logit_bias": {5: 3.0}, "presence_penalty": 1.5, "logprobs": 0},
)


def request_of(number: int, prompt: list[int]) -> EngineRequest:
    changes = SAMPLINGS[number % len(SAMPLINGS)]
    return EngineRequest(
        id=RequestId(f"r{number}"),
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(temperature=number % 2, **changes),
        output_tokens_max=100,
        stop_token_ids=frozenset((*range(0, VOCAB_SIZE, 4), 10**6)),
        seed=number,
    )


def decode(request: EngineRequest, tokens: list[int], draft: tuple[int, ...] = ()) -> ScheduledChunk:
    return ScheduledChunk(request, tokens, len(tokens) - 1, 1, range(100), True, draft)


class Device:
    """A DeviceSampler, and random logits that both samplers get."""

    def __init__(self, seed: int) -> None:
        self._sampler = DeviceSampler(reference_fused, VOCAB_SIZE, torch.zeros(64, dtype=torch.int64))
        self._generator = torch.Generator().manual_seed(seed)

    def step(self, chunks: list[ScheduledChunk], *, hidden: bool = False) -> list[int]:
        """Sample on the device, compare with `sample`, and return the tokens. If `hidden` is True, the host does not
        know the newest token of each row.
        """
        rows = sampled_rows(chunks)
        logits = torch.randn(len(rows), VOCAB_SIZE, generator=self._generator) * 3
        inputs = torch.tensor([row.tokens[row.start + row.count - 1] for row in rows])
        wanted = sample(logits, rows)
        seen = rows
        if hidden:
            seen = [
                ScheduledChunk(row.request, row.tokens[:-1], row.start, 1, row.block_table, True, awaits_token=True)
                for row in rows
            ]
        got = self._sampler.launch(logits, seen, lambda: inputs)()
        assert got.token_ids == wanted.token_ids
        assert not got.errors
        assert got.logprobs.keys() == wanted.logprobs.keys()
        for row, entry in got.logprobs.items():
            assert entry == wanted.logprobs[row]
        return [token for token in got.token_ids if token is not None]


@pytest.mark.parametrize("hidden", (False, True), ids=("known", "awaited"))
@pytest.mark.parametrize("seed", range(3))
def test_requests_enter_leave_and_resume(seed: int, hidden: bool) -> None:
    """Requests come and go, change their rows, and miss steps. Tokens repeat often."""
    rng, device = random.Random(seed), Device(seed)
    requests: dict[int, EngineRequest] = {}
    tokens: dict[int, list[int]] = {}
    for step in range(40):
        if step % 3 == 0:
            number = len(requests)
            tokens[number] = [rng.randrange(12) for _ in range(rng.randint(1, 20))]
            requests[number] = request_of(number, tokens[number])
        here = rng.sample(sorted(requests), rng.randint(1, min(len(requests), 9)))
        for number, token in zip(
            here, device.step([decode(requests[each], tokens[each]) for each in here], hidden=hidden), strict=True
        ):
            tokens[number].append(token)


def test_rows_after_draft_tokens_count_the_drafts_before_them() -> None:
    rng, device = random.Random(5), Device(5)
    requests = [request_of(number, [1, 2, 3]) for number in range(7)]
    tokens = [[1, 2, 3] for _ in requests]
    for _ in range(12):
        drafts = [tuple(rng.randrange(9) for _ in range(rng.randrange(4))) for _ in requests]
        device.step([decode(request, tokens[at], drafts[at]) for at, request in enumerate(requests)])
        for known, draft in zip(tokens, drafts, strict=True):
            known += draft[: rng.randint(0, len(draft))]  # accepted
            known.append(rng.randrange(9))


def test_new_request_with_a_used_id_starts_without_history() -> None:
    device = Device(2)
    for prompt in ([4] * 9, [5, 6, 7, 8]):
        device.step([decode(request_of(6, prompt), prompt)])
        device.step([decode(request_of(3, prompt), prompt)])


def test_step_that_is_repeated_counts_its_tokens_once() -> None:
    device = Device(3)
    request = request_of(2, [4, 4, 4])
    for tokens in ([4, 4, 4, 4], [4, 4, 4, 4], [4, 4, 4, 4, 5]):
        device.step([decode(request, tokens)])


def test_arrays_of_a_decode_do_not_grow_with_its_context(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    add = Sending.add

    def noted(self: Sending, values: Any) -> Tensor:
        sent.append(values.nbytes)
        return add(self, values)

    monkeypatch.setattr(Sending, "add", noted)
    byte_counts = []
    for prompt_tokens in (10, 5_000):
        device = Device(1)
        request = request_of(6, [1] * prompt_tokens)
        tokens = list(request.prompt_token_ids)
        for _ in range(3):
            del sent[:]
            tokens += device.step([decode(request, tokens)])
            byte_counts.append(sum(sent))
    assert byte_counts[1:3] == byte_counts[4:6]
    assert byte_counts[1] < 100 < 40_000 < byte_counts[3]
