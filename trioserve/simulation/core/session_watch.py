"""Expected state of a simulation's sessions: which of them may retain blocks, and which turns may be deferred."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import msgspec

from trioserve.contracts.ids import RequestId
from trioserve.contracts.request import DEFAULT_RETENTION, Retention
from trioserve.core.engine import EngineCore
from trioserve.core.prefix_cache import PrefixChain
from trioserve.simulation.core.expected import ExpectedSequence
from trioserve.simulation.core.history import EndSession, HintSession, OpenSession, World
from trioserve.simulation.core.step_rules import block_count
from trioserve.simulation.core.transfer_watch import TransferWatch

__all__ = ["SessionWatch"]


class OpenedSession(msgspec.Struct, eq=False):
    """An open session.

    Attributes:
        idle_seconds: how long the pool prefers to keep the session's blocks after the last turn or hint.
        expires_at: time at which this preference ends if no request is live, in seconds.
        live: ids of the session's live requests.
        blocks: blocks that the session's requests have used since the preference last ended.
        has_waited: True if the session has waited for its next turn.
        priority: best priority of the session's requests. None before the first request.
    """

    idle_seconds: float
    expires_at: float
    live: set[str] = msgspec.field(default_factory=set)
    blocks: set[int] = msgspec.field(default_factory=set)
    has_waited: bool = False
    priority: int | None = None


class SessionWatch:
    """Records the sessions of one simulation, and checks what the core retains for them.

    Args:
        world: the engine.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._open: dict[str, OpenedSession] = {}
        self._session_of: dict[str, OpenedSession] = {}  # The session of each live request, which may have ended.
        self._tenants: set[str | None] = {None}
        self._deferred_since: dict[str, float] = {}  # Time at which each turn was first found deferred.

    def open(self, core: EngineCore, event: OpenSession, now: float) -> None:
        """Let the core open a session, or change the retention of an open one.

        Args:
            event: event of the history, with id and retention.
            now: time in seconds.
        """
        retention = Retention(weight=event.weight, idle_seconds=event.idle, tenant=event.tenant)
        core.open_session(event.id, retention, now)
        self._tenants.add(event.tenant)
        opened = self._open.setdefault(event.id, OpenedSession(event.idle, now))
        opened.idle_seconds, opened.expires_at = event.idle, now + event.idle

    def end(self, core: EngineCore, event: EndSession, now: float) -> None:
        """Let the core end a session, which need not be open.

        Args:
            event: event of the history, with the id.
            now: time in seconds.
        """
        before = core.stats()
        core.end_session(event.id, now)
        self._open.pop(event.id, None)
        after = core.stats()
        assert (before.blocks_cached, before.blocks_free) == (after.blocks_cached, after.blocks_free), (
            f"the end of {event.id} changed which blocks are cached: {before}, then {after}"
        )

    def hint(self, core: EngineCore, event: HintSession, now: float) -> None:
        """Let the core note that the next turn of a session is expected. The session need not be open.

        Args:
            event: event of the history, with the id and the expected time.
            now: time in seconds.
        """
        core.hint_session(event.id, event.seconds, now)
        opened = self._open.get(event.id)
        if opened is not None:
            self._forget_expired(now)
            opened.expires_at = now + min(event.seconds, opened.idle_seconds) + opened.idle_seconds

    def note_arrival(self, name: str, session: str, priority: int, now: float) -> None:
        """Note that a request of a session was accepted.

        Args:
            name: id of the request.
            session: id of the session. It is opened if it is not open.
            priority: priority of the request.
            now: time in seconds.
        """
        opened = self._open.setdefault(session, OpenedSession(DEFAULT_RETENTION.idle_seconds, now))
        opened.live.add(name)
        opened.priority = priority if opened.priority is None else min(priority, opened.priority)
        self._session_of[name] = opened

    def note_end(self, name: str, now: float) -> None:
        """Note the end of a request. The core may keep its blocks until a step in flight has returned.

        Args:
            name: id of the request.
            now: time in seconds.
        """
        opened = self._session_of.pop(name, None)
        if opened is not None:
            opened.live.remove(name)
            opened.has_waited |= not opened.live
            opened.expires_at = max(opened.expires_at, now + opened.idle_seconds)

    def note_forgotten(self) -> None:
        """Note that the prefix cache has forgotten all blocks. Only live requests may publish their blocks later."""
        for opened in self._open.values():
            if not opened.live:
                opened.blocks.clear()

    def protected_blocks(self, core: EngineCore, now: float) -> set[int]:
        """Return the blocks that open sessions retain, and may still retain at the given time.

        Args:
            core: the core under test.
            now: time in seconds.
        """
        retained: set[int] = set(core.pool.order.retained_blocks())
        waiting = (opened for opened in self._open.values() if opened.live or opened.expires_at > now)
        return retained & {block for opened in waiting for block in opened.blocks}

    def check_prefetches(self, transfers: TransferWatch, protected: Collection[int]) -> int:
        """Check the prefetches, and note that their sessions may retain their blocks.

        Args:
            transfers: the watch of the transfers.
            protected: result of `protected_blocks` before the event that may have started prefetches.

        Returns:
            The number of new prefetches.
        """
        for load in transfers.prefetches():
            if load.request.session in self._open:
                self._open[load.request.session].blocks.update(load.block_table)
        return transfers.check_prefetches(self._open, protected, self._world.block_size)

    def check(self, core: EngineCore, now: float) -> None:
        """Assert that the core retains only blocks of open sessions that are not idle for too long.

        Args:
            core: the core. It has noted the time `now`.
            now: time in seconds.
        """
        self._forget_expired(now)
        for name, opened in self._session_of.items():
            opened.blocks.update(core.blocks_of(RequestId(name)))
        retained = set(core.pool.order.retained_blocks())
        allowed = {block for opened in self._open.values() for block in opened.blocks}
        assert retained <= allowed, f"blocks {sorted(retained - allowed)} are retained, but no session may retain them"
        blocks_max = len(self._tenants) * int(self._world.block_count * self._world.session_share)
        assert len(retained) <= blocks_max, f"{len(retained)} blocks are retained, but the limit is {blocks_max}"
        stats = core.stats()
        assert stats.sessions_active + stats.sessions_waiting == len(self._open), (
            f"{list(self._open)} are open: {stats}"
        )

    def check_deferred(self, core: EngineCore, live: Mapping[str, ExpectedSequence], now: float) -> int:
        """Assert that each deferred request is a cold turn that would evict blocks of others, and is not overdue.

        Args:
            core: a core that has just planned a step, or found nothing to compute.
            live: sequences that have not ended.
            now: time in seconds.

        Returns:
            The number of deferred requests that were not deferred before.
        """
        new_count = 0
        for name in [deferred.request.id for deferred in core.scheduler.deferred]:
            assert name in live, f"{name} has ended, but is still deferred"
            entry, own = live[name], self._session_of.get(name)
            assert own is not None, f"{name} has no session, but is deferred"
            assert entry.cached_count is None, f"{name} has run before, but is deferred"
            if name not in self._deferred_since:
                new_count += 1
                self._deferred_since[name] = now
                states = core.scheduler.states
                can_end_at = None if states is None else states.has_snapshot
                hit_count = len(core.cache.match(PrefixChain(entry.request.cache_salt), entry.known, can_end_at))
                # The core notes the end of a request when the step that reads the request's blocks has returned.
                is_first = bool(core.flights.ended) or not (own.has_waited or own.live - {name})
                assert is_first or entry.needs_every_row or 2 * hit_count * self._world.block_size < len(entry.known), (
                    f"{name} is deferred, but {hit_count} blocks of its prompt are cached"
                )
                assert not entry.output_count, f"{name} resumes a response, but is deferred"
                reason = "its blocks are available without those of other sessions"
                assert self.may_defer(core, entry), f"{name} is deferred, but {reason}"
            seconds = now - self._deferred_since[name]
            assert seconds < self._world.cold_turn_seconds, f"{name} is deferred for {seconds} s"
        return new_count

    def may_defer(self, core: EngineCore, entry: ExpectedSequence) -> bool:
        """Return True if a request needs blocks of other sessions that may return, none of which has a worse priority.

        Args:
            core: the core under test.
            entry: a request of a session.
        """
        own = self._session_of[entry.request.id]
        others = [opened for opened in self._open.values() if opened is not own]
        if all(opened.priority is None or opened.priority > entry.request.priority for opened in others):
            return False
        blocks = {block for opened in others for block in opened.blocks}
        spared_count = core.pool.available_count - len(blocks.intersection(core.pool.order.retained_blocks()))
        return block_count(core, entry) > spared_count

    def check_end(self, core: EngineCore, now: float) -> int:
        """Assert that no block is retained once all requests have ended and all sessions were idle for idle_seconds.

        Args:
            core: a core without requests.
            now: time in seconds.

        Returns:
            The number of blocks that were retained before.
        """
        count = core.stats().blocks_retained
        assert core.stats().sessions_active == 0, f"no request is left, but {core.stats()}"
        for name in self._open if not self._world.prefetches else ():  # A hint may start another prefetch.
            self.hint(core, HintSession(id=name, seconds=1e6), now)
        for time in sorted(opened.expires_at for opened in self._open.values()):
            core.schedule(max(now, time))
            self.check(core, max(now, time))
        assert core.stats().blocks_retained == 0, f"the preference of all sessions is over, but {core.stats()}"
        return count

    def _forget_expired(self, now: float) -> None:
        for opened in self._open.values():
            if not opened.live and opened.expires_at <= now:
                opened.blocks.clear()
