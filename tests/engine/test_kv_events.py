"""Tests that a subscriber of cache events learns the content of the cache, even if it reads slowly."""

from __future__ import annotations

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import wait_all_tasks_blocked

from trioserve.contracts.endpoint import BlocksRemoved, BlocksStored, ResidencySnapshot
from trioserve.contracts.errors import EngineFault, Overloaded
from trioserve.contracts.ids import HASH_SCHEME
from trioserve.core.kv_blocks import BlockPool
from trioserve.core.prefix_cache import PrefixCache, PrefixChain
from trioserve.engine import kv_cache
from trioserve.engine.kv_cache import KvEvents, KvReader
from trioserve.testing.fake_engine import open_fake_engine

BLOCK_SIZE = 2


class Cache:
    """A prefix cache, together with the record of its changes."""

    def __init__(self, *, block_count: int = 4, events_max: int = 100) -> None:
        self.pool = BlockPool(block_count)
        self.cache = PrefixCache(self.pool, BLOCK_SIZE)
        self.events = KvEvents(self.cache, model="m", block_size=BLOCK_SIZE, events_max=events_max)

    def compute(self, *tokens: int) -> None:
        """Compute a prompt and release its blocks at once. The blocks stay cached until others need the space."""
        chain = PrefixChain(None)
        hits = self.cache.match(chain, tokens)
        self.pool.share(hits)
        blocks = hits + self.pool.allocate(-(-len(tokens) // BLOCK_SIZE) - len(hits))
        self.cache.publish(chain, tokens, len(tokens), blocks)
        self.pool.release(blocks)

    def resident(self) -> set[bytes]:
        return set(self.cache.resident_hashes())


class Follower:
    """A subscriber that applies events as the documentation describes. `resident` is None until a snapshot is
    complete.
    """

    def __init__(self, reader: KvReader) -> None:
        self.reader = reader
        self.resident: set[bytes] | None = None
        self.snapshot_count = 0
        self._snapshot: set[bytes] = set()
        self._sequence = 0

    def read(self, count: int = 10_000) -> None:
        """Read at most this number of events."""
        for _ in range(count):
            event = self.reader.next_nowait()
            if event is None:
                return
            self.take(event)

    def take(self, event) -> None:
        if isinstance(event, ResidencySnapshot):
            self.resident = None
            assert not self._snapshot & set(event.hashes)
            self._snapshot |= set(event.hashes)
            if event.left == 0:
                self.resident, self._snapshot = self._snapshot, set()
                self._sequence = event.sequence
                self.snapshot_count += 1
            return
        assert self.resident is not None
        assert event.sequence == self._sequence
        assert event.hashes
        self._sequence += len(event.hashes)
        for name in event.hashes:
            assert (name in self.resident) == isinstance(event, BlocksRemoved), "each change is told once"
        if isinstance(event, BlocksStored):
            self.resident |= set(event.hashes)
        else:
            self.resident -= set(event.hashes)


def test_subscriber_gets_a_snapshot_and_then_each_change_in_order():
    cache = Cache()
    cache.compute(1, 1, 2, 2, 0)
    with cache.events.reading() as reader:
        snapshot = reader.next_nowait()
        assert isinstance(snapshot, ResidencySnapshot)
        assert set(snapshot.hashes) == cache.resident()
        assert (snapshot.epoch, snapshot.sequence, snapshot.left) == (cache.events.epoch, 2, 0)
        assert (snapshot.model, snapshot.block_size, snapshot.hash_scheme) == ("m", BLOCK_SIZE, HASH_SCHEME)
        assert reader.next_nowait() is None
        before = cache.resident()
        cache.compute(3, 3, 4, 4, 5, 5, 0)
        removed, stored = reader.next_nowait(), reader.next_nowait()
        assert isinstance(removed, BlocksRemoved)
        assert isinstance(stored, BlocksStored)
        assert (removed.sequence, stored.sequence) == (2, 2 + len(removed.hashes))
        assert before - set(removed.hashes) | set(stored.hashes) == cache.resident()
        assert reader.next_nowait() is None


@given(
    moves=st.lists(
        st.one_of(
            st.lists(st.integers(0, 2), min_size=2, max_size=9).map(tuple),  # The test then computes this prompt.
            st.integers(1, 3),  # The test then reads this number of events.
        ),
        max_size=60,
    ),
    events_max=st.integers(1, 12),
    hashes_max=st.integers(1, 4),
)
def test_slow_subscriber_knows_the_resident_blocks_after_catching_up(moves, events_max, hashes_max):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_cache, "EVENT_HASHES_MAX", hashes_max)
        cache = Cache(block_count=5, events_max=events_max)
        with cache.events.reading() as slow, cache.events.reading() as quick:
            slow_one, quick_one = Follower(slow), Follower(quick)
            for move in moves:
                if isinstance(move, int):
                    slow_one.read(move)
                else:
                    cache.compute(*move)
                quick_one.read()
                assert quick_one.resident == cache.resident()
            slow_one.read()
            assert slow_one.resident == cache.resident()
        assert len(cache.events._ring) <= events_max


def test_subscriber_that_is_too_far_behind_gets_a_new_snapshot():
    cache = Cache(events_max=3)
    with cache.events.reading() as reader:
        follower = Follower(reader)
        follower.read()
        cache.compute(1, 1, 2, 2, 3, 3, 0)
        follower.read()
        assert follower.snapshot_count == 1
        cache.compute(4, 4, 5, 5, 6, 6, 0)
        follower.read()
        assert follower.snapshot_count == 2
        assert follower.resident == cache.resident()


def test_each_engine_has_its_own_epoch():
    assert Cache().events.epoch != Cache().events.epoch


def test_number_of_subscribers_of_kv_events_is_limited(monkeypatch):
    monkeypatch.setattr(kv_cache, "READERS_MAX", 1)
    cache = Cache()
    with cache.events.reading(), pytest.raises(Overloaded, match="1 clients read"), cache.events.reading():
        pass
    with cache.events.reading():
        pass


async def test_waiting_subscriber_of_kv_events_wakes_at_the_next_change_and_at_the_end():
    cache = Cache()
    got = []

    async def read() -> None:
        with cache.events.reading() as reader:
            while (event := await reader.next()) is not None:
                got.append(type(event))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await wait_all_tasks_blocked()
        assert got == [ResidencySnapshot]
        cache.compute(1, 1, 2, 2, 0)
        await wait_all_tasks_blocked()
        assert got == [ResidencySnapshot, BlocksStored]
        cache.events.end()


async def test_subscribers_wake_when_the_engine_breaks_before_clients_get_the_fault():
    were_released = []
    with pytest.raises(EngineFault):
        async with open_fake_engine(kv_events_max=10) as engine, engine.generate("hello"):

            async def tell_clients() -> None:
                were_released.append(engine.kv_events.is_over)

            engine.on_fault = tell_clients
            with engine.kv_events.reading() as reader:
                await reader.next()
                engine.break_next_step()
                assert await reader.next() is None
            await trio.sleep_forever()
    assert were_released == [True]
    assert engine.kv_events._reader_count == 0
