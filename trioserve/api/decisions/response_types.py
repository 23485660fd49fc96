"""Types of responses with decisions, for the OpenAPI document."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from trioserve.api.openai.response_types import Response

__all__ = ["Decisions"]


class PredicateAnswer(Response, tag_field="type", tag="predicate"):
    """Answer to a predicate.

    Attributes:
        probability: probability that the predicate is true.
    """

    name: str | None
    probability: float


class ChoiceProbability(Response):
    value: str | bool
    probability: float


class ChoiceAnswer(Response, tag_field="type", tag="choice"):
    """Answer to a choice.

    Attributes:
        probabilities: probabilities among the choices.
        confidence: probability of the best choice among all tokens of the model.
    """

    name: str | None
    choice: str | bool
    probabilities: list[ChoiceProbability]
    confidence: float


class ScoreProbability(Response):
    value: int
    label: str
    probability: float


class ScoreAnswer(Response, tag_field="type", tag="score"):
    """Answer to a score.

    Attributes:
        score: expected level, counted from 0.
        probabilities: probabilities among the levels.
        confidence: probability of the best level among all tokens of the model.
    """

    name: str | None
    score: float
    probabilities: list[ScoreProbability]
    confidence: float


class NamedAnswer(msgspec.Struct, forbid_unknown_fields=True):
    """Answer in SGLang's format.

    Attributes:
        label_mass: probability of all labels together, among all tokens of the model.
    """

    type: Literal["choice", "score", "yes_no"]
    probabilities: dict[str, float]
    label_mass: float
    choice: str | UnsetType = UNSET
    score: float | UnsetType = UNSET


class InputTokensDetails(Response):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(Response):
    reasoning_tokens: int


class DecisionsUsage(Response):
    """Token counts: input_tokens for OpenAI's format, prompt_tokens for SGLang's."""

    total_tokens: int
    input_tokens: int | UnsetType = UNSET
    input_tokens_details: InputTokensDetails | UnsetType = UNSET
    output_tokens: int | UnsetType = UNSET
    output_tokens_details: OutputTokensDetails | UnsetType = UNSET
    prompt_tokens: int | UnsetType = UNSET
    completion_tokens: int | UnsetType = UNSET


class Decisions(Response):
    """Response with decisions.

    Attributes:
        answers: in OpenAI's format a list in the order of the questions, in SGLang's format an object by id.
        object: only in SGLang's format.
        prompt_format_version: only in SGLang's format.
    """

    model: str
    answers: list[PredicateAnswer | ChoiceAnswer | ScoreAnswer] | dict[str, NamedAnswer]
    usage: DecisionsUsage
    object: Literal["decisions"] | UnsetType = UNSET
    prompt_format_version: int | UnsetType = UNSET
