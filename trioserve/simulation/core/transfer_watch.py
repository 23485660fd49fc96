"""The fake connector of a simulation, and the rules for its transfers with the core.

The fake connector records its calls and its open transfers: loads, and sends. A send is a hold on the blocks of an
ended request, which another engine may read. From these records follow the held blocks with their deadlines, the
reports that belong to no transfer, and the calls that the core must have made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence

from trioserve.contracts.events import EngineEvent, FinishReason, RequestFinished
from trioserve.contracts.ids import NO_BLOCK, BlockIndex, RequestId
from trioserve.contracts.kv_transfer import HoldKind, LoadFailed, TransferEvent, TransferFault
from trioserve.contracts.request import EngineRequest
from trioserve.core.engine import EngineCore
from trioserve.core.prefetches import LOADING_MAX, LOADING_SHARE
from trioserve.simulation.core.expected import ExpectedSequence
from trioserve.simulation.core.history import Arrive, Break, Report, World
from trioserve.testing.fake_executor import FakeExecutor
from trioserve.testing.scripted_connector import FakeConnector, FakeLoad

__all__ = ["TransferWatch"]

STRAY = (TransferFault.UNKNOWN, TransferFault.DOUBLE, TransferFault.LATE)


def is_prefetch(name: str) -> bool:
    """Return True for the id of a prefetch. No request of a history has such an id.

    Args:
        name: id of a load.
    """
    return name.startswith("prefetch-")


class TransferWatch:
    """Checks the connector of a simulation.

    Args:
        world: the engine.
        executor: the executor with the KV blocks.

    Attributes:
        connector: the fake connector. Create the core with it.
    """

    def __init__(self, world: World, executor: FakeExecutor) -> None:
        self.connector = FakeConnector(executor, matched_count=self._matched_count, holds=self._holds)
        self._world = world
        self._remote_counts: dict[str, int] = {}
        self._sent: set[str] = set()
        self._stray_count = 0
        self._aborted_after_end: set[str] = (
            set()
        )  # requests that were aborted after their end, possibly before the connector was notified of the end
        self._was_sent: set[str] = set()
        self._expired_count = 0
        self._waiting: list[Report] = []
        self._asked_at = 0.0
        # A deadline is recorded after the event that began the load or the hold, or that changed the deadline.
        self._load_deadlines: dict[str, float] = {}
        self._known_prefetches: set[str] = set()
        self._prefetched_count = 0  # number of tokens that prefetches have loaded
        self._hold_deadlines: dict[tuple[str, HoldKind], float] = {}

    def note_arrival(self, name: str, event: Arrive) -> None:
        self._remote_counts[name] = event.remote
        if event.is_sent:
            self._sent.add(name)

    def note_abort(self, ended_names: Iterable[str]) -> None:
        """Check that the connector was notified of each abort of a request that had already ended.

        The connector must also be notified if it begins to hold the request's blocks only after the abort.

        Args:
            ended_names: the aborted requests that had already ended.
        """
        self._aborted_after_end.update(ended_names)
        self._check_aborts_known()

    def _check_aborts_known(self) -> None:
        for name, send in self.connector.sends.items():
            is_notified = send.is_aborted or name not in self._aborted_after_end
            assert is_notified, f"{name} was aborted after its end, but the connector was not notified"

    def is_loading(self, name: str) -> bool:
        """Return True if a request waits for its KV.

        Args:
            name: the request.
        """
        load = self.connector.loads.get(RequestId(name))
        return load is not None and not load.is_abandoned

    def could_load(self, name: str) -> bool:
        """Return True if some KV of a request can be loaded.

        Args:
            name: the request.
        """
        return self._remote_counts[name] > 0

    def may_wait_to_load(self, name: str, ready_count: int) -> bool:
        """Return True if a request may have to wait to load its KV.

        It may have to wait if the number of requests that load KV or have loaded it reaches the number of slots.

        Args:
            name: the request.
            ready_count: requests that have loaded their KV and wait to run.
        """
        pending_count = sum(
            not (load.is_abandoned or is_prefetch(load_name)) for load_name, load in self.connector.loads.items()
        )
        return self._remote_counts[name] > 0 and pending_count + ready_count >= self._world.max_num_seqs

    def prefetches(self) -> list[FakeLoad]:
        """Return the pending prefetches of waiting sessions."""
        return [load for name, load in self.connector.loads.items() if is_prefetch(name) and not load.is_abandoned]

    def awaits(self, request: EngineRequest, known: Sequence[int]) -> bool:
        """Return True if a request may wait, because its session's prefetch loads its prefix.

        Args:
            known: the request's known tokens.
        """
        for load in self.prefetches():
            prefix = load.request.prompt_token_ids[: load.start + load.token_count]
            is_own = load.request.session == request.session and load.request.cache_salt == request.cache_salt
            if is_own and len(known) > len(prefix) and tuple(known[: len(prefix)]) == prefix:
                return True
        return False

    def check_prefetches(self, open_sessions: Container[str], protected: Container[int], block_size: int) -> int:
        """Check the limits of prefetches, that each has an open session, and that new ones have evicted nothing else.

        Args:
            open_sessions: ids of the open sessions.
            protected: blocks that sessions retained before the event, and may still retain.
            block_size: tokens of a block.

        Returns:
            The number of prefetches that were not there at the last call.
        """
        new_count = written_count = 0
        for load in self.prefetches():
            name, written = load.request.id, load.block_table[load.start // block_size :]
            assert load.request.session in open_sessions, f"{name} outlives its session {load.request.session}"
            written_count += len(written)
            if name not in self._known_prefetches:
                self._known_prefetches.add(name)
                new_count += 1
                taken = [block for block in written if block in protected]
                assert not taken, f"{name} evicts blocks {taken}, which sessions retain"
        assert len(self.prefetches()) <= LOADING_MAX, f"{len(self.prefetches())} prefetches at a time"
        written_max = int(self._world.block_count * LOADING_SHARE)
        assert written_count <= written_max, f"prefetches load {written_count} blocks, but {written_max} are allowed"
        return new_count

    def record_break(self, event: Break) -> None:
        self.connector.raises = set(event.calls)

    def report(
        self, core: EngineCore, report: Report, live: Mapping[str, ExpectedSequence], now: float
    ) -> list[EngineEvent]:
        """Pass the connector's report to the core, at once or when the core asks.

        Args:
            live: sequences that have not ended.
            now: the time.

        Returns:
            Events of the core. There are none if the report waits.
        """
        if not report.waits or not self._may_wait(report):
            return core.on_transfer(self._made(report, live, now), now)
        self._waiting.append(report)
        self.connector.outbox.append(lambda: self._made(report, live, self._asked_at))
        return []

    def ask(self, core: EngineCore, now: float) -> list[EngineEvent]:
        """Let the core ask for the waiting reports, and return the core's events.

        Args:
            now: the time.
        """
        self._asked_at = now
        is_notified = "progress" not in self.connector.raises
        events = core.progress(now)
        if is_notified:
            self._waiting.clear()
        assert not (is_notified and self.connector.outbox), "the core has not taken the waiting reports"
        return events

    def _may_wait(self, report: Report) -> bool:
        """Return False for a report that must not wait together with the reports that already wait.

        The connector makes all waiting reports before the core processes the first one. But the end of a load may end
        its request, and then the connector may begin to hold the request's blocks. So no report about this hold may
        wait together with the end of the load.
        """
        ends_load = report.what in ("loaded", "failed")
        others = [other for other in self._waiting if other.id == report.id]
        return not any(ends_load or other.what in ("loaded", "failed") for other in others)

    def _made(self, report: Report, live: Mapping[str, ExpectedSequence], now: float) -> TransferEvent:
        """Let the connector make a report, and record the effect on the request."""
        connector, request_id = self.connector, RequestId(report.id)
        event: TransferEvent
        if report.what == "read":
            self._stray_count += report.id not in self._was_sent
            event = connector.still_read(request_id)
            if request_id in connector.sends:
                self._hold_deadlines[report.id, HoldKind.SEND] = now + self._world.hold_seconds
        elif report.what == "released":
            self._stray_count += request_id not in connector.sends
            event = connector.released(request_id)
        else:
            load = connector.loads.get(request_id)
            self._stray_count += load is None
            if report.what == "failed":
                event = connector.load_failed(request_id)
            else:
                event = connector.loaded(request_id, report.tokens)
            if load is not None and not load.is_abandoned:
                if is_prefetch(report.id):
                    count = 0 if isinstance(event, LoadFailed) else event.token_count
                    self._prefetched_count += count if 0 <= count <= load.token_count else 0
                else:
                    self._note_load(live[report.id], load, event)
        return event

    def overdue(self, live: Mapping[str, ExpectedSequence], now: float) -> None:
        """Mark the requests whose deadline for KV has passed. Call this method before the core's `expire`.

        Args:
            live: sequences that have not ended.
            now: the time.
        """
        for name, deadline in self._load_deadlines.items():
            if deadline <= now and not is_prefetch(name):
                live[name].lacks_kv = self._world.fails_without_kv

    def check(self, core: EngineCore, now: float) -> None:
        """Assert that the core keeps the contract of connectors. Call this method at any time.

        Args:
            now: the time.
        """
        connector = self.connector
        connector.check()
        self._check_aborts_known()
        self._check_asked()
        self._check_not_early(now)
        holds: Counter[BlockIndex] = Counter()
        hold_deadlines: dict[tuple[str, HoldKind], float] = {}
        load_deadlines: dict[str, float] = {}
        hold_deadline = now + self._world.hold_seconds
        # The connector reports nothing about a load that could not begin, so the load's deadline is now.
        load_deadline = now if "start_load" in connector.raises else now + self._world.load_seconds
        for name, send in connector.sends.items():
            holds.update(block for block in send.block_table if block != NO_BLOCK)
            hold_deadlines[name, HoldKind.SEND] = self._hold_deadlines.get((name, HoldKind.SEND), hold_deadline)
        for name, load in connector.loads.items():
            written = load.block_table[load.start // self._world.block_size :]
            written = tuple(block for block in written if block != NO_BLOCK)
            if load.is_abandoned:
                holds.update(written)
                hold_deadlines[name, HoldKind.LOAD] = self._hold_deadlines.get((name, HoldKind.LOAD), hold_deadline)
            else:
                load_deadlines[name] = self._load_deadlines.get(name, load_deadline)
                for block in written:
                    assert core.pool.user_count(block) == 1, f"block {block} is loaded for {name}, but has other users"
        self._hold_deadlines, self._load_deadlines = hold_deadlines, load_deadlines
        for index in range(core.pool.block_count):
            block = BlockIndex(index)
            count = core.pool.hold_count(block)
            assert count == holds[block], f"block {block} counts {count} holds, but the connector has {holds[block]}"
        deadlines = (*hold_deadlines.values(), *load_deadlines.values())
        assert core.transfers is not None
        deadline = core.transfers.next_deadline()
        assert deadline == min(deadlines, default=None), f"the next deadline of a transfer is {deadline}"
        raised_count = core.transfers.faults.totals[TransferFault.RAISED]
        assert raised_count == connector.raised_count, (
            f"{connector.raised_count} calls raised, but {raised_count} are counted"
        )
        stray_count = sum([core.transfers.faults.totals[fault] for fault in STRAY])
        assert stray_count == self._stray_count, (
            f"{self._stray_count} reports named no hold and no load, but {stray_count} are counted"
        )

    def check_params(self, event: RequestFinished) -> None:
        """Check that the event for a request's end contains the transfer parameters of the held blocks."""
        name = event.request_id
        expected = self.connector.params.get(name) if name in self.connector.finished else None
        assert event.kv_transfer == expected, (
            f"{name}: its end has {event.kv_transfer}, but the connector returned {expected}"
        )

    def check_expired(self, now: float) -> None:
        """Assert that no hold and no load is past its deadline. Call this method after the core's `expire`.

        Args:
            now: the time.
        """
        for (name, kind), deadline in self._hold_deadlines.items():
            assert now < deadline, f"{name} is held until {deadline} ({kind.value}), but the time is {now}"
        for name, deadline in self._load_deadlines.items():
            assert now < deadline, f"{name} waits for its KV until {deadline}, but the time is {now}"

    def check_end(self, core: EngineCore, entries: Mapping[str, ExpectedSequence]) -> None:
        """Check that the connector was notified of every request's end and reason, and has no open transfers.

        Args:
            core: the core, for its counts of prefetches.
            entries: all sequences. All of them have ended.
        """
        connector = self.connector
        assert not connector.loads, f"loads have not ended: {sorted(connector.loads)}"
        assert not connector.sends, f"sends have not ended: {sorted(connector.sends)}"
        ends = {entry.request.id: entry.finished.reason for entry in entries.values() if entry.finished is not None}
        # The connector sees a request that was handed over as one that has stopped.
        ends = {id: FinishReason.STOP if end is FinishReason.HANDED_OVER else end for id, end in ends.items()}
        count = core.stats().session_prefetched_tokens_total
        assert count == self._prefetched_count, (
            f"prefetches loaded {self._prefetched_count} tokens, but {count} are counted"
        )
        missing = self._known_prefetches - connector.finished.keys()
        assert not missing, f"the connector was not notified of the end of {sorted(missing)}"
        finished = {name: reason for name, reason in connector.finished.items() if not is_prefetch(name)}
        assert finished == ends, "the ends that the connector knows differ from the real ones"

    # --- Helpers ---

    def _check_asked(self) -> None:
        """Check that the core has read the transfer parameters of each new hold once."""
        connector = self.connector
        new = connector.sends.keys() - self._was_sent
        assert new <= connector.asked, (
            f"{sorted(new - connector.asked)}: held, but the core has not read the transfer parameters"
        )
        self._was_sent |= new

    def _check_not_early(self, now: float) -> None:
        new, self._expired_count = self.connector.expired[self._expired_count :], len(self.connector.expired)
        for name, kind in new:
            deadline = self._hold_deadlines[name, kind]
            assert deadline <= now, f"{name} was held until {now} ({kind.value}), but its deadline is {deadline}"

    def _matched_count(self, request: EngineRequest, computed_count: int) -> int:
        count = len(request.prompt_token_ids) if is_prefetch(request.id) else self._remote_counts[request.id]
        return max(0, count - computed_count)

    def _holds(self, request: EngineRequest, _reason: FinishReason) -> bool:
        return request.id in self._sent

    def _note_load(self, entry: ExpectedSequence, load: FakeLoad, event: TransferEvent) -> None:
        count = 0 if isinstance(event, LoadFailed) else event.token_count  # type: ignore[union-attr]
        seen_from = 0
        if self._world.window_tokens is not None:
            seen_from = max(0, load.start + count - self._world.window_tokens + 1) // self._world.block_size
        if 0 < count <= load.token_count and NO_BLOCK not in load.block_table[seen_from:]:
            entry.loaded_count = count
        else:
            entry.lacks_kv = self._world.fails_without_kv
