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
from typing import NamedTuple, TypeVar

from trioserve.api.decisions.bodies import Choice, Decisions, DecisionsBody, Level, Question
from trioserve.api.embeddings.embeddings import pool
from trioserve.api.request_context import RequestContext
from trioserve.api.route_table import GENERATES, Forwarding, Operation
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.pooling import LabelledPrompt, PoolingParams
from trioserve.contracts.prompt import ChatPrompt
from trioserve.text.chat_messages import check_shape

__all__ = ["OPERATIONS", "create_decisions"]

T = TypeVar("T")

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


class QuestionPrompt(NamedTuple):
    """Prompt of one question.

    Attributes:
        text: text after the input.
        labels: possible next tokens, one for each answer.
        answer: converts the labels' probabilities into the JSON of the answer.
    """

    text: str
    labels: tuple[str, ...]
    answer: Callable[[LabelWeights], dict[str, object]]


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


def question_prompt(question: Question, place: str, *, in_sglang_format: bool) -> QuestionPrompt:
    """Make the prompt of a question.

    Args:
        question: one question.
        place: path of the question in the body.
        in_sglang_format: True: SGLang's format. False: OpenAI's format.

    Raises:
        InvalidRequest: a field is missing or has a bad value.
    """
    return _sglang_prompt(question, place) if in_sglang_format else _openai_prompt(question, place)


# --- OpenAI's format ---


def _openai_prompt(question: Question, place: str) -> QuestionPrompt:
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
            lambda weights: {"type": "predicate", "name": question.name, "probability": weights.probabilities[1]},
        )
    if question.type == "choice":
        choices = _counted(question.choices, f"{place}.choices", LETTERS)
        values = [_value_of(choice, f"{place}.choices[{index}]") for index, choice in enumerate(choices)]
        _check_distinct([(type(value), value) for value in values], f"{place}.choices")
        return _lettered(
            question.instructions,
            [(json.dumps(v, ensure_ascii=False), c.description) for v, c in zip(values, choices, strict=True)],
            lambda weights: {
                "type": "choice",
                "name": question.name,
                "choice": values[weights.best],
                "probabilities": [
                    {"value": value, "probability": probability}
                    for value, probability in zip(values, weights.probabilities, strict=True)
                ],
                "confidence": weights.confidence,
            },
        )
    levels = [
        level if isinstance(level, Level) else Level(label=level)
        for level in _counted(question.levels, f"{place}.levels", DIGITS)
    ]
    return _lettered(
        question.instructions,
        [(level.label, level.description) for level in levels],
        lambda weights: {
            "type": "score",
            "name": question.name,
            "score": weights.expected,
            "probabilities": [
                {"value": index, "label": level.label, "probability": probability}
                for index, (level, probability) in enumerate(zip(levels, weights.probabilities, strict=True))
            ],
            "confidence": weights.confidence,
        },
    )


def _lettered(
    instructions: str, options: Sequence[tuple[str, str | None]], answer: Callable[[LabelWeights], dict[str, object]]
) -> QuestionPrompt:
    labels = LETTERS[: len(options)]
    lines = [f"Question: {instructions}"] if instructions else []
    return QuestionPrompt("\n".join([*lines, *_lines(labels, options), ONE_LETTER]), labels, answer)


# --- SGLang's format ---


def _sglang_prompt(question: Question, place: str) -> QuestionPrompt:
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

    def answer(weights: LabelWeights) -> dict[str, object]:
        answered: dict[str, object] = {
            "type": question.type,
            "probabilities": dict(zip(names, weights.probabilities, strict=True)),
            "label_mass": weights.mass,
        }
        if question.type == "choice":
            answered["choice"] = names[weights.best]
        elif question.type == "score":
            answered["score"] = weights.expected
        return answered

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
    by_id = has_ids(body.questions)
    questions = [
        question_prompt(question, f"questions[{index}]", in_sglang_format=by_id)
        for index, question in enumerate(body.questions)
    ]
    text = body.text
    arguments = WITHOUT_REASONING | (body.chat_template_kwargs or {})
    prompts = [
        LabelledPrompt(
            ChatPrompt(
                messages=[{"role": "user", "content": f"{text}\n\n{question.text}"}], template_arguments=arguments
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
    if by_id:
        answered: dict[str, object] = {
            "object": "decisions",
            "model": model,
            "prompt_format_version": PROMPT_FORMAT_VERSION,
            "answers": {question.id: answer for question, answer in zip(body.questions, answers, strict=True)},
            "usage": response.usage,
        }
    else:
        answered = {
            "model": model,
            "answers": answers,
            "usage": _usage(response.usage.prompt_tokens, response.cached_token_count),
        }
    await context.respond_json(answered)


def _usage(token_count: int, cached_token_count: int) -> dict[str, object]:
    return {
        "input_tokens": token_count,
        "input_tokens_details": {"cached_tokens": cached_token_count, "cache_write_tokens": 0},
        "output_tokens": 0,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": token_count,
    }


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
