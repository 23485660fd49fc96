"""Prefetches load the evicted blocks of a waiting session from the connector before its next turn.

A hint names the time of the next turn. Shortly before it, the core loads the blocks of the session's last turn that the
prefix cache has lost. A prefetch belongs to its session:

    hint ──► planned ──starts_at──► loading ──arrived──► its blocks are cached, and the session retains them
                │                      └──end of the session, lack of blocks, deadline──► its blocks are released
                └──the turn, end of the session, nothing to load, expires_at──► nothing to release

A prefetch takes no blocks from requests, and evicts no block that a session retains. It starts only while no request
waits, and only with spare blocks (free, or cached and not retained). A request that lacks blocks cancels all
prefetches. The connector may still write to blocks of a cancelled load, so these blocks are held until its report, as
for every abandoned load (transfers.py).

A turn of the session that continues the prefetched tokens waits for them, because its own load would take longer.
"""

from __future__ import annotations

import heapq
import itertools
from array import array
from collections import OrderedDict
from typing import Final

import msgspec

from trioserve.contracts.events import FinishReason
from trioserve.contracts.ids import RequestId
from trioserve.contracts.page import PrefetchResult
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.core.eviction_order import STALE_MAX
from trioserve.core.kv_blocks import BlockPool
from trioserve.core.prefix_cache import PrefixCache
from trioserve.core.request_state import LiveRequest, RequestStatus
from trioserve.core.sessions import Session, Sessions
from trioserve.core.settings import CoreSettings
from trioserve.core.transfers import Transfers

__all__ = ["LOADING_MAX", "LOADING_SHARE", "Prefetch", "Prefetches"]

LOADING_MAX: Final = 4  # More loads at a time would only share the bandwidth of the host's memory or disk.
LOADING_SHARE: Final = 0.25  # Fraction of the pool that pending prefetches may fill.
# A prefetch starts this long before the next turn, because a long prefix may come from a slow disk.
LEAD_SECONDS: Final = 2.0
RETRY_SECONDS: Final = 0.25  # A prefetch that could not start tries again after this time.
# Tokens of last turns that are kept, per token of the pool. Each needs 4 bytes, a small part of the size of its KV.
HISTORY_FACTOR: Final = 16


class LastTurn(msgspec.Struct, frozen=True):
    """The tokens whose KV the last turn of a session computed, and one more token.

    Attributes:
        salt: cache salt of the turn.
        tokens: the tokens, as 32-bit numbers.
    """

    salt: str | None
    tokens: array[int]


class Prefetch:
    """A planned or pending prefetch of one session.

    Attributes:
        starts_at: time of the next attempt to start, in seconds.
        expires_at: time after which the prefetch does not start any more, in seconds.
        live: the load as a request that never runs. None before the first attempt.
        is_loading: True while the connector loads the blocks.
        end: position after the last token that is loaded.
        continuing: True for each request of the session that continues the loaded tokens, by request id.
    """

    __slots__ = ("continuing", "end", "expires_at", "is_loading", "live", "session", "session_id", "starts_at")

    def __init__(self, session_id: str, session: Session) -> None:
        self.session_id = session_id
        self.session = session
        self.starts_at = self.expires_at = 0.0
        self.live: LiveRequest | None = None
        self.is_loading = False
        self.end = 0
        self.continuing: dict[RequestId, bool] = {}


class Prefetches:
    """All prefetches of one engine core. Without a connector, or if the option is off, this object does nothing.

    Args:
        settings: limits of the engine core.
        pool: the pool that owns the blocks.
        cache: the prefix cache.
        sessions: the open sessions.
        transfers: transfers with the connector. None without a connector.

    Attributes:
        loading: the prefetches that the connector loads, by request id.
        results_total: number of prefetches by result.
        tokens_total: tokens that prefetches have loaded.

    Cost:
        O(log prefetches) for each call, plus O(tokens of a turn) for its end and for each start.
    """

    def __init__(
        self,
        settings: CoreSettings,
        pool: BlockPool,
        cache: PrefixCache,
        sessions: Sessions,
        transfers: Transfers | None,
    ) -> None:
        # Blocks behind a sliding window do not come back, so a session that waits has lost little.
        self.is_on = settings.session_prefetch and settings.enable_prefix_caching and settings.window_tokens is None
        self._transfers = transfers if self.is_on else None
        self.is_on = self._transfers is not None
        self._settings = settings
        self._pool = pool
        self._cache = cache
        self._sessions = sessions
        self._loading_blocks_max = int(settings.block_count * LOADING_SHARE)
        self._history_tokens_max = HISTORY_FACTOR * settings.block_count * settings.block_size
        self._history_tokens = 0
        self._last_turns: OrderedDict[Session, LastTurn] = OrderedDict()  # The latest turn comes last.
        self._of_session: dict[Session, Prefetch] = {}
        # Entries whose prefetch has ended, or has another time, are stale.
        self._starts: list[tuple[float, int, Prefetch]] = []
        self._serials = itertools.count(1)
        self.loading: dict[RequestId, Prefetch] = {}
        self.results_total = dict.fromkeys(PrefetchResult, 0)
        self.tokens_total = 0
        if self._transfers is not None:
            sessions.on_close = self._forget
            self._transfers.on_prefetched = self._take

    # --- Sessions ---

    def expect(self, session_id: str, session: Session, expected_at: float, now: float) -> None:
        """Plan a prefetch for the next turn of a session. It replaces a planned one, and a pending one continues.

        Args:
            expected_at: expected time of the next turn, in seconds.
            now: time in seconds.
        """
        if not self.is_on:
            return
        planned = self._of_session.get(session)
        if planned is None:
            planned = self._of_session[session] = Prefetch(session_id, session)
        elif planned.is_loading:
            return
        planned.starts_at = max(now, expected_at - LEAD_SECONDS)
        planned.expires_at = expected_at + self._settings.remote_kv_seconds_max
        self._plan(planned)

    def note_turn(self, live: LiveRequest) -> None:
        """Note that a turn of a session has arrived, so a planned prefetch comes too late. A pending one continues.

        Args:
            live: a new request.
        """
        planned = None if live.session is None else self._of_session.get(live.session)
        if planned is not None and not planned.is_loading:
            self._end(planned, PrefetchResult.LATE, self._pool.order.now)

    def note_turn_end(self, live: LiveRequest, reason: FinishReason) -> None:
        """Note the tokens of a turn that ends. Call this while the request still has its blocks.

        Args:
            live: the request.
            reason: its finish reason.
        """
        session = live.session
        # Connectors have no KV of failed requests, and identify prompts by their tokens only.
        if not self.is_on or session is None or not session.is_open or reason is FinishReason.ERROR:
            return
        if live.request.given or live.chain.is_private or live.computed_count < self._settings.block_size:
            return
        self._drop_turn(session)
        # A lookup never matches the last token, so the turn has one more token than its KV.
        turn = LastTurn(live.request.cache_salt, array("I", [*live.tokens[: live.computed_count], 0]))
        self._last_turns[session] = turn
        self._history_tokens += len(turn.tokens)
        while self._history_tokens > self._history_tokens_max:
            self._drop_turn(next(iter(self._last_turns)))

    def forget_turns(self) -> None:
        """Cancel all prefetches and forget the tokens of all sessions, because other weights compute from now on."""
        for planned in list(self._of_session.values()):
            self._end(planned, PrefetchResult.CANCELLED, self._pool.order.now)
        self._last_turns.clear()
        self._history_tokens = 0

    # --- Loads ---

    def is_awaited_by(self, live: LiveRequest) -> bool:
        """Return True if a waiting request continues tokens that its session's prefetch loads now.

        Args:
            live: a request that waits.
        """
        if not self.loading or live.session is None or live.status is not RequestStatus.WAITING:
            return False
        prefetch = self._of_session.get(live.session)
        if prefetch is None or prefetch.live is None or not prefetch.is_loading:
            return False
        if live.load_was_tried or live.needs_every_row or live.chain.is_private or live.request.given:
            return False
        request_id = live.request.id
        if request_id not in prefetch.continuing:
            is_alike = live.request.cache_salt == prefetch.live.request.cache_salt
            end = prefetch.end
            prefetch.continuing[request_id] = (
                is_alike and len(live.tokens) > end and live.tokens[:end] == prefetch.live.tokens[:end]
            )
        return prefetch.continuing[request_id]

    def start_due(self, now: float, *, has_waiting: bool) -> None:
        """Start the prefetches whose time has come. A prefetch that cannot start yet tries again later.

        Args:
            now: time in seconds.
            has_waiting: True if a request waits. Then no prefetch starts.
        """
        while self._starts and self._starts[0][0] <= now:
            time, _serial, prefetch = heapq.heappop(self._starts)
            if self._is_stale(time, prefetch):
                continue
            if prefetch.expires_at <= now:
                self._end(prefetch, PrefetchResult.NO_ROOM, now)
            elif has_waiting or prefetch.session.live_count or not self._start(prefetch, now):
                prefetch.starts_at = min(now + RETRY_SECONDS, prefetch.expires_at)
                self._plan(prefetch)

    def cancel_all(self, now: float) -> bool:
        """Cancel the pending prefetches, because their blocks are needed. Return True if there was one.

        Args:
            now: time in seconds.
        """
        cancelled = list(self.loading.values())
        for prefetch in cancelled:
            self._end(prefetch, PrefetchResult.CANCELLED, now)
        return bool(cancelled)

    def next_start(self) -> float | None:
        """Return the time at which start_due() must be called. None if no prefetch is planned."""
        while self._starts and self._is_stale(self._starts[0][0], self._starts[0][2]):
            heapq.heappop(self._starts)
        return self._starts[0][0] if self._starts else None

    def _start(self, prefetch: Prefetch, now: float) -> bool:
        """Start to load as many blocks as are spare. Return False if none are, or if too many loads are pending."""
        assert self._transfers is not None
        room = self._loading_blocks_max - sum(map(_written_count, self.loading.values()))
        if min(room, self._pool.spare_count) == 0 or len(self.loading) >= LOADING_MAX:
            return False
        live = prefetch.live = prefetch.live or self._load_of(prefetch)
        if live is None:
            self._end(prefetch, PrefetchResult.NOT_NEEDED, now)
            return True
        block_size, owner = self._settings.block_size, prefetch.session.serial
        hit_blocks = self._cache.match(live.chain, live.tokens)
        hit_count = len(hit_blocks) * block_size
        matched_count = self._transfers.loads.matched_count(live, hit_count) // block_size
        count = min(matched_count, room, self._pool.spare_count - self._pool.spare_count_of(hit_blocks))
        if count <= 0:
            live.chain.restart()
            if matched_count == 0:
                self._end(prefetch, PrefetchResult.NOT_NEEDED, now)
            return matched_count == 0
        self._pool.share(hit_blocks, owner)
        live.computed_count = hit_count
        live.blocks = [*hit_blocks, *self._pool.allocate(count, owner, is_spare=True)]
        prefetch.end = hit_count + count * block_size
        prefetch.is_loading = True
        self.loading[live.request.id] = prefetch
        self._transfers.loads.begin(live, count * block_size, now, is_prefetch=True)
        return True

    def _load_of(self, prefetch: Prefetch) -> LiveRequest | None:
        """Return the load of a session's last turn. None if its tokens are not known."""
        turn = self._last_turns.get(prefetch.session)
        if turn is None:
            return None
        serial = next(self._serials)
        request = EngineRequest(
            id=RequestId(f"prefetch-{serial}"),
            prompt_token_ids=tuple(turn.tokens),
            sampling=SamplingParams(),
            output_tokens_max=1,
            stop_token_ids=frozenset(),
            seed=0,
            cache_salt=turn.salt,
            session=prefetch.session_id,
        )
        return LiveRequest(request, serial)

    def _take(self, live: LiveRequest, token_count: int, now: float) -> None:
        """Cache the blocks that have arrived, and end the prefetch.

        Args:
            live: the load.
            token_count: number of tokens that arrived. 0 if the load has failed.
            now: time in seconds.
        """
        live.computed_count += token_count
        self._cache.publish(live.chain, live.tokens, live.computed_count, live.blocks)
        self.tokens_total += token_count
        result = PrefetchResult.LOADED if token_count else PrefetchResult.FAILED
        self._end(self.loading[live.request.id], result, now)

    def _end(self, prefetch: Prefetch, result: PrefetchResult, now: float) -> None:
        """End a prefetch, and release its blocks. Every prefetch ends with a call of this method."""
        del self._of_session[prefetch.session]
        self.results_total[result] += 1
        live = prefetch.live
        if live is None:
            return
        assert self._transfers is not None
        self._transfers.request_ends(live, FinishReason.ABORT, now)
        if prefetch.is_loading:
            del self.loading[live.request.id]
            self._sessions.keep(prefetch.session, live.blocks)
        live.blocks = []
        live.move(RequestStatus.FINISHED)

    def _plan(self, prefetch: Prefetch) -> None:
        heapq.heappush(self._starts, (prefetch.starts_at, next(self._serials), prefetch))
        if len(self._starts) > 2 * len(self._of_session) + STALE_MAX:
            self._starts = [entry for entry in self._starts if not self._is_stale(entry[0], entry[2])]
            heapq.heapify(self._starts)

    def _is_stale(self, time: float, prefetch: Prefetch) -> bool:
        is_current = self._of_session.get(prefetch.session) is prefetch and prefetch.starts_at == time
        return prefetch.is_loading or not is_current

    def _drop_turn(self, session: Session) -> None:
        turn = self._last_turns.pop(session, None)
        if turn is not None:
            self._history_tokens -= len(turn.tokens)

    def _forget(self, session: Session) -> None:
        """Cancel the prefetch of a session that ends, and forget its tokens."""
        self._drop_turn(session)
        prefetch = self._of_session.get(session)
        if prefetch is not None:
            self._end(prefetch, PrefetchResult.CANCELLED, self._pool.order.now)


def _written_count(prefetch: Prefetch) -> int:
    """Return the number of blocks that a pending prefetch loads."""
    assert prefetch.live is not None
    return len(prefetch.live.blocks) - prefetch.live.chain.block_count
