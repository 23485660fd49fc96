"""POST /v1/decisions: computes the probability of each possible answer to questions about one input.

The server generates no text. Each question is a prompt that ends where the answer would begin. Each possible answer has
a label, and the result is the probability that this label is the next token. All prompts begin with the input and
belong to one request. The input is computed once, and the other prompts hit the prefix cache.

Bodies and responses have two formats: OpenAI's, which vLLM uses, and SGLang's.
"""

from __future__ import annotations

import json
import math
import string
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from trioserve.api.openai.embeddings import PoolingResponse, Priority, pool
from trioserve.api.openai.request_types import check_cache_salt
from trioserve.api.request_context import RequestContext
from trioserve.api.response import Response
from trioserve.api.route_table import GENERATES, Forwarding, Operation
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.pooling import LabelledPrompt, PoolingParams
from trioserve.contracts.prompt import ChatPrompt
from trioserve.text.chat_messages import check_shape

__all__ = ["Decisions", "OPERATIONS", "create_decisions"]


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


T = TypeVar("T")
AnswerType = TypeVar("AnswerType")

# All known tokenizers encode each of these letters as one token after a chat template.
LETTERS = tuple(string.ascii_uppercase)
DIGITS = tuple(string.digits)
ONE_LETTER = "Answer with the letter of one option only."
ONE_NUMBER = "Answer with the number of one level only."
YES_OR_NO = "Answer with yes or no only."


class LabelWeights(NamedTuple):
    """Probabilities of a question's labels.

    Attributes:
        probabilities: probability of each label among the labels.
        mass: probability of all labels together among all tokens.
    """

    probabilities: list[float]
    mass: float

    @classmethod
    def of(cls, logprobs: Sequence[float], temperature: float) -> LabelWeights:
        largest = max(logprobs)
        weights = [math.exp((logprob - largest) / temperature) for logprob in logprobs]
        return cls([weight / sum(weights) for weight in weights], math.fsum(map(math.exp, logprobs)))

    @property
    def best(self) -> int:
        return self.probabilities.index(max(self.probabilities))

    @property
    def expected(self) -> float:
        return math.fsum(index * probability for index, probability in enumerate(self.probabilities))

    @property
    def confidence(self) -> float:
        return max(self.probabilities) * self.mass


class QuestionPrompt(NamedTuple, Generic[AnswerType]):
    """Prompt of one question.

    Attributes:
        text: text after the input.
        labels: possible next tokens, one for each answer.
        answer: converts the labels' probabilities into the answer.
    """

    text: str
    labels: tuple[str, ...]
    answer: Callable[[LabelWeights], AnswerType]


def has_ids(questions: Sequence[Question]) -> bool:
    """Return True if the questions have SGLang's format, with ids.

    Args:
        questions: questions of the body.

    Raises:
        InvalidRequest: the questions have different formats, or an id is missing or repeated.
    """
    with_id = [question.id is not None or question.question is not None for question in questions]
    if not any(with_id):
        return False
    if not all(with_id):
        index = with_id.index(not with_id[0])
        raise InvalidRequest(
            "questions mix two formats: some have id and question, and some have instructions",
            param=f"questions[{index}]",
        )
    seen: set[str] = set()
    for index, question in enumerate(questions):
        if not (question.id or "").strip() or question.id in seen:
            raise InvalidRequest(
                f"questions[{index}].id is {question.id!r}: each question needs a unique id",
                param=f"questions[{index}].id",
            )
        seen.add(question.id or "")
    return True


# --- OpenAI's format ---


def _openai_prompt(question: Question, place: str) -> QuestionPrompt[OpenAIAnswer]:
    if question.instructions is None:
        raise InvalidRequest(f"{place} has no instructions", param=f"{place}.instructions")
    if question.type == "yes_no":
        raise InvalidRequest(
            f'{place} has the type yes_no, which needs id and question: send "predicate"', param=f"{place}.type"
        )
    if question.type == "predicate":
        return _lettered(
            question.instructions,
            [("false", None), ("true", None)],
            lambda weights: PredicateAnswer(name=question.name, probability=weights.probabilities[1]),
        )
    if question.type == "choice":
        choices = _counted(question.choices, f"{place}.choices", LETTERS)
        values = [_value_of(choice, f"{place}.choices[{index}]") for index, choice in enumerate(choices)]
        _check_distinct([(type(value), value) for value in values], f"{place}.choices")
        return _lettered(
            question.instructions,
            [(json.dumps(v, ensure_ascii=False), c.description) for v, c in zip(values, choices, strict=True)],
            lambda weights: ChoiceAnswer(
                name=question.name,
                choice=values[weights.best],
                probabilities=[
                    ChoiceProbability(value=value, probability=probability)
                    for value, probability in zip(values, weights.probabilities, strict=True)
                ],
                confidence=weights.confidence,
            ),
        )
    levels = [
        level if isinstance(level, Level) else Level(label=level)
        for level in _counted(question.levels, f"{place}.levels", DIGITS)
    ]
    return _lettered(
        question.instructions,
        [(level.label, level.description) for level in levels],
        lambda weights: ScoreAnswer(
            name=question.name,
            score=weights.expected,
            probabilities=[
                ScoreProbability(value=index, label=level.label, probability=probability)
                for index, (level, probability) in enumerate(zip(levels, weights.probabilities, strict=True))
            ],
            confidence=weights.confidence,
        ),
    )


def _lettered(
    instructions: str, options: Sequence[tuple[str, str | None]], answer: Callable[[LabelWeights], OpenAIAnswer]
) -> QuestionPrompt[OpenAIAnswer]:
    labels = LETTERS[: len(options)]
    lines = [f"Question: {instructions}"] if instructions else []
    return QuestionPrompt("\n".join([*lines, *_lines(labels, options), ONE_LETTER]), labels, answer)


# --- SGLang's format ---


def _sglang_prompt(question: Question, place: str) -> QuestionPrompt[NamedAnswer]:
    if not (question.question or "").strip():
        raise InvalidRequest(f"{place} has no question", param=f"{place}.question")
    if question.type == "predicate":
        raise InvalidRequest(
            f'{place} has the type predicate, which needs instructions: send "yes_no"', param=f"{place}.type"
        )
    lines = [f"Question: {question.question}"]
    if question.type == "choice":
        options = _counted(question.options, f"{place}.options", LETTERS)
        names = [_name_of(option, f"{place}.options[{index}]") for index, option in enumerate(options)]
        _check_distinct(names, f"{place}.options")
        labels = LETTERS[: len(names)]
        described = [(name, option.description) for name, option in zip(names, options, strict=True)]
        lines += [*_lines(labels, described), ONE_LETTER]
    elif question.type == "score":
        levels = _counted(question.levels, f"{place}.levels", DIGITS)
        texts = [level if isinstance(level, str) else level.label for level in levels]
        names = [str(index) for index in range(len(texts))]
        labels = DIGITS[: len(names)]
        lines += [*(f"{label}: {text}" for label, text in zip(labels, texts, strict=True)), ONE_NUMBER]
    else:
        names, labels = ["yes", "no"], ("yes", "no")
        meanings = (("yes", question.yes), ("no", question.no))
        lines = [f"Is the following true? {question.question}"]
        lines += [*(f"{label}: {meaning}" for label, meaning in meanings if meaning), YES_OR_NO]

    kind: Literal["choice", "score", "yes_no"] = question.type

    def answer(weights: LabelWeights) -> NamedAnswer:
        return NamedAnswer(
            type=kind,
            probabilities=dict(zip(names, weights.probabilities, strict=True)),
            label_mass=weights.mass,
            choice=names[weights.best] if kind == "choice" else UNSET,
            score=weights.expected if kind == "score" else UNSET,
        )

    return QuestionPrompt("\n".join(lines), labels, answer)


# --- both formats ---


def _lines(labels: Sequence[str], options: Sequence[tuple[str, str | None]]) -> list[str]:
    return [
        f"{label}: {name} - {description}" if description else f"{label}: {name}"
        for label, (name, description) in zip(labels, options, strict=True)
    ]


def _counted(values: list[T] | None, place: str, labels: Sequence[str]) -> list[T]:
    if values is None or not 2 <= len(values) <= len(labels):
        count = 0 if values is None else len(values)
        raise InvalidRequest(f"{place} has {count} entries, allowed are 2 to {len(labels)}", param=place)
    return values


def _check_distinct(values: Sequence[object], place: str) -> None:
    if len(set(values)) != len(values):
        raise InvalidRequest(f"{place} has two equal entries", param=place)


def _value_of(choice: Choice, place: str) -> str | bool:
    if choice.value is None:
        raise InvalidRequest(f"{place} has no value", param=f"{place}.value")
    return choice.value


def _name_of(option: Choice, place: str) -> str:
    if not (option.name or "").strip():
        raise InvalidRequest(f"{place} has no name", param=f"{place}.name")
    assert option.name is not None, "checked above"
    return option.name


PROMPT_FORMAT_VERSION = 1  # The version of SGLang's wording of the prompts.
WITHOUT_REASONING = {"enable_thinking": False, "thinking": False}
"""Template arguments that switch reasoning off, so that the answer is the first output token."""


async def create_decisions(context: RequestContext) -> None:
    body = await context.body(DecisionsBody)
    model = context.model_name(body.model)
    body.check()
    check_shape(body.chat_template_kwargs, "chat_template_kwargs")
    if has_ids(body.questions):
        prompts = [_sglang_prompt(question, f"questions[{index}]") for index, question in enumerate(body.questions)]
        answers, response = await _answers(context, body, prompts)
        decisions = Decisions(
            model=model,
            answers={question.id or "": answer for question, answer in zip(body.questions, answers, strict=True)},
            usage=DecisionsUsage(
                prompt_tokens=response.usage.prompt_tokens,
                completion_tokens=response.usage.completion_tokens,
                total_tokens=response.usage.total_tokens,
            ),
            object="decisions",
            prompt_format_version=PROMPT_FORMAT_VERSION,
        )
    else:
        lettered = [_openai_prompt(question, f"questions[{index}]") for index, question in enumerate(body.questions)]
        chosen, response = await _answers(context, body, lettered)
        decisions = Decisions(
            model=model,
            answers=chosen,
            usage=DecisionsUsage(
                input_tokens=response.usage.prompt_tokens,
                input_tokens_details=InputTokensDetails(
                    cached_tokens=response.cached_token_count, cache_write_tokens=0
                ),
                output_tokens=0,
                output_tokens_details=OutputTokensDetails(reasoning_tokens=0),
                total_tokens=response.usage.total_tokens,
            ),
        )
    await context.respond_json(decisions)


async def _answers(
    context: RequestContext, body: DecisionsBody, questions: Sequence[QuestionPrompt[AnswerType]]
) -> tuple[list[AnswerType], PoolingResponse]:
    """Compute the answer to each question, in order."""
    arguments = WITHOUT_REASONING | (body.chat_template_kwargs or {})
    prompts = [
        LabelledPrompt(
            ChatPrompt(
                messages=[{"role": "user", "content": f"{body.text}\n\n{question.text}"}], template_arguments=arguments
            ),
            question.labels,
        )
        for question in questions
    ]
    response = await pool(
        context, body, prompts, PoolingParams(task="labels"), name_of=lambda index: f"questions[{index}]"
    )
    temperature = 1.0 if body.temperature is None else body.temperature
    answers = [
        question.answer(LabelWeights.of(one.values(), temperature))
        for question, one in zip(questions, response.pooled, strict=True)
    ]
    return answers, response


OPERATIONS: tuple[Operation[RequestContext], ...] = (
    Operation(
        method="POST",
        path="/v1/decisions",
        handler=create_decisions,
        summary="Compute the probability of each possible answer to a question",
        forwarding=Forwarding.BY_MODEL,
        description="Questions have OpenAI's format, as in vLLM, or SGLang's format with ids. The answers have the "
        "same format. Fields that are not named here are ignored.",
        body=DecisionsBody,
        response=Decisions,
        errors=GENERATES,
        takes_deadlines=True,
    ),
)
