"""What a response with decisions looks like, as types: for the API's description."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from trioserve.api.openai.response_types import Response

__all__ = ["Decisions"]


class PredicateAnswer(Response, tag_field="type", tag="predicate"):
    """probability: that it is true."""

    name: str | None
    probability: float


class ChoiceProbability(Response):
    value: str | bool
    probability: float


class ChoiceAnswer(Response, tag_field="type", tag="choice"):
    """probabilities: among the choices. confidence: that of the choice, among all tokens of the model."""

    name: str | None
    choice: str | bool
    probabilities: list[ChoiceProbability]
    confidence: float


class ScoreProbability(Response):
    value: int
    label: str
    probability: float


class ScoreAnswer(Response, tag_field="type", tag="score"):
    """score: the level that is to be expected, counted from 0."""

    name: str | None
    score: float
    probabilities: list[ScoreProbability]
    confidence: float


class NamedAnswer(msgspec.Struct, forbid_unknown_fields=True):
    """In SGLang's shape. label_mass: the probability of all labels together, among all tokens of the model."""

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
    """With the names of the shape of the questions: input_tokens, or prompt_tokens."""

    total_tokens: int
    input_tokens: int | UnsetType = UNSET
    input_tokens_details: InputTokensDetails | UnsetType = UNSET
    output_tokens: int | UnsetType = UNSET
    output_tokens_details: OutputTokensDetails | UnsetType = UNSET
    prompt_tokens: int | UnsetType = UNSET
    completion_tokens: int | UnsetType = UNSET


class Decisions(Response):
    """answers: a list, in the order of the questions, or, where these have ids, by their id. object and
    prompt_format_version come with the latter."""

    model: str
    answers: list[PredicateAnswer | ChoiceAnswer | ScoreAnswer] | dict[str, NamedAnswer]
    usage: DecisionsUsage
    object: Literal["decisions"] | UnsetType = UNSET
    prompt_format_version: int | UnsetType = UNSET
