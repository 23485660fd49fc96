"""Values that the live page and operators see at one moment: a server, the requests in its engine, and its counts."""

from __future__ import annotations

import enum
from collections.abc import Mapping

import msgspec

from trioserve.contracts.events import IterativePhase, Phase
from trioserve.contracts.kv_transfer import TransferFault

__all__ = [
    "BlockState",
    "ENDED_SECONDS",
    "EngineStats",
    "EvictionClass",
    "Freed",
    "HISTORY_POINTS_MAX",
    "HistoryShown",
    "LiveImageView",
    "LiveRequestView",
    "PageSnapshot",
    "PrefetchResult",
    "REQUESTS_SHOWN_MAX",
    "RequestShown",
    "ServerShown",
    "StepsShown",
]

HISTORY_POINTS_MAX = 180
"""Points of a quarter of an hour, with one point in 5 seconds."""

REQUESTS_SHOWN_MAX = 512  # The page shows the newest requests, up to this number. They take about 150 KB of JSON.
ENDED_SECONDS = 30.0  # The page shows a request for this many seconds after the request's end.


class BlockState(enum.IntEnum):
    """State of a KV block, as a number in the page's map of all blocks. See core/kv_blocks."""

    FREE = 0
    CACHED = 1
    USED = 2
    HELD = 3
    RETIRED = 4


class Freed(msgspec.Struct, frozen=True):
    """Effect of cancelling a request.

    Attributes:
        blocks: Number of the request's blocks that became unused. Blocks that other requests share do not count.
        steps: Engine steps between the cancellation and the moment at which the blocks were free.
        seconds: Seconds between the same two moments.
    """

    blocks: int
    steps: int
    seconds: float


class RequestShown(msgspec.Struct, frozen=True, kw_only=True):
    """One request, with all of its choices. Times are seconds of the server's clock. A time is None if the request has
    not reached that point.

    Attributes:
        id: Id that the caller gave to the request. Other requests may have the same id.
        state: "queued" (waits for a lease), "preparing", "waiting", "running", "held" or "finished".
        phase: Phase of the most advanced choice.
        entered_at: Time at which the request entered the server.
        running_at: Time at which the request began to run.
        first_token_at: Time of its first token.
        ended_at: Time of its end.
        outcome: "finished", "cancelled", "deadline", "handed_over" or "error". None before the end.
        prompt_tokens: Tokens of the prompt.
        completion_tokens: Output tokens of all choices.
        cached_tokens: Prompt tokens found in the prefix cache.
        deadline_at: Time of the request's next deadline. None without a deadline.
        tenant: Short name of the request's tenant.
        priority: A lower number runs sooner.
        choices: Number of choices.
        blocks: Runs of block indices (first, count). Each block appears once. For a held request: the held blocks.
        held_until: Time at which the hold of its blocks expires. None if no blocks are held.
        endpoint: Endpoint to which a router sent the request.
        freed: Effect of the cancellation. None if the request was not cancelled.
    """

    id: str
    state: str
    phase: str
    entered_at: float
    running_at: float | None = None
    first_token_at: float | None = None
    ended_at: float | None = None
    outcome: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    deadline_at: float | None = None
    tenant: str | None = None
    priority: int = 0
    choices: int = 1
    blocks: tuple[tuple[int, int], ...] = ()
    held_until: float | None = None
    endpoint: str | None = None
    freed: Freed | None = None


class ServerShown(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of the server that rarely change.

    Attributes:
        kind: "engine" or "router".
        model: Name of the model.
        version: Version of this program.
        executor: Name of the code that computes steps. None if the server computes no steps, or if the name is not
            known.
        max_num_seqs: Maximum number of sequences that run at once.
        max_model_len: Maximum number of tokens of prompt and output.
        block_size: Tokens in a block.
        block_count: Blocks in the pool.
        role: Role of the engine in KV transfers.
        is_draining: True while the server drains.
        restarts: Number of engine restarts.
        sees: Whether the reader may see all requests, or only the reader's own.
        started_at: Time of the start.
        process: Which process of a router with several processes this is, such as "1 of 2". The page shows only the
            requests of this process.
    """

    kind: str
    model: str
    version: str
    executor: str | None = None
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    block_size: int | None = None
    block_count: int = 0
    role: str | None = None
    is_draining: bool = False
    restarts: int = 0
    sees: str = "all"
    started_at: float | None = None
    process: str | None = None


class StepsShown(msgspec.Struct, frozen=True, kw_only=True):
    """The steps of about the last second, and the time that each part of a step took."""

    count: int
    schedule_seconds: float
    forward_seconds: float
    update_seconds: float
    deliver_seconds: float


class HistoryShown(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements at regular intervals, oldest first.

    Attributes:
        interval_seconds: Seconds between two points.
        at: Time of the last point.
        number: Number of the last point. The first point after the start of the server has number 0.
        series: Points of each series, by its name. A point is None if there was no measurement.
    """

    interval_seconds: float
    at: float
    number: int
    series: Mapping[str, tuple[float | None, ...]]


class PageSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All values of the page at one moment. A part is None if it does not exist, or if the reader may not see it.

    Attributes:
        now: Time of the snapshot.
        server: Properties of the server.
        blocks: The BlockState of each block, one byte per block.
        requests: The newest requests that the reader may see, by a unique name.
        request_count: All live requests that the reader may see.
        stats: Statistics, by name.
        steps: Recent steps.
        history: Measurements of the last minutes.
        transfers: Transfers of KV.
        endpoints: Endpoints of a router, by id.
        queues: Queues of a router.
        models: Models that are loaded on demand, by name.
    """

    now: float
    server: ServerShown
    blocks: bytes | None = None
    requests: Mapping[str, RequestShown] = {}
    request_count: int = 0
    stats: Mapping[str, float] = {}
    steps: StepsShown | None = None
    history: HistoryShown | None = None
    transfers: Mapping[str, object] | None = None
    endpoints: Mapping[str, Mapping[str, object]] | None = None
    queues: Mapping[str, object] | None = None
    models: Mapping[str, Mapping[str, object]] | None = None


class LiveRequestView(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of one request, with all of its choices.

    Attributes:
        id: Id that the caller gave to the request.
        state: "preparing" (tokenization), "waiting", "running" (at least one choice computes), "finished" (complete,
            but its reader has not left) or "held" (complete, and its blocks are held for another engine).
        phase: Phase of the most advanced choice.
        priority: A lower number runs sooner.
        age_seconds: Seconds since the request entered the engine.
        prompt_token_count: Tokens of the prompt.
        completion_token_count: Output tokens of all choices so far.
        block_count: KV blocks in use or held. A block that choices share counts once for each choice.
    """

    id: str
    state: str
    phase: Phase
    priority: int
    age_seconds: float
    prompt_token_count: int
    completion_token_count: int
    block_count: int


class LiveImageView(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot of one image request, with all of its images.

    Attributes:
        id: Id that the caller gave to the request.
        state: See LiveRequestView.
        phase: Phase of the most advanced image.
        priority: A lower number runs sooner.
        age_seconds: Seconds since the request entered the engine.
        image_count: Number of images.
        steps_done: Denoising steps done, summed over images.
        step_count: All denoising steps, summed over images.
        slot_count: Latent slots in use, including the slots of preempted images.
    """

    id: str
    state: str
    phase: IterativePhase
    priority: int
    age_seconds: float
    image_count: int
    steps_done: int
    step_count: int
    slot_count: int


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
