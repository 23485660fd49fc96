"""Tests /v1/decisions with a real engine and a scripted model: both formats, errors with their path, disconnects."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.api.openai.decisions import Decisions
from trioserve.testing import MemoryServer, open_memory_server
from trioserve.testing.fake_executor import FakeModel

PATH = "/v1/decisions"
INPUT = "What it is all about, in a few words."
PREDICATE = {"type": "predicate", "instructions": "Is it so?", "name": "so"}
CHOICE = {
    "type": "choice",
    "instructions": "Which?",
    "choices": [{"value": "one"}, {"value": True, "description": "the truth"}, {"value": "three"}],
}
SCORE = {"type": "score", "instructions": "How much?", "levels": [{"label": "little"}, {"label": "much"}]}
LETTERS = "Answer with the letter of one option only."


@asynccontextmanager
async def served(**options: Any) -> AsyncIterator[MemoryServer]:
    options = {"max_model_len": 512, "block_count": 1024, "max_num_batched_tokens": 128} | options
    async with open_memory_server(**options) as server:
        yield server
        await trio.sleep(1)
        await server.assert_all_free()


async def ask(server: MemoryServer, body: dict[str, Any], **headers: str) -> tuple[int, Any]:
    async with server.client().ask(PATH, body, headers=headers) as response:
        return await response.head(), await response.json()


def weights(question: str, labels: str, temperature: float = 1.0) -> tuple[list[float], float]:
    """Return the expected probabilities of the labels, normalized to 1, and the sum of their raw probabilities."""
    model = FakeModel(vocab_size=256)
    prompt = f"user: {INPUT}\n\n{question}\nassistant: "
    digest = model.digest(list(prompt.encode()))
    logprobs = [model.logprob(ord(label), digest, 0).logprob for label in labels]
    scaled = [math.exp(logprob / temperature) for logprob in logprobs]
    return [weight / sum(scaled) for weight in scaled], sum(map(math.exp, logprobs))


async def test_questions_in_openais_format_get_answers_in_openais_format(autojump_clock: Any) -> None:
    async with served() as server:
        status, response = await ask(server, {"input": INPUT, "model": "fake", "questions": [PREDICATE, CHOICE, SCORE]})
        assert status == 200, response
        msgspec.convert(response, Decisions)
        predicate, choice, score = response["answers"]
        probabilities, _ = weights(f"Question: Is it so?\nA: false\nB: true\n{LETTERS}", "AB")
        assert predicate == {
            "type": "predicate",
            "name": "so",
            "probability": pytest.approx(probabilities[1], rel=1e-5),
        }
        probabilities, mass = weights(f'Question: Which?\nA: "one"\nB: true - the truth\nC: "three"\n{LETTERS}', "ABC")
        values = ["one", True, "three"]
        assert choice["choice"] == values[probabilities.index(max(probabilities))]
        assert [entry["value"] for entry in choice["probabilities"]] == values
        assert [entry["probability"] for entry in choice["probabilities"]] == pytest.approx(probabilities, rel=1e-5)
        assert choice["confidence"] == pytest.approx(max(probabilities) * mass, rel=1e-5)
        probabilities, _ = weights(f"Question: How much?\nA: little\nB: much\n{LETTERS}", "AB")
        assert score["score"] == pytest.approx(probabilities[1], rel=1e-5)
        assert [(entry["value"], entry["label"]) for entry in score["probabilities"]] == [(0, "little"), (1, "much")]
        usage = response["usage"]
        assert usage["input_tokens"] == usage["total_tokens"] > 3 * len(INPUT)
        assert usage["input_tokens_details"]["cached_tokens"] > len(INPUT), "the other questions hit the input's blocks"


async def test_questions_in_sglangs_format_get_answers_in_sglangs_format(autojump_clock: Any) -> None:
    questions = [
        {"id": "a", "type": "score", "question": "How much?", "levels": ["little", "much"]},
        {
            "id": "b",
            "type": "choice",
            "question": "Which?",
            "options": [{"name": "x"}, {"name": "y", "description": "z"}],
        },
    ]
    async with served() as server:
        status, response = await ask(server, {"input": INPUT, "questions": questions, "temperature": 2.0})
        assert status == 200, response
        msgspec.convert(response, Decisions)
        assert (response["object"], response["prompt_format_version"]) == ("decisions", 1)
        levels, mass = weights(
            "Question: How much?\n0: little\n1: much\nAnswer with the number of one level only.", "01", 2.0
        )
        assert response["answers"]["a"] == {
            "type": "score",
            "probabilities": pytest.approx({"0": levels[0], "1": levels[1]}, rel=1e-5),
            "label_mass": pytest.approx(mass, rel=1e-5),
            "score": pytest.approx(levels[1], rel=1e-5),
        }
        options, _ = weights(f"Question: Which?\nA: x\nB: y - z\n{LETTERS}", "AB", 2.0)
        assert response["answers"]["b"]["probabilities"] == pytest.approx({"x": options[0], "y": options[1]}, rel=1e-5)
        assert response["answers"]["b"]["choice"] == "xy"[options.index(max(options))]


async def test_decision_input_of_messages_is_their_joined_text(autojump_clock: Any) -> None:
    parts = [{"type": "input_text", "text": "in two"}, {"type": "input_text", "text": "parts"}]
    messages = [{"role": "user", "content": "one"}, {"role": "user", "content": parts}]
    async with served() as server:
        _, first = await ask(server, {"input": messages, "questions": [PREDICATE]})
        _, second = await ask(server, {"input": "one\n\nin two\nparts", "questions": [PREDICATE]})
        assert first["answers"] == second["answers"]


@pytest.mark.parametrize(
    "fields, param, words",
    [
        ({"questions": []}, "questions", "allowed are 1 to 64"),
        ({"questions": [PREDICATE] * 65}, "questions", "65 entries"),
        ({"questions": [{"type": "predicate"}]}, "questions[0].instructions", "has no instructions"),
        (
            {"questions": [{**CHOICE, "choices": [{"value": "a"}]}]},
            "questions[0].choices",
            "1 entries, allowed are 2 to 26",
        ),
        ({"questions": [PREDICATE, {**CHOICE, "choices": None}]}, "questions[1].choices", "0 entries"),
        ({"questions": [{**CHOICE, "choices": [{"value": "a"}] * 2}]}, "questions[0].choices", "has two equal entries"),
        ({"questions": [{**CHOICE, "choices": [{"value": "a"}, {}]}]}, "questions[0].choices[1].value", "no value"),
        ({"questions": [{**SCORE, "levels": ["a"] * 11}]}, "questions[0].levels", "11 entries, allowed are 2 to 10"),
        ({"questions": [{"type": "yes_no", "instructions": "a"}]}, "questions[0].type", 'send "predicate"'),
        ({"questions": [{"type": "rank", "instructions": "a"}]}, "questions[0].type", "rank"),
        ({"questions": [{"type": "predicate", "id": "a", "question": "b"}]}, "questions[0].type", 'send "yes_no"'),
        ({"questions": [{"type": "yes_no", "id": "a"}]}, "questions[0].question", "has no question"),
        ({"questions": [{"type": "yes_no", "question": "b"}]}, "questions[0].id", "needs a unique id"),
        ({"questions": [{"type": "yes_no", "id": "a", "question": "b"}] * 2}, "questions[1].id", "needs a unique id"),
        ({"questions": [PREDICATE, {"type": "yes_no", "id": "a", "question": "b"}]}, "questions[1]", "mix two formats"),
        # After this chat template, each byte is a token.
        (
            {"questions": [{"type": "yes_no", "id": "a", "question": "b"}]},
            "questions[0]",
            "label 'yes' is not one token",
        ),
        ({"input": "x" * 600}, "questions[0]", "maximum context length is 512 tokens"),
        ({"input": [{"role": "system", "content": "a"}]}, "input[0].role", "system"),
        ({"temperature": 0}, "temperature", "> 0"),
        ({"priority": 101}, "priority", "<= 100"),
        ({"cache_salt": ""}, "cache_salt", "1 to 256"),
    ],
)
async def test_invalid_field_of_a_decision_request_is_refused_with_its_path(
    fields: dict[str, Any], param: str, words: str, autojump_clock: Any
) -> None:
    async with served() as server:
        status, response = await ask(server, {"input": INPUT, "questions": [PREDICATE], **fields})
        assert status == 400, response
        assert response["error"]["param"] == param
        assert words in response["error"]["message"]
        assert server.engine.stats().steps_total == 0


async def test_an_encoder_model_refuses_decisions(autojump_clock: Any) -> None:
    async with served(encoder="embed") as server:
        status, response = await ask(server, {"input": INPUT, "questions": [PREDICATE]})
        assert status == 400
        assert "is an encoder" in response["error"]["message"]


@pytest.mark.parametrize("steps_before", [0, 1, 2])
async def test_a_client_that_leaves_cancels_all_questions(steps_before: int, autojump_clock: Any) -> None:
    async with served(paused=True) as server:
        async with server.client().ask(PATH, {"input": INPUT, "questions": [PREDICATE, CHOICE, SCORE]}):
            await wait_all_tasks_blocked()
            await server.engine.step(steps_before)
            assert server.engine.live_requests()
        await server.assert_all_free()
        server.engine.resume()


async def test_deadline_ends_a_decision_request(autojump_clock: Any) -> None:
    async with served(step_seconds=1) as server:
        status, response = await ask(server, {"input": INPUT, "questions": [PREDICATE, CHOICE], "timeout": 0.5})
        assert (status, response["error"]["code"]) == (504, "timeout")
