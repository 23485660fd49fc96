"""A connector whose every response is scripted, and which watches how it is called.

It moves KV between the slots of a FakeExecutor. A load that is out scribbles over everything it may write to whenever
somebody looks (`work`), and a send compares what it reads with what was there when it began: a block that the core
uses too early is noticed on either side. Reports are made here and given to the core by the script, so that they come
late, twice, never, or for nobody; or they wait here until the core asks for progress.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import msgspec

from trioserve.contracts.events import FinishReason
from trioserve.contracts.ids import NO_BLOCK, BlockIndex, RequestId
from trioserve.contracts.kv_transfer import HoldKind, Loaded, LoadFailed, Released, StillRead, TransferEvent
from trioserve.contracts.kv_transfer_params import KVTransferParams
from trioserve.contracts.request import EngineRequest
from trioserve.testing.fake_executor import FakeExecutor

__all__ = ["FakeConnector", "FakeLoad", "FakeSend"]


class FakeLoad(msgspec.Struct):
    """A load that may still write. is_abandoned: nobody waits for it."""

    request: EngineRequest
    block_table: tuple[BlockIndex, ...]
    start: int
    token_count: int
    is_abandoned: bool = False


class FakeSend(msgspec.Struct):
    """A send that may still read. content: of its blocks when it began. is_aborted: nobody wants it."""

    request: EngineRequest
    block_table: tuple[BlockIndex, ...]
    tokens: tuple[int, ...]
    content: tuple[object, ...]
    is_aborted: bool = False


class FakeConnector:
    """A KVConnector (contracts.kv_transfer).

    matched_count: answers num_matched_tokens, from the request and computed_count; change it at any time. holds:
    answers request_finished. raises: names of calls that raise, until taken out again. loads, sends: what is out, by
    request. outbox: makes what the core hears when it asks for progress. finished: the reason of every request that
    ended. params: what the core was told of the blocks that are held, or were. violations: what the core did that it
    must not; `check` asserts that there is none (they are kept, since what a connector raises is only counted by the
    core).
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

    # --- the script's side ---

    def loaded(self, request_id: RequestId, token_count: int | None = None) -> Loaded:
        """The KV arrives, all that was asked for or the first `token_count` tokens. The load is over, if it was out:
        otherwise this is a report about nothing, which writes nothing."""
        load = self.loads.pop(request_id, None)
        if load is None:
            return Loaded(request_id, 1 if token_count is None else token_count)
        self._scribble(load)
        count = load.token_count if token_count is None else token_count
        arrived_count = max(0, min(count, load.token_count))
        self.executor.write_prompt(load.request, load.block_table, load.start, arrived_count)
        return Loaded(request_id, count)

    def load_failed(self, request_id: RequestId) -> LoadFailed:
        """The load ends with garbage in its blocks; of an unknown one it is only said so."""
        load = self.loads.pop(request_id, None)
        if load is not None:
            self._scribble(load)
        return LoadFailed(request_id, "the other side is gone")

    def released(self, request_id: RequestId) -> Released:
        """The send has read what it wanted; of an unknown one it is only said so."""
        send = self.sends.pop(request_id, None)
        if send is not None:
            self._compare(send)
        return Released(request_id)

    def still_read(self, request_id: RequestId) -> StillRead:
        """Somebody reads the send on; of an unknown one it is only said so."""
        send = self.sends.get(request_id)
        if send is not None:
            self._compare(send)
        return StillRead(request_id)

    def work(self) -> None:
        """Use every right that a connector has at this moment: write to what is being loaded, read what is sent."""
        for load in self.loads.values():
            self._scribble(load)
        for send in self.sends.values():
            self._compare(send)

    def check(self) -> None:
        """Assert that the core has kept its side of the contract so far."""
        self.work()
        assert not self.violations, self.violations

    # --- the core's side ---

    def num_matched_tokens(self, request: EngineRequest, computed_count: int) -> int:
        self._note("num_matched_tokens")
        self._expect(request.id not in self.finished, f"{request.id} has finished and is matched")
        self._expect(request.id not in self.loads, f"{request.id} is being loaded and is matched")
        self._expect(computed_count % self.executor.block_size == 0, f"{request.id}: {computed_count} tokens computed")
        return self.matched_count(request, computed_count)

    def start_load(
        self, request: EngineRequest, block_table: Sequence[BlockIndex], computed_count: int, token_count: int
    ) -> None:
        known_count = len(request.known_token_ids)
        self._expect(request.id not in self.loads, f"{request.id} is loaded twice at a time")
        self._expect(request.id not in self.finished, f"{request.id} has finished and is loaded")
        self._expect(
            0 <= computed_count < computed_count + token_count < known_count,
            f"{request.id}: a load of {token_count} tokens from {computed_count} on, and {known_count} are known",
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
            self._expect(False, f"{request_id} has no load and it is abandoned")
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
        self._expect(load is None or load.is_abandoned, f"{name} has finished, and its load goes on")
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
        self._expect(request_id in self.sends, f"{request_id}: nothing is held, and it is asked how to get at that")
        self._expect(request_id not in self.asked, f"{request_id}: it is asked twice how to get at what is held")
        self.asked.add(request_id)
        self._note("transfer_params")
        self.params[request_id] = KVTransferParams(do_remote_prefill=True, remote_request_id=request_id)
        return self.params[request_id]

    def progress(self) -> Iterable[TransferEvent]:
        """What the script has put out; while it raises, that waits."""
        self._note("progress")
        made, self.outbox = self.outbox, []
        return [make() for make in made]

    def request_aborted_after_finish(self, request_id: RequestId) -> None:
        send = self.sends.get(request_id)
        if send is None:
            self._expect(False, f"{request_id} is aborted after its end, and it holds nothing")
            return
        self._expect(not send.is_aborted, f"{request_id} is aborted twice after its end")
        send.is_aborted = True
        self._note("request_aborted_after_finish")

    def hold_expired(self, request_id: RequestId, kind: HoldKind) -> None:
        self.expired.append((request_id, kind))
        if kind is HoldKind.SEND:
            send = self.sends.pop(request_id, None)
            self._expect(send is not None, f"a send of {request_id} expires, and there is none")
            if send is not None:
                self._compare(send)
        else:
            load = self.loads.pop(request_id, None)
            self._expect(load is not None and load.is_abandoned, f"a load of {request_id} expires, and none is left")
            if load is not None:
                self._scribble(load)
        self._note("hold_expired")

    # --- inside ---

    def _note(self, call: str) -> None:
        self.calls[call] += 1
        if call in self.raises:
            self.raised_count += 1
            raise RuntimeError(f"{call} is broken")

    def _expect(self, holds: bool, violation: str) -> None:
        if not holds:
            self.violations.append(violation)

    def _expect_blocks(self, name: RequestId, block_table: Sequence[BlockIndex], position: int, end: int) -> None:
        """A block in each place before position `end` that the token at `position` sees."""
        size, window = self.executor.block_size, self.executor.window_tokens
        first = 0 if window is None else max(0, position - window + 1) // size
        table = block_table[first : -(-end // size)]
        self._expect(NO_BLOCK not in table, f"{name}: {end} tokens in {list(block_table)}, and {first} may be missing")

    def _scribble(self, load: FakeLoad) -> None:
        self.executor.spoil(load.block_table, load.start, load.token_count)

    def _compare(self, send: FakeSend) -> None:
        is_same = self.executor.content(send.block_table) == send.content
        self._expect(is_same, f"what is sent of {send.request.id} has been overwritten")
