"""Tests fields that change the prompt or select choices, with a whole engine."""

from __future__ import annotations

from typing import Any

import pytest

from trioserve.testing import open_memory_server
from trioserve.testing.byte_tokenizer import BYTE_VOCAB_SIZE, byte_backend
from trioserve.text.fill_in_middle import FORMATS, fill_in_middle
from trioserve.text.tokenizer import Tokenizer
from trioserve.text.tokenizer_parts import TokenizerParts

PATH = "/v1/completions"


async def asked(path: str, body: dict[str, Any], **options: Any) -> tuple[int, Any]:
    async with open_memory_server(**options) as server:
        response = await server.client().post(path, body)
        answer = await response.json()
        await server.assert_all_free()
    assert response.status is not None
    return response.status, answer


def seen(prompt: str) -> str:
    """Return a script whose output repeats the prompt."""
    return f"<{prompt}>"


@pytest.mark.parametrize(
    "fields, shown",
    [
        ({"truncate_prompt_tokens": 3}, "hij"),
        ({"truncate_prompt_tokens": 100}, "abcdefghij"),
        ({"truncate_prompt_tokens": 3, "prompt": list(b"abcdefghij")}, "hij"),
        ({"truncate_prompt_tokens": -1, "max_tokens": 20}, "abcdefghij"),
    ],
)
async def test_truncation_keeps_the_last_tokens_of_a_prompt(fields: dict[str, Any], shown: str) -> None:
    status, answer = await asked(PATH, {"prompt": "abcdefghij", "echo": True, **fields}, response=seen)
    assert status == 200
    assert answer["choices"][0]["text"] == f"{shown}<{shown}>"
    assert answer["usage"]["prompt_tokens"] == len(shown)


async def test_truncation_minus_one_keeps_the_tokens_that_leave_room_for_the_response() -> None:
    body = {"prompt": "x" * 5000, "max_tokens": 28}
    status, answer = await asked(PATH, {**body, "truncate_prompt_tokens": -1}, max_model_len=128)
    assert status == 200
    assert answer["usage"]["prompt_tokens"] == 100
    status, answer = await asked(PATH, {"prompt": "x" * 5000, "max_tokens": 28}, max_model_len=128)
    assert status == 400
    assert "maximum context length is 128 tokens" in answer["error"]["message"]


async def test_a_chat_and_its_token_count_are_truncated_alike() -> None:
    messages = [{"role": "user", "content": "x" * 500}]
    body = {"messages": messages, "truncate_prompt_tokens": 20}
    status, answer = await asked("/v1/chat/completions", {**body, "max_tokens": 4})
    assert (status, answer["usage"]["prompt_tokens"]) == (200, 20)
    status, answer = await asked("/tokenize", body)
    assert bytes(answer["tokens"]).decode() == "xxxxxxxx\nassistant: "


async def test_best_of_returns_the_best_choices() -> None:
    body = {"prompt": "ab", "max_tokens": 8, "seed": 7, "logprobs": 0, "ignore_eos": True, "temperature": 1}
    _, all_of_them = await asked(PATH, {**body, "n": 6})
    _, best = await asked(PATH, {**body, "n": 2, "best_of": 6})

    def mean(choice: dict[str, Any]) -> float:
        logprobs = choice["logprobs"]["token_logprobs"]
        return float(sum(logprobs) / len(logprobs))

    expected = sorted(all_of_them["choices"], key=mean, reverse=True)[:2]
    assert [choice["text"] for choice in best["choices"]] == [choice["text"] for choice in expected]
    assert [choice["index"] for choice in best["choices"]] == [0, 1]
    assert best["usage"]["completion_tokens"] == all_of_them["usage"]["completion_tokens"]


async def test_best_of_returns_no_logprobs_unless_requested() -> None:
    status, answer = await asked(PATH, {"prompt": "ab", "max_tokens": 3, "best_of": 3})
    assert status == 200
    [choice] = answer["choices"]
    assert choice["logprobs"] is None


def tokenizer_with(tokens: tuple[str, ...]) -> Tokenizer:
    backend = byte_backend(BYTE_VOCAB_SIZE)
    backend.add_special_tokens(list(tokens))
    return Tokenizer(
        TokenizerParts(backend=backend, bos_token=None, eos_token=None, chat_template=None, tool_chat_template=None)
    )


@pytest.mark.parametrize(
    "form, prompt",
    [
        (FORMATS[0], "<|fim_prefix|>a{b}<|fim_suffix|>c<|fim_middle|>"),
        (FORMATS[3], "[SUFFIX]c[PREFIX]a{b}"),
    ],
)
def test_prompt_with_a_suffix_has_the_format_of_the_model_family(form: Any, prompt: str) -> None:
    tokenizer = tokenizer_with((*form.tokens, *form.ends))
    found = fill_in_middle(tokenizer)
    assert found is form
    assert found.prompt("a{b}", "c") == prompt
    assert len(found.end_token_ids(tokenizer)) == len(form.ends)


async def test_suffix_is_accepted_only_by_a_model_that_fills_gaps() -> None:
    tokenizer = tokenizer_with(FORMATS[0].tokens)
    marks = [tokenizer.added_token_id(token) for token in FORMATS[0].tokens]
    body = {"prompt": "ab", "suffix": "cd", "return_token_ids": True}
    async with open_memory_server(tokenizer=tokenizer, response=seen) as server:
        client = server.client(http=2)
        answer = await (await client.post(PATH, body)).json()
        [choice] = answer["choices"]
        assert choice["text"] == "<abcd>"
        assert choice["prompt_token_ids"] == [marks[0], *b"ab", marks[1], *b"cd", marks[2]]
        for fields, param in (({"prompt": [97]}, "prompt"), ({"echo": True}, "echo")):
            refused = await (await client.post(PATH, {**body, **fields})).json()
            assert refused["error"]["param"] == param
        await server.assert_all_free()
