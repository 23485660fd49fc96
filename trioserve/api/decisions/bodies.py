"""Bodies of POST /v1/decisions and its response in two formats: OpenAI's, which vLLM uses, and SGLang's."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from trioserve.api.embeddings.embeddings import Priority
from trioserve.api.openai.request_types import check_cache_salt
from trioserve.api.response import Response
from trioserve.contracts.errors import InvalidRequest

__all__ = ["Decisions", "DecisionsBody", "Question"]

# The number is limited, because each question is a prompt. All prompts share the blocks of the input.
QUESTIONS_MAX = 64
Temperature = Annotated[float, msgspec.Meta(gt=0, le=100)]


class InputText(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["input_text"]
    text: str


class InputMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["user"]
    content: str | list[InputText]


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """Possible answer.

    Attributes:
        value: answer in OpenAI's format.
        name: answer in SGLang's format.
    """

    value: str | bool | None = None
    name: str | None = None
    description: str | None = None


class Level(msgspec.Struct, frozen=True, kw_only=True):
    label: str
    description: str | None = None


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """One question.

    OpenAI's format has instructions, optionally a name, and choices for a choice or levels for a score. SGLang's format
    has id, question, and options, levels as texts, or the meanings of yes and no.
    """

    type: Literal["predicate", "choice", "score", "yes_no"]
    instructions: str | None = None
    name: str | None = None
    choices: list[Choice] | None = None
    levels: list[str | Level] | None = None
    id: str | None = None
    question: str | None = None
    options: list[Choice] | None = None
    yes: str | None = None
    no: str | None = None


class DecisionsBody(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /v1/decisions.

    Attributes:
        input: text that the questions are about.
        temperature: temperature of the probabilities among the labels.
        safety_identifier: accepted and ignored.
        user: accepted and ignored.
    """

    input: str | list[InputMessage]
    questions: list[Question]
    model: str | None = None
    temperature: Temperature | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    safety_identifier: str | None = None
    user: str | None = None
    priority: Priority | None = None
    cache_salt: str | None = None
    queue_timeout: float | None = None
    ttft_timeout: float | None = None
    timeout: float | None = None

    # A prompt is never truncated, because the question is at its end.
    @property
    def truncate_prompt_tokens(self) -> None:
        return None

    @property
    def truncation_side(self) -> None:
        return None

    def check(self) -> None:
        """Check rules that types cannot express.

        Raises:
            InvalidRequest: a rule is broken. The error names the field.
        """
        check_cache_salt(self.cache_salt)
        if not 1 <= len(self.questions) <= QUESTIONS_MAX:
            raise InvalidRequest(
                f"questions has {len(self.questions)} entries, allowed are 1 to {QUESTIONS_MAX}", param="questions"
            )

    @property
    def text(self) -> str:
        if isinstance(self.input, str):
            return self.input
        return "\n\n".join(
            message.content if isinstance(message.content, str) else "\n".join(part.text for part in message.content)
            for message in self.input
        )


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


OpenAIAnswer = PredicateAnswer | ChoiceAnswer | ScoreAnswer
"""Answer in OpenAI's format."""


class NamedAnswer(Response):
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
    answers: list[OpenAIAnswer] | dict[str, NamedAnswer]
    usage: DecisionsUsage
    object: Literal["decisions"] | UnsetType = UNSET
    prompt_format_version: int | UnsetType = UNSET
