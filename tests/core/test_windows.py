"""Tests of sliding windows. Blocks that no window reaches are freed while the request runs, exactly once and not too
early.

The prefix cache also finds prompts whose first blocks were evicted.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trioserve.contracts.events import FinishReason, TokensReady
from trioserve.contracts.ids import NO_BLOCK, BlockHash, RequestId, hash_block
from trioserve.contracts.request import EngineRequest, KVTransferParams
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.step import StepPlan
from trioserve.core.engine import EngineCore
from trioserve.core.kv_blocks import BlockPool
from trioserve.core.prefix_cache import PrefixCache, PrefixChain
from trioserve.core.settings import CoreSettings
from trioserve.testing.fake_executor import FakeExecutor
from trioserve.testing.invariants import check_core, check_idle
from trioserve.testing.scripted_connector import FakeConnector

WINDOW, BLOCK_SIZE = 10, 4


class Engine:
    def __init__(self, block_count: int = 8, *, has_connector: bool = False, **changes: object) -> None:
        self.executor = FakeExecutor(block_count=block_count, block_size=BLOCK_SIZE, window_tokens=WINDOW)
        self.connector = FakeConnector(self.executor, holds=lambda request, reason: request.kv_transfer is not None)
        limits = {
            "block_count": block_count,
            "block_size": BLOCK_SIZE,
            "context_tokens_max": 400,
            "max_num_seqs": 4,
            "step_tokens_max": 8,
            "window_tokens": WINDOW,
            **changes,
        }
        self.core = EngineCore(CoreSettings(**limits), connector=self.connector if has_connector else None)
        self.tokens: dict[str, list[int]] = {}

    def add(self, name: str, prompt: list[int], count: int = 1, *, is_held: bool = False) -> None:
        self.tokens[name] = []
        self.core.add(
            EngineRequest(
                id=RequestId(name),
                prompt_token_ids=tuple(prompt),
                sampling=SamplingParams(temperature=0.0),
                output_tokens_max=count,
                stop_token_ids=frozenset(),
                seed=0,
                kv_transfer=KVTransferParams(do_remote_decode=True) if is_held else None,
            )
        )

    def compute(self, plan: StepPlan) -> None:
        result = self.executor.execute(plan, self.core.flights.abandonment(plan))
        if result is None:
            self.core.drop_plan(plan, 0.0)
        else:
            for event in self.core.update_from_output(plan, result, 0.0):
                if isinstance(event, TokensReady):
                    self.tokens[event.request_id] += event.token_ids
        check_core(self.core)

    def run(self) -> None:
        while (plan := self.core.schedule(0.0)) is not None:
            self.compute(plan)

    def used(self) -> int:
        return self.core.stats().blocks_used


def test_a_long_request_owns_blocks_of_its_window_and_one_step():
    # The maximum is 24 tokens in blocks: 10 of the window and 8 of a step, which can start anywhere in a block.
    engine = Engine(block_count=6)
    engine.add("a", list(range(150)), count=100)
    counts = []
    while (plan := engine.core.schedule(0.0)) is not None:
        counts.append(engine.used())
        engine.compute(plan)
    assert max(counts) <= engine.core.settings.blocks_held_max(250) == 6
    assert max(counts[-90:]) == 4, "a decode: a window of 10 tokens and the token before it use at most 4 blocks of 4"
    assert len(engine.tokens["a"]) == 100
    assert engine.core.stats().blocks_given_back_total == (249 - WINDOW) // BLOCK_SIZE
    check_idle(engine.core)


def test_a_block_is_freed_when_the_window_leaves_it():
    engine = Engine(enable_prefix_caching=False)
    engine.add("a", list(range(8)), count=20)
    table_of = next(iter(engine.core.live_requests()))
    gone = {}
    while (plan := engine.core.schedule(0.0)) is not None:
        engine.compute(plan)
        gone[table_of.computed_count] = table_of.absent_block_count
    # The last of 14 computed tokens attends to the positions 4 to 13.
    assert (gone[13], gone[14], gone[17], gone[18], gone[22]) == (0, 1, 1, 2, 3)


def test_blocks_that_a_second_step_in_flight_reads_are_kept():
    engine = Engine(overlap_steps=True, enable_prefix_caching=False)
    engine.add("a", list(range(12)), count=20)
    plan = engine.core.schedule(0.0)
    while plan is not None:
        result = engine.executor.execute(plan)
        ahead = engine.core.schedule_ahead(0.0)
        table = [] if ahead is None else list(ahead.chunks[0].block_table)
        engine.core.update_from_output(plan, result, 0.0)
        check_core(engine.core)
        if ahead is not None:
            chunk = ahead.chunks[0]
            assert list(chunk.block_table) == table, "the block table of a step in flight was changed"
            seen = table[max(0, chunk.start - WINDOW + 1) // BLOCK_SIZE :]
            assert all(engine.core.pool.user_count(block) == 1 for block in seen)
        plan = ahead
    assert engine.core.stats().blocks_given_back_total > 0


def test_next_chat_turn_hits_the_cache_even_if_its_first_blocks_were_evicted():
    engine = Engine(block_count=6)
    prompt = list(range(100))
    engine.add("a", prompt, count=10)
    engine.run()
    engine.add("b", [*prompt, *engine.tokens["a"], 7, 8])
    plan = engine.core.schedule(0.0)
    assert plan is not None
    (chunk,) = plan.chunks
    assert chunk.start == 108
    assert list(chunk.block_table[: (108 - WINDOW + 1) // BLOCK_SIZE]) == [NO_BLOCK] * 24
    assert NO_BLOCK not in chunk.block_table[24:]
    engine.compute(plan)
    engine.run()
    check_idle(engine.core)


def test_hold_covers_only_the_blocks_in_the_last_window():
    engine = Engine(block_count=12, has_connector=True)
    engine.add("a", list(range(50)), is_held=True)
    engine.run()
    (hold,) = engine.core.transfers.holds
    table = engine.connector.sends["a"].block_table
    assert table.count(NO_BLOCK) == (49 - WINDOW + 1) // BLOCK_SIZE
    assert list(hold.blocks) == [block for block in table if block != NO_BLOCK]
    assert engine.core.stats().blocks_held == len(hold.blocks) == 3
    engine.core.on_transfer(engine.connector.released("a"), 0.0)
    engine.connector.check()
    check_idle(engine.core)


def test_a_load_allocates_only_blocks_that_the_window_reaches():
    engine = Engine(block_count=8, has_connector=True)
    engine.connector.matched_count = lambda request, computed_count: 90 - computed_count
    engine.add("a", list(range(100)), count=4)
    assert engine.core.schedule(0.0) is None
    assert engine.used() == 25 - (90 - WINDOW + 1) // BLOCK_SIZE == 5
    engine.core.on_transfer(engine.connector.loaded("a"), 0.0)
    engine.run()
    assert len(engine.tokens["a"]) == 4
    assert engine.core.stats().loaded_tokens_total == 90
    check_idle(engine.core)


def test_partial_kv_load_is_rejected_if_the_window_reaches_further_back():
    engine = Engine(block_count=8, has_connector=True)
    engine.connector.matched_count = lambda request, computed_count: 90 - computed_count
    engine.add("a", list(range(100)), count=4)
    assert engine.core.schedule(0.0) is None
    engine.core.on_transfer(engine.connector.loaded("a", 60), 0.0)
    check_core(engine.core)
    engine.run()
    assert len(engine.tokens["a"]) == 4, "the request computes its whole prompt itself"
    assert engine.core.stats().loaded_tokens_total == 0
    check_idle(engine.core)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("caching", [False, True])
def test_aborts_in_every_phase_leave_no_block_in_use(overlap: bool, caching: bool):
    """The phases are: waiting, prompt chunk in flight, between two steps, and decode with one or two steps in
    flight.
    """
    rng = random.Random(2 * overlap + caching)
    engine = Engine(block_count=14, overlap_steps=overlap, enable_prefix_caching=caching)
    core, plans, phases = engine.core, [], set()
    for number in range(3_000):
        if len(list(core.live_requests())) < 6 and rng.random() < 0.5:
            engine.add(f"r{number}", [rng.randrange(3) for _ in range(rng.randint(1, 90))], rng.randint(1, 60))
        lives = list(core.live_requests())
        if lives and rng.random() < 0.3:
            live = rng.choice(lives)
            phases.add((live.phase, live.steps_in_flight, live.absent_block_count > 0))
            core.abort([live.request.id], FinishReason.ABORT, now=0.0)
        if not plans:
            plan = core.schedule(0.0)
            plans += [] if plan is None else [plan]
        elif len(plans) == 1 and overlap and rng.random() < 0.5:
            plan = core.schedule_ahead(0.0)
            plans += [] if plan is None else [plan]
        elif rng.random() < 0.7:
            engine.compute(plans.pop(0))
        check_core(core)
    core.abort([live.request.id for live in core.live_requests()], now=0.0)
    while plans:
        engine.compute(plans.pop(0))
    check_idle(core)
    assert core.stats().blocks_given_back_total > 1_000
    assert len(phases) >= (10 if overlap else 7), phases


# --- evicted blocks that the prefix cache remembers ---


def always_the_same(parent: BlockHash, token_ids: tuple[int, ...]) -> BlockHash:
    return BlockHash(b"same")


def own_tokens_only(parent: BlockHash, token_ids: tuple[int, ...]) -> BlockHash:
    return BlockHash(bytes(token_ids))


class Windowed:
    """A prefix cache with blocks of two tokens and a sliding window. The content of every block is known."""

    def __init__(self, block_count: int, window: int, hash_function: Callable[..., BlockHash], names_max: int = 100):
        self.first_block_read = lambda position: max(0, position - window + 1) // 2
        self.pool = BlockPool(block_count)
        self.cache = PrefixCache(
            self.pool,
            2,
            hash_block=hash_function,
            first_block_read=self.first_block_read,
            names_max=names_max,
        )
        self.content: dict[int, tuple[int, ...]] = {}

    def match(self, tokens: tuple[int, ...]) -> tuple[PrefixChain, list[int]]:
        chain = PrefixChain(None)
        blocks = self.cache.match(chain, tokens)
        first = self.first_block_read(2 * len(blocks))
        assert blocks[:first] == [NO_BLOCK] * first
        for index, block in enumerate(blocks[first:], start=first):
            assert self.content[block] == tokens[: 2 * index + 2], "the block holds other tokens"
        return chain, blocks

    def compute(self, tokens: tuple[int, ...]) -> int:
        """Compute tokens block by block. Free the blocks that the window has passed, and finally all blocks. Return how
        many blocks were cache hits.
        """
        chain, blocks = self.match(tokens)
        hit_count = len(blocks)
        gone = self.first_block_read(2 * hit_count)
        self.pool.share(blocks[gone:])
        for index in range(hit_count, len(tokens) // 2):
            blocks += self.pool.allocate(1)
            self.content[blocks[-1]] = tokens[: 2 * index + 2]
            self.cache.publish(chain, tokens, 2 * index + 2, blocks)
            first = self.first_block_read(2 * index + 1)
            self.pool.release(blocks[gone:first])
            blocks[gone:first] = [NO_BLOCK] * (first - gone)
            gone = max(gone, first)
            self.cache.check()
        self.pool.release(blocks[gone:])
        self.cache.check()
        self.pool.check()
        return hit_count


def test_prefix_is_found_if_only_its_last_blocks_are_cached():
    cache = Windowed(4, 5, hash_block)
    prompt = tuple(range(40))
    assert cache.compute(prompt) == 0
    assert cache.compute((*prompt, 1, 2, 3)) == 20
    assert len(cache.match((*range(20), 9, 9, 9))[1]) == 0, "blocks of the middle are evicted"


def test_an_evicted_block_that_is_computed_again_keeps_its_identity():
    cache = Windowed(8, 5, hash_block)
    prompt = tuple(range(40))
    cache.compute(prompt)
    # This call evicts the least recently used blocks, and publishes the first blocks again.
    cache.compute(tuple(range(6)))
    assert len(cache.match((*prompt, 1))[1]) == 20


def test_number_of_evicted_blocks_whose_tokens_are_kept_is_limited():
    cache = Windowed(4, 5, hash_block, names_max=10)
    cache.compute(tuple(range(60)))
    assert len(cache.cache._evicted) == 10
    assert len(cache.match((*range(60), 1))[1]) == 0, "the oldest names are dropped"


def test_tokens_of_evicted_blocks_are_dropped_if_no_later_block_is_cached():
    cache = Windowed(4, 5, hash_block)
    cache.compute(tuple(range(40)))
    cache.compute(tuple(range(100, 140)))
    assert len(cache.cache._evicted) == 40 // 2 - 4


@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=30).map(tuple), max_size=12),
    window=st.integers(2, 9),
    hash_function=st.sampled_from([hash_block, always_the_same, own_tokens_only]),
    names_max=st.sampled_from([0, 1, 5, 100]),
)
@settings(max_examples=150, deadline=None)
def test_cache_with_a_window_finds_only_equal_prefixes_even_with_weak_hashes(prompts, window, hash_function, names_max):
    cache = Windowed(7, window, hash_function, names_max)
    for tokens in prompts:
        cache.compute(tokens)
