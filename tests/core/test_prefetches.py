"""Tests of prefetches: when the evicted blocks of a waiting session are loaded, and who gets the blocks."""

from __future__ import annotations

import pytest

from trioserve.contracts.ids import RequestId
from trioserve.contracts.kv_transfer import Loaded
from trioserve.contracts.page import PrefetchResult
from trioserve.contracts.request import EngineRequest, Retention
from trioserve.contracts.sampling import SamplingParams
from trioserve.core.engine import EngineCore
from trioserve.core.prefix_cache import PrefixChain
from trioserve.core.settings import CoreSettings
from trioserve.testing.fake_executor import FakeExecutor, FakeModel
from trioserve.testing.invariants import check_core, check_idle
from trioserve.testing.scripted_connector import FakeConnector

BLOCK_SIZE = 4
BLOCK_COUNT = 16


class Served:
    """A core with a connector that has the KV of every prefetch."""

    def __init__(self) -> None:
        model = FakeModel(vocab_size=1000, stop_token_id=0, stop_period=10**9)
        self.executor = FakeExecutor(block_count=BLOCK_COUNT, block_size=BLOCK_SIZE, model=model)
        self.connector = FakeConnector(self.executor, matched_count=self._matched_count)
        self.core = EngineCore(
            CoreSettings(
                block_count=BLOCK_COUNT,
                block_size=BLOCK_SIZE,
                context_tokens_max=BLOCK_COUNT * BLOCK_SIZE,
                max_num_seqs=2,
                step_tokens_max=64,
                session_prefetch=True,
            ),
            connector=self.connector,
        )
        self.now = 0.0
        self._count = 0

    def _matched_count(self, request: EngineRequest, computed_count: int) -> int:
        return len(request.prompt_token_ids) - computed_count if request.id.startswith("prefetch-") else 0

    def add(self, prompt: list[int], session: str | None = None, *, output: int = 1) -> None:
        self._count += 1
        self.core.add(
            EngineRequest(
                id=RequestId(f"r{self._count}"),
                prompt_token_ids=tuple(prompt),
                sampling=SamplingParams(),
                output_tokens_max=output,
                stop_token_ids=frozenset(),
                seed=0,
                session=session,
            )
        )

    def step(self) -> list[str]:
        """Run one step, and return the ids of its requests."""
        plan = self.core.schedule(self.now)
        if plan is None:
            return []
        result = self.executor.execute(plan, self.core.flights.abandonment(plan))
        self.core.update_from_output(plan, result, self.now)
        check_core(self.core)
        return [chunk.request.id for chunk in plan.chunks]

    def turn(self, prompt: list[int], session: str | None = None) -> int:
        """Run one request to its end, and return how many of its prompt tokens were cached."""
        hits = self.core.stats().prefix_hit_tokens_total
        self.add(prompt, session)
        while self.step():
            pass
        return self.core.stats().prefix_hit_tokens_total - hits

    def hint(self, session: str, seconds: float = 0.0) -> None:
        self.core.hint_session(session, seconds, self.now)
        check_core(self.core)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.core.expire(self.now)
        check_core(self.core)

    def arrive(self, token_count: int | None = None) -> None:
        """Let the only pending load arrive."""
        (name,) = self.connector.loads
        self.core.on_transfer(self.connector.loaded(name, token_count), self.now)
        check_core(self.core)

    @property
    def results(self) -> dict[PrefetchResult, int]:
        return {result: count for result, count in self.core.stats().session_prefetches_total.items() if count}


def prompt(start: int, blocks: int) -> list[int]:
    return list(range(start, start + blocks * BLOCK_SIZE))


@pytest.fixture
def served() -> Served:
    """Return a core in which a session has run a turn of four blocks, which are no longer in the prefix cache."""
    served = Served()
    served.turn([*prompt(1, 4), 900], "agent")
    served.core.forget_prefixes()
    return served


def test_the_next_turn_finds_the_prefetched_blocks(served):
    served.hint("agent")
    served.arrive()
    assert served.turn([*prompt(1, 4), 900, 901], "agent") == 16
    assert served.results == {PrefetchResult.LOADED: 1}
    assert served.core.stats().session_prefetched_tokens_total == 16
    check_idle(served.core)


@pytest.mark.parametrize(("seconds", "waits"), [(1.0, 0.0), (2.0, 0.0), (10.0, 8.0)])
def test_a_prefetch_starts_two_seconds_before_the_expected_turn(served, seconds, waits):
    served.hint("agent", seconds)
    assert bool(served.connector.loads) == (waits == 0)
    if waits:
        assert served.core.next_deadline() == waits
        served.wait(waits)
        assert len(served.connector.loads) == 1


def test_a_later_hint_replaces_the_time_of_an_earlier_one(served):
    served.hint("agent", 10.0)
    served.hint("agent", 100.0)
    assert served.core.next_deadline() == 98.0
    served.wait(50.0)
    assert not served.connector.loads


def test_a_turn_waits_for_the_prefetch_of_its_prefix(served):
    served.hint("agent")
    served.add([*prompt(1, 4), 900, 901], "agent")
    assert served.step() == []
    served.arrive()
    assert served.step() == ["r2"]
    assert served.core.stats().prefix_hit_tokens_total == 16


def test_a_turn_with_another_prefix_does_not_wait(served):
    served.hint("agent")
    served.add(prompt(500, 2), "agent")
    assert served.step() == ["r2"]


def test_a_turn_that_waits_for_a_failed_prefetch_computes_its_prompt(served):
    served.hint("agent")
    served.add([*prompt(1, 4), 900, 901], "agent")
    served.arrive(0)
    assert served.step() == ["r2"]
    assert served.results == {PrefetchResult.FAILED: 1}


def test_a_turn_before_the_start_drops_the_prefetch(served):
    served.hint("agent", 10.0)
    served.turn([*prompt(1, 4), 900], "agent")
    assert served.results == {PrefetchResult.LATE: 1}
    assert served.core.next_deadline() is None


def test_the_end_of_the_session_cancels_its_prefetch(served):
    served.hint("agent")
    served.core.end_session("agent", served.now)
    check_core(served.core)
    assert served.core.stats().blocks_held == 4  # The connector may still write to them.
    served.arrive()
    assert served.core.stats().blocks_free == BLOCK_COUNT
    assert served.results == {PrefetchResult.CANCELLED: 1}
    check_idle(served.core)


def test_an_overdue_prefetch_ends(served):
    served.hint("agent")
    served.wait(10.0)
    assert served.results == {PrefetchResult.FAILED: 1}
    served.core.on_transfer(Loaded(RequestId("prefetch-2"), 16), served.now)
    assert served.core.stats().session_prefetched_tokens_total == 0


def test_no_prefetch_of_blocks_that_are_cached():
    served = Served()
    served.turn([*prompt(1, 4), 900], "agent")
    served.hint("agent")
    assert not served.connector.loads
    assert served.results == {PrefetchResult.NOT_NEEDED: 1}


def test_no_prefetch_while_a_request_waits(served):
    served.add(prompt(500, 2))
    served.hint("agent")
    assert not served.connector.loads
    while served.step():
        pass
    served.wait(0.25)
    assert len(served.connector.loads) == 1


def test_a_request_that_lacks_blocks_cancels_the_prefetch(served):
    served.turn([*prompt(1, 4), 900], "agent")  # The cache has its prefix, and another session has the lost blocks.
    served.core.forget_prefixes()
    served.hint("agent")
    served.add(prompt(500, 13))
    assert served.step() == []  # The connector may still write to four blocks.
    assert served.results == {PrefetchResult.CANCELLED: 1}
    served.arrive()
    assert served.step() == ["r3"]


def test_prefetches_fill_at_most_a_quarter_of_the_pool():
    served = Served()
    served.turn([*prompt(1, 6), 900], "agent")
    served.turn([*prompt(101, 3), 900], "other")
    served.core.forget_prefixes()
    served.hint("agent")
    served.hint("other")
    (load,) = served.connector.loads.values()
    assert load.token_count == 4 * BLOCK_SIZE
    served.arrive()
    served.wait(0.25)
    (load,) = served.connector.loads.values()
    assert load.token_count == 3 * BLOCK_SIZE


def test_a_prefetch_evicts_no_block_that_a_session_retains(served):
    served.core.open_session("weak", Retention(weight=0.0), served.now)
    served.turn([*prompt(101, 9), 900], "weak")
    served.now = 20.0
    served.turn([*prompt(201, 2), 900])
    served.turn([*prompt(301, 2), 900])
    assert served.core.pool.free_count + served.core.pool.cached_count == BLOCK_COUNT
    served.hint("agent")
    served.arrive()
    chain = PrefixChain(None)
    assert len(served.core.cache.match(chain, [*prompt(101, 9), 0])) == 9
