"""POST /v1/decisions: computes the probability of each possible answer to questions about one input.

The server generates no text. Each question is a prompt that ends where the answer would begin. Each possible answer has
a label, and the result is the probability that this label is the next token. All prompts begin with the input and
belong to one request. The input is computed once, and the other prompts hit the prefix cache.
"""

from __future__ import annotations

import json
import math
import string
from collections.abc import Callable, Sequence
from typing import Generic, Literal, NamedTuple, TypeVar

from msgspec import UNSET

from trioserve.api.decisions import bodies
from trioserve.api.decisions.bodies import DecisionsBody, OpenAIAnswer, Question
from trioserve.api.embeddings.embeddings import PoolingResponse, pool
from trioserve.api.request_context import RequestContext
from trioserve.api.route_table import GENERATES, Forwarding, Operation
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.pooling import LabelledPrompt, PoolingParams
from trioserve.contracts.prompt import ChatPrompt
from trioserve.text.chat_messages import check_shape

__all__ = ["OPERATIONS", "create_decisions"]

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
            lambda weights: bodies.PredicateAnswer(name=question.name, probability=weights.probabilities[1]),
        )
    if question.type == "choice":
        choices = _counted(question.choices, f"{place}.choices", LETTERS)
        values = [_value_of(choice, f"{place}.choices[{index}]") for index, choice in enumerate(choices)]
        _check_distinct([(type(value), value) for value in values], f"{place}.choices")
        return _lettered(
            question.instructions,
            [(json.dumps(v, ensure_ascii=False), c.description) for v, c in zip(values, choices, strict=True)],
            lambda weights: bodies.ChoiceAnswer(
                name=question.name,
                choice=values[weights.best],
                probabilities=[
                    bodies.ChoiceProbability(value=value, probability=probability)
                    for value, probability in zip(values, weights.probabilities, strict=True)
                ],
                confidence=weights.confidence,
            ),
        )
    levels = [
        level if isinstance(level, bodies.Level) else bodies.Level(label=level)
        for level in _counted(question.levels, f"{place}.levels", DIGITS)
    ]
    return _lettered(
        question.instructions,
        [(level.label, level.description) for level in levels],
        lambda weights: bodies.ScoreAnswer(
            name=question.name,
            score=weights.expected,
            probabilities=[
                bodies.ScoreProbability(value=index, label=level.label, probability=probability)
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


def _sglang_prompt(question: Question, place: str) -> QuestionPrompt[bodies.NamedAnswer]:
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

    def answer(weights: LabelWeights) -> bodies.NamedAnswer:
        return bodies.NamedAnswer(
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


def _value_of(choice: bodies.Choice, place: str) -> str | bool:
    if choice.value is None:
        raise InvalidRequest(f"{place} has no value", param=f"{place}.value")
    return choice.value


def _name_of(option: bodies.Choice, place: str) -> str:
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
        decisions = bodies.Decisions(
            model=model,
            answers={question.id or "": answer for question, answer in zip(body.questions, answers, strict=True)},
            usage=bodies.DecisionsUsage(
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
        decisions = bodies.Decisions(
            model=model,
            answers=chosen,
            usage=bodies.DecisionsUsage(
                input_tokens=response.usage.prompt_tokens,
                input_tokens_details=bodies.InputTokensDetails(
                    cached_tokens=response.cached_token_count, cache_write_tokens=0
                ),
                output_tokens=0,
                output_tokens_details=bodies.OutputTokensDetails(reasoning_tokens=0),
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
        response=bodies.Decisions,
        errors=GENERATES,
        takes_deadlines=True,
    ),
)
