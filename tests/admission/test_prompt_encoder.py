"""Tests of encoding prompts: results, refusals, and the thread that does the work."""

from __future__ import annotations

import threading

import pytest

from trioserve.admission.text_threads import TextThreads
from trioserve.contracts.errors import ContextTooLong, InvalidRequest
from trioserve.contracts.prompt import ChatPrompt
from trioserve.testing.fake_engine import open_fake_engine

TEMPLATE = "{% for message in messages %}<{{ message.content }}>{% endfor %}"


@pytest.fixture
def calls(monkeypatch):
    """Return a function that makes an engine record the thread and options of each later call of tokenizer.encode."""
    seen: list[tuple[str, dict[str, object]]] = []

    def watch(engine) -> list[tuple[str, dict[str, object]]]:
        encode = engine.tokenizer.encode

        def watched(*arguments: object, **options: object) -> list[int]:
            seen.append((threading.current_thread().name, options))
            return encode(*arguments, **options)

        monkeypatch.setattr(engine.tokenizer, "encode", watched)
        return seen

    return watch


@pytest.mark.parametrize("times, thread", [(1, "MainThread"), (2000, "trioserve-text")])
async def test_long_prompts_and_chats_are_encoded_in_the_text_thread(times, thread, calls):
    async with open_fake_engine(max_model_len=4096, block_count=1024, new_text_threads=TextThreads) as fake:
        seen = calls(fake)
        assert await fake.encode("x" * times) == [ord("x")] * times
        chat = ChatPrompt(messages=[{"role": "user", "content": [{"type": "text", "text": "x" * times}]}])
        assert await fake.encode(chat) == list(b"user: " + b"x" * times + b"\nassistant: ")
        assert seen == [(thread, {"add_special_tokens": True}), (thread, {"add_special_tokens": False})]


@pytest.mark.parametrize(
    ("options", "thread"),
    [
        ({"chat_template": TEMPLATE}, "trioserve-text-longest"),
        ({"tools": [{"type": "function", "function": {"name": "x" * 2000}}]}, "trioserve-text"),
        ({"template_arguments": {"x" * 2000: 1}}, "trioserve-text"),
        ({"template_arguments": {"x": "x" * 100_000}}, "trioserve-text-long"),
        ({"template_arguments": {"x": "x" * 2_000_000}}, "trioserve-text-longest"),
        ({"template_arguments": {"x": [1] * 9000}}, "trioserve-text-longest"),
        ({"messages": [{"role": "user", "content": "x"}] * 200}, "trioserve-text"),
    ],
)
async def test_long_chat_is_rendered_in_a_text_thread(options, thread, calls):
    """The request has its own template, which may need much time even for a short chat."""
    async with open_fake_engine(max_model_len=4096, block_count=1024, new_text_threads=TextThreads) as fake:
        seen = calls(fake)
        await fake.encode(ChatPrompt(**{"messages": [{"role": "user", "content": "x"}], **options}))
        assert [where for where, _options in seen] == [thread]


async def test_prompt_that_cannot_fit_is_refused_before_tokenizing(calls):
    """The longest token of the vocabulary, <|end|>, has 7 bytes."""
    async with open_fake_engine(max_model_len=128) as fake:
        seen = calls(fake)
        content = "x" * 10_000
        for prompt, param in (
            (content, "prompt"),
            (ChatPrompt(messages=[{"role": "user", "content": content}]), "messages"),
        ):
            with pytest.raises(ContextTooLong, match=r"length is 128 tokens.* at least 14\d\d tokens") as refused:
                await fake.encode(prompt)
            assert refused.value.param == param
            with pytest.raises(ContextTooLong, match="This model's maximum context length is 128 tokens"):
                async with fake.generate(prompt):
                    pass
        assert seen == []
        assert fake.stats().blocks_used == 0


async def test_prompt_that_may_fit_is_tokenized_and_counted(calls):
    """A text that would fit with the longest tokens is tokenized, so that its tokens can be counted."""
    async with open_fake_engine(max_model_len=128) as fake:
        assert await fake.encode("<|end|>" * 128) == [256] * 128
        assert len(await fake.encode("x" * 7 * 128)) == 7 * 128
        with pytest.raises(ContextTooLong):
            await fake.encode("x" * (7 * 128 + 1))


async def test_only_the_rendered_text_of_a_chat_counts():
    """A template may omit parts of the messages. Some templates omit earlier reasoning."""
    async with open_fake_engine(max_model_len=128) as fake:
        messages = [{"role": "user", "content": "x" * 100_000}, {"role": "user", "content": "hi"}]
        chat = ChatPrompt(messages=messages, chat_template="{{ messages[-1].content }}")
        assert await fake.encode(chat) == list(b"hi")


async def test_too_many_token_ids_are_refused_before_they_are_checked():
    async with open_fake_engine(max_model_len=128) as fake:
        assert await fake.encode([1] * 128) == [1] * 128
        with pytest.raises(ContextTooLong, match="maximum context length is 128 tokens, and the prompt has 129"):
            await fake.encode([-1] * 129)


async def test_caller_chooses_whether_special_tokens_are_added(calls):
    async with open_fake_engine() as fake:
        seen = calls(fake)
        await fake.encode("x", add_special_tokens=False)
        async with fake.generate("x", add_special_tokens=False):
            pass
        assert [options for _thread, options in seen] == [{"add_special_tokens": False}] * 2


async def test_decode_returns_text_and_refuses_unknown_token_ids():
    async with open_fake_engine() as fake:
        assert await fake.decode(b"text") == "text"
        assert await fake.decode([ord("x")] * 2000) == "x" * 2000
        for token_id in (-1, 257):
            for count in (1, 2000):
                with pytest.raises(InvalidRequest, match=f"token id {token_id}"):
                    await fake.decode([*[1] * count, token_id])


@pytest.mark.parametrize("count", [1, 2000])
async def test_token_ids_must_be_integers(count):
    async with open_fake_engine(max_model_len=4096, block_count=1024, new_text_threads=TextThreads) as fake:
        assert await fake.encode([1] * count) == [1] * count
        with pytest.raises(InvalidRequest, match=r"prompt holds 1\.0 \(float\), allowed is a list of token ids"):
            await fake.encode([1.0] * count)
