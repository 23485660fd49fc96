"""Tests the policy of the host store step by step: saved blocks, loaded blocks, and memory that must stay unchanged."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np
import pytest

from trioserve.connectors.host import copying
from trioserve.connectors.host.block_files import BlockChain, BlockFiles, Proofs
from trioserve.connectors.host.copying import BlockMemory, Gate, block_bytes, copy_in, copy_out
from trioserve.connectors.host.policy import CHAINS_MAX, HostPolicy, HostSettings, Lane
from trioserve.contracts.events import FinishReason
from trioserve.contracts.ids import BlockIndex, RequestId
from trioserve.contracts.kv_transfer import HoldKind, Loaded, LoadFailed, Released
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.simulation.reference_engine import poor_hash
from trioserve.testing.connector_conformance.side import SMALL_LAYOUT, MemoryPages

SIZE = SMALL_LAYOUT.block_size
BLOCK_BYTES = block_bytes(SMALL_LAYOUT)
FOREIGN = 999  # seed of the content that another request would write


def tokens_of(name: str, count: int) -> tuple[int, ...]:
    """Return tokens that differ for each letter."""
    return tuple(ord(name[0]) * 1000 + position for position in range(count))


class Stage:
    """An engine's cache of 32 blocks and a store whose work runs on demand.

    Args:
        memory_blocks: Limit of blocks in memory.
        directory_blocks: Limit of blocks in files.
    """

    def __init__(self, *, memory_blocks=16, tmp_path=None, directory_blocks=16, has_views=True, hash_block=None):
        self.pages = MemoryPages(32, has_views=has_views)
        self.wakes = 0
        self.files = None if tmp_path is None else BlockFiles(tmp_path, SMALL_LAYOUT)
        limit = 0 if self.files is None else directory_blocks * self.files.file_bytes
        settings = HostSettings(
            memory_bytes=memory_blocks * BLOCK_BYTES + BLOCK_BYTES - 1, directory=tmp_path, directory_bytes=limit
        )
        more = {} if hash_block is None else {"hash_block": hash_block}
        self.host = HostPolicy(settings, self.pages, self._wake, files=self.files, **more)
        if self.files is not None:
            self.host.store.found(self.files.open(limit))
        self.requests = 0

    def _wake(self) -> None:
        self.wakes += 1

    def request(self, tokens: Sequence[int], salt: str | None = None) -> EngineRequest:
        """Make a request with a unique id."""
        self.requests += 1
        return EngineRequest(
            id=RequestId(f"r{self.requests}"),
            prompt_token_ids=tuple(tokens),
            sampling=SamplingParams(temperature=0.0),
            output_tokens_max=1,
            stop_token_ids=frozenset(),
            seed=0,
            cache_salt=salt,
        )

    def fill(self, tokens: Sequence[int], blocks: Sequence[int], salt: str | None = None) -> None:
        """Fill blocks as if these tokens had been computed in them."""
        for index, block in enumerate(blocks):
            prefix = tuple(tokens[: (index + 1) * SIZE])
            for layer in range(SMALL_LAYOUT.layer_count):
                self.pages.write(layer, BlockIndex(block), 0, memoryview(kv_of(prefix, layer, salt)))

    def finish(
        self, tokens: Sequence[int], blocks: Sequence[int], salt: str | None = None, reason=FinishReason.STOP
    ) -> EngineRequest | None:
        """End a request over these tokens in these blocks. Returns None if the blocks are not held."""
        request = self.request(tokens, salt)
        self.fill(tokens, blocks, salt)
        return request if self.host.request_finished(request, blocks, tokens, reason) else None

    def save(self, tokens: Sequence[int], first: int = 0, salt: str | None = None) -> None:
        """Save the blocks of a request completely. Afterwards, the blocks belong to other requests."""
        blocks = range(first, first - (-len(tokens) // SIZE))
        request = self.finish(tokens, blocks, salt)
        self.work()
        if request is not None:
            assert self.events() == [Released(request.id)]
        self.pages.fill(blocks, FOREIGN)

    def matched(self, tokens: Sequence[int], computed_count: int = 0, salt: str | None = None) -> int:
        """Return the matched tokens of a prompt that has one more token."""
        return self.host.num_matched_tokens(self.request([*tokens, 7], salt), computed_count)

    def start(
        self, tokens: Sequence[int], first: int = 16, computed_count: int = 0, token_count=None, salt=None
    ) -> EngineRequest:
        """Start the load of a prompt that has one more token, to blocks from `first` on."""
        request = self.request([*tokens, 7], salt)
        blocks = [BlockIndex(block) for block in range(first, first + len(tokens) // SIZE + 1)]
        self.pages.fill(blocks, FOREIGN)
        count = len(tokens) - computed_count if token_count is None else token_count
        self.host.start_load(request, blocks, computed_count, count)
        return request

    def work(self, *lanes: Lane) -> None:
        """Run all waiting work of the given lanes, or of all lanes."""
        while any(self.work_once(lane) for lane in lanes or Lane):
            pass

    def work_once(self, lane: Lane) -> bool:
        job = self.host.begin_job(lane)
        if job is None:
            return False
        while (work := job.next_work()) is not None:
            try:
                result = work()
            except Exception as error:
                self.host.fail(job, error)
            else:
                self.host.take(job, result)
        self.host.job_ended(job)
        return True

    def events(self) -> list[object]:
        return list(self.host.progress())

    def load(self, tokens: Sequence[int], computed_count: int = 0, salt: str | None = None) -> int:
        """Load a prompt completely, check every byte of the blocks, and return the number of loaded tokens."""
        request = self.start(tokens, computed_count=computed_count, salt=salt)
        self.work(Lane.LOAD, Lane.LOAD_FILES)
        (event,) = self.events()
        assert event.request_id == request.id
        came = event.token_count if isinstance(event, Loaded) else 0
        self.check_blocks(tokens, 16, computed_count, came, salt)
        self.work()
        self.check()
        return came

    def check_blocks(self, tokens, first: int, computed_count: int, count: int, salt=None) -> None:
        foreign = MemoryPages(32)
        foreign.fill(range(32), FOREIGN)
        for index in range(len(tokens) // SIZE):
            content = self.pages.content(first + index)
            if computed_count <= index * SIZE < computed_count + count:
                prefix = tuple(tokens[: (index + 1) * SIZE])
                assert content == b"".join(kv_of(prefix, layer, salt) for layer in range(SMALL_LAYOUT.layer_count))
            elif index * SIZE < computed_count:
                assert content == foreign.content(first + index)

    def check(self) -> None:
        """Check that nothing is reserved or pinned."""
        store = self.host.store
        store.memory.check(reserved_bytes=0)
        store.files.check(reserved_bytes=0)
        assert not store.memory.pinned
        assert not store.files.pinned

    def count(self, name: str) -> float:
        return self.host.counts()[f"host_{name}"]


def kv_of(prefix: tuple[int, ...], layer: int, salt: str | None) -> bytes:
    """Return the content of one layer of the block at the end of a prefix."""
    size = SIZE * SMALL_LAYOUT.token_bytes
    return random.Random(f"{prefix} {salt} {layer}").randbytes(size)


@pytest.fixture
def make(tmp_path) -> Iterator[Callable[..., Stage]]:
    """Return a function that creates stages. Its signature is make(in_files=False, **more)."""
    stages: list[Stage] = []

    def stage(*, in_files: bool = False, **more) -> Stage:
        stages.append(Stage(tmp_path=tmp_path if in_files else None, **more))
        return stages[-1]

    yield stage
    for made in stages:
        if made.files is not None:
            made.files.close()


class HookLock:
    """Lock that calls `hook` after its n-th release."""

    def __init__(self, count: int, hook: Callable[[], None]) -> None:
        self._lock = threading.Lock()
        self._count = count
        self._hook = hook

    def __enter__(self) -> None:
        assert self._lock.acquire(blocking=False), "closing the gate would wait for a whole job"

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        self._count -= 1
        if self._count == 0:
            self._hook()


# --- saving and loading ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_files", [False, True], ids=["memory", "files"])
@pytest.mark.parametrize("has_views", [True, False], ids=["host", "device"])
def test_saved_blocks_are_loaded_into_other_blocks(make, in_files, has_views):
    stage = make(in_files=in_files, has_views=has_views)
    tokens = tokens_of("a", 12)
    stage.save(tokens)
    if in_files:  # Restart the store, so that memory is empty.
        stage.files.close()
        stage = make(in_files=True, has_views=has_views)
    assert stage.matched(tokens) == 12
    assert stage.load(tokens) == 12
    assert stage.count("loaded") == 3
    assert stage.count("loaded_from_files") == (3 if in_files else 0)
    assert stage.wakes >= 1


@pytest.mark.parametrize(
    ("tokens", "computed_count", "expect"),
    [
        pytest.param(tokens_of("a", 12), 0, 12, id="all"),
        pytest.param(tokens_of("a", 12), 4, 8, id="what is not here"),
        pytest.param(tokens_of("a", 12), 12, 0, id="nothing is left"),
        pytest.param(tokens_of("a", 12), 2, 0, id="not from the middle of a block"),
        pytest.param(tokens_of("a", 16), 0, 12, id="more than was saved"),
        pytest.param((*tokens_of("a", 8), 1, 2, 3, 4), 0, 8, id="a common beginning"),
        pytest.param((1, *tokens_of("a", 12)[1:]), 0, 0, id="another beginning"),
        pytest.param(tokens_of("b", 12), 0, 0, id="a stranger"),
    ],
)
def test_prompt_matches_only_consecutive_stored_blocks(make, tokens, computed_count, expect):
    stage = make()
    stage.save(tokens_of("a", 13))
    assert stage.matched(tokens, computed_count) == expect
    if expect:
        assert stage.load(tokens[: computed_count + expect], computed_count) == expect


def test_the_last_token_of_a_prompt_is_never_matched(make):
    stage = make()
    stage.save(tokens_of("a", 12))
    assert stage.host.num_matched_tokens(stage.request(tokens_of("a", 12)), 0) == 8


def test_matching_a_prompt_changes_nothing_in_the_host_store(make):
    stage = make(memory_blocks=2)
    stage.save(tokens_of("a", 4))
    stage.save(tokens_of("b", 4))
    for _ in range(3):
        assert stage.matched(tokens_of("a", 4)) == 4
    before = stage.host.counts()
    stage.save(tokens_of("c", 4))
    assert stage.matched(tokens_of("a", 4)) == 0, "the block was the least recently used one"
    assert before["host_loaded"] == before["host_evicted"] == 0


def test_block_names_of_a_prompt_are_computed_once(make):
    named = []

    def counting(parent, token_ids):
        named.append(token_ids)
        return poor_hash(parent, token_ids)

    stage = make(hash_block=counting)
    stage.save(tokens_of("a", 12))
    request = stage.request(tokens_of("a", 13))
    del named[:]
    for _ in range(3):
        stage.host.num_matched_tokens(request, 0)
    assert len(named) == 3
    for _ in range(CHAINS_MAX):
        stage.host.num_matched_tokens(stage.request(tokens_of("b", 5)), 0)
    del named[:]
    stage.host.num_matched_tokens(request, 0)
    assert len(named) == 3, "the number of remembered requests is limited"
    stage.host.request_finished(request, (), (), FinishReason.ABORT)
    del named[:]
    stage.host.num_matched_tokens(request, 0)
    assert len(named) == 3, "ended requests are not remembered"


def test_blocks_with_different_salts_are_not_exchanged(make):
    stage = make()
    stage.save(tokens_of("a", 8), salt="x")
    assert [stage.matched(tokens_of("a", 8), salt=salt) for salt in ("x", "y", "", None)] == [8, 0, 0, 0]
    assert stage.load(tokens_of("a", 8), salt="x") == 8


def test_load_of_a_partial_block_writes_only_its_tokens(make):
    stage = make()
    tokens = tokens_of("a", 8)
    stage.save(tokens)
    request = stage.start(tokens, token_count=6)
    before = stage.pages.content(17)
    stage.work()
    assert stage.events() == [Loaded(request.id, 6)]
    half = 2 * SMALL_LAYOUT.token_bytes
    for layer in range(SMALL_LAYOUT.layer_count):
        here = bytes(stage.pages.read(layer, BlockIndex(17)))
        assert here[:half] == kv_of(tokens, layer, None)[:half]
        assert here[half:] == before[layer * 2 * half : (layer + 1) * 2 * half][half:]


@pytest.mark.parametrize("in_files", [False, True], ids=["memory", "files"])
def test_collision_of_block_names_causes_a_miss(make, in_files):
    stage = make(in_files=in_files, hash_block=poor_hash)
    salts = (None, "x", "y")
    prompts = [(name, salt) for name in "abcdef" for salt in salts]
    came = 0
    for name, salt in prompts:
        stage.save(tokens_of(name, 8), salt=salt)
        for other, other_salt in prompts:
            tokens = tokens_of(other, 8)
            matched = stage.matched(tokens, salt=other_salt)
            if matched:
                came += stage.load(tokens[:matched], salt=other_salt)
    assert came > 0
    assert stage.count("dropped") > 0


def test_proof_covers_all_tokens_before_the_block():
    def proofs(tokens, salt=None):
        made = Proofs(salt, tokens, 4)
        return [made.of(index) for index in range(3)]

    base = proofs(tokens_of("a", 12))
    assert proofs(tokens_of("a", 12)) == base
    assert len({*base, *proofs(tokens_of("a", 12), ""), *proofs(tokens_of("a", 12), "x")}) == 9
    changed = proofs((1, *tokens_of("a", 12)[1:]))
    assert not set(changed) & set(base)
    assert Proofs(None, tokens_of("a", 12), 4).of(2) == base[2], "also if earlier proofs were not requested"


# --- limits ----------------------------------------------------------------------------------------------------------


def test_least_recently_used_blocks_are_evicted_from_the_end_of_a_prefix(make):
    stage = make(memory_blocks=4)
    stage.save(tokens_of("a", 12))
    stage.save(tokens_of("b", 4))
    stage.save(tokens_of("c", 8))
    assert [stage.matched(tokens_of(name, 12)) for name in "abc"] == [4, 4, 8]
    assert stage.count("evicted") == 2
    stage.load(tokens_of("a", 4))
    stage.save(tokens_of("d", 4))
    assert [stage.matched(tokens_of(name, 12)) for name in "abcd"] == [4, 0, 8, 4]
    assert stage.count("memory_bytes_used") == 4 * BLOCK_BYTES
    stage.check()


def test_blocks_served_by_the_prefix_cache_count_as_used(make):
    stage = make(memory_blocks=2)
    stage.save(tokens_of("a", 4))
    stage.save(tokens_of("b", 4))
    assert stage.finish(tokens_of("a", 4), [0]) is None
    stage.save(tokens_of("c", 4))
    assert [stage.matched(tokens_of(name, 4)) for name in "abc"] == [4, 0, 4]


def test_beginning_of_a_prompt_larger_than_memory_is_kept(make):
    stage = make(memory_blocks=3)
    stage.save(tokens_of("a", 20))
    assert stage.matched(tokens_of("a", 20)) == 12
    assert stage.count("unsaved") == 2
    stage.save(tokens_of("a", 20))
    assert stage.matched(tokens_of("a", 20)) == 12, "the beginning is not evicted for the end of the same prompt"


def test_blocks_being_loaded_are_not_evicted(make):
    stage = make(memory_blocks=3)
    stage.save(tokens_of("a", 12))
    request = stage.start(tokens_of("a", 12))
    assert stage.finish(tokens_of("b", 8), [0, 1]) is None
    assert stage.count("unsaved") == 2
    stage.work()
    assert stage.events() == [Loaded(request.id, 12)]
    stage.check_blocks(tokens_of("a", 12), 16, 0, 12)
    stage.save(tokens_of("b", 8))
    assert stage.matched(tokens_of("b", 8)) == 8, "loaded blocks may be evicted"
    stage.check()


def test_at_most_half_of_the_pool_is_held_for_copies(make):
    stage = make(memory_blocks=64)
    first = stage.finish(tokens_of("a", 40), range(10))
    second = stage.finish(tokens_of("b", 40), range(10, 20))
    assert stage.finish(tokens_of("c", 4), [20]) is None
    assert stage.count("unsaved") == 4 + 1
    stage.work()
    assert stage.events() == [Released(first.id), Released(second.id)]
    assert stage.matched(tokens_of("b", 40)) == 24
    stage.save(tokens_of("c", 4), first=20)
    assert stage.matched(tokens_of("c", 4)) == 4, "memory is free again afterwards"
    stage.check()


def test_stored_or_saving_blocks_are_not_copied_again(make):
    stage = make()
    first = stage.finish(tokens_of("a", 8), [0, 1])
    assert stage.finish(tokens_of("a", 8), [2, 3]) is None
    third = stage.finish(tokens_of("a", 12), [4, 5, 6])
    stage.work()
    assert stage.events() == [Released(first.id), Released(third.id)]
    assert stage.finish(tokens_of("a", 12), [0, 1, 2]) is None
    assert stage.count("saved") == 3
    stage.work()
    assert stage.events() == []


@pytest.mark.parametrize("count", [0, 3])
def test_no_blocks_are_held_for_a_request_without_a_full_block(make, count):
    assert make().finish(tokens_of("a", count), range(-(-count // SIZE))) is None


def test_blocks_of_a_failed_request_are_not_saved(make):
    stage = make()
    assert stage.finish(tokens_of("a", 8), [0, 1], reason=FinishReason.ERROR) is None
    assert stage.finish(tokens_of("a", 8), [0, 1], reason=FinishReason.ABORT) is not None


def test_held_blocks_have_no_transfer_params(make):
    stage = make()
    request = stage.finish(tokens_of("a", 8), [0, 1])
    assert stage.host.transfer_params(request.id) is None


def test_host_memory_is_reused_after_its_last_reference(monkeypatch):
    monkeypatch.setattr(copying, "SLAB_BYTES", 3 * 100)
    memory = BlockMemory(100, 1000)
    taken = [memory.take() for _ in range(5)]
    assert memory.slab_count == 2
    for number, content in enumerate(taken):
        content[:] = number
    assert [set(content.tolist()) for content in taken] == [{0}, {1}, {2}, {3}, {4}], "each block has its own memory"
    kept = taken.pop()
    del taken, content
    again = [memory.take() for _ in range(5)]
    for content in again:
        content[:] = 9
    assert memory.slab_count == 2
    assert set(kept.tolist()) == {4}, "memory with a reference is not reused"


def test_host_memory_of_evicted_blocks_is_reused_in_place(make):
    stage = make(memory_blocks=4)
    for name in "abcdef":
        stage.save(tokens_of(name, 12))
    assert stage.host.store.places.slab_count == 1


# --- holds and loads that end early ----------------------------------------------------------------------------------


def begin(stage: Stage, lane: Lane, hook: Callable[[], None], pieces: int = 1):
    """Begin a job of this lane. Its thread calls `hook` after a number of pieces."""
    job = stage.host.begin_job(lane)
    job.gate = Gate(HookLock(pieces, hook))
    return job


def run(stage: Stage, job) -> None:
    while (work := job.next_work()) is not None:
        stage.host.take(job, work())
    stage.host.job_ended(job)


@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_copy_of_blocks_is_dropped_if_its_hold_expires(make, pieces):
    stage = make()
    request = stage.finish(tokens_of("a", 8), [0, 1])
    reads = []

    def expire() -> None:
        stage.host.hold_expired(request.id, HoldKind.SEND)
        stage.pages.fill([0, 1], FOREIGN)
        stage.pages.read = lambda layer, block: reads.append(block)

    run(stage, begin(stage, Lane.SAVE, expire, pieces))
    assert not reads, "nothing is read after hold_expired has returned"
    assert stage.events() == []
    assert stage.matched(tokens_of("a", 8)) == 0
    assert stage.count("saved") == 0
    assert stage.count("unsaved") == 2
    stage.check()


def test_earlier_batches_of_a_copy_are_kept_if_the_hold_expires(make, monkeypatch):
    monkeypatch.setattr("trioserve.connectors.host.jobs.BATCH_BYTES", BLOCK_BYTES)
    stage = make()
    request = stage.finish(tokens_of("a", 12), [0, 1, 2])
    job = stage.host.begin_job(Lane.SAVE)
    stage.host.take(job, job.next_work()())
    late = job.next_work()()
    stage.host.hold_expired(request.id, HoldKind.SEND)
    stage.host.take(job, late)
    assert job.next_work() is None
    stage.host.job_ended(job)
    assert stage.load(tokens_of("a", 12)[:4]) == 4
    assert stage.matched(tokens_of("a", 12)) == 4
    assert stage.events() == []


def test_no_block_is_saved_if_the_hold_expires_before_the_copy(make):
    stage = make()
    request = stage.finish(tokens_of("a", 8), [0, 1])
    stage.host.hold_expired(request.id, HoldKind.SEND)
    stage.check()
    stage.work()
    assert stage.events() == []
    stage.save(tokens_of("a", 8))
    assert stage.matched(tokens_of("a", 8)) == 8


def test_expired_hold_drops_its_waiting_report(make):
    stage = make()
    stage.save(tokens_of("a", 8))
    send = stage.finish(tokens_of("b", 8), [0, 1])
    load = stage.start(tokens_of("a", 8))
    stage.work()
    stage.host.hold_expired(send.id, HoldKind.SEND)
    stage.host.load_abandoned(load.id)
    stage.host.hold_expired(load.id, HoldKind.LOAD)
    assert stage.events() == []


def test_abort_after_the_end_stops_the_copy_and_keeps_copied_blocks(make, monkeypatch):
    monkeypatch.setattr("trioserve.connectors.host.jobs.BATCH_BYTES", BLOCK_BYTES)
    stage = make()
    request = stage.finish(tokens_of("a", 12), [0, 1, 2])
    job = stage.host.begin_job(Lane.SAVE)
    stage.host.take(job, job.next_work()())
    stage.host.request_aborted_after_finish(request.id)
    assert job.next_work() is None
    stage.host.job_ended(job)
    assert stage.events() == [Released(request.id)]
    assert stage.matched(tokens_of("a", 12)) == 4
    waiting = stage.finish(tokens_of("b", 8), [0, 1])
    stage.host.request_aborted_after_finish(waiting.id)
    assert stage.events() == [Released(waiting.id)], "a job that has not begun ends at once"
    stage.host.request_aborted_after_finish(waiting.id)
    assert stage.events() == []
    stage.check()


@pytest.mark.parametrize("in_files", [False, True], ids=["memory", "files"])
def test_expired_load_writes_nothing_more(make, in_files):
    stage = make(in_files=in_files)
    tokens = tokens_of("a", 12)
    stage.save(tokens)
    if in_files:
        stage.files.close()
        stage = make(in_files=True)
    request = stage.start(tokens)
    seen = []

    def expire() -> None:
        stage.host.load_abandoned(request.id)
        stage.host.hold_expired(request.id, HoldKind.LOAD)
        stage.pages.fill(range(16, 20), FOREIGN + 1)
        seen.append([stage.pages.content(block) for block in range(16, 20)])

    run(stage, begin(stage, Lane.LOAD_FILES if in_files else Lane.LOAD, expire, pieces=3))
    assert [stage.pages.content(block) for block in range(16, 20)] == seen[0]
    assert stage.events() == []
    stage.work()
    stage.check()


def test_abandoned_load_stops_at_its_next_piece_and_is_reported_once(make):
    stage = make()
    stage.save(tokens_of("a", 12))
    request = stage.start(tokens_of("a", 12))
    seen = []

    def abandon() -> None:
        stage.host.load_abandoned(request.id)
        assert stage.events() == [], "the load may still write"
        seen.append([stage.pages.content(block) for block in range(16, 20)])

    run(stage, begin(stage, Lane.LOAD, abandon))
    assert [stage.pages.content(block) for block in range(16, 20)] == seen[0]
    assert stage.events() == [LoadFailed(request.id, "the request does not need it any more")]
    stage.host.load_abandoned(request.id)
    stage.work()
    assert stage.events() == []
    stage.check()


def test_abandoned_load_that_has_not_begun_ends_at_once(make):
    stage = make()
    stage.save(tokens_of("a", 8))
    request = stage.start(tokens_of("a", 8))
    stage.host.load_abandoned(request.id)
    assert stage.events() == [LoadFailed(request.id, "the request does not need it any more")]
    stage.check()


def test_load_of_evicted_blocks_fails(make):
    stage = make()
    request = stage.start(tokens_of("a", 8))
    stage.work()
    assert stage.events() == [LoadFailed(request.id, "no block of it is stored any more")]


def test_gate_is_locked_during_each_copy_and_stops_copies_once_it_is_closed():
    order = []

    class Recording:
        def __enter__(self) -> None:
            order.append("enter")

        def __exit__(self, *_: object) -> None:
            order.append("leave")

    pages = MemoryPages(2, has_views=False)
    pages.write = lambda *_: order.append("write")
    gate = Gate(Recording())
    assert copy_in(pages, BlockIndex(0), np.empty(BLOCK_BYTES, np.uint8), SIZE, gate)
    assert order == ["enter", "write", "leave"] * 2
    pages.read = lambda layer, block: order.append("read") or bytes(SIZE * SMALL_LAYOUT.token_bytes)
    del order[:]
    assert copy_out(pages, BlockIndex(0), np.empty(BLOCK_BYTES, np.uint8), gate)
    assert order == ["enter", "read", "leave"] * 2
    del order[:]
    gate.close()
    assert order == ["enter", "leave"]
    del order[:]
    assert not copy_in(pages, BlockIndex(0), np.empty(BLOCK_BYTES, np.uint8), SIZE, gate)
    assert not copy_out(pages, BlockIndex(0), np.empty(BLOCK_BYTES, np.uint8), gate)
    assert not {"read", "write"} & set(order)


def test_a_large_block_is_copied_in_pieces(monkeypatch):
    monkeypatch.setattr(copying, "PIECE_BYTES", 24)
    entered = []

    class Counting:
        def __enter__(self) -> None:
            entered.append(1)

        def __exit__(self, *_: object) -> None:
            pass

    for has_views in (True, False):
        pages = MemoryPages(3, has_views=has_views)
        pages.fill([0, 1], 5)
        content = np.empty(BLOCK_BYTES, np.uint8)
        del entered[:]
        assert copy_out(pages, BlockIndex(0), content, Gate(Counting()))
        assert copy_in(pages, BlockIndex(2), content, SIZE, Gate(Counting()))
        assert pages.content(2) == pages.content(0)
        assert len(entered) == 2 * 2 * 3


# --- files -----------------------------------------------------------------------------------------------------------


def test_evicted_block_is_read_from_its_file_into_memory(make):
    stage = make(in_files=True, memory_blocks=2)
    stage.save(tokens_of("a", 8))
    stage.save(tokens_of("b", 8))
    assert stage.count("written") == 4
    assert stage.load(tokens_of("a", 8)) == 8
    assert stage.count("loaded_from_files") == 2
    assert stage.load(tokens_of("a", 8)) == 8
    assert stage.count("loaded_from_files") == 2, "the second load uses memory"
    assert stage.load(tokens_of("b", 8)) == 8
    assert stage.count("loaded_from_files") == 4


def test_load_combines_blocks_in_memory_and_files(make):
    stage = make(in_files=True, memory_blocks=2)
    stage.save(tokens_of("a", 8))
    stage.save((*tokens_of("a", 8), *tokens_of("b", 8))[:12])
    assert stage.load((*tokens_of("a", 8), *tokens_of("b", 4))) == 12


def test_least_recently_used_files_are_evicted_above_the_limit(make, tmp_path):
    stage = make(in_files=True, memory_blocks=2, directory_blocks=4)
    for name in "abc":
        stage.save(tokens_of(name, 8))
        stage.load(tokens_of("a", 8))
    assert [stage.matched(tokens_of(name, 8)) for name in "abc"] == [8, 0, 8]
    files = list(tmp_path.glob("*/*.kv"))
    assert len(files) == 4
    assert stage.count("files_evicted") == 2
    assert sum(file.stat().st_size for file in files) == stage.count("directory_bytes_used")


def test_blocks_evicted_before_they_are_written_are_counted(make):
    stage = make(in_files=True, memory_blocks=2)
    for name in "ab":
        stage.finish(tokens_of(name, 8), [0, 1])
        stage.work(Lane.SAVE)
    assert stage.count("unwritten") == 2
    stage.work()
    assert [stage.matched(tokens_of(name, 8)) for name in "ab"] == [0, 8]
    assert stage.count("written") == 2


def test_block_files_are_found_after_a_restart_least_recently_used_first(make):
    stage = make(in_files=True)
    for name in "abc":
        stage.save(tokens_of(name, 4))
    for second, name in enumerate("bca"):
        set_age(stage, tokens_of(name, 4), second)
    stage.files.close()
    stage = make(in_files=True, directory_blocks=2)
    assert [stage.matched(tokens_of(name, 4)) for name in "abc"] == [4, 0, 4]
    stage.save(tokens_of("d", 4))
    assert [stage.matched(tokens_of(name, 4)) for name in "abcd"] == [4, 0, 0, 4]


def set_age(stage: Stage, tokens, second: int) -> None:
    os.utime(path_of(stage, tokens), (second, second))


def path_of(stage: Stage, tokens, index: int = 0):
    chain = BlockChain(None, SIZE)
    return stage.files._directory / stage.files.key(chain.name(index, tokens))


@pytest.mark.parametrize(
    ("damage", "files_left"),
    [
        pytest.param(lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\xff"), 1, id="a byte"),
        pytest.param(lambda path: path.write_bytes(path.read_bytes()[:-1]), 1, id="short"),
        pytest.param(lambda path: path.write_bytes(b""), 1, id="empty"),
        pytest.param(lambda path: path.write_bytes(b"x" * len(path.read_bytes())), 1, id="something else"),
        pytest.param(lambda path: path.unlink(), 1, id="gone"),
    ],
)
@pytest.mark.parametrize("index", [0, 1])
def test_damaged_file_ends_the_load_at_its_block(make, damage, files_left, index):
    stage = make(in_files=True, memory_blocks=2)
    tokens = tokens_of("a", 8)
    stage.save(tokens)
    stage.save(tokens_of("b", 8))
    damage(path_of(stage, tokens, index))
    request = stage.start(tokens)
    stage.work(Lane.LOAD_FILES)
    (event,) = stage.events()
    if index == 0:
        assert isinstance(event, LoadFailed)
        assert event.message.startswith("block 0: ")
    else:
        assert event == Loaded(request.id, 4)
        stage.check_blocks(tokens, 16, 0, 4)
    assert stage.count("dropped") == stage.count("read_failures") == 1
    stage.work()
    assert not path_of(stage, tokens, index).exists()
    assert stage.matched(tokens) == 4 * index
    stage.check()
    stage.save(tokens)
    assert stage.load(tokens) == 8, "blocks that are computed again are stored again"


def test_damaged_file_found_by_two_loads_is_dropped_once(make):
    stage = make(in_files=True, memory_blocks=1)
    tokens = tokens_of("a", 4)
    stage.save(tokens)
    stage.save(tokens_of("b", 4))
    path_of(stage, tokens).unlink()
    stage.start(tokens)
    stage.start(tokens, first=20)
    stage.work()
    assert [type(event) for event in stage.events()] == [LoadFailed, LoadFailed]
    assert stage.count("dropped") == 1
    stage.check()


def test_unwritable_directory_is_logged_once_and_memory_still_works(make, monkeypatch, caplog):
    stage = make(in_files=True)

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stage.files, "write", refuse)
    for name in "abc":
        stage.save(tokens_of(name, 8))
        assert stage.load(tokens_of(name, 8)) == 8
    assert stage.count("write_failures") == 3, "each attempt tries one file"
    assert stage.count("unwritten") == 6
    assert [record.message.count("No space left") for record in caplog.records] == [1]
    monkeypatch.undo()
    stage.save(tokens_of("d", 8))
    assert stage.count("written") == 2, "the write is tried again"
    stage.check()


def test_blocks_in_files_do_not_match_while_a_load_from_files_hangs(make):
    stage = make(in_files=True, memory_blocks=2)
    stage.save(tokens_of("a", 8))
    stage.save(tokens_of("b", 8))
    request = stage.start(tokens_of("a", 8))
    job = stage.host.begin_job(Lane.LOAD_FILES)
    hanging = job.next_work()
    assert stage.matched(tokens_of("a", 8)) == 8
    stage.host.load_abandoned(request.id)
    assert (stage.matched(tokens_of("a", 8)), stage.matched(tokens_of("b", 8))) == (0, 0)
    stage.save(tokens_of("c", 4))
    assert stage.matched(tokens_of("c", 4)) == 0, "no memory is free while blocks of a are reserved"
    stage.host.hold_expired(request.id, HoldKind.LOAD)
    assert stage.matched(tokens_of("a", 8)) == 0
    stage.host.take(job, hanging())
    stage.host.job_ended(job)
    assert stage.matched(tokens_of("a", 8)) == 8
    assert stage.events() == []
    stage.check()


def test_blocks_of_another_layout_are_not_loaded(make, tmp_path):
    stage = make(in_files=True)
    stage.save(tokens_of("a", 4))
    files = set(tmp_path.rglob("*.kv"))
    stage.files.close()
    for changed in ({"model": "large"}, {"dtype": "float16", "head_dim": 4}):
        layout = msgspec.structs.replace(SMALL_LAYOUT, **changed)
        there = BlockFiles(tmp_path, layout)
        assert {file.key for file in there.open(10**9)} == {str(file.relative_to(tmp_path)) for file in files}
        assert not (tmp_path / there.key(BlockChain(None, SIZE).name(0, tokens_of("a", 4)))).exists()
        there.close()


# --- closing ---------------------------------------------------------------------------------------------------------


def test_closed_host_policy_changes_and_reports_nothing(make):
    stage = make()
    stage.save(tokens_of("a", 12))
    load, send = stage.start(tokens_of("a", 12)), stage.finish(tokens_of("b", 8), [0, 1])
    del load, send
    job = stage.host.begin_job(Lane.LOAD)
    work = job.next_work()
    before = [stage.pages.content(block) for block in range(32)]
    stage.host.close()
    work()
    assert [stage.pages.content(block) for block in range(32)] == before
    assert all(stage.host.begin_job(lane) is None for lane in Lane)
    assert stage.matched(tokens_of("a", 12)) == 0
    assert stage.finish(tokens_of("c", 8), [0, 1]) is None
    stage.start(tokens_of("a", 8), first=20)
    assert stage.events() != [], "a load is still answered"
