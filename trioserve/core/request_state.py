"""States of a request and the legal transitions between them, for token requests and iterative requests.

    WAITING ──────────► RUNNING ◄──────► PREEMPTED
       │  ▲                │ └──► ENDED      │
       ▼  │                ▼        ▼        │
    WAITING_FOR_          FINISHED ◄┴────────┘
    REMOTE_KV ──────────►  (from every state, once)

A request owns blocks, or a slot, while it is RUNNING. No transition leaves FINISHED, so
blocks and slots are released exactly once. iterative_core.py describes the slots of iterative requests.

LiveRequest is one sequence in the core: its tokens, how many of them are computed, and the blocks that contain their
KV. It owns blocks in these states only:

- RUNNING. The blocks that its sliding window has passed are already free.
- WAITING_FOR_REMOTE_KV.
- WAITING, if its KV has arrived from another engine.
- ENDED. The end was reported, but a step that was planned ahead still reads the blocks (steps_in_flight.py).
"""

from __future__ import annotations

import enum
from typing import Generic, Protocol, TypeVar

import msgspec

from trioserve.contracts.events import FinishReason, Phase
from trioserve.contracts.ids import BlockIndex, RequestId
from trioserve.contracts.request import EngineRequest
from trioserve.core.drafting import Drafter, ModelDraft
from trioserve.core.prefix_cache import PrefixChain
from trioserve.core.sessions import Session
from trioserve.core.state_slots import OwnState

__all__ = ["CoreRequest", "LiveRequest", "RequestLife", "RequestStatus"]


class RequestStatus(enum.Enum):
    """The state of a request in a core."""

    WAITING = "waiting"
    WAITING_FOR_REMOTE_KV = "waiting_for_remote_kv"
    RUNNING = "running"
    PREEMPTED = "preempted"
    ENDED = "ended"
    FINISHED = "finished"


_LEGAL_MOVES: frozenset[tuple[RequestStatus, RequestStatus]] = frozenset(
    {
        (RequestStatus.WAITING, RequestStatus.WAITING_FOR_REMOTE_KV),
        (RequestStatus.WAITING, RequestStatus.RUNNING),
        (RequestStatus.WAITING, RequestStatus.FINISHED),
        (RequestStatus.WAITING_FOR_REMOTE_KV, RequestStatus.WAITING),
        (RequestStatus.WAITING_FOR_REMOTE_KV, RequestStatus.FINISHED),
        (RequestStatus.RUNNING, RequestStatus.PREEMPTED),
        (RequestStatus.RUNNING, RequestStatus.ENDED),
        (RequestStatus.RUNNING, RequestStatus.FINISHED),
        (RequestStatus.PREEMPTED, RequestStatus.RUNNING),
        (RequestStatus.PREEMPTED, RequestStatus.FINISHED),
        (RequestStatus.ENDED, RequestStatus.FINISHED),
    }
)


class CoreRequest(Protocol):
    """Fields that all request types have in common.

    Attributes:
        id: id, unique among the live requests of a core.
        priority: a lower number runs sooner.
    """

    @property
    def id(self) -> RequestId: ...

    @property
    def priority(self) -> int: ...


RequestT = TypeVar("RequestT", bound=CoreRequest)


class RequestLife(Generic[RequestT]):
    """The state of one unfinished request in a core.

    Args:
        request: the client's request.
        arrival_index: number of requests that arrived at this core before.
    """

    __slots__ = ("abort_reason", "arrival_index", "request", "status", "steps_in_flight")

    def __init__(self, request: RequestT, arrival_index: int) -> None:
        self.request = request
        self.arrival_index = arrival_index
        self.status = RequestStatus.WAITING
        self.steps_in_flight = 0  # Number of steps in flight that read or write the request's blocks or slot.
        # If this is set, the request ends when all steps in flight that contain it have returned.
        self.abort_reason: FinishReason | None = None

    def move(self, status: RequestStatus) -> None:
        """Change the state of the request.

        Args:
            status: the next state. An illegal transition fails an assertion, because a second FINISHED would free
                blocks twice.
        """
        assert (self.status, status) in _LEGAL_MOVES, f"{self.request.id}: {self.status.value} -> {status.value}"
        self.status = status

    @property
    def order(self) -> tuple[int, int]:
        """Return the sort key for the queue. The request with the smaller key runs first."""
        return (self.request.priority, self.arrival_index)


class LiveRequest(RequestLife[EngineRequest]):
    """The state of one sequence.

    `tokens` contains all known tokens: first the prompt, then the output. The KV of the first `computed_count` tokens
    is in `blocks`. The other known tokens are due, which means that later steps must compute them.

    Args:
        request: the request, with its prompt and perhaps known output.
        arrival_index: number of requests that arrived at this core before.
    """

    __slots__ = (
        "absent_block_count",
        "blocks",
        "blocks_wanted",
        "cached_token_count",
        "chain",
        "computed_count",
        "deferred_until",
        "drafter",
        "guide",
        "is_pooling",
        "is_whole",
        "joint_spans",
        "joint_tokens_max",
        "load_was_tried",
        "loaded_token_count",
        "overtaken_count",
        "prompt_logprobs_count",
        "reserved_blocks",
        "session",
        "state",
        "tokens",
        "wants_load",
    )

    def __init__(self, request: EngineRequest, arrival_index: int) -> None:
        super().__init__(request, arrival_index)
        self.is_pooling = request.pooling is not None
        self.is_whole = request.pooling is not None and request.pooling.is_whole
        # Spans of the prompt that must not be cut by the end of a chunk, see GivenRows.is_bidirectional.
        self.joint_spans = tuple((rows.start, rows.end) for rows in request.given if rows.is_bidirectional)
        self.joint_tokens_max = max((end - start for start, end in self.joint_spans), default=0)
        self.tokens = [*request.prompt_token_ids, *request.resumed_output]
        self.computed_count = 0
        self.blocks: list[BlockIndex] = []  # The block table. Its first absent_block_count entries are NO_BLOCK.
        self.absent_block_count = 0
        # Additional blocks that the request owns, for known tokens that a load did not cover.
        self.reserved_blocks: list[BlockIndex] = []
        self.state: OwnState | None = None  # Set while the request runs, if the model's layers keep a state.
        # While fewer blocks than this are available, the scheduler does not try to admit the request.
        self.blocks_wanted = 0
        # Number of later requests that started while there were too few blocks for this request.
        self.overtaken_count = 0
        self.deferred_until: float | None = None  # Set when the request is deferred as a cold turn for the first time.
        self.chain = PrefixChain(request.cache_salt, request.given)
        self.drafter: Drafter | ModelDraft | None = None  # Created for the request's first draft.
        self.guide = request.guide
        self.session: Session | None = None
        self.cached_token_count: int | None = None  # Set when the request first runs.
        self.wants_load = False  # True if KV could be loaded, but too many loads were pending.
        self.load_was_tried = False  # True if a load was started. There is no second load.
        self.loaded_token_count = 0  # Number of tokens whose KV came from another engine.
        # Number of prompt logprobs that were reported. A recomputed prompt must not report them again.
        self.prompt_logprobs_count = 0

    def rename_blocks(self, salt: str | None, *, is_private: bool) -> None:
        """Use another salt for the hashes of this request's blocks, both in the core and in connectors.

        Args:
            salt: the cache salt that is used from now on.
            is_private: True if no other request may share the blocks.
        """
        self.request = msgspec.structs.replace(self.request, cache_salt=salt)
        self.chain = PrefixChain(salt, self.request.given, is_private=is_private)

    @property
    def own_blocks(self) -> list[BlockIndex]:
        """Return all blocks on which the request has a claim. Each block is listed once."""
        return [*self.blocks[self.absent_block_count :], *self.reserved_blocks]

    @property
    def own_block_count(self) -> int:
        return len(self.blocks) - self.absent_block_count + len(self.reserved_blocks)

    @property
    def prompt_count(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def output_count(self) -> int:
        return len(self.tokens) - len(self.request.prompt_token_ids)

    @property
    def due_count(self) -> int:
        return len(self.tokens) - self.computed_count

    def chunk_tokens(self, start: int, count: int, budget: int) -> int:
        """Return the length of a chunk that does not end inside a joint span.

        A span that the chunk would cut is included if the budget allows it. Otherwise the chunk ends before the span.

        Args:
            start: position of the chunk's first token.
            count: number of tokens that the chunk would have.
            budget: largest number of tokens.

        Returns:
            Number of tokens, at most `budget`. 0 if the rest of a span at `start` exceeds the budget.
        """
        for first, end in self.joint_spans:
            if first < start + count < end:
                return end - start if end - start <= budget else max(first - start, 0)
        return count

    @property
    def needs_every_row(self) -> bool:
        """Return True if the request must compute every prompt token itself.

        Cached or loaded tokens have no hidden states. Prompt logprobs and some pooling methods need the hidden states.
        """
        return self.is_whole or self.request.sampling.prompt_logprobs is not None

    @property
    def phase(self) -> Phase:
        if self.cached_token_count is None:
            return Phase.QUEUED
        return Phase.DECODE if self.output_count else Phase.PREFILL
