"""The engine's side of a request whose prompts become vectors or scores: any number of them, and still one scope, one
place in the queue and one lease.

The core has a bounded number of its sequences at a time. The next one joins when one has ended, so that a request of
thousands of prompts neither fills the core's queue nor keeps everybody else out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trioserve.admission.prompt_encoder import PromptEncoder
from trioserve.contracts.deadlines import Deadlines
from trioserve.contracts.pooling import PooledInput, PoolingParams
from trioserve.contracts.prompt import Cut
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.tracing import NO_SPAN, Span
from trioserve.engine.open_request import Choice, OpenRequest
from trioserve.text.tokenizer import EncodedInput

__all__ = ["PooledRequest"]

NO_SAMPLING = SamplingParams(max_tokens=0)  # nothing is sampled, and nothing shown


class PooledRequest(OpenRequest):
    """inputs: one sequence each, and one choice, in this order. name_of: what an input is called in an error. cut: what
    becomes of one that is too long; None: it is refused."""

    generates = False

    def __init__(
        self,
        inputs: Sequence[PooledInput],
        params: PoolingParams,
        *,
        name_of: Callable[[int], str],
        cut: Cut | None,
        sequence_count_max: int,
        request_id: str,
        priority: int,
        cache_salt: str | None,
        add_special_tokens: bool,
        deadlines: Deadlines,
        owner: str | None,
        tenant: str,
        part_of: Span = NO_SPAN,
        adapter: str | None = None,
    ) -> None:
        super().__init__(
            (),
            NO_SAMPLING,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            add_special_tokens=add_special_tokens,
            deadlines=deadlines,
            owner=owner,
            tenant=tenant,
            part_of=part_of,
            adapter=adapter,
        )
        self.inputs = tuple(inputs)
        self.params = params
        self.name_of = name_of
        self.cut = cut
        self.sequence_count = min(len(self.inputs), sequence_count_max)
        self.encoded: list[EncodedInput] = []  # until its sequences are made of it
        self.input_token_counts: tuple[int, ...] = ()  # known once they are tokenized
        self._unfinished_count = len(self.inputs)

    @property
    def choice_count(self) -> int:
        return len(self.inputs)

    @property
    def prompts(self) -> tuple[PooledInput, ...]:
        return self.inputs

    async def tokenize(self, encoder: PromptEncoder) -> None:
        self.encoded = await encoder.encode_inputs(
            self.inputs, name_of=self.name_of, add_special_tokens=self.add_special_tokens, cut=self.cut
        )
        self.input_token_counts = tuple(len(one.token_ids) for one in self.encoded)

    @property
    def prompt_token_count(self) -> int:
        return sum(self.input_token_counts)

    def prompt_token_count_of(self, choice: Choice) -> int:
        return self.input_token_counts[choice.index]

    def note_cached(self, choice: Choice, token_count: int) -> None:
        self.cached_token_count += token_count

    @property
    def completion_token_count(self) -> int:
        return 0
