"""Tests that every step with NoConnector is the same as without a connector."""

from __future__ import annotations

import inspect

import pytest

from trioserve.contracts.events import FinishReason
from trioserve.contracts.ids import RequestId
from trioserve.contracts.kv_transfer import HoldKind, KVConnector
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.core.engine import EngineCore
from trioserve.core.settings import CoreSettings
from trioserve.testing.fake_executor import FakeExecutor
from trioserve.testing.invariants import check_core, check_idle
from trioserve.testing.scripted_connector import FakeConnector, NoConnector

CALLS = [name for name in vars(KVConnector) if not name.startswith("_")]


def request(name: str, prompt_count: int = 9) -> EngineRequest:
    return EngineRequest(
        id=RequestId(name),
        prompt_token_ids=tuple(range(prompt_count)),
        sampling=SamplingParams(temperature=0.0),
        output_tokens_max=3,
        stop_token_ids=frozenset(),
        seed=0,
    )


def history(connector: KVConnector | None) -> tuple[list[object], EngineCore]:
    """Return plans and events of four requests in a small pool, one of which is aborted."""
    core = EngineCore(
        CoreSettings(block_count=8, block_size=2, context_tokens_max=16, max_num_seqs=2, step_tokens_max=8),
        connector=connector,
    )
    executor = FakeExecutor(block_count=8, block_size=2)
    seen: list[object] = []
    for name in "abcd":
        core.add(request(name))
    for step in range(100):
        plan = core.schedule(float(step))
        if plan is None:
            break
        seen.append([(chunk.request.id, chunk.start, chunk.count, list(chunk.block_table)) for chunk in plan.chunks])
        result = executor.execute(plan)
        assert result is not None
        seen.append(core.update_from_output(plan, result, float(step)))
        if step == 1:
            seen.append(core.abort([RequestId("a")], now=1.0))
        check_core(core)
    check_idle(core)
    return seen, core


def test_steps_with_the_connector_none_are_the_same_as_without_a_connector():
    seen, core = history(NoConnector())
    assert seen == history(None)[0]
    stats = core.stats()
    assert set(stats.transfer_faults_total.values()) == {0}
    assert stats.blocks_held == 0
    assert core.next_deadline() is None


def test_no_tokens_match_and_no_blocks_are_held():
    connector = NoConnector()
    assert connector.num_matched_tokens(request("a"), 0) == 0
    assert not connector.request_finished(request("a"), [0, 1], [1, 2, 3], FinishReason.STOP)


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("start_load", (request("a"), [0], 0, 1)),
        ("load_abandoned", ("a",)),
        ("transfer_params", ("a",)),
        ("request_aborted_after_finish", ("a",)),
        ("hold_expired", ("a", HoldKind.SEND)),
    ],
)
def test_calls_that_the_core_must_not_make_raise_an_error(call, arguments):
    with pytest.raises(AssertionError, match=r"^a: |^a: no "):
        getattr(NoConnector(), call)(*arguments)


@pytest.mark.parametrize("connector", [NoConnector, FakeConnector])
def test_connector_has_every_method_of_the_contract(connector):
    assert len(CALLS) == 8
    for call in CALLS:
        assert inspect.signature(getattr(connector, call)) == inspect.signature(getattr(KVConnector, call)), call
