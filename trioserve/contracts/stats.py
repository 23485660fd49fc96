"""What an engine says of itself, at one moment."""

from __future__ import annotations

import msgspec

from trioserve.contracts.kv_transfer import TransferFault

__all__ = ["EngineStats"]


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot. blocks_free + blocks_cached + blocks_used + blocks_held == blocks_total, always.

    Cached blocks are used by nobody and can be had at once. Held ones are used by no live request, but a connector may
    still read or write them. remote_kv_count: of those that wait, how many wait for KV from elsewhere. The *_total
    figures only grow: preemptions, blocks that requests gave back while they ran, since no layer's sliding window
    reached them any more (given_back), steps, prompt tokens that were looked up in the prefix cache (queries), found
    there (hits) and loaded from elsewhere, drafts that were verified, their tokens, those of them that were right
    (accepted), tokens that were forced by a guide and so taken without being sampled, requests that asked to be held
    and were not, since too much was held already, and what went wrong with the connector, by kind (empty without one).

    Where the model has layers that keep a state: states_used of states_total slots belong to requests, and of
    snapshots_total slots for copies snapshots_kept hold what the prefix cache can find. 0 elsewhere.
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

    @property
    def kv_usage(self) -> float:
        """Share of the pool that live requests use or a connector holds: 0 to 1; 0 where there is no pool."""
        return 0.0 if not self.blocks_total else (self.blocks_used + self.blocks_held) / self.blocks_total
