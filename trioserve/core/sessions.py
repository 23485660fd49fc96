"""Sessions and the chains of blocks that they retain between two turns.

A session is a sequence of requests that continue each other, such as the turns of an agent. Between two turns it waits,
for a tool or for a person. Its blocks then count as used later than they were (eviction_order.py). This preference is
soft. It decays with the time since the last turn, ends after idle_seconds, and is limited per tenant. It is also
scaled with the tenant's rate of returns: blocks of sessions that do not continue are evicted by recency.

    open ──request──► active ──last request ends──► waiting ──request──► active
                                                    waiting ──idle_seconds──► waiting, without a preference
    any state ──end_session──► ended: its blocks that no other request used are evicted first
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from trioserve.contracts.ids import BlockIndex
from trioserve.contracts.request import DEFAULT_RETENTION, EngineRequest, Retention
from trioserve.core.eviction_order import BONUS_SECONDS, STALE_MAX, Chain, TenantShare
from trioserve.core.kv_blocks import BlockPool
from trioserve.core.settings import CoreSettings

__all__ = ["Session", "Sessions"]

LAPSE_SECONDS: Final = 15.0  # A session that waits for longer than this counts as one that does not return.
# Prefix length, in tokens, from which on a block costs twice as much to compute as a block of a short prefix, because
# of attention. It is a typical value, which depends on the model.
DEPTH_TOKENS: Final = 32_768
CHAINS_MAX: Final = 4  # Maximum number of chains per session. An agent and each agent that it starts have a chain.
TENANTS_MAX: Final = 4096  # Maximum number of tenants whose rate of returns is stored.


class Session:
    """The state of one session.

    Args:
        serial: number of the session, above 0. It is unique in this core.
        retention: how strongly the session's blocks are preferred.
        share: the share of the session's tenant.

    Attributes:
        chains: the blocks that the session retains. The chain that was used last comes last.
        live_count: live requests of the session.
        expires_at: time at which the preference ends if no turn or hint follows, in seconds.
        is_open: False after the session has ended, or was forgotten because there were too many sessions.
        lapses_at: time at which the current wait counts as one without a return, in seconds. None between waits.
        turn_count: number of times that the session began to wait after a turn.
        is_expected: True while the session's next turn is expected soon, or waits and is not cold.
        priority: priority of the session's last turn.
        watched_at: time of the session's current entry in the heap of expiries. None if it has none.
    """

    __slots__ = (
        "chains",
        "expires_at",
        "is_expected",
        "is_open",
        "lapses_at",
        "live_count",
        "priority",
        "retention",
        "serial",
        "share",
        "turn_count",
        "watched_at",
    )

    def __init__(self, serial: int, retention: Retention, share: TenantShare) -> None:
        self.serial = serial
        self.retention = retention
        self.share = share
        self.chains: list[Chain] = []
        self.live_count = 0
        self.expires_at = 0.0
        self.is_open = True
        self.lapses_at: float | None = None
        self.turn_count = 0
        self.is_expected = False
        self.priority = 0
        self.watched_at: float | None = None


class Sessions:
    """The open sessions of one engine core.

    Args:
        settings: limits of the engine core.
        pool: the pool whose eviction order the sessions change.

    Attributes:
        hits_total: requests of sessions that started with tokens from the prefix cache.
        hit_tokens_total: prompt tokens of these requests that were found in the prefix cache.
        on_close: called with each session that ends or is forgotten, while it still retains its blocks.

    Cost:
        O(log sessions) for each call, plus O(log blocks) for each block that a session ceases to retain.
    """

    def __init__(self, settings: CoreSettings, pool: BlockPool) -> None:
        self._pool = pool
        self._order = pool.order
        self._block_size = settings.block_size
        self._sessions_max = settings.sessions_max
        self._is_retaining = settings.session_retention and settings.enable_prefix_caching
        self._expects = self._is_retaining and settings.cold_turn_seconds > 0
        self._expected_priorities: Counter[int] = Counter()  # Number of expected sessions by priority.
        self._blocks_max = int(settings.block_count * settings.session_share_max)
        self._sessions: OrderedDict[str, Session] = OrderedDict()  # The session that was active last comes last.
        self._shares: OrderedDict[str | None, TenantShare] = OrderedDict()
        self._serials = itertools.count(1)
        self._expiries: list[tuple[float, int, Session]] = []
        self.active_count = 0
        self.on_close: Callable[[Session], None] = lambda session: None
        self.hits_total = 0
        self.hit_tokens_total = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, session_id: str) -> Session | None:
        return self._sessions.get(session_id)

    def retained_count(self, session_id: str) -> int:
        """Return how many blocks a session retains. 0 for an unknown session.

        Args:
            session_id: id of any session.
        """
        session = self._sessions.get(session_id)
        return 0 if session is None else len({listing for chain in session.chains for listing in chain.listings})

    def expects(self, priority: int) -> bool:
        """Return True if a session is expected whose last turn had this priority or a better one.

        Args:
            priority: priority of a request.
        """
        return any(one <= priority for one in self._expected_priorities)

    def next_change(self) -> float:
        """Return the earliest time at which a session may cease to be expected. Infinite if there is no such time."""
        return self._expiries[0][0] if self._expiries else math.inf

    def advance(self, now: float) -> None:
        """Note the time, and end the preference of sessions that were idle for too long.

        Args:
            now: time in seconds.
        """
        self._order.now = now = max(now, self._order.now)
        while self._expiries and self._expiries[0][0] <= now:
            watched_at, _serial, session = heapq.heappop(self._expiries)
            if watched_at != session.watched_at:
                continue  # A later change has made the expiry earlier.
            session.watched_at = None
            if session.live_count or not session.is_open:
                continue  # The end of its last request starts the next wait.
            if session.lapses_at is not None and min(session.lapses_at, session.expires_at) <= now:
                self._note_wait(session, returned=False)
                session.lapses_at = None
                self._expect(session, is_expected=False)
            if session.expires_at > now:
                self._watch(session)
            else:
                self._drop_chains(session)

    def open(self, session_id: str, retention: Retention, now: float) -> Session:
        """Open a session, or change the retention of an open session.

        Args:
            retention: how strongly the session's blocks are preferred. Chains that exist keep their tenant.
            now: time in seconds.
        """
        self.advance(now)
        session = self._sessions.get(session_id)
        if session is not None:
            session.retention, session.share = retention, self._share(retention.tenant)
            self._start_wait(session)
            return session
        session = Session(next(self._serials), retention, self._share(retention.tenant))
        self._sessions[session_id] = session
        if len(self._sessions) > self._sessions_max:
            self._forget_one()
        return session

    def end(self, session_id: str, now: float) -> None:
        """End a session. Blocks that no other request used are evicted first from now on.

        Args:
            session_id: id of any session. Nothing happens if it is not open.
            now: time in seconds.
        """
        self.advance(now)
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self._close(session)
            dropped = self._drop_chains(session)
            self._order.evict_soon(self._own_blocks(session, reversed(dropped)))

    def hint(self, session_id: str, seconds: float, now: float) -> float:
        """Note that the next turn of a session is expected.

        Args:
            session_id: id of any session. Nothing happens if it is not open.
            seconds: expected time until the next turn. Limited to 0 and the session's idle_seconds.
            now: time in seconds.

        Returns:
            The limited time until the next turn.
        """
        self.advance(now)
        session = self._sessions.get(session_id)
        if session is not None:
            seconds = min(max(seconds, 0.0), session.retention.idle_seconds)
            self._sessions.move_to_end(session_id)
            self._start_wait(session, seconds)
        return seconds

    # --- Requests ---

    def join(self, request: EngineRequest) -> Session | None:
        """Note a new request. If it names a session that is not open, open the session.

        Returns:
            The request's session. None if it names none.
        """
        session_id = request.session
        if session_id is None:
            return None
        session = self._sessions.get(session_id)
        if session is None:
            session = self.open(session_id, DEFAULT_RETENTION, self._order.now)
        self._sessions.move_to_end(session_id)
        if not session.live_count:
            self.active_count += 1
            session.lapses_at = None
            self._note_wait(session, returned=True)
        session.live_count += 1
        return session

    def note_turn(self, session: Session, priority: int) -> None:
        """Note that a turn of a session starts or is cold, so the session is not expected any more.

        Args:
            session: the session that `join` returned for the request.
            priority: priority of the request.
        """
        self._expect(session, is_expected=False)
        session.priority = priority

    def leave(self, session: Session) -> None:
        """Note that a request of a session has ended and has released its blocks.

        Args:
            session: the session that `join` returned for the request.
        """
        session.live_count -= 1
        if session.is_open and not session.live_count:
            self.active_count -= 1
            session.turn_count += 1
            session.lapses_at = self._order.now + LAPSE_SECONDS
            self._start_wait(session)
            rate = session.share.return_rates[session.turn_count > 1]
            self._expect(session, is_expected=self._expects and rate > TenantShare.RATE_AT_START)

    def note_hits(self, token_count: int) -> None:
        """Count the prompt tokens that a request of a session found in the prefix cache when it first ran.

        Args:
            token_count: number of these tokens.
        """
        if token_count:
            self.hits_total += 1
            self.hit_tokens_total += token_count

    def release(self, session: Session, blocks: Sequence[BlockIndex]) -> None:
        """Release the blocks of a request that ends or is preempted. Its session retains those that are published.

        Args:
            session: the request's session.
            blocks: consecutive blocks of the request, the first block of its prefix first.
        """
        if session.is_open and self._is_retaining:
            self._retain(session, self._order.listings(filter(self._pool.is_published, blocks)))
        self._pool.release(blocks)
        if not session.is_open and self._is_retaining:
            self._order.evict_soon(self._own_blocks(session, blocks))

    def keep(self, session: Session, blocks: Sequence[BlockIndex]) -> None:
        """Release blocks that were loaded for the next turn. Their session retains those that are published.

        No other session loses a block: this session retains only as many as fit into the share of its tenant.

        Args:
            session: a session. It retains nothing if it has ended, or if its preference is over.
            blocks: consecutive blocks, the first block of the prefix first.
        """
        if session.is_open and self._is_retaining and (session.live_count or session.expires_at > self._order.now):
            was_expected = session.is_expected
            self._expect(session, is_expected=False)
            room, kept = self._blocks_max - session.share.block_count, []
            for block in filter(self._pool.is_published, blocks):
                room -= not self._order.is_listed(block)
                if room < 0:
                    break
                kept.append(block)
            self._retain(session, self._order.listings(kept))
            self._expect(session, is_expected=was_expected)
        self._pool.release(blocks)

    # --- Chains ---

    def _retain(self, session: Session, listings: list[int]) -> None:
        """Let a session retain the blocks of a request, in the place of chains that the request continues.

        A chain that shares at least half of its blocks with the request is replaced, because the session continues
        here. The blocks that only the old chain lists are evicted by recency.
        """
        extended: Chain | None = None
        replaced = []
        for chain in session.chains:
            shared_count = _common_count(chain.listings, listings)
            if shared_count == len(listings):
                extended, listings = chain, []
                break  # A request that ended early has no block that the chain does not list.
            if shared_count == len(chain.listings):
                if extended is not None:
                    replaced.append(extended)
                extended = chain
            elif 2 * shared_count >= len(chain.listings):
                replaced.append(chain)
        if extended is None:
            if not listings:
                return
            extended = Chain(session.share)
            session.chains.append(extended)
        session.chains.remove(extended)
        session.chains.append(extended)
        extended.used_at = self._order.now
        self._order.retain(extended, listings[len(extended.listings) :])
        if len(session.chains) - len(replaced) > CHAINS_MAX:
            replaced.append(next(chain for chain in session.chains if chain not in replaced))
        for chain in replaced:
            session.chains.remove(chain)
            self._order.drop(chain)
        self._rank(session)
        self._order.limit(extended.share, self._blocks_max)

    def _rank(self, session: Session) -> None:
        """Set the values of a session's chains."""
        session.chains = [chain for chain in session.chains if chain.listings]
        for chain in session.chains:
            chain.value = chain.used_at + self._bonus_seconds(session, len(chain.listings))
            self._order.rank(chain)

    def _bonus_seconds(self, session: Session, block_count: int) -> float:
        """Return by how many seconds a chain counts as used later than it was."""
        cost = 1 + math.log2(1 + block_count * self._block_size / DEPTH_TOKENS)
        rate = session.share.return_rates[session.turn_count > 1]
        return BONUS_SECONDS * cost * session.retention.weight * rate

    def _start_wait(self, session: Session, expected_seconds: float = 0.0) -> None:
        """Start the time of a session's preference again, and refresh its chains."""
        now = self._order.now
        session.expires_at = now + expected_seconds + session.retention.idle_seconds
        for chain in session.chains:
            chain.used_at = now
        self._rank(session)
        self._watch(session)

    def _note_wait(self, session: Session, *, returned: bool) -> None:
        if session.turn_count:
            session.share.note_wait(is_first=session.turn_count == 1, returned=returned)

    def _watch(self, session: Session) -> None:
        time = session.expires_at if session.lapses_at is None else min(session.lapses_at, session.expires_at)
        if session.watched_at is None or time < session.watched_at:
            session.watched_at = time
            heapq.heappush(self._expiries, (time, session.serial, session))
            if len(self._expiries) > 2 * len(self._sessions) + STALE_MAX:
                self._expiries = [entry for entry in self._expiries if entry[0] == entry[2].watched_at]
                heapq.heapify(self._expiries)

    def _drop_chains(self, session: Session) -> list[BlockIndex]:
        """Let a session retain nothing. Return its cached blocks that no other session retains, the last one first."""
        chains, session.chains = session.chains, []
        return [block for chain in chains for block in self._order.drop(chain)]

    def _own_blocks(self, session: Session, blocks: Iterable[BlockIndex]) -> Iterator[BlockIndex]:
        """Yield the blocks that only requests of this session have used."""
        return (block for block in blocks if self._pool.owner(block) == session.serial)

    def _expect(self, session: Session, *, is_expected: bool) -> None:
        if session.is_expected == is_expected:
            return
        session.is_expected = is_expected
        self._expected_priorities[session.priority] += 1 if is_expected else -1
        if not self._expected_priorities[session.priority]:
            del self._expected_priorities[session.priority]
        for chain in session.chains:
            self._order.expect(chain, is_expected=is_expected)

    def _close(self, session: Session) -> None:
        self._expect(session, is_expected=False)
        session.is_open = False
        self.on_close(session)
        self.active_count -= bool(session.live_count)

    def _forget_one(self) -> None:
        """Forget the session that was idle for the longest time. Sessions with live requests stay."""
        for session_id, session in self._sessions.items():
            if not session.live_count:
                del self._sessions[session_id]
                self._close(session)
                self._drop_chains(session)
                return

    def _share(self, tenant: str | None) -> TenantShare:
        share = self._shares.get(tenant)
        if share is None:
            share = self._shares[tenant] = TenantShare()
            if len(self._shares) > TENANTS_MAX:
                self._shares.popitem(last=False)
        self._shares.move_to_end(tenant)
        return share


def _common_count(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common beginning of two sequences."""
    count = min(len(one), len(other))
    if one[:count] == other[:count]:
        return count
    return next(index for index in range(count) if one[index] != other[index])
