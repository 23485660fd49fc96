"""Tests of reasoning between tags: where reasoning begins and ends, and calls before, within and after reasoning."""

from __future__ import annotations

import pytest

CALL = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("family", "inside", "text", "reasoning", "content"),
    [
        ("qwen3", None, "<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
        ("qwen3", None, "\n<think>Hm.</think>Yes.", "Hm.", "Yes."),
        ("qwen3", None, "Yes.", "", "Yes."),
        ("qwen3", None, "\n\n  Yes.\n", "", "\n\n  Yes.\n"),
        ("qwen3", None, "<think>\n\n</think>\n\nYes.", "", "Yes."),
        ("qwen3", True, "Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
        ("qwen3", True, "<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
        ("qwen3", True, "Hm", "Hm", ""),
        ("qwen3", None, "<think>Hm </thi", "Hm </thi", ""),
        ("qwen3", False, "Hm.</think>Yes.", "", "Hm.</think>Yes."),
        ("qwen3", None, "<think>a\n\nb  c</think> d", "a\n\nb  c", " d"),
        ("qwen3", None, "<think>a</think>\n\n    indented", "a", "    indented"),
        ("qwen3", None, "<think>I write <think> here</think>ok", "I write <think> here", "ok"),
        ("qwen3", None, "<think>a</think></think>\n</think>b", "a", "b"),
        ("qwen3", None, "<think>a</think><think>b</think>c", "a", "<think>b</think>c"),
        ("qwen3", None, "<think>a</think>b\n<think>c</think>d", "a", "b\n<think>c</think>d"),
        ("qwen3", None, "Models write\n<think>\nfirst.", "", "Models write\n<think>\nfirst."),
        ("qwen3", True, "a</think>\nb:\n```\n<think>\nc\n</think>\n```", "a", "b:\n```\n<think>\nc\n</think>\n```"),
        ("qwen3", False, "<think>a</think>b", "", "<think>a</think>b"),
        ("deepseek_r1", None, "a</think>b\n<think>c", "a", "b\n<think>c"),
        ("deepseek_r1", False, "b\n<think>c", "", "b\n<think>c"),
        ("mistral", None, "[THINK]a[/THINK]b\n[THINK]c", "a", "b\n[THINK]c"),
        ("gemma4", None, "<|channel>thought\na<channel|>b\n<|channel>thought\nc<channel|>d", "ac", "b\nd"),
        ("gemma4", False, "<|channel>thought\na<channel|>b", "a", "b"),
        ("qwen3", None, "The tag <think> opens", "", "The tag <think> opens"),
        ("qwen3", None, "<thin", "", "<thin"),
        ("qwen3", None, "", "", ""),
        ("deepseek_r1", None, "Hm.</think>Yes.", "Hm.", "Yes."),
        ("deepseek_r1", None, "<think>\nHm.\n</think>\nYes.", "Hm.", "Yes."),
        ("deepseek_r1", None, "Never ends", "Never ends", ""),
        ("deepseek_r1", False, "Yes.", "", "Yes."),
        ("mistral", None, "[THINK]Hm.[/THINK]Yes.", "Hm.", "Yes."),
        ("mistral", None, "<think>Hm.</think>Yes.", "Hm.", "Yes."),
        (None, None, "<think>Hm.</think>Yes.", "", "<think>Hm.</think>Yes."),
    ],
)
def test_reasoning_is_separated_from_content(read, family, inside, text, reasoning, content):
    found = read(text, None, family, begins_inside=inside)
    assert (found.reasoning, found.content) == (reasoning, content)


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "count"),
    [
        (f"<think>\nHm.\n</think>\n\n{CALL}", "Hm.", "", 1),
        (f"<think>Hm.</think>\nI look.\n{CALL}", "Hm.", "I look.", 1),
        (f"<think>Shall I write {CALL}?</think>No.", f"Shall I write {CALL}?", "No.", 0),
        (f"<think>Shall I write\n{CALL}", f"Shall I write\n{CALL}", "", 0),
        (f"{CALL}\n<think>And now?</think>\n{CALL}", "", "\n<think>And now?</think>", 2),
    ],
)
def test_parser_reads_calls_after_reasoning_but_not_within_reasoning(read, text, reasoning, content, count):
    found = read(text, "hermes", "qwen3")
    assert (found.reasoning, found.content, len(found.calls)) == (reasoning, content, count)


def test_a_tag_within_arguments_does_not_open_reasoning(read):
    text = '<tool_call>{"name": "write_file", "arguments":\n{"content": "x\n<think>y</think>"}}</tool_call>'
    found = read(text, "hermes", "qwen3")
    assert found.calls == [("write_file", {"content": "x\n<think>y</think>"})]
    assert found.reasoning == ""


def test_parser_needs_no_recursion_for_many_pieces_of_reasoning(read_in_pieces):
    text = "<|channel>thought\na<channel|>" * 20_000 + "b"
    found = read_in_pieces([text], None, "gemma4")
    assert (found.reasoning, found.content) == ("a" * 20_000, "b")
