"""Request to an engine core: one sequence to continue or to pool."""

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

PRIORITY_MIN = -100  # each priority in use has its own queue, so the range is limited
PRIORITY_MAX = 100


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence. A request with n choices is n sequences.

    Attributes:
        id: The engine's own name of the sequence.
        prompt_token_ids: At least one token.
        sampling: Sampling parameters.
        output_tokens_max: At least 1, or 0 for pooling. Prompt and output must fit the model's context.
        stop_token_ids: All tokens that end the sequence. Includes the model's end tokens unless they are ignored.
        seed: 0 <= seed < 2**64. Seed and position determine the randomness of each token, regardless of other requests.
        priority: PRIORITY_MIN to PRIORITY_MAX. A lower number runs sooner.
        cache_salt: Requests share cached prefix blocks only if their salts are equal. Includes the adapter's content
            (adapter_salt).
        kv_transfer: Task for the connector. None if there is none.
        guide: Restrains the tokens of this sequence only. None without a grammar.
        known_output: First output tokens of a resumed response. Computed like the prompt, but counted as output. Fewer
            than output_tokens_max, and no end token. The guide has accepted them.
        pooling: The last chunk of the prompt gives a vector or scores instead of a token, and the sequence ends.
            sampling and seed have no effect. None to continue the prompt.
        given: Prompt rows with given embeddings, ordered by position, without overlap. Blocks are shared only if these
            are equal too. Connectors do not see such a request.
        adapter: Adapter to add to the model's weights. None for none.
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
        """Return the tokens that are known before the first step: the prompt and the known output."""
        return self.prompt_token_ids + self.known_output if self.known_output else self.prompt_token_ids
