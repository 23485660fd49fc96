"""Tests of selecting families of calls and reasoning by a chat template or by options."""

from __future__ import annotations

from pathlib import Path

import pytest

from trioserve.contracts.errors import InvalidRequest
from trioserve.text.response_parsers.families import REASONING_FAMILIES, TOOL_FAMILIES
from trioserve.text.response_parsers.registry import families_of_template, named_families


@pytest.mark.parametrize(
    ("template", "families"),
    [
        ("{{ messages }}", (None, None)),
        ("<tool_call>\\n{{ call }}\\n</tool_call>", ("hermes", None)),
        ("<tool_call>{{ call }}</tool_call> {{ content.split('</think>')[-1] }}", ("hermes", "qwen3")),
        ("[TOOL_CALLS] {{ call }}", ("mistral", None)),
        ("[THINK]{{ thought }}[/THINK][TOOL_CALLS] {{ call }}", ("mistral", "mistral")),
        ("<|python_tag|>{{ call }}", ("llama3_json", None)),
        ("<tool_call>\n<function={{ name }}>\n<parameter={{ key }}> </think>", ("qwen3_coder", "qwen3")),
        ("<tool_call>{{ name }}\n<arg_key>{{ key }}</arg_key> </think>", ("glm45", "glm45")),
        ("<tool_call>{{ name }}<arg_key>{{ key }}</arg_key> </think>", ("glm47", "glm45")),
        ("<｜Assistant｜></think><｜tool▁calls▁begin｜>```json {{ call }}", ("deepseek_v3", "deepseek_r1")),
        ("{% if thinking is defined %}<｜Assistant｜></think><｜tool▁calls▁begin｜>", ("deepseek_v31", "deepseek_v3")),
        ("<｜Assistant｜></think><｜DSML｜function_calls>", ("deepseek_v32", "deepseek_v3")),
        ("<｜Assistant｜></think><｜DSML｜tool_calls>", ("deepseek_v4", "deepseek_v3")),
        ("<｜Assistant｜></think><｜DSML｜ calls>", ("deepseek_v41", "deepseek_v3")),
        ("<|tool_calls_section_begin|>{{ call }} </think>", ("kimi_k2", "kimi_k2")),
        ("<|open|>think<|sep|>{{ call }}", ("kimi_k3", "kimi_k3")),
        ("<|start|>assistant<|channel|>analysis<|message|>", ("openai", "openai_gptoss")),
        ("<|tool_call>call:{{ name }} <|channel>thought", ("gemma4", "gemma4")),
        ("<minimax:tool_call>{{ call }}</think>", ("minimax_m2", "minimax_m2")),
        ("<seed:tool_call>{{ call }}<seed:think>", ("seed_oss", "seed_oss")),
        ("<tool_calls>[{{ calls }}]</tool_calls>", ("jamba", None)),
        ("<TOOLCALL>[{{ calls }}]</TOOLCALL>", ("nemotron_json", None)),
        ("<|tool_call_start|>[{{ calls }}]<|tool_call_end|>", ("lfm2", None)),
        ("<|START_THINKING|><|START_ACTION|>[", ("cohere_command3", "cohere_command3")),
        ("<|tool_call|>{{ calls }}", ("granite", None)),
        ("[func_name1(params_name1=params_value1)]", ("pythonic", None)),
    ],
)
def test_template_selects_the_families_of_its_format(template, families):
    assert families_of_template(template) == families


@pytest.mark.parametrize(
    ("tool", "reasoning", "expect"),
    [
        ("auto", "auto", ("hermes", "qwen3")),
        ("none", "none", (None, None)),
        ("mistral", "deepseek_r1", ("mistral", "deepseek_r1")),
    ],
)
def test_options_select_families_by_name(tool, reasoning, expect):
    assert named_families(tool, reasoning, "<tool_call></tool_call><think></think>") == expect


@pytest.mark.parametrize(("tool", "reasoning"), [("hermess", "auto"), ("auto", "think")])
def test_unknown_family_name_is_refused_and_the_error_lists_known_names(tool, reasoning):
    with pytest.raises(InvalidRequest, match=r"known are auto, none, .*mistral"):
        named_families(tool, reasoning, None)


def test_docs_page_about_call_formats_lists_every_family():
    page = (Path(__file__).parents[3] / "docs" / "reference" / "call-formats.md").read_text(encoding="utf-8")
    calls, _, rest = page.partition("## Formats of reasoning")
    reasoning = rest.partition("## Rules for calls")[0]
    rows = {kind: {name for line in part.splitlines() if line.startswith("| `") for name in names_of(line)}
            for kind, part in (("calls", calls), ("reasoning", reasoning))}  # fmt: skip
    assert rows == {"calls": set(TOOL_FAMILIES), "reasoning": set(REASONING_FAMILIES)}


def names_of(row: str) -> list[str]:
    """Return the names in the first cell of a table row."""
    return [name.strip("` ") for name in row.split("|")[1].split(",")]
