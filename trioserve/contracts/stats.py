"""Statistics of an engine at one moment."""

from __future__ import annotations

import enum

import msgspec

from trioserve.contracts.kv_transfer import TransferFault

__all__ = ["EngineStats", "EvictionClass", "PrefetchResult"]


class EvictionClass(enum.Enum):
    """Why a block was evicted before other blocks."""

    ENDED = "ended"  # A block of a session that has ended.
    RECENCY = "recency"  # No session retained it, and it was used least recently.
    RETAINED = "retained"  # A session retained it, but its value was the lowest.


class PrefetchResult(enum.Enum):
    """How the prefetch of a session's blocks ended."""

    LOADED = "loaded"  # Blocks arrived before the next turn, or while it waited for them.
    NOT_NEEDED = "not_needed"  # The prefix cache had the blocks, or the connector had none of the lacking ones.
    LATE = "late"  # The next turn arrived before the prefetch started.
    NO_ROOM = "no_room"  # Requests waited, or there were no spare blocks.
    CANCELLED = "cancelled"  # The session ended, a request needed the blocks, or the engine was paused.
    FAILED = "failed"  # The load failed or took too long.


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot. blocks_free + blocks_cached + blocks_used + blocks_held == blocks_total, always.

    Fields whose names end in _total, except blocks_total, states_total and snapshots_total, only grow.

    Attributes:
        running_count: Running sequences.
        waiting_count: Waiting sequences.
        blocks_total: Blocks in the pool.
        blocks_free: Blocks without content.
        blocks_cached: Blocks in the prefix cache that no request uses. They can be reused at once.
        blocks_used: Blocks of live requests.
        blocks_held: Blocks of ended requests that a connector may still read or write.
        remote_kv_count: Waiting sequences that wait for KV from another engine or a file.
        preemptions_total: Number of preemptions.
        blocks_given_back_total: Blocks that running requests freed because the sliding windows of all layers had passed
            these blocks.
        steps_total: Number of steps.
        prefix_query_tokens_total: Prompt tokens looked up in the prefix cache.
        prefix_hit_tokens_total: Prompt tokens found there.
        loaded_tokens_total: Prompt tokens loaded by the connector.
        drafts_total: Drafts that were verified.
        draft_tokens_total: Draft tokens of these drafts.
        accepted_tokens_total: Draft tokens that the model accepted.
        forced_tokens_total: Output tokens that were not sampled, because a grammar forced them.
        holds_refused_total: Requests whose blocks were not held for another engine, because too many blocks were held
            already.
        transfer_faults_total: Faults of the connector by kind. Empty without a connector.
        states_total: Slots for the state of recurrent layers. 0 for models without such layers, here and below.
        states_used: State slots that requests use.
        snapshots_total: Slots for copies of such states.
        snapshots_kept: Snapshot slots whose copy the prefix cache can find.
        sessions_active: Sessions with a live request.
        sessions_waiting: Other open sessions. They wait for their next turn.
        blocks_retained: Cached blocks that the eviction order prefers to keep for a session.
        blocks_spared: Those of them that would be evicted already if only recency counted.
        session_hits_total: Requests of sessions that started with tokens from the prefix cache.
        session_hit_tokens_total: Prompt tokens of these requests that were found there.
        spared_tokens_total: Prompt tokens of any request that were found in spared blocks. Without retention, the
            engine would have computed them again.
        turns_deferred_total: Cold turns of sessions that waited, so that other sessions kept their blocks.
        evictions_total: Evicted blocks by the class that they had in the eviction order.
        session_prefetches_total: Prefetches of waiting sessions by result.
        session_prefetched_tokens_total: Tokens that these prefetches loaded.
    """

    running_count: int
    waiting_count: int
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    blocks_used: int
    blocks_held: int
    remote_kv_count: int
    preemptions_total: int
    blocks_given_back_total: int
    steps_total: int
    prefix_query_tokens_total: int
    prefix_hit_tokens_total: int
    loaded_tokens_total: int
    drafts_total: int
    draft_tokens_total: int
    accepted_tokens_total: int
    forced_tokens_total: int
    holds_refused_total: int
    transfer_faults_total: dict[TransferFault, int]
    states_total: int = 0
    states_used: int = 0
    snapshots_total: int = 0
    snapshots_kept: int = 0
    sessions_active: int = 0
    sessions_waiting: int = 0
    blocks_retained: int = 0
    blocks_spared: int = 0
    session_hits_total: int = 0
    session_hit_tokens_total: int = 0
    spared_tokens_total: int = 0
    turns_deferred_total: int = 0
    evictions_total: dict[EvictionClass, int] = {}
    session_prefetches_total: dict[PrefetchResult, int] = {}
    session_prefetched_tokens_total: int = 0

    @property
    def kv_usage(self) -> float:
        """Return the share of the pool that is used or held, 0 to 1. 0 without a pool."""
        return 0.0 if not self.blocks_total else (self.blocks_used + self.blocks_held) / self.blocks_total
