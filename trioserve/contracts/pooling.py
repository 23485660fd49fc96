"""Pooling: parameters of requests that turn a prompt into a vector or scores, and their results."""

from __future__ import annotations

import array
import sys
from typing import Literal

import msgspec

from trioserve.contracts.arguments import refuse, to_bool, to_int
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.prompt import ChatPrompt, Prompt

__all__ = [
    "DIMENSIONS_MAX",
    "INPUTS_MAX",
    "LabelledPrompt",
    "PoolingResult",
    "PoolingInput",
    "Pooling",
    "PoolingMethod",
    "PoolingParams",
    "PoolingTask",
    "TOKEN_TASKS",
    "TextPair",
]

INPUTS_MAX = 2048  # One request may have this many inputs, as in OpenAI's API.
DIMENSIONS_MAX = 2**24  # No model has so many dimensions. The engine checks the limit of the loaded model.

PoolingMethod = Literal["last", "mean", "cls"]
PoolingTask = Literal["embed", "score", "labels", "token_embed", "token_classify"]
METHODS: tuple[PoolingMethod, ...] = ("last", "mean", "cls")
TASKS: tuple[PoolingTask, ...] = ("embed", "score", "labels", "token_embed", "token_classify")
TOKEN_TASKS: tuple[PoolingTask, ...] = ("token_embed", "token_classify")
"""Tasks whose result has one row for each token. Only encoders compute them."""


class TextPair(msgspec.Struct, frozen=True):
    """Two texts that a model scores together, such as a query and a document."""

    first: str
    second: str


class LabelledPrompt(msgspec.Struct, frozen=True):
    """A prompt, and the labels that may follow it.

    Attributes:
        prompt: The prompt.
        labels: Each label must add exactly one token to the prompt. No two labels may add the same token.
    """

    prompt: str | ChatPrompt
    labels: tuple[str, ...]


PoolingInput = Prompt | TextPair | LabelledPrompt


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of a pooling request.

    Attributes:
        task: "embed" returns a vector for each prompt. "score" returns the score of a pair of texts, for models with a
            scoring head. "labels" returns the natural logarithm of each label's probability among all tokens.
            "token_embed" returns a vector for each token of a prompt, and "token_classify" the probability of each of
            the model's labels for each token. Both are for encoders.
        method: Which hidden states become the vector: "last" (last token), "cls" (first token) or "mean" (the mean of
            all tokens). None for the model's own method.
        normalize: True to scale the vector to length 1. None for the model's own setting.
        dimensions: Number of leading vector entries to keep, for models that support it. None for all.

    Raises:
        InvalidRequest: a value that no model supports.
    """

    task: PoolingTask = "embed"
    method: PoolingMethod | None = None
    normalize: bool | None = None
    dimensions: int | None = None

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            refuse("task", self.task, " or ".join(f'"{task}"' for task in TASKS))
        if self.method is not None and self.method not in METHODS:
            refuse("method", self.method, f"None, {', '.join(f'{method!r}' for method in METHODS)}")
        if self.normalize is not None:
            to_bool("normalize", self.normalize)
        if self.dimensions is not None:
            dimensions = to_int("dimensions", self.dimensions)
            if not 1 <= dimensions <= DIMENSIONS_MAX:
                raise InvalidRequest(
                    f"dimensions is {dimensions}, allowed is 1 to {DIMENSIONS_MAX}", param="dimensions"
                )
            msgspec.structs.force_setattr(self, "dimensions", dimensions)


class Pooling(msgspec.Struct, frozen=True, kw_only=True):
    """Pooling of one sequence, with the model's defaults filled in. The core and the executor read it.

    Attributes:
        task: See PoolingParams.
        method: See PoolingParams.
        normalize: See PoolingParams.
        dimensions: See PoolingParams.
        is_whole: True if one step must compute the whole prompt, because the method needs all rows at once. False to
            compute it in chunks.
        first_segment_tokens: Tokens of the first text of a pair, for models with token types. None for a single text.
        label_token_ids: Tokens of the labels. At least one for the task "labels".
    """

    task: PoolingTask
    method: PoolingMethod
    normalize: bool
    dimensions: int | None = None
    is_whole: bool = False
    first_segment_tokens: int | None = None
    label_token_ids: tuple[int, ...] = ()


class PoolingResult(msgspec.Struct, frozen=True):
    """Result for one prompt.

    Attributes:
        data: float32 numbers, little-endian.
        row_size: Numbers for each token. 0: the result is for the whole prompt.
    """

    data: bytes
    row_size: int = 0

    @classmethod
    def of(cls, values: list[float]) -> PoolingResult:
        """Return a result with these numbers, rounded to float32 and packed into bytes.

        Args:
            values: The numbers.
        """
        numbers = array.array("f", values)
        if sys.byteorder == "big":
            numbers.byteswap()
        return cls(numbers.tobytes())

    def __len__(self) -> int:
        """Return the count of numbers."""
        return len(self.data) // 4

    def rows(self) -> list[list[float]]:
        """Return the numbers of each token, for a task of TOKEN_TASKS."""
        numbers, size = self.values(), self.row_size
        return [numbers[first : first + size] for first in range(0, len(numbers), size)]

    def values(self) -> list[float]:
        numbers = array.array("f", self.data)
        if sys.byteorder == "big":
            numbers.byteswap()
        return numbers.tolist()
