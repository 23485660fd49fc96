"""What is asked of a prompt that is to become a vector or a score instead of being continued, and what comes of it."""

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
    "Pooled",
    "PooledInput",
    "Pooling",
    "PoolingMethod",
    "PoolingParams",
    "PoolingTask",
    "TextPair",
]

INPUTS_MAX = 2048  # of one request, as in OpenAI's API
DIMENSIONS_MAX = 2**24  # no model's vectors are as long; the model's own limit is checked where it is known

PoolingMethod = Literal["last", "mean", "cls"]
PoolingTask = Literal["embed", "score", "labels"]
METHODS: tuple[PoolingMethod, ...] = ("last", "mean", "cls")
TASKS: tuple[PoolingTask, ...] = ("embed", "score", "labels")


class TextPair(msgspec.Struct, frozen=True):
    """Two texts that are judged together, such as a query and a document."""

    first: str
    second: str


class LabelledPrompt(msgspec.Struct, frozen=True):
    """A prompt, and the labels of which one is to come next: each adds exactly one token to the prompt's, and no two
    add the same one."""

    prompt: str | ChatPrompt
    labels: tuple[str, ...]


PooledInput = Prompt | TextPair | LabelledPrompt


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True):
    """What a caller asks for. Raises InvalidRequest for what no model could do.

    task: "embed" gives a vector for each prompt; "score" gives the number that a model with a head for it gives to a
    pair of texts; "labels" gives the natural logarithm of the probability of each label of a prompt, among all tokens.
    method: which of the prompt's hidden states become the vector: that of its last token, of its first
    one, or the mean of all; None: the model's own. normalize: the vector is given length 1; None: as the model says.
    dimensions: only so many of its first numbers, for models that were made for that; None: all.
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
    """The same for one sequence, when the model is known, as the engine's core and the executor need it.

    is_whole: all of the prompt is computed in one step, since every row of it is needed at once; otherwise it comes in
    chunks like any other. first_segment_tokens: of a pair of texts, the tokens of the first one, for models that tell
    the two apart; None: there is one text. label_token_ids: of the task "labels", at least one.
    """

    task: PoolingTask
    method: PoolingMethod
    normalize: bool
    dimensions: int | None = None
    is_whole: bool = False
    first_segment_tokens: int | None = None
    label_token_ids: tuple[int, ...] = ()


class Pooled(msgspec.Struct, frozen=True):
    """What came of one prompt. data: its numbers, float32, in little-endian order."""

    data: bytes

    @classmethod
    def of(cls, values: list[float]) -> Pooled:
        """Rounds to float32."""
        numbers = array.array("f", values)
        if sys.byteorder == "big":
            numbers.byteswap()
        return cls(numbers.tobytes())

    def __len__(self) -> int:
        """How many numbers."""
        return len(self.data) // 4

    def values(self) -> list[float]:
        numbers = array.array("f", self.data)
        if sys.byteorder == "big":
            numbers.byteswap()
        return numbers.tolist()
