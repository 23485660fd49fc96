"""Tests that the fake model notices errors that a real model would only turn into wrong output."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from trioserve.contracts.events import FinishReason
from trioserve.contracts.ids import RequestId
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.step import ScheduledChunk, StepPlan
from trioserve.simulation.reference_engine import ReferenceEngine
from trioserve.testing.fake_executor import FakeExecutor, FakeModel

BLOCK_SIZE = 2


def request(name: str, prompt: Sequence[int] = (1, 2, 3), **more: object) -> EngineRequest:
    of_sampling = more.keys() & set(SamplingParams.__struct_fields__) - set(EngineRequest.__struct_fields__)
    sampling = SamplingParams(**{"temperature": 0.0, **{key: more.pop(key) for key in of_sampling}})
    defaults = {"output_tokens_max": 4, "stop_token_ids": frozenset(), "seed": 0}
    return EngineRequest(id=RequestId(name), prompt_token_ids=tuple(prompt), sampling=sampling, **{**defaults, **more})


def chunk(of: EngineRequest, start: int, count: int, table: list[int], tokens: list[int] | None = None):
    known = list(of.prompt_token_ids) if tokens is None else tokens
    return ScheduledChunk(of, known, start, count, table, start + count == len(known))


class Stage:
    """An executor, and the steps it has seen."""

    def __init__(self, **model: object) -> None:
        self.executor = FakeExecutor(block_count=6, block_size=BLOCK_SIZE, model=FakeModel(**model))

    def step(self, *chunks: ScheduledChunk, **more: object):
        count = sum(chunk.count for chunk in chunks)
        plan = StepPlan(**{"step_index": self.executor.plans, "chunks": chunks, "token_count": count, **more})
        return self.executor.execute(plan)


def test_fake_token_does_not_depend_on_chunks_and_blocks():
    a = request("a", range(5))
    whole = Stage().step(chunk(a, 0, 5, [0, 1, 2])).token_ids
    stage = Stage()
    assert stage.step(chunk(a, 0, 3, [5, 3])).token_ids == (None,)
    assert stage.step(chunk(a, 3, 2, [5, 3, 4])).token_ids == whole
    assert whole == ReferenceEngine(FakeModel()).response(a).token_ids[:1]


def test_shared_prefix_is_read_and_not_written_again():
    stage = Stage()
    stage.step(chunk(request("a", (1, 2, 3)), 0, 3, [0, 1]))
    b = request("b", (1, 2, 9))
    assert stage.step(chunk(b, 2, 1, [0, 2])).token_ids == Stage().step(chunk(b, 0, 3, [0, 1])).token_ids


@pytest.mark.parametrize(
    "second",
    [
        pytest.param(lambda: chunk(request("b", (1, 9, 3)), 2, 1, [0, 2]), id="other tokens"),
        pytest.param(lambda: chunk(request("b", (1, 2, 3), cache_salt="x"), 2, 1, [0, 2]), id="another salt"),
        pytest.param(lambda: chunk(request("b", (1, 2, 3)), 2, 1, [1, 2]), id="a block that is not full"),
        pytest.param(lambda: chunk(request("b", (1, 2, 3)), 2, 1, [4, 2]), id="a block that was never written"),
        pytest.param(lambda: chunk(request("b", (5, 6, 1, 2, 7)), 4, 1, [3, 0, 2]), id="another place"),
    ],
)
def test_block_shared_between_different_prefixes_is_noticed(second):
    stage = Stage()
    stage.step(chunk(request("a", (1, 2, 3)), 0, 3, [0, 1]))
    stage.step(chunk(request("c", (5, 6)), 0, 2, [3]))
    with pytest.raises(AssertionError):
        stage.step(second())


def test_block_with_two_owners_is_noticed_in_the_same_step():
    stage = Stage()
    with pytest.raises(AssertionError, match="a: position 2"):
        stage.step(chunk(request("a", (1, 2, 3)), 0, 3, [0, 1]), chunk(request("b", (7, 8, 9)), 0, 3, [2, 1]))


def test_block_that_was_freed_too_early_is_noticed_when_it_is_read():
    stage = Stage()
    a = request("a", (1, 2, 3))
    (token_id,) = stage.step(chunk(a, 0, 3, [0, 1])).token_ids
    stage.step(chunk(request("b", (7, 8)), 0, 2, [0]))
    with pytest.raises(AssertionError, match="a: position 0, in block 0"):
        stage.step(chunk(a, 3, 1, [0, 1], [1, 2, 3, token_id]))


def test_output_of_a_failed_chunk_cannot_be_read():
    stage = Stage()
    stage.executor.errors[RequestId("a")] = "broken"
    result = stage.step(chunk(request("a", (1, 2, 3)), 0, 3, [0, 1]))
    assert (result.token_ids, result.errors, stage.executor.errors) == ((None,), {"a": "broken"}, {})
    with pytest.raises(AssertionError):
        stage.step(chunk(request("b", (1, 2, 3)), 2, 1, [0, 2]))


@pytest.mark.parametrize(
    ("chunks", "more"),
    [
        pytest.param([], {}, id="nothing to do"),
        pytest.param([(0, 0, [])], {}, id="an empty chunk"),
        pytest.param([(0, 4, [0, 1])], {}, id="tokens that nobody knows"),
        pytest.param([(0, 3, [0])], {}, id="too few blocks"),
        pytest.param([(0, 3, [0, 1, 2])], {}, id="too many blocks"),
        pytest.param([(0, 3, [0, 0])], {}, id="a block twice"),
        pytest.param([(0, 3, [0, 6])], {}, id="a block that does not exist"),
        pytest.param([(0, 3, [0, 1])], {"token_count": 2}, id="a wrong sum"),
        pytest.param([(0, 3, [0, 1])], {"step_index": 1}, id="a step that was left out"),
        pytest.param([(0, 3, [0, 1])], {"preempted": ("a",)}, id="one who lost its blocks"),
        pytest.param([(0, 3, [0, 1])], {"admitted": ("b",)}, id="one who was admitted for nothing"),
        pytest.param([(0, 2, [0]), (2, 1, [0, 1])], {}, id="a request twice"),
    ],
)
def test_fake_executor_refuses_a_contradictory_plan(chunks, more):
    with pytest.raises(AssertionError):
        Stage().step(*(chunk(request("a"), *fields) for fields in chunks), **more)


def test_seed_changes_fake_output_only_with_a_temperature():
    def response(**more: object) -> tuple[int, ...]:
        return ReferenceEngine(FakeModel()).response(request("a", output_tokens_max=8, **more)).token_ids

    assert response(seed=1) == response(seed=2)
    assert response(seed=1, temperature=1.0) != response(seed=2, temperature=1.0)
    assert response(seed=1, temperature=1.0) == response(seed=1, temperature=1.0, priority=3, cache_salt="x")


def test_fake_output_has_no_end_token_before_min_tokens():
    def response(min_tokens: int):
        engine = ReferenceEngine(FakeModel(vocab_size=16, stop_token_id=5, stop_period=2))
        stops = frozenset({5})
        return engine.response(request("a", output_tokens_max=40, stop_token_ids=stops, min_tokens=min_tokens))

    for min_tokens in (0, 10, 30):
        got = response(min_tokens)
        assert (got.reason, got.stop_token_id, got.token_ids[-1]) == (FinishReason.STOP, 5, 5)
        assert got.token_ids.index(5) == len(got.token_ids) - 1 >= min_tokens


def test_logprob_of_the_chosen_token_equals_its_entry_in_top_logprobs():
    stage = Stage(vocab_size=8)
    a = request("a", (1, 2, 3, 4), logprobs=8, prompt_logprobs=2)
    first = stage.step(chunk(a, 0, 3, [0, 1]))
    second = stage.step(chunk(a, 3, 1, [0, 1]))
    response = ReferenceEngine(stage.executor.model).response(a)
    assert first.prompt_logprobs["a"] + second.prompt_logprobs["a"] == response.prompt_logprobs[1:]
    chosen = second.logprobs["a"]
    assert chosen == response.logprobs[0]
    assert dict(chosen.top)[chosen.token_id] == chosen.logprob
    assert [logprob for _, logprob in chosen.top] == sorted((logprob for _, logprob in chosen.top), reverse=True)
    assert [entry.token_id for entry in response.prompt_logprobs[1:]] == [2, 3, 4]
