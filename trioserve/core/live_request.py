"""What the core knows of a sequence: its tokens, how many of them are computed, and the blocks that hold their KV.

A request owns blocks while it is RUNNING (but those that its window has left behind), while it is
WAITING_FOR_REMOTE_KV, while it is WAITING to run with KV that has arrived, and while it is ENDED: everything was said,
and a step that was planned ahead still reads them (steps_in_flight). At no other time here.
"""

from __future__ import annotations

import msgspec

from trioserve.contracts.events import Phase
from trioserve.contracts.ids import BlockIndex
from trioserve.contracts.request import EngineRequest
from trioserve.core.drafting import Drafter
from trioserve.core.model_draft import ModelDraft
from trioserve.core.prefix_cache import PrefixChain
from trioserve.core.request_state import RequestLife
from trioserve.core.state_slots import OwnState

__all__ = ["LiveRequest"]


class LiveRequest(RequestLife[EngineRequest]):
    """`tokens` are the known ones, prompt and then output; the first `computed_count` of them have their KV in
    `blocks`. A request catches up: whatever is known and not computed is due."""

    __slots__ = (
        "asked_remote",
        "blocks",
        "blocks_wanted",
        "cached_token_count",
        "chain",
        "computed_count",
        "drafter",
        "gone_count",
        "guide",
        "is_pooled",
        "is_whole",
        "is_wide",
        "loaded_token_count",
        "overtaken_count",
        "prompt_logprobs_count",
        "reserved_blocks",
        "state",
        "tokens",
        "wants_load",
    )

    def __init__(self, request: EngineRequest, arrival_index: int) -> None:
        super().__init__(request, arrival_index)
        self.is_pooled = request.pooling is not None
        self.is_whole = request.pooling is not None and request.pooling.is_whole
        self.is_wide = False  # when it started, more was due than one step computes
        self.tokens = [*request.prompt_token_ids, *request.known_output]
        self.computed_count = 0
        self.blocks: list[BlockIndex] = []  # by place in the table; NO_BLOCK in the first gone_count of them
        self.gone_count = 0
        self.reserved_blocks: list[BlockIndex] = []  # its own as well, for what is known and not loaded
        self.state: OwnState | None = None  # while it runs, if the model's layers keep one
        self.blocks_wanted = 0  # as many must be available before it is worth looking again whether it fits
        self.overtaken_count = 0  # by those who came later and fitted, while it did not
        self.chain = PrefixChain(request.cache_salt, request.given)
        self.drafter: Drafter | ModelDraft | None = None  # made when it first may draft
        self.guide = request.guide
        self.cached_token_count: int | None = None  # set when it runs for the first time
        self.wants_load = False  # and there was no room for one more
        self.asked_remote = False  # a load was begun: it is not tried twice
        self.loaded_token_count = 0  # that came from elsewhere
        self.prompt_logprobs_count = 0  # handed out so far; a recomputed prompt repeats them

    def rename_blocks(self, salt: str | None, *, is_private: bool) -> None:
        """Its blocks are called otherwise from here on, by the core and by a connector. is_private: they are nobody
        else's."""
        self.request = msgspec.structs.replace(self.request, cache_salt=salt)
        self.chain = PrefixChain(salt, self.request.given, is_private=is_private)

    @property
    def own_blocks(self) -> list[BlockIndex]:
        """All that it has a claim on, each once."""
        return [*self.blocks[self.gone_count :], *self.reserved_blocks]

    @property
    def own_block_count(self) -> int:
        return len(self.blocks) - self.gone_count + len(self.reserved_blocks)

    @property
    def prompt_count(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def output_count(self) -> int:
        return len(self.tokens) - len(self.request.prompt_token_ids)

    @property
    def due_count(self) -> int:
        return len(self.tokens) - self.computed_count

    @property
    def needs_every_row(self) -> bool:
        """No token of its prompt may come from elsewhere, be it the prefix cache: what computing it gives is asked."""
        return self.is_whole or self.request.sampling.prompt_logprobs is not None

    @property
    def phase(self) -> Phase:
        if self.cached_token_count is None:
            return Phase.QUEUED
        return Phase.DECODE if self.output_count else Phase.PREFILL
