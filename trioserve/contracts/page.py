"""The values that the live page shows about a server at one moment."""

from __future__ import annotations

import enum
from collections.abc import Mapping

import msgspec

__all__ = [
    "ENDED_SECONDS",
    "HISTORY_POINTS_MAX",
    "REQUESTS_SHOWN_MAX",
    "BlockState",
    "Freed",
    "HistoryShown",
    "PageSnapshot",
    "RequestShown",
    "ServerShown",
    "StepsShown",
]


HISTORY_POINTS_MAX = 180
"""Points of a quarter of an hour, with one point in 5 seconds."""

REQUESTS_SHOWN_MAX = 512  # the newest requests, about 150 KB of JSON
ENDED_SECONDS = 30.0  # an ended request stays visible for this time


class BlockState(enum.IntEnum):
    """State of a KV block, as a number in the page's map of all blocks. See core/kv_blocks."""

    FREE = 0
    CACHED = 1
    USED = 2
    HELD = 3


class Freed(msgspec.Struct, frozen=True):
    """Effect of cancelling a request.

    Attributes:
        blocks: Blocks of the request that became unused. Shared blocks stay in use and do not count.
        steps: Engine steps until then.
        seconds: Seconds until then.
    """

    blocks: int
    steps: int
    seconds: float


class RequestShown(msgspec.Struct, frozen=True, kw_only=True):
    """One request, with all of its choices. Times are seconds of the server's clock, None if not reached yet.

    Attributes:
        id: The caller's id. Other requests may have the same id.
        state: "queued" (waits for a lease), "preparing", "waiting", "running", "held" or "finished".
        phase: Phase of the choice that is furthest.
        entered_at: Time of entering.
        running_at: Time at which it began to run.
        first_token_at: Time of its first token.
        ended_at: Time of its end.
        outcome: "finished", "cancelled", "deadline", "handed_over" or "error". None before the end.
        prompt_tokens: Tokens of the prompt.
        completion_tokens: Output tokens of all choices.
        cached_tokens: Prompt tokens found in the prefix cache.
        deadline_at: The next of its deadlines.
        tenant: Short name of its tenant.
        priority: A lower number runs sooner.
        choices: Number of choices.
        blocks: Runs of block indices (first, count). Each block appears once. For a held request: the held blocks.
        held_until: End of its hold.
        endpoint: Endpoint to which a router sent it.
        freed: Effect of its cancellation, once it was cancelled.
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
        executor: Code that computes steps. None if there is none, or if it is not known.
        max_num_seqs: Most sequences that run at once.
        max_model_len: Most tokens of prompt and output.
        block_size: Tokens in a block.
        block_count: Blocks in the pool.
        role: Role of the engine in transfers of KV.
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
    """The steps of about the last second, and the time of their parts."""

    count: int
    schedule_seconds: float
    forward_seconds: float
    update_seconds: float
    deliver_seconds: float


class HistoryShown(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements at regular intervals, oldest first.

    Attributes:
        interval_seconds: Between two points.
        at: Time of the last point.
        number: Number of the last point, counted from the first point since the start.
        series: Points by name. None if there was no measurement.
    """

    interval_seconds: float
    at: float
    number: int
    series: Mapping[str, tuple[float | None, ...]]


class PageSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """All values of the page at one moment. Parts that do not exist, or that the reader may not see, are None.

    Attributes:
        now: Time of the snapshot.
        server: Properties of the server.
        blocks: One byte for each block, a BlockState.
        requests: The newest requests that the reader may see, by a unique name.
        request_count: All live requests that the reader may see.
        stats: Numbers by name.
        steps: Recent steps.
        history: Measurements of the last minutes.
        transfers: Transfers of KV.
        endpoints: Endpoints of a router, by id.
        queues: Queues of a router.
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
