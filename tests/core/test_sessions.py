"""Tests of sessions: which cached blocks are evicted first while sessions wait, have ended, or expect a turn."""

from __future__ import annotations

import pytest

from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.page import EvictionClass
from trioserve.contracts.request import RETENTION_IDLE_SECONDS_MAX, RETENTION_WEIGHT_MAX, EngineRequest, Retention
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.step import StepResult
from trioserve.core.engine import EngineCore
from trioserve.core.prefix_cache import PrefixChain
from trioserve.core.settings import CoreSettings
from trioserve.testing.invariants import check_core, check_idle

BLOCK_SIZE = 4


class Served:
    """A core whose model answers every prompt with one token, 99."""

    def __init__(self, block_count: int, **settings) -> None:
        self.core = EngineCore(
            CoreSettings(
                block_count=block_count,
                block_size=BLOCK_SIZE,
                context_tokens_max=block_count * BLOCK_SIZE,
                max_num_seqs=2,
                **settings,
            )
        )
        self.now = 0.0
        self._count = 0

    def add(self, prompt: list[int], session: str | None = None, *, priority: int = 0, output: int = 1) -> str:
        self._count += 1
        request = EngineRequest(
            id=f"r{self._count}",
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(),
            output_tokens_max=output,
            stop_token_ids=frozenset(),
            seed=0,
            priority=priority,
            session=session,
        )
        self.core.add(request)
        return request.id

    def run(self) -> None:
        """Run until no request is left."""
        while (plan := self.core.schedule(self.now)) is not None:
            tokens = tuple(99 if chunk.samples else None for chunk in plan.chunks)
            self.core.update_from_output(plan, StepResult(tokens), self.now)
            check_core(self.core)

    def turn(self, prompt: list[int], session: str | None = None) -> int:
        """Run one request, and return how many of its prompt tokens were cached."""
        hits = self.core.stats().prefix_hit_tokens_total
        self.add(prompt, session)
        self.run()
        return self.core.stats().prefix_hit_tokens_total - hits

    def cached(self, prompt: list[int]) -> int:
        """Return how many blocks of a prompt are cached, without using them."""
        return len(self.core.cache.match(PrefixChain(None), [*prompt, 0]))


def prompt(start: int, blocks: int) -> list[int]:
    return list(range(start, start + blocks * BLOCK_SIZE))


def test_blocks_without_a_session_are_evicted_before_blocks_of_an_idle_session():
    served = Served(8)
    served.turn(prompt(0, 3), "agent")
    served.now = 1.0
    served.turn(prompt(100, 3))
    served.turn(prompt(200, 3))
    assert (served.cached(prompt(0, 3)), served.cached(prompt(100, 3))) == (3, 2)
    assert served.core.stats().blocks_retained == 3


def test_without_retention_blocks_are_evicted_by_recency():
    served = Served(8, session_retention=False)
    served.turn(prompt(0, 3), "agent")
    served.turn(prompt(100, 3))
    served.turn(prompt(200, 3))
    assert (served.cached(prompt(0, 3)), served.cached(prompt(100, 3))) == (2, 3)
    assert served.core.stats().blocks_retained == 0


def test_blocks_of_an_ended_session_are_evicted_first():
    served = Served(8)
    served.turn(prompt(0, 3))
    served.turn(prompt(100, 3), "agent")
    served.core.end_session("agent", served.now)
    served.core.end_session("agent", served.now)
    assert served.core.stats().blocks_retained == 0
    served.turn(prompt(200, 3))
    assert (served.cached(prompt(0, 3)), served.cached(prompt(100, 3))) == (3, 2)
    assert served.core.stats().evictions_total[EvictionClass.ENDED] == 1


def test_prefix_used_by_another_request_stays_cached_after_its_session_ends():
    served = Served(8)
    served.turn(prompt(500, 3))
    served.turn(prompt(0, 3), "agent")
    served.turn([*prompt(0, 2), *prompt(300, 1)])
    served.core.end_session("agent", served.now)
    served.turn(prompt(400, 3))
    assert served.cached([*prompt(0, 2), *prompt(300, 1)]) == 3, "another request used the first two blocks"


def test_preference_ends_after_idle_seconds():
    served = Served(8)
    served.core.open_session("agent", Retention(idle_seconds=10.0, weight=4.0), served.now)
    served.turn(prompt(0, 3), "agent")
    served.now = 9.0
    served.turn(prompt(100, 1))
    assert served.core.stats().blocks_retained == 3
    served.now = 10.0
    served.turn(prompt(200, 1))
    assert served.core.stats().blocks_retained == 0
    served.turn(prompt(300, 3))
    served.turn(prompt(400, 2))
    assert served.cached(prompt(0, 3)) == 1


@pytest.mark.parametrize("seconds", [0.0, 5.0, 1e9])
def test_hint_starts_the_preference_again_from_the_expected_turn(seconds):
    served = Served(8)
    served.core.open_session("agent", Retention(idle_seconds=10.0), served.now)
    served.turn(prompt(0, 3), "agent")
    served.now = 9.0
    served.core.hint_session("agent", seconds, served.now)
    served.core.hint_session("nobody", seconds, served.now)
    last = 9.0 + min(seconds, 10.0) + 10.0
    served.now = last - 0.5
    served.turn(prompt(100, 1))
    assert served.core.stats().blocks_retained == 3
    served.now = last
    served.turn(prompt(100, 1))
    assert served.core.stats().blocks_retained == 0


def test_blocks_of_a_session_idle_for_longer_than_its_bonus_are_evicted_before_recently_used_blocks():
    served = Served(8)
    served.core.open_session("agent", Retention(weight=0.1, idle_seconds=1000.0), served.now)
    served.turn(prompt(0, 3), "agent")
    served.now = 100.0
    served.turn(prompt(100, 3))
    served.turn(prompt(200, 3))
    assert (served.cached(prompt(0, 3)), served.cached(prompt(100, 3))) == (2, 3)
    assert served.core.stats().evictions_total[EvictionClass.RETAINED] == 1


def test_heavier_session_is_evicted_later():
    served = Served(8)
    served.core.open_session("heavy", Retention(weight=2.0), served.now)
    served.turn(prompt(0, 3), "heavy")
    served.now = 1.0
    served.turn(prompt(100, 3), "light")
    served.turn(prompt(200, 3), "last")
    assert (served.cached(prompt(0, 3)), served.cached(prompt(100, 3))) == (3, 2)


def test_block_of_two_sessions_is_retained_until_both_have_ended():
    served = Served(12)
    served.turn([*prompt(0, 2), *prompt(100, 1)], "one")
    served.turn([*prompt(0, 2), *prompt(200, 1)], "other")
    assert served.core.stats().blocks_retained == 4
    served.core.end_session("one", served.now)
    assert served.core.stats().blocks_retained == 3
    served.core.end_session("other", served.now)
    assert served.core.stats().blocks_retained == 0


def test_sessions_of_one_tenant_retain_at_most_their_share():
    served = Served(12, session_share_max=0.5)
    for index in range(3):
        served.core.open_session(f"agent {index}", Retention(tenant="a"), served.now)
        served.turn(prompt(100 * index, 3), f"agent {index}")
        served.now += 1.0
    assert served.core.stats().blocks_retained == 6
    served.core.open_session("other", Retention(tenant="b"), served.now)
    served.turn(prompt(500, 3), "other")
    assert served.core.stats().blocks_retained == 9


def test_session_that_changes_its_tenant_retains_no_more_than_one_share():
    served = Served(12, session_share_max=0.5)
    for blocks, tenant in ((4, "a"), (8, "b")):
        served.core.open_session("agent", Retention(tenant=tenant), served.now)
        served.turn(prompt(0, blocks), "agent")
    assert served.core.stats().blocks_retained == 6


def test_growing_session_retains_each_block_once():
    served = Served(16)
    for blocks in range(1, 5):
        assert served.turn(prompt(0, blocks), "agent") == max(0, blocks - 1) * BLOCK_SIZE
        assert served.core.stats().blocks_retained == blocks
    stats = served.core.stats()
    assert (stats.session_hits_total, stats.session_hit_tokens_total) == (3, (1 + 2 + 3) * BLOCK_SIZE)
    assert (stats.sessions_active, stats.sessions_waiting) == (0, 1)


def test_rewritten_history_replaces_the_old_chain():
    served = Served(16)
    served.turn(prompt(0, 4), "agent")
    served.turn([*prompt(0, 3), *prompt(100, 2)], "agent")
    assert served.core.stats().blocks_retained == 5


def test_session_keeps_the_chains_of_two_agents():
    served = Served(16)
    served.turn(prompt(0, 4), "agent")
    served.turn([*prompt(0, 1), *prompt(100, 3)], "agent")
    assert served.core.stats().blocks_retained == 7


def test_tenant_whose_sessions_never_return_is_evicted_by_recency():
    served = Served(64, session_share_max=1.0)
    for index in range(100):
        served.core.open_session(f"once {index}", Retention(idle_seconds=5.0), served.now)
        served.turn(prompt(10 * index, 1), f"once {index}")
        served.now += 10.0
    served.now += 1.0
    served.turn(prompt(5000, 1), "last")
    for index in range(70):
        served.now += 0.1
        served.turn(prompt(10_000 + 10 * index, 1))
    assert served.cached(prompt(5000, 1)) == 0


def test_spared_tokens_count_hits_that_recency_would_have_missed():
    served = Served(8)
    served.turn(prompt(0, 3), "agent")
    served.turn(prompt(100, 5))
    served.turn(prompt(200, 2))
    assert served.core.stats().blocks_spared == 2
    assert served.turn(prompt(0, 4), "agent") == 3 * BLOCK_SIZE
    assert served.core.stats().spared_tokens_total == 2 * BLOCK_SIZE


def test_engine_forgets_the_session_that_was_idle_longest():
    served = Served(16, sessions_max=2)
    for name in ("a", "b", "a", "c"):
        served.turn(prompt(ord(name) * 100, 1), name)
    assert served.core.sessions.get("b") is None
    assert served.core.stats().sessions_waiting == 2
    assert served.core.stats().blocks_retained == 2


def test_session_that_ends_before_its_request_frees_the_blocks_afterwards():
    served = Served(8)
    served.turn(prompt(0, 3))
    served.add(prompt(100, 3), "agent")
    served.core.end_session("agent", served.now)
    served.run()
    stats = served.core.stats()
    assert (stats.blocks_retained, stats.sessions_active, stats.sessions_waiting) == (0, 0, 0)
    served.turn(prompt(200, 3))
    assert (served.cached(prompt(0, 3)), served.cached(prompt(100, 3))) == (3, 2)


def test_forgotten_prefixes_are_not_retained():
    served = Served(8)
    served.turn(prompt(0, 3), "agent")
    served.core.forget_prefixes()
    assert served.core.stats().blocks_retained == 0
    served.turn(prompt(100, 7))
    check_core(served.core)
    served.core.end_session("agent", served.now)
    assert served.core.stats().blocks_cached == 7


@pytest.mark.parametrize(
    "values",
    [
        {"weight": -0.1},
        {"weight": RETENTION_WEIGHT_MAX + 0.1},
        {"weight": float("nan")},
        {"weight": "much"},
        {"idle_seconds": 0},
        {"idle_seconds": RETENTION_IDLE_SECONDS_MAX + 1},
    ],
)
def test_retention_out_of_range_is_refused(values):
    with pytest.raises(InvalidRequest, match=next(iter(values))):
        Retention(**values)


def returning(block_count: int = 12, **settings) -> Served:
    """Return a core in which the session "agent" waits with four cached blocks, and has returned from two waits."""
    served = Served(block_count, cold_turn_seconds=60.0, **settings)
    for blocks in (2, 3, 4):
        served.turn(prompt(0, blocks), "agent")
    assert served.core.pool.order.expected_count == 4
    return served


def test_cold_turn_waits_while_it_would_evict_blocks_of_a_session_that_returns_soon():
    served = returning()
    served.add(prompt(100, 9), "new")
    served.run()
    stats = served.core.stats()
    assert (stats.waiting_count, stats.turns_deferred_total) == (1, 1)
    assert served.turn(prompt(0, 5), "agent") == 4 * BLOCK_SIZE, "the warm turn runs first, and has its blocks"
    served.core.end_session("agent", served.now)
    served.run()
    assert served.core.stats().waiting_count == 0
    assert served.core.next_deadline() is None


@pytest.mark.parametrize(
    ("blocks", "session"), [(8, "new"), (9, None)], ids=["other blocks suffice", "request without a session"]
)
def test_turn_is_not_deferred_if_other_blocks_suffice_or_if_it_has_no_session(blocks, session):
    served = returning()
    served.turn(prompt(100, blocks), session)
    assert served.core.stats().waiting_count == served.core.stats().turns_deferred_total == 0


def test_warm_turn_evicts_blocks_of_other_sessions_at_once():
    served = returning()
    served.turn(prompt(100, 4), "other")
    served.turn(prompt(100, 9), "other")
    assert served.core.stats().turns_deferred_total == 1, "more than half of the prompt is new"
    served = returning()
    served.turn(prompt(100, 5), "other")
    served.turn(prompt(100, 9), "other")
    assert served.core.stats().turns_deferred_total == 0


def test_turn_that_lost_its_blocks_is_cold():
    served = returning()
    served.turn(prompt(100, 4), "other")
    served.turn(prompt(100, 5), "other")
    served.turn(prompt(200, 8))
    assert served.cached(prompt(100, 5)) + served.cached(prompt(0, 4)) == 4
    lost, start = ("other", 100) if served.cached(prompt(0, 4)) == 4 else ("agent", 0)
    served.add(prompt(start, 9), lost)
    served.run()
    assert served.core.stats().turns_deferred_total == 1


def test_cold_turn_starts_after_cold_turn_seconds_even_if_sessions_return():
    served = returning()
    served.add(prompt(100, 9), "new")
    served.run()
    for _ in range(6):
        served.now += 9.9
        assert served.turn(prompt(0, 4), "agent") == 3 * BLOCK_SIZE
    assert served.core.stats().waiting_count == 1
    assert served.core.next_deadline() == 60.0
    served.now = 60.0
    served.run()
    assert served.core.stats().waiting_count == 0
    assert served.cached(prompt(0, 4)) == 3


def test_cold_turn_starts_when_no_session_is_expected_any_more():
    served = returning()
    served.add(prompt(100, 9), "new")
    served.run()
    assert served.core.next_deadline() == 15.0
    served.now = 15.0
    served.run()
    assert served.core.stats().waiting_count == 0


def test_abort_ends_a_deferral():
    served = returning()
    request_id = served.add(prompt(100, 9), "new")
    served.run()
    blocks = served.core.block_states()
    served.core.abort([request_id], now=served.now)
    assert served.core.next_deadline() is None
    assert served.core.block_states() == blocks
    check_idle(served.core)


def test_turn_of_a_better_priority_does_not_wait():
    served = returning()
    served.add(prompt(100, 9), "new", priority=-1)
    served.run()
    assert served.core.stats().waiting_count == served.core.stats().turns_deferred_total == 0


def test_at_most_max_num_seqs_turns_are_deferred():
    served = returning()
    for index in range(3):
        served.add(prompt(100 * index + 100, 9), f"new {index}")
    served.run()
    assert served.core.stats().turns_deferred_total == served.core.stats().waiting_count == 2
    assert served.cached(prompt(0, 4)) == 3, "the third turn has evicted a block of the expected session"


def test_first_turns_do_not_wait_for_sessions_of_tenants_that_never_return():
    served = Served(12, cold_turn_seconds=60.0)
    for index in range(8):
        served.turn(prompt(100 * index, 9), f"once {index}")
    assert served.core.stats().turns_deferred_total == 0


def test_deferred_turn_does_not_stop_draft_tokens():
    served = returning(16, draft_tokens_max=2)
    served.add(prompt(100, 13), "new")
    served.add([1, 2, 3, 1, 2, 3, 1, 2], output=8)
    drafted = 0
    while (plan := served.core.schedule(served.now)) is not None:
        drafted += sum(len(chunk.draft) for chunk in plan.chunks)
        ids = tuple((chunk.start + chunk.count) % 3 + 1 if chunk.samples else None for chunk in plan.chunks)
        drafts = {chunk.request.id: (9,) * len(chunk.draft) for chunk in plan.chunks if chunk.draft}
        served.core.update_from_output(plan, StepResult(ids, draft_token_ids=drafts), served.now)
    assert served.core.stats().turns_deferred_total == 1
    assert drafted > 0
