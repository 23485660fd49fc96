"""What is asked of an engine core: one sequence to be continued, or to be pooled."""

from __future__ import annotations

import msgspec

from trioserve.contracts.adapter import AdapterRef
from trioserve.contracts.given_rows import GivenRows
from trioserve.contracts.guide import Guide
from trioserve.contracts.ids import RequestId
from trioserve.contracts.kv_transfer_params import KVTransferParams
from trioserve.contracts.pooling import Pooling
from trioserve.contracts.sampling import SamplingParams

__all__ = ["EngineRequest", "PRIORITY_MAX", "PRIORITY_MIN"]

PRIORITY_MIN = -100  # each level in use is a queue of its own, so their number is bounded
PRIORITY_MAX = 100


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence. A request with n choices is n of these.

    prompt_token_ids: at least one. output_tokens_max: at least one, and prompt and output fit the model's context.
    stop_token_ids: every token that ends it, the model's end tokens included unless they are to be ignored.
    seed: 0 <= seed < 2**64, always set: with the position it fixes the randomness of each token, whatever else runs.
    priority: PRIORITY_MIN to PRIORITY_MAX, a lower number runs sooner.
    cache_salt: requests share cached prefix blocks only when their salts are equal. With an adapter, its content is in
        it (adapter_salt).
    adapter: what is added to the model's weights for it; None: nothing is.
    kv_transfer: what a connector is to do for it; None: nothing.
    guide: what restrains its tokens, which belongs to this sequence alone; None: nothing does.
    known_output: the first tokens of its output, where it began elsewhere. They are computed as the prompt is, and
        count as output in everything else. Fewer than output_tokens_max, and none of them ends it. A guide has been
        told of them.
    pooling: the prompt is computed, and what its last chunk gives is a vector or a score in the place of a token: with
        that it ends. output_tokens_max is 0 then, and of sampling and seed nothing is looked at. None: it is continued.
    given: rows of the prompt whose embeddings are given, in the order of their positions, none in two. Blocks are
        shared only where these are equal, too; no connector is told of such a request.
    """

    id: RequestId
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    output_tokens_max: int
    stop_token_ids: frozenset[int]
    seed: int
    priority: int = 0
    cache_salt: str | None = None
    kv_transfer: KVTransferParams | None = None
    guide: Guide | None = None
    known_output: tuple[int, ...] = ()
    pooling: Pooling | None = None
    given: tuple[GivenRows, ...] = ()
    adapter: AdapterRef | None = None

    @property
    def known_token_ids(self) -> tuple[int, ...]:
        """All that is there before the first step."""
        return self.prompt_token_ids + self.known_output if self.known_output else self.prompt_token_ids
