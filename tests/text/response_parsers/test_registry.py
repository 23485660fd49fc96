"""Which families a chat template and two settings mean, and whether a prompt opens a thought."""

from __future__ import annotations

import pytest

from trioserve.contracts.errors import InvalidRequest
from trioserve.text.response_parsers.registry import families_of_template, named_families, prompt_begins_thought


@pytest.mark.parametrize(
    ("template", "families"),
    [
        ("{{ messages }}", (None, None)),
        ("<tool_call>\\n{{ call }}\\n</tool_call>", ("hermes", None)),
        ("<tool_call>{{ call }}</tool_call> {{ content.split('</think>')[-1] }}", ("hermes", "qwen3")),
        ("[TOOL_CALLS] {{ call }}", ("mistral", None)),
        ("[THINK]{{ thought }}[/THINK][TOOL_CALLS] {{ call }}", ("mistral", "mistral")),
        ("<|python_tag|>{{ call }}", ("llama3_json", None)),
    ],
)
def test_families_of_a_template(template, families):
    assert families_of_template(template) == families


@pytest.mark.parametrize(
    ("tool", "reasoning", "expect"),
    [
        ("auto", "auto", ("hermes", "qwen3")),
        ("none", "none", (None, None)),
        ("mistral", "deepseek_r1", ("mistral", "deepseek_r1")),
    ],
)
def test_named_families(tool, reasoning, expect):
    assert named_families(tool, reasoning, "<tool_call></tool_call><think></think>") == expect


@pytest.mark.parametrize(("tool", "reasoning"), [("hermess", "auto"), ("auto", "think")])
def test_an_unknown_name_is_refused_with_those_that_are_known(tool, reasoning):
    with pytest.raises(InvalidRequest, match=r"known are auto, none, .*mistral"):
        named_families(tool, reasoning, None)


@pytest.mark.parametrize(
    ("prompt", "family", "expect"),
    [
        ("<|im_start|>assistant\n<think>\n", "qwen3", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "qwen3", False),
        ("<|im_start|>assistant\n", "qwen3", None),
        ("<|im_start|>assistant\n<think>\n", None, None),
    ],
)
def test_whether_a_prompt_opens_a_thought(prompt, family, expect):
    assert prompt_begins_thought(prompt, family) is expect
