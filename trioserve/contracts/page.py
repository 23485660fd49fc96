"""What the live page shows of a server, at one moment. Values; who makes them and who sends them is elsewhere."""

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
"""A quarter of an hour at one in 5 seconds."""

REQUESTS_SHOWN_MAX = 512  # the newest: more than anybody looks at, about 150 KB of JSON
ENDED_SECONDS = 30.0  # so long one that has left can still be seen


class BlockState(enum.IntEnum):
    """Of a KV block, as a number that stands for it in a map of all of them. See core/kv_blocks."""

    FREE = 0
    CACHED = 1
    USED = 2
    HELD = 3


class Freed(msgspec.Struct, frozen=True):
    """What it was to cancel a request: of its blocks, how many nobody used or held then, after how many steps of the
    engine and how many seconds. Those that others share stay."""

    blocks: int
    steps: int
    seconds: float


class RequestShown(msgspec.Struct, frozen=True, kw_only=True):
    """One request, its choices taken together.

    id: its caller's, which others may bear, too. state: "queued" (it waits for a lease), "preparing", "waiting",
    "running", "held" or "finished". phase: how far the furthest choice has come. Times are seconds of the server's
    clock; None: not yet. deadline_at: the next of its deadlines. outcome: None while it lives; "finished", "cancelled",
    "deadline", "handed_over" or "error". tenant: a short name. blocks: runs of block indices (first, count), as its
    choices have them, each block once; of one that is held, those that are. freed: once it was cancelled.
    endpoint: where a router has sent it.
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
    """What hardly changes. kind: "engine" or "router". executor: what computes; None: nothing here does, or nobody has
    said. sees: whether the reader sees all requests, or its own. process: of a router of several processes, which one
    this is, such as "1 of 2"; only its requests are shown."""

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
    """The steps of the last second or so, and where their time went."""

    count: int
    schedule_seconds: float
    forward_seconds: float
    update_seconds: float
    deliver_seconds: float


class HistoryShown(msgspec.Struct, frozen=True, kw_only=True):
    """Points at equal distances in time, the oldest first, the last one at `at`; None: nothing was measured then.
    number: of the last one, counted from the first that there ever was."""

    interval_seconds: float
    at: float
    number: int
    series: Mapping[str, tuple[float | None, ...]]


class PageSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """blocks: one byte for each, a BlockState; None: not for this reader. requests: by a name that is theirs alone, the
    newest of those that the reader may see. request_count: how many there are to be seen and live. stats: numbers by
    name. The others are None where there is nothing of the kind, or where it is not for this reader."""

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
