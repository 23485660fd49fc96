"""Tests the host store with a real core: evicted blocks are loaded again, and no response changes."""

from __future__ import annotations

import importlib.util
import random
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from trioserve.connectors.host.block_files import BlockFiles, hash_block
from trioserve.connectors.host.copying import block_bytes
from trioserve.connectors.host.policy import HostPolicy, HostSettings, Lane
from trioserve.contracts.events import FinishReason, RequestFinished, TokensReady
from trioserve.contracts.ids import BlockIndex, RequestId
from trioserve.contracts.kv_transfer import KVPages
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.core.engine import EngineCore
from trioserve.core.settings import CoreSettings
from trioserve.model.loading.checkpoint import open_checkpoint
from trioserve.model.loading.default_model import find_default_model
from trioserve.model.runner import ModelRunner
from trioserve.model.settings import ModelSettings
from trioserve.simulation.reference_engine import ReferenceEngine, poor_hash
from trioserve.testing.connector_conformance.side import SMALL_LAYOUT
from trioserve.testing.fake_executor import FakeExecutor
from trioserve.testing.invariants import check_core, check_idle

SIZE = SMALL_LAYOUT.block_size


def request(name: str, prompt: Sequence[int], output_tokens_max: int = 2, salt: str | None = None) -> EngineRequest:
    return EngineRequest(
        id=RequestId(name),
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(temperature=0.0),
        output_tokens_max=output_tokens_max,
        stop_token_ids=frozenset(),
        seed=0,
        cache_salt=salt,
    )


def work_off(host: HostPolicy) -> None:
    while any(_work_once(host, lane) for lane in Lane):
        pass


def _work_once(host: HostPolicy, lane: Lane) -> bool:
    job = host.begin_job(lane)
    if job is None:
        return False
    while (work := job.next_work()) is not None:
        host.take(job, work())
    host.job_ended(job)
    return True


class SlotPages:
    """Slots of a FakeExecutor as bytes: a digest and a salt for each token, in both layers.

    A token counts as written when its last layer equals its first.
    """

    layout = SMALL_LAYOUT

    def __init__(self, executor: FakeExecutor, salts: Sequence[str | None]) -> None:
        assert SMALL_LAYOUT.token_bytes == 16
        self.block_count = executor.block_count
        self._executor = executor
        self._salts = list(salts)
        self._first_layer: dict[int, bytes] = {}

    def view(self, layer: int, block: BlockIndex) -> None:
        return None

    def read(self, layer: int, block: BlockIndex) -> memoryview:
        return memoryview(b"".join(self._packed(slot) for slot in self._executor.content([block])))

    def write(self, layer: int, block: BlockIndex, start: int, content: memoryview) -> None:
        for offset in range(0, len(content), 16):
            slot, token = block * SIZE + (start + offset) // 16, bytes(content[offset : offset + 16])
            if layer == 0:
                self._first_layer[slot] = token
                self._executor._slots[slot] = None
            else:
                is_whole = self._first_layer[slot] == token
                self._executor._slots[slot] = self._unpacked(token) if is_whole else None

    def _packed(self, slot: Any) -> bytes:
        return bytes(16) if slot is None else struct.pack("<QQ", slot[0], 1 + self._salts.index(slot[1]))

    def _unpacked(self, token: bytes) -> tuple[int, str | None] | None:
        digest, salt = struct.unpack("<QQ", token)
        return (digest, self._salts[salt - 1]) if salt else None


SALTS = (None, "x")


class History:
    """History from a seed: a core with a small pool, a store, and requests that arrive, end early and share prefixes.

    The seed also decides how slow the store's threads are.
    """

    def __init__(self, seed: int, directory: Path | None) -> None:
        self.chance = random.Random(seed)
        names = poor_hash if self.chance.random() < 0.3 else hash_block
        blocks = self.chance.choice((10, 16))
        self.executor = FakeExecutor(block_count=blocks, block_size=SIZE)
        pages: KVPages = SlotPages(self.executor, SALTS)
        memory = self.chance.choice((2, 5, 20)) * block_bytes(SMALL_LAYOUT)
        self.files = None if directory is None else BlockFiles(directory, SMALL_LAYOUT)
        limit = 0 if self.files is None else self.chance.choice((3, 30)) * self.files.file_bytes
        settings = HostSettings(memory_bytes=memory, directory=directory, directory_bytes=limit)
        self.host = HostPolicy(settings, pages, lambda: None, files=self.files, hash_block=names)
        if self.files is not None:
            self.host.store.found(self.files.open(limit))
        self.core = EngineCore(
            CoreSettings(
                block_count=blocks,
                block_size=SIZE,
                context_tokens_max=blocks * SIZE,
                max_num_seqs=3,
                step_tokens_max=12,
                hold_seconds_max=3.0,
                remote_kv_seconds_max=3.0,
            ),
            connector=self.host,
        )
        self.now = 0.0
        self.jobs: dict[Lane, tuple[Any, list[Any]]] = {}
        self.requests: dict[RequestId, EngineRequest] = {}
        self.tokens: dict[RequestId, list[int]] = {}
        self.finished: dict[RequestId, RequestFinished] = {}

    def play(self) -> None:
        for _ in range(250):
            self.chance.choice((self.arrive, *[self.step] * 3, *[self.thread] * 5))()
            if self.chance.random() < 0.05:
                self.leave()
            if self.chance.random() < 0.05:
                self.wait(self.chance.choice((0.5, 3.0)))
            self.take(self.core.progress(self.now))
            check_core(self.core)
        while list(self.core.live_requests()) or self.core.stats().blocks_held or self.jobs:
            self.thread()
            self.step()
            self.take(self.core.progress(self.now))
            self.wait(0.01)
        check_idle(self.core)
        work_off(self.host)
        self.host.store.memory.check(reserved_bytes=0)
        self.host.store.files.check(reserved_bytes=0)
        if self.files is not None:
            self.files.close()
        self.compare()

    def arrive(self) -> None:
        family, length = self.chance.randrange(3), self.chance.randrange(4, 30)
        branch = self.chance.randrange(0, length + 1) if self.chance.random() < 0.3 else length
        prompt = [family * 50 + position for position in range(branch)]
        prompt += [200 + self.chance.randrange(2) for _ in range(length - branch)]
        made = request(f"r{len(self.requests)}", prompt, self.chance.randrange(1, 6), self.chance.choice(SALTS))
        self.requests[made.id], self.tokens[made.id] = made, []
        self.core.add(made)

    def step(self) -> None:
        plan = self.core.schedule(self.now)
        if plan is None:
            return
        for _ in range(self.chance.randrange(3)):
            self.thread()
        result = self.executor.execute(plan)
        assert result is not None
        self.take(self.core.update_from_output(plan, result, self.now))

    def thread(self) -> None:
        """Do what the worker thread of a random lane does next: begin a job, run a piece of a job, or return the result
        of a piece.
        """
        lane = self.chance.choice(tuple(Lane))
        if lane not in self.jobs:
            job = self.host.begin_job(lane)
            if job is not None:
                self._next(lane, job)
            return
        job, stages = self.jobs[lane]
        if callable(stages[0]):
            stages[0] = (stages[0](),)
        else:
            self.host.take(job, stages[0][0])
            self._next(lane, job)

    def _next(self, lane: Lane, job: Any) -> None:
        work = job.next_work()
        if work is None:
            self.jobs.pop(lane, None)
            self.host.job_ended(job)
        else:
            self.jobs[lane] = (job, [work])

    def leave(self) -> None:
        if self.requests:
            name = self.chance.choice(tuple(self.requests))
            for result in self.core.abort([name], now=self.now).values():
                self.take([] if result.finished is None else [result.finished])

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.take(self.core.expire(self.now))

    def take(self, events: Sequence[Any]) -> None:
        for event in events:
            if isinstance(event, TokensReady):
                self.tokens[event.request_id] += event.token_ids
            elif isinstance(event, RequestFinished):
                self.finished[event.request_id] = event

    def compare(self) -> None:
        reference = ReferenceEngine(self.executor.model)
        assert set(self.finished) == set(self.requests)
        for name, made in self.requests.items():
            response = reference.response(made).token_ids
            assert tuple(self.tokens[name]) == response[: len(self.tokens[name])]
            if self.finished[name].reason is FinishReason.LENGTH:
                assert tuple(self.tokens[name]) == response


@pytest.mark.slow
@pytest.mark.parametrize("in_files", [False, True], ids=["memory", "files"])
def test_responses_are_the_same_with_and_without_a_host_store(tmp_path, in_files):
    """The executor checks every slot that it reads, so it detects any wrong byte that is loaded."""
    loaded = faults = 0
    for seed in range(70):
        history = History(seed, tmp_path / str(seed) if in_files else None)
        history.play()
        stats = history.core.stats()
        loaded += stats.loaded_tokens_total
        counted = {fault.value: total for fault, total in stats.transfer_faults_total.items() if total}
        assert not counted.keys() & {"late", "double", "unknown", "bad_count", "raised"}, (seed, counted)
        faults += sum(counted.values())
    assert loaded > 500, loaded
    assert faults > 10, faults


# --- with a real model ------------------------------------------------------------------------------------------------


class Engine:
    """A real model with a core that has few blocks, and optionally a store."""

    def __init__(self, runner: ModelRunner, block_count: int, make: Callable[[KVPages], HostPolicy] | None) -> None:
        self.runner = runner
        pages = runner.kv_pages("tiny")
        self.host = None if make is None else make(pages)
        self.core = EngineCore(
            CoreSettings(
                block_count=block_count,
                block_size=pages.layout.block_size,
                context_tokens_max=block_count * pages.layout.block_size,
            ),
            connector=self.host,
        )
        self.count = 0

    def response(self, prompt: Sequence[int], output_tokens_max: int = 8) -> list[int]:
        self.count += 1
        self.core.add(request(f"r{self.count}", prompt, output_tokens_max))
        tokens: list[int] = []
        for _ in range(1000):
            plan = self.core.schedule(0.0)
            if plan is not None:
                result = self.runner.execute(plan)
                assert result is not None
                for event in self.core.update_from_output(plan, result, 0.0):
                    tokens += event.token_ids if isinstance(event, TokensReady) else ()
            if self.host is not None:
                work_off(self.host)
                self.core.progress(0.0)
            if not list(self.core.live_requests()):
                return tokens
        raise AssertionError("no end is in sight")


def tiny_checkpoints() -> ModuleType:
    place = Path(__file__).parents[1] / "model" / "tiny_checkpoints.py"
    spec = importlib.util.spec_from_file_location("tiny_checkpoints", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", params=["auto", "int8", "latents"])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    """Runner of a tiny model. Its KV cache has the parameter's format, or consists of latents."""
    kv_cache_dtype = "auto" if request.param == "latents" else request.param
    path = find_default_model("smollm2")
    if request.param == "latents":
        path = tmp_path_factory.mktemp("latents")
        tiny_checkpoints().write_checkpoint(path, "deepseek-v3")
    if path is None:
        pytest.skip("the default model is not installed")
    settings = ModelSettings(
        dtype="float32", device="cpu", threads=1, kv_cache_bytes=2**26, kv_cache_dtype=kv_cache_dtype
    )
    runner = ModelRunner.load(open_checkpoint(path), settings)
    runner.allocate_kv(6)
    return runner


@pytest.mark.slow
@pytest.mark.parametrize("in_files", [False, True], ids=["memory", "files"])
def test_evicted_prompt_is_loaded_and_gives_the_same_response(runner, tmp_path, in_files):
    vocab = min(40_000, runner.config.vocab_size)
    prompts = [[(7919 * (number + 1) * (position + 1)) % vocab for position in range(52)] for number in range(3)]
    plain = Engine(runner, 6, None)
    expected = [plain.response(prompt) for prompt in prompts]

    def make(pages: KVPages) -> HostPolicy:
        files = BlockFiles(tmp_path, pages.layout) if in_files else None
        # With files, memory is too small for two prompts, so the first prompt must be read from its files.
        memory = (4 if in_files else 100) * block_bytes(pages.layout)
        settings = HostSettings(memory_bytes=memory, directory_bytes=2**30 if in_files else 0)
        if files is not None:
            files.open(2**30)
        return HostPolicy(settings, pages, lambda: None, files=files)

    engine = Engine(runner, 6, make)
    assert [engine.response(prompt) for prompt in prompts] == expected
    assert engine.core.stats().loaded_tokens_total == 0
    assert [engine.response(prompt) for prompt in prompts] == expected
    assert engine.core.stats().loaded_tokens_total == 3 * 48, (
        "three blocks of 16 tokens are loaded each, and 4 tokens are computed"
    )
    assert engine.host is not None
    assert engine.host.counts()["host_loaded_from_files"] == (9 if in_files else 0)
    check_idle(engine.core)
    if engine.host._files is not None:
        engine.host._files.close()
