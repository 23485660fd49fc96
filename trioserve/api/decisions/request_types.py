"""Body of POST /v1/decisions in two formats: OpenAI's, which vLLM uses, and SGLang's."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from trioserve.api.embeddings.request_types import Priority
from trioserve.api.openai.request_types import check_cache_salt
from trioserve.contracts.errors import InvalidRequest

__all__ = ["Choice", "DecisionsBody", "InputMessage", "Level", "Question"]

QUESTIONS_MAX = 64  # each question is a prompt, though all share the input's blocks
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

    # Never truncate a prompt, since its end is the question.
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
