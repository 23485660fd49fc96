"""Tests that PromptReasoning finds in a prompt's tokens whether reasoning is open, has ended, or has no marker."""

from __future__ import annotations

import pytest

from trioserve.contracts.sampling import SamplingParams, Thinking
from trioserve.testing.byte_tokenizer import END_TOKEN_ID, byte_tokenizer
from trioserve.text.grammar_compiler import GrammarCompiler
from trioserve.text.guide_factory import GuideFactory
from trioserve.text.reasoning_state import PromptReasoning
from trioserve.text.response_parsers.families import REASONING_FAMILIES
from trioserve.text.tokenizer import Tokenizer

TURNS = ("<|im_start|>", "<|im_end|>")
ASK = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def begins_inside(tokenizer: Tokenizer, prompt: str, family: str = "qwen3") -> bool | None:
    tags = REASONING_FAMILIES[family].tags
    reasoning = PromptReasoning(tokenizer, opening=tags.opening, closing=tags.closing)
    return reasoning.begins_inside(tokenizer.encode(prompt, add_special_tokens=False))


@pytest.mark.parametrize("signs", [(*TURNS, "<think>", "</think>"), TURNS], ids=["tokens", "text"])
@pytest.mark.parametrize(
    ("prompt", "expect"),
    [
        (ASK, None),
        (f"{ASK}<think>\n", True),
        (f"{ASK}<think>\nI was thinking about it", True),
        (f"{ASK}<think>\n\n</think>\n\n", False),
        (f"{ASK}<think>\nhm\n</think>\n\nIt is", False),
        (f"{ASK}</think>It is", False),
        (f"{ASK}<think>\nhm\n</think>\n\nParis.<|im_end|>\n{ASK}", None),
        (f"{ASK}<think>\nhm<|im_end|>\n{ASK}", None),
        ("<|im_start|>user\nWhat is <think><|im_end|>\n<|im_start|>assistant\n", None),
        ("<|im_start|>user\nWhat is </think><|im_end|>\n<|im_start|>assistant\n", None),
        (f"{ASK}<think>\n{'word ' * 2000}", True),
    ],
)
def test_the_last_marker_of_the_last_turn_shows_whether_reasoning_is_open(
    signs: tuple[str, ...], prompt: str, expect: bool | None
) -> None:
    assert begins_inside(byte_tokenizer(signs=signs), prompt) is expect


def test_text_is_not_a_marker_if_the_vocabulary_has_marker_tokens() -> None:
    tokenizer = byte_tokenizer(signs=(*TURNS, "<think>", "</think>"))
    reasoning = PromptReasoning(tokenizer, opening=("<think>",), closing=("</think>",))
    token_ids = [*tokenizer.encode(ASK, add_special_tokens=False), *b"<think>"]
    assert reasoning.begins_inside(token_ids) is None


def test_without_control_tokens_a_text_marker_counts_only_at_the_end() -> None:
    tokenizer = byte_tokenizer()
    assert begins_inside(tokenizer, "user: what is\n<think> here?\nassistant: ") is None
    assert begins_inside(tokenizer, "user: what is\n<think> here?\nassistant: <think>\n") is True
    assert begins_inside(tokenizer, "user: Hi\nassistant: <think>\n</think>\n") is False


@pytest.mark.parametrize(
    ("family", "prompt", "expect"),
    [
        ("kimi_k3", "<|open|>think<|sep|>", True),
        ("kimi_k3", "<|open|>think<|sep|>hm<|close|>think<|sep|><|open|>response<|sep|>", False),
        ("kimi_k3", "<|open|>think<|sep|>hm<|close|>think<|sep|><|open|>response<|sep|>Yes", False),
        ("kimi_k3", "<|open|>think<|sep|>a<|close|>think<|sep|><|close|>message<|sep|><|open|>message<|sep|>", None),
        ("gemma4", "<|turn>model\n<|channel>thought\n<channel|>", False),
        ("gemma4", "<|turn>model\n<|channel>thought\nhm", True),
        ("gemma4", "<|turn>model\n<|channel>final", None),
        ("openai_gptoss", "<|start|>assistant", None),
        ("openai_gptoss", "<|start|>assistant<|channel|>analysis<|message|>hm", True),
        ("openai_gptoss", "<|start|>assistant<|channel|>final<|message|>", None),
        ("cohere_command3", "<|CHATBOT|><|START_THINKING|>", True),
        ("cohere_command3", "<|CHATBOT|><|START_THINKING|><|END_THINKING|>", False),
    ],
)
def test_reasoning_markers_of_several_tokens_are_found(family: str, prompt: str, expect: bool | None) -> None:
    signs = dict.fromkeys((*REASONING_FAMILIES[family].special_tokens, "<|turn>", "<|CHATBOT|>"))
    assert begins_inside(byte_tokenizer(signs=tuple(signs)), prompt, family) is expect


@pytest.mark.parametrize("signs", [(*TURNS, "<think>", "</think>"), TURNS], ids=["tokens", "text"])
@pytest.mark.parametrize(
    ("prompt", "is_forced", "is_over"),
    [
        (ASK, False, False),
        (f"{ASK}<think>\nI was thinking", True, False),
        (f"{ASK}<think>\nhm\n</think>\n\nIt is", False, True),
        (f"{ASK}<think>\nhm\n</think>\n\nParis.<|im_end|>\n{ASK}", False, False),
        ("<|im_start|>user\nWhat is <think><|im_end|>\n<|im_start|>assistant\n", False, False),
    ],
)
def test_reasoning_state_of_a_new_guide_follows_from_the_prompt(
    signs: tuple[str, ...], prompt: str, is_forced: bool, is_over: bool
) -> None:
    tokenizer = byte_tokenizer(signs=signs)
    compiler = GrammarCompiler(tokenizer, vocab_size=tokenizer.vocab_size, end_token_ids=(END_TOKEN_ID,))
    sampling = SamplingParams(thinking=Thinking(begin="<think>", end="</think>", tokens_max=0))
    prepared = GuideFactory(compiler).prepare(sampling)
    guide = prepared.new_guide((END_TOKEN_ID,), tokenizer.encode(prompt, add_special_tokens=False))
    assert bool(guide.forced_tokens(16)) is is_forced
    assert guide.end_reasoning() is not is_over
