"""The engine's side of a request whose inputs become vectors or scores.

A request may have thousands of inputs. The core has only a bounded number of its sequences at a time. The next sequence
joins when another one has ended. So the request neither fills the core's queue nor blocks other requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trioserve.admission.prompt_encoder import PromptEncoder
from trioserve.contracts.deadlines import Deadlines
from trioserve.contracts.pooling import PoolingInput, PoolingParams
from trioserve.contracts.prompt import Cut
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.tracing import NO_SPAN, Span
from trioserve.engine.open_request import Choice, OpenRequest
from trioserve.text.tokenizer import EncodedInput

__all__ = ["PoolingRequest"]

NO_SAMPLING = SamplingParams(max_tokens=0)  # no token is sampled


class PoolingRequest(OpenRequest):
    """A pooled request. `Engine.embed` and `Engine.generate` document the other arguments.

    Args:
        inputs: one sequence and one choice each, in this order.
        params: what is computed from the inputs.
        name_of: returns the name of an input for error messages, by its index.
        cut: how to shorten an input that is too long. None: it is refused.
        sequence_count_max: most sequences that the core has of this request at a time.

    Attributes:
        encoded: the tokenized inputs, until sequences are made from them.
        input_token_counts: tokens of each input. Set when the inputs are tokenized.
    """

    generates = False

    def __init__(
        self,
        inputs: Sequence[PoolingInput],
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
        self.encoded: list[EncodedInput] = []
        self.input_token_counts: tuple[int, ...] = ()
        self._unfinished_count = len(self.inputs)

    @property
    def choice_count(self) -> int:
        return len(self.inputs)

    @property
    def prompts(self) -> tuple[PoolingInput, ...]:
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
