"""Tests that the core counts a connector's faults, and that a metric shows the counts."""

from __future__ import annotations

from trioserve.admission.text_threads import TextThreads
from trioserve.contracts.ids import RequestId
from trioserve.contracts.kv_transfer import Released, TransferFault
from trioserve.core.engine import EngineCore
from trioserve.core.settings import CoreSettings
from trioserve.engine.engine import Engine, ModelDescription
from trioserve.engine.settings import EngineSettings
from trioserve.metrics.registry import Metrics
from trioserve.testing.byte_tokenizer import BYTE_VOCAB_SIZE, END_TOKEN_ID, byte_tokenizer
from trioserve.testing.fake_executor import FakeExecutor
from trioserve.testing.scripted_connector import NoConnector
from trioserve.testing.stepped_by_hand import ControlledSteps


def engine_around(core: EngineCore) -> Engine:
    """Create an engine that never runs. The test only reads its counters."""
    return Engine(
        model=ModelDescription(
            served_names=("fake",),
            source="fake",
            context_tokens_max=core.settings.context_tokens_max,
            vocab_size=BYTE_VOCAB_SIZE,
            eos_token_ids=(END_TOKEN_ID,),
            created_at=0,
        ),
        core=core,
        steps=ControlledSteps(FakeExecutor(block_count=8, block_size=4)),
        tokenizer=byte_tokenizer(),
        text_threads=TextThreads(),
        metrics=Metrics("fake"),
        settings=EngineSettings(),
    )


def shown_faults(engine: Engine) -> dict[str, float]:
    start = 'trioserve:transfer_faults_total{engine="0",kind="'
    lines = [line for line in engine.metrics.expose().decode().splitlines() if line.startswith(start)]
    return {line.removeprefix(start).partition('"')[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


async def test_metric_counts_each_connector_fault_once_by_its_kind():
    core = EngineCore(CoreSettings(block_count=8, block_size=4, context_tokens_max=32), connector=NoConnector())
    engine = engine_around(core)
    none = dict.fromkeys((fault.value for fault in TransferFault), 0.0)
    assert shown_faults(engine) == none
    core.on_transfer(Released(RequestId("nobody")), 0.0)
    core.on_transfer(Released(RequestId("nobody else")), 0.0)
    assert shown_faults(engine) == none | {"unknown": 2.0}
    core.on_transfer(Released(RequestId("nobody")), 0.0)
    assert shown_faults(engine) == none | {"unknown": 3.0}


async def test_an_engine_without_a_connector_shows_no_fault():
    engine = engine_around(EngineCore(CoreSettings(block_count=8, block_size=4, context_tokens_max=32)))
    assert set(shown_faults(engine).values()) == {0.0}
