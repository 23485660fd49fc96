"""Tests of resumed responses. Known output is computed like a prompt, but counts as output everywhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.events import FinishReason
from trioserve.contracts.ids import RequestId
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.simulation.reference_engine import ReferenceEngine, ReferenceResponse
from trioserve.testing.automaton_guide import AutomatonGuide
from trioserve.testing.fake_executor import FakeModel

PROMPT = (3, 1, 4, 1, 5)
MODEL = FakeModel(vocab_size=8, stop_token_id=0, stop_period=12)


def response_to(output_tokens_max: int, **more: Any) -> ReferenceResponse:
    sampling = {key: more.pop(key) for key in ("min_tokens", "logprobs", "prompt_logprobs") if key in more}
    request = EngineRequest(
        id=RequestId("a"),
        prompt_token_ids=PROMPT,
        output_tokens_max=output_tokens_max,
        sampling=SamplingParams(temperature=0.0, **sampling),
        **{"stop_token_ids": frozenset(), "seed": 0, **more},
    )
    return ReferenceEngine(MODEL).response(request)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"stop_token_ids": frozenset({0, 2}), "min_tokens": 4},
        {"logprobs": 2, "prompt_logprobs": 1},
        {"seed": 7},
    ],
)
def test_response_resumed_at_any_token_equals_the_uninterrupted_response(
    drive: Callable[..., Any], fields: dict[str, Any]
) -> None:
    whole = response_to(9, **fields)
    for known in range(len(whole.token_ids)):
        driver = drive(model=MODEL)
        driver.add("a", PROMPT, 9, resumed_output=whole.token_ids[:known], **fields)
        driver.run()
        assert tuple(driver.tokens["a"]) == whole.token_ids


def test_known_output_is_computed_in_chunks_and_not_sampled(drive: Callable[..., Any]) -> None:
    driver = drive(model=MODEL, step_tokens_max=4)
    driver.add("a", PROMPT, 9, resumed_output=response_to(9).token_ids[:5])
    chunks = [chunk for plan in iter(driver.step, None) for chunk in plan.chunks]
    assert [(chunk.start, chunk.count, chunk.samples) for chunk in chunks[:4]] == [
        (0, 4, False),
        (4, 4, False),
        (8, 2, True),
        (10, 1, True),
    ]
    driver.compare()


def test_cached_token_count_of_a_resumed_request_counts_prompt_tokens_only(drive: Callable[..., Any]) -> None:
    driver = drive(model=MODEL)
    known = response_to(9).token_ids[:8]
    driver.add("a", PROMPT, 9)
    driver.run()
    driver.add("b", PROMPT, 9, resumed_output=known)
    assert driver.step().chunks[0].start == 12
    driver.run()
    assert driver.finished["b"].cached_token_count == len(PROMPT)
    stats = driver.core.stats()
    assert (stats.prefix_query_tokens_total, stats.prefix_hit_tokens_total) == (5 + 13, 12)


def test_a_resumed_request_can_be_preempted(check: Callable[..., Any], drive: Callable[..., Any]) -> None:
    whole = response_to(12)
    driver = drive(model=MODEL, block_count=6, block_size=4, max_num_seqs=2, context_tokens_max=24)
    driver.add("first", PROMPT, 16)
    driver.add("a", PROMPT, 12, resumed_output=whole.token_ids[:3], cache_salt="own")
    driver.run()
    assert driver.core.stats().preemptions_total > 0
    assert tuple(driver.tokens["a"]) == whole.token_ids


def test_forced_tokens_follow_the_known_output(drive: Callable[..., Any]) -> None:
    automaton = (((1, 1), (2, 1)), ((3, 2),), ((4, 3), (5, 3)), ((6, 4),), ())
    whole = response_to(9, guide=AutomatonGuide(automaton))
    for known in range(len(whole.token_ids)):
        driver = drive(model=MODEL)
        guide = AutomatonGuide(automaton)
        for token_id in whole.token_ids[:known]:
            guide.accept(token_id)
        driver.add("a", PROMPT, 9, resumed_output=whole.token_ids[:known], guide=guide)
        driver.run()
        assert (tuple(driver.tokens["a"]), driver.finished["a"].reason) == (whole.token_ids, FinishReason.STOP)


def test_connector_can_load_the_kv_of_known_output(drive: Callable[..., Any]) -> None:
    driver = drive(model=MODEL, connected=True)
    driver.remote["a"] = 100
    driver.add("a", PROMPT, 9, resumed_output=response_to(9).token_ids[:6])
    assert driver.step() is None
    assert driver.connector.loads[RequestId("a")].token_count == len(PROMPT) + 6 - 1
    driver.report(driver.connector.loaded(RequestId("a")))
    driver.run()


@pytest.mark.parametrize(
    ("known", "message"),
    [((1, 2, 3), "3 tokens of the response are known, and max_tokens is 3"), ((1, -1), "outside 0 to")],
)
def test_a_response_that_cannot_be_resumed_is_refused(
    drive: Callable[..., Any], known: tuple[int, ...], message: str
) -> None:
    driver = drive()
    with pytest.raises(InvalidRequest, match=message) as refused:
        driver.add("a", PROMPT, 3, resumed_output=known)
    assert refused.value.param == "resume.token_ids"
    assert not list(driver.core.live_requests())
