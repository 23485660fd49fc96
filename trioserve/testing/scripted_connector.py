"""KV connectors for fake engines: FakeConnector, which a script controls, ScriptedConnector, which a test controls, and
NoConnector, which transfers nothing.

FakeConnector checks the calls of the core. It moves KV between the slots of a FakeExecutor. At each call of `work`, an
open load writes garbage to all positions that it may write to. An open send compares its blocks with their content at
the beginning of the send. So a block that the core uses too early is detected. The script creates the reports and
passes them to the core. A report may be late, repeated, missing, or for an unknown request. The script can also put
reports into `outbox`, where they wait until the core calls `progress`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import msgspec
import trio

from trioserve.contracts.events import FinishReason
from trioserve.contracts.ids import NO_BLOCK, BlockIndex, RequestId
from trioserve.contracts.kv_transfer import HoldKind, Loaded, LoadFailed, Released, Started, StillRead, TransferEvent
from trioserve.contracts.request import EngineRequest, KVTransferParams
from trioserve.testing.fake_executor import FakeExecutor

__all__ = ["FakeConnector", "FakeLoad", "FakeSend", "NoConnector", "ScriptedConnector"]


class FakeLoad(msgspec.Struct):
    """A load that may still write.

    Attributes:
        request: the request.
        block_table: blocks of the request.
        start: first position to load.
        token_count: number of positions to load.
        is_abandoned: True if the request no longer waits for the load.
    """

    request: EngineRequest
    block_table: tuple[BlockIndex, ...]
    start: int
    token_count: int
    is_abandoned: bool = False


class FakeSend(msgspec.Struct):
    """A send that may still read.

    Attributes:
        request: the request.
        block_table: blocks of the request.
        tokens: tokens of the request.
        content: content of the blocks when the send began.
        is_aborted: True if the request was aborted after it had finished.
    """

    request: EngineRequest
    block_table: tuple[BlockIndex, ...]
    tokens: tuple[int, ...]
    content: tuple[object, ...]
    is_aborted: bool = False


class FakeConnector:
    """A KVConnector (contracts.kv_transfer) under the control of a script.

    Args:
        executor: the executor with the KV blocks.
        matched_count: returns the result of num_matched_tokens for a request and a computed count. A script may replace
            this function at any time.
        holds: returns the result of request_finished for a request and its finish reason.

    Attributes:
        raises: names of calls that raise. A call raises until its name is removed.
        loads: open loads by request.
        sends: open sends by request.
        outbox: functions that create the events which `progress` returns.
        finished: finish reason of every request that ended.
        asked: requests whose transfer parameters the core has read.
        params: transfer parameters of all sends, including sends that have ended.
        expired: holds that expired, oldest first.
        violations: calls of the core that violate the contract. `check` asserts that this list is empty. Exceptions
            would not show the violations, because the core only counts exceptions of a connector.
        calls: number of calls by name.
        raised_count: number of calls that raised because of `raises`.
    """

    def __init__(
        self,
        executor: FakeExecutor,
        *,
        matched_count: Callable[[EngineRequest, int], int] = lambda request, computed_count: 0,
        holds: Callable[[EngineRequest, FinishReason], bool] = lambda request, reason: False,
    ) -> None:
        self.executor = executor
        self.matched_count = matched_count
        self.holds = holds
        self.raises: set[str] = set()
        self.loads: dict[RequestId, FakeLoad] = {}
        self.sends: dict[RequestId, FakeSend] = {}
        self.outbox: list[Callable[[], TransferEvent]] = []
        self.finished: dict[RequestId, FinishReason] = {}
        self.asked: set[RequestId] = set()
        self.params: dict[RequestId, KVTransferParams] = {}
        self.expired: list[tuple[RequestId, HoldKind]] = []
        self.violations: list[str] = []
        self.calls: Counter[str] = Counter()
        self.raised_count = 0

    # --- methods for the script ---

    def loaded(self, request_id: RequestId, token_count: int | None = None) -> Loaded:
        """End a load with success, and return the report for the core.

        Args:
            request_id: the request. If it has no open load, no KV is written.
            token_count: number of tokens that arrive. The default is all tokens.
        """
        load = self.loads.pop(request_id, None)
        if load is None:
            return Loaded(request_id, 1 if token_count is None else token_count)
        self._scribble(load)
        count = load.token_count if token_count is None else token_count
        arrived_count = max(0, min(count, load.token_count))
        self.executor.write_prompt(load.request, load.block_table, load.start, arrived_count)
        return Loaded(request_id, count)

    def load_failed(self, request_id: RequestId) -> LoadFailed:
        """End a load with garbage in its blocks, and return the report for the core.

        Args:
            request_id: the request. If it has no open load, only the report is created.
        """
        load = self.loads.pop(request_id, None)
        if load is not None:
            self._scribble(load)
        return LoadFailed(request_id, "the other side is gone")

    def released(self, request_id: RequestId) -> Released:
        """End a send, and return the report for the core.

        Args:
            request_id: the request. If it has no open send, only the report is created.
        """
        send = self.sends.pop(request_id, None)
        if send is not None:
            self._compare(send)
        return Released(request_id)

    def still_read(self, request_id: RequestId) -> StillRead:
        """Return a report that a send is still being read.

        Args:
            request_id: the request. If it has no open send, only the report is created.
        """
        send = self.sends.get(request_id)
        if send is not None:
            self._compare(send)
        return StillRead(request_id)

    def work(self) -> None:
        """Do everything that a connector may do now: write to the blocks of loads, and read the blocks of sends."""
        for load in self.loads.values():
            self._scribble(load)
        for send in self.sends.values():
            self._compare(send)

    def check(self) -> None:
        """Assert that the core has kept the contract so far."""
        self.work()
        assert not self.violations, self.violations

    # --- methods for the core ---

    def num_matched_tokens(self, request: EngineRequest, computed_count: int) -> int:
        self._note("num_matched_tokens")
        self._expect(request.id not in self.finished, f"{request.id} was matched after it had finished")
        self._expect(request.id not in self.loads, f"{request.id} was matched while it is being loaded")
        self._expect(computed_count % self.executor.block_size == 0, f"{request.id}: {computed_count} tokens computed")
        return self.matched_count(request, computed_count)

    def start_load(
        self, request: EngineRequest, block_table: Sequence[BlockIndex], computed_count: int, token_count: int
    ) -> None:
        known_count = len(request.known_token_ids)
        self._expect(request.id not in self.loads, f"{request.id} got a second load while the first is open")
        self._expect(request.id not in self.finished, f"{request.id} got a load after it had finished")
        self._expect(
            0 <= computed_count < computed_count + token_count < known_count,
            f"{request.id}: a load of {token_count} tokens from {computed_count} on, but only {known_count} are known",
        )
        size = self.executor.block_size
        self._expect(computed_count % size == 0, f"{request.id}: a load from {computed_count} on")
        self._expect(
            len(block_table) * size >= computed_count + token_count, f"{request.id}: {len(block_table)} blocks"
        )
        end = computed_count + token_count
        self._expect_blocks(request.id, block_table, end, end)
        load = FakeLoad(request, tuple(block_table), computed_count, token_count)
        self.loads[request.id] = load
        self._note("start_load")
        self._scribble(load)

    def load_abandoned(self, request_id: RequestId) -> None:
        load = self.loads.get(request_id)
        if load is None:
            self._expect(False, f"{request_id} has no load that could be abandoned")
            return
        self._expect(not load.is_abandoned, f"the load of {request_id} is abandoned twice")
        load.is_abandoned = True
        self._note("load_abandoned")

    def request_finished(
        self,
        request: EngineRequest,
        block_table: Sequence[BlockIndex],
        tokens: Sequence[int],
        reason: FinishReason,
    ) -> bool:
        name, load = request.id, self.loads.get(request.id)
        self._expect(name not in self.finished, f"{name} has finished twice")
        self._expect(load is None or load.is_abandoned, f"{name} has finished, but its load is not abandoned")
        block_count = -(-len(tokens) // self.executor.block_size)
        self._expect(len(block_table) == block_count, f"{name}: {len(tokens)} tokens in {len(block_table)} blocks")
        self._expect_blocks(name, block_table, max(0, len(tokens) - 1), len(tokens))
        self.finished[name] = reason
        self._note("request_finished")
        if not self.holds(request, reason):
            return False
        content = self.executor.content(block_table)
        self.sends[name] = FakeSend(request, tuple(block_table), tuple(tokens), content)
        return True

    def transfer_params(self, request_id: RequestId) -> KVTransferParams | None:
        self._expect(request_id in self.sends, f"{request_id}: transfer parameters were read, but nothing is held")
        self._expect(request_id not in self.asked, f"{request_id}: transfer parameters were read twice")
        self.asked.add(request_id)
        self._note("transfer_params")
        self.params[request_id] = KVTransferParams(do_remote_prefill=True, remote_request_id=request_id)
        return self.params[request_id]

    def progress(self) -> Iterable[TransferEvent]:
        """Return the events of the outbox. If this call raises, the events stay in the outbox."""
        self._note("progress")
        made, self.outbox = self.outbox, []
        return [make() for make in made]

    def request_aborted_after_finish(self, request_id: RequestId) -> None:
        send = self.sends.get(request_id)
        if send is None:
            self._expect(False, f"{request_id} is aborted after its end, but has no open send")
            return
        self._expect(not send.is_aborted, f"{request_id} is aborted twice after its end")
        send.is_aborted = True
        self._note("request_aborted_after_finish")

    def hold_expired(self, request_id: RequestId, kind: HoldKind) -> None:
        self.expired.append((request_id, kind))
        if kind is HoldKind.SEND:
            send = self.sends.pop(request_id, None)
            self._expect(send is not None, f"a send of {request_id} expires, but there is none")
            if send is not None:
                self._compare(send)
        else:
            load = self.loads.pop(request_id, None)
            self._expect(
                load is not None and load.is_abandoned, f"a load of {request_id} expires, but no abandoned load is open"
            )
            if load is not None:
                self._scribble(load)
        self._note("hold_expired")

    # --- helpers ---

    def _note(self, call: str) -> None:
        self.calls[call] += 1
        if call in self.raises:
            self.raised_count += 1
            raise RuntimeError(f"{call} is broken")

    def _expect(self, holds: bool, violation: str) -> None:
        if not holds:
            self.violations.append(violation)

    def _expect_blocks(self, name: RequestId, block_table: Sequence[BlockIndex], position: int, end: int) -> None:
        """Check that a block table has every block before `end` that the token at `position` attends to."""
        size, window = self.executor.block_size, self.executor.window_tokens
        first = 0 if window is None else max(0, position - window + 1) // size
        table = block_table[first : -(-end // size)]
        self._expect(
            NO_BLOCK not in table,
            f"{name}: {end} tokens in {list(block_table)}, where only the first {first} may be missing",
        )

    def _scribble(self, load: FakeLoad) -> None:
        self.executor.spoil(load.block_table, load.start, load.token_count)

    def _compare(self, send: FakeSend) -> None:
        is_same = self.executor.content(send.block_table) == send.content
        self._expect(is_same, f"a block of {send.request.id} was overwritten while it is being sent")


class ScriptedConnector(FakeConnector):
    """Connector for open_fake_engine(connector=ScriptedConnector).

    It holds the blocks of a finished request with do_remote_decode, and matches all tokens of a prompt with
    do_remote_prefill. No transfer ends by itself. A test ends all transfers with `release_all`, `load_all` or
    `fail_loads`, or ends a single transfer with `report(lambda: connector.released(id))`.

    Args:
        executor: the executor with the KV blocks.
        wake: wakes the engine, which then takes the reports.

    Attributes:
        totals: counters that the connector shows, by metric name without "kv_transfer_".
    """

    def __init__(self, executor: FakeExecutor, wake: Callable[[], None]) -> None:
        super().__init__(executor, matched_count=_matched_count, holds=_holds)
        self.totals: dict[str, float] = {}
        self._wake = wake
        self._reports: list[Callable[[], TransferEvent]] = []
        self._error: Exception | None = None
        self._is_broken = trio.Event()

    # --- methods for the test ---

    def report(self, happen: Callable[[], TransferEvent]) -> None:
        """Wake the engine, and report an event when the engine takes the reports.

        Args:
            happen: creates the event at that time.
        """
        self._reports.append(happen)
        self._wake()

    def release_all(self) -> None:
        """Report that all held blocks may be freed."""
        for request_id in list(self.sends):
            self.report(partial(self.released, request_id))

    def load_all(self) -> None:
        """Report that all loads have arrived completely."""
        for request_id in list(self.loads):
            self.report(partial(self.loaded, request_id))

    def fail_loads(self) -> None:
        """Report that all loads have failed."""
        for request_id in list(self.loads):
            self.report(partial(self.load_failed, request_id))

    def break_down(self, error: Exception) -> None:
        """Make the connector's task raise an exception. The engine treats the exception as its own fault.

        Args:
            error: the exception.
        """
        self._error = error
        self._is_broken.set()

    # --- methods for the engine ---

    def progress(self) -> Iterable[TransferEvent]:
        events = [*super().progress(), *(happen() for happen in self._reports)]
        self._reports.clear()
        return events

    def counts(self) -> Mapping[str, float]:
        return self.totals

    async def run(self, *, task_status: Started) -> None:
        task_status.started("nowhere")
        await self._is_broken.wait()
        assert self._error is not None
        raise self._error


def _holds(request: EngineRequest, reason: FinishReason) -> bool:
    asked = request.kv_transfer
    return asked is not None and asked.do_remote_decode and reason in (FinishReason.STOP, FinishReason.LENGTH)


def _matched_count(request: EngineRequest, computed_count: int) -> int:
    asked = request.kv_transfer
    if asked is None or not asked.do_remote_prefill:
        return 0
    return max(0, len(request.known_token_ids) - 1 - computed_count)


class NoConnector:
    """Connector that matches no tokens and holds no blocks. It is the smallest correct KVConnector.

    The core must never call the methods for loads and holds. They raise AssertionError. An EngineCore without a
    connector behaves the same way, but makes no calls.
    """

    knows_windows = True

    def num_matched_tokens(self, request: EngineRequest, computed_count: int) -> int:
        return 0

    def start_load(
        self, request: EngineRequest, block_table: Sequence[BlockIndex], computed_count: int, token_count: int
    ) -> None:
        raise AssertionError(f"{request.id}: nothing was matched, so nothing can be loaded")

    def load_abandoned(self, request_id: RequestId) -> None:
        raise AssertionError(f"{request_id}: no load was started, so none can be abandoned")

    def request_finished(
        self,
        request: EngineRequest,
        block_table: Sequence[BlockIndex],
        tokens: Sequence[int],
        reason: FinishReason,
    ) -> bool:
        return False

    def transfer_params(self, request_id: RequestId) -> KVTransferParams | None:
        raise AssertionError(f"{request_id}: no block of it is held")

    def request_aborted_after_finish(self, request_id: RequestId) -> None:
        raise AssertionError(f"{request_id}: no block of it is held")

    def hold_expired(self, request_id: RequestId, kind: HoldKind) -> None:
        raise AssertionError(f"{request_id}: no block of it is held")

    def progress(self) -> Iterable[TransferEvent]:
        return ()
