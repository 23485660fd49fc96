"""What a question looks like to the model, and how the probabilities of its labels become an answer.

The wording is vLLM's for questions in OpenAI's shape, and SGLang's (version 1 of it) for those in its own, so that both
give the numbers that people know from there.
"""

from __future__ import annotations

import json
import math
import string
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from trioserve.api.decisions.request_types import Choice, Level, Question
from trioserve.contracts.errors import InvalidRequest

__all__ = ["Asked", "Weighed", "asked", "has_ids"]

T = TypeVar("T")

LETTERS = tuple(string.ascii_uppercase)  # one token each, behind a chat's template, in the tokenizers that we know
DIGITS = tuple(string.digits)
ONE_LETTER = "Answer with the letter of one option only."
ONE_NUMBER = "Answer with the number of one level only."
YES_OR_NO = "Answer with yes or no only."


class Weighed(NamedTuple):
    """probabilities: of each label, among the labels. mass: of all of them, among all tokens."""

    probabilities: list[float]
    mass: float

    @classmethod
    def of(cls, logprobs: Sequence[float], temperature: float) -> Weighed:
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


class Asked(NamedTuple):
    """text: what the model reads behind the input. answer: what the labels' weights say."""

    text: str
    labels: tuple[str, ...]
    answer: Callable[[Weighed], dict[str, object]]


def has_ids(questions: Sequence[Question]) -> bool:
    """Whether they are in SGLang's shape. Raises InvalidRequest if some are and others not, or an id comes twice."""
    with_id = [question.id is not None or question.question is not None for question in questions]
    if not any(with_id):
        return False
    if not all(with_id):
        index = with_id.index(not with_id[0])
        raise InvalidRequest(
            "questions mix two shapes: those with id and question, and those with instructions",
            param=f"questions[{index}]",
        )
    seen: set[str] = set()
    for index, question in enumerate(questions):
        if not (question.id or "").strip() or question.id in seen:
            raise InvalidRequest(
                f"questions[{index}].id is {question.id!r}: an id of its own is needed", param=f"questions[{index}].id"
            )
        seen.add(question.id or "")
    return True


def asked(question: Question, place: str, *, in_sglangs_shape: bool) -> Asked:
    """place: of the question in the body. Raises InvalidRequest."""
    return _asked_by_id(question, place) if in_sglangs_shape else _asked(question, place)


# --- OpenAI's shape ---


def _asked(question: Question, place: str) -> Asked:
    if question.instructions is None:
        raise InvalidRequest(f"{place} has no instructions", param=f"{place}.instructions")
    if question.type == "yes_no":
        raise InvalidRequest(
            f'{place} is of type yes_no, which has id and question: send "predicate"', param=f"{place}.type"
        )
    if question.type == "predicate":
        return _lettered(
            question.instructions,
            [("false", None), ("true", None)],
            lambda weighed: {"type": "predicate", "name": question.name, "probability": weighed.probabilities[1]},
        )
    if question.type == "choice":
        choices = _distinct(question.choices, f"{place}.choices", LETTERS)
        values = [_value_of(choice, f"{place}.choices[{index}]") for index, choice in enumerate(choices)]
        _check_distinct([(type(value), value) for value in values], f"{place}.choices")
        return _lettered(
            question.instructions,
            [(json.dumps(v, ensure_ascii=False), c.description) for v, c in zip(values, choices, strict=True)],
            lambda weighed: {
                "type": "choice",
                "name": question.name,
                "choice": values[weighed.best],
                "probabilities": [
                    {"value": value, "probability": probability}
                    for value, probability in zip(values, weighed.probabilities, strict=True)
                ],
                "confidence": weighed.confidence,
            },
        )
    levels = [
        level if isinstance(level, Level) else Level(label=level)
        for level in _distinct(question.levels, f"{place}.levels", DIGITS)
    ]
    return _lettered(
        question.instructions,
        [(level.label, level.description) for level in levels],
        lambda weighed: {
            "type": "score",
            "name": question.name,
            "score": weighed.expected,
            "probabilities": [
                {"value": index, "label": level.label, "probability": probability}
                for index, (level, probability) in enumerate(zip(levels, weighed.probabilities, strict=True))
            ],
            "confidence": weighed.confidence,
        },
    )


def _lettered(
    instructions: str, options: Sequence[tuple[str, str | None]], answer: Callable[[Weighed], dict[str, object]]
) -> Asked:
    labels = LETTERS[: len(options)]
    lines = [f"Question: {instructions}"] if instructions else []
    return Asked("\n".join([*lines, *_lines(labels, options), ONE_LETTER]), labels, answer)


# --- SGLang's shape ---


def _asked_by_id(question: Question, place: str) -> Asked:
    if not (question.question or "").strip():
        raise InvalidRequest(f"{place} has no question", param=f"{place}.question")
    if question.type == "predicate":
        raise InvalidRequest(
            f'{place} is of type predicate, which has instructions: send "yes_no"', param=f"{place}.type"
        )
    lines = [f"Question: {question.question}"]
    if question.type == "choice":
        options = _distinct(question.options, f"{place}.options", LETTERS)
        names = [_name_of(option, f"{place}.options[{index}]") for index, option in enumerate(options)]
        _check_distinct(names, f"{place}.options")
        labels = LETTERS[: len(names)]
        described = [(name, option.description) for name, option in zip(names, options, strict=True)]
        lines += [*_lines(labels, described), ONE_LETTER]
    elif question.type == "score":
        levels = _distinct(question.levels, f"{place}.levels", DIGITS)
        texts = [level if isinstance(level, str) else level.label for level in levels]
        names = [str(index) for index in range(len(texts))]
        labels = DIGITS[: len(names)]
        lines += [*(f"{label}: {text}" for label, text in zip(labels, texts, strict=True)), ONE_NUMBER]
    else:
        names, labels = ["yes", "no"], ("yes", "no")
        meanings = (("yes", question.yes), ("no", question.no))
        lines = [f"Is the following true? {question.question}"]
        lines += [*(f"{label}: {meaning}" for label, meaning in meanings if meaning), YES_OR_NO]

    def answer(weighed: Weighed) -> dict[str, object]:
        said: dict[str, object] = {
            "type": question.type,
            "probabilities": dict(zip(names, weighed.probabilities, strict=True)),
            "label_mass": weighed.mass,
        }
        if question.type == "choice":
            said["choice"] = names[weighed.best]
        elif question.type == "score":
            said["score"] = weighed.expected
        return said

    return Asked("\n".join(lines), labels, answer)


# --- what both have ---


def _lines(labels: Sequence[str], options: Sequence[tuple[str, str | None]]) -> list[str]:
    return [
        f"{label}: {name} - {description}" if description else f"{label}: {name}"
        for label, (name, description) in zip(labels, options, strict=True)
    ]


def _distinct(values: list[T] | None, place: str, labels: Sequence[str]) -> list[T]:
    if values is None or not 2 <= len(values) <= len(labels):
        count = 0 if values is None else len(values)
        raise InvalidRequest(f"{place} has {count} entries, allowed are 2 to {len(labels)}", param=place)
    return values


def _check_distinct(values: Sequence[object], place: str) -> None:
    if len(set(values)) != len(values):
        raise InvalidRequest(f"{place} names the same twice", param=place)


def _value_of(choice: Choice, place: str) -> str | bool:
    if choice.value is None:
        raise InvalidRequest(f"{place} has no value", param=f"{place}.value")
    return choice.value


def _name_of(option: Choice, place: str) -> str:
    if not (option.name or "").strip():
        raise InvalidRequest(f"{place} has no name", param=f"{place}.name")
    assert option.name is not None, "looked at just now"
    return option.name
