"""Tests that parsers process any text of a model without an error, invent no text, and show text without delay."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trioserve.text.response_parsers.families import REASONING_FAMILIES, TOOL_FAMILIES
from trioserve.text.response_parsers.offered_tools import OfferedTool
from trioserve.text.response_parsers.registry import make_response_parser
from trioserve.text.response_parts import ContentText, ReasoningText, WholeCall

PARIS = WholeCall("get_weather", '{"city": "Paris", "days": 3}')
WRITE = WholeCall(
    "write_file", '{"path": "a b.txt", "content": "x\\n<b>\\n\\"y\\" \\u00e9", "lines": [1, {"a": null}]}'
)
NOON = WholeCall("get_time", "{}")

COMMON = [
    *(
        "{",
        "}",
        "[",
        "]",
        '"',
        "'",
        ",",
        ":",
        "=",
        "(",
        ")",
        "<",
        ">",
        "|",
        "/",
        "\\",
        "```json\n",
        "```",
        "\n",
        " ",
        ";",
    ),
    *(
        '{"name": "get_time", "arguments": {}}',
        '"name": ',
        '"arguments": ',
        '"get_time"',
        "get_time",
        "null",
        "-1e5",
        "True",
    ),
    *("Some text. ", "\n\n", "é", "<think>", "</think>", "<tool_call>", "</tool_call>", "<", "</", "<|", '{"a": "b"}'),
]


def fragments_of(family: str) -> list[str]:
    """Return fragments of a family's texts: calls in its own format, split at possible marks."""
    texts = [TOOL_FAMILIES[family].call_format.written(calls) for calls in ([PARIS], [NOON], [WRITE, NOON])]
    pieces = [piece for text in texts for piece in _cut(text)]
    reasoning = [tag for known in REASONING_FAMILIES.values() for tag in (*known.tags.opening, *known.tags.closing)]
    tokens = list(TOOL_FAMILIES[family].special_tokens)
    return sorted({*pieces, *texts, *reasoning, *tokens, *TOOL_FAMILIES[family].readers})


def _cut(text: str) -> list[str]:
    pieces, begin = [], 0
    for at, character in enumerate(text):
        if character in "<[{(" and at > begin:
            pieces.append(text[begin:at])
            begin = at
        elif character in ">]})":
            pieces.append(text[begin : at + 1])
            begin = at + 1
    return [*pieces, text[begin:]]


def texts_of(family: str) -> st.SearchStrategy[str]:
    own, common = st.sampled_from(fragments_of(family)), st.sampled_from(COMMON)
    return st.lists(own | own | common | st.text(max_size=3), max_size=14).map("".join)


PAIRS = [
    ("hermes", "qwen3"), ("hermes", None), ("llama3_json", None), ("mistral", "mistral"), ("pythonic", None),
    ("olmo3", None), ("qwen3_coder", "qwen3"), ("seed_oss", "seed_oss"), ("glm45", "glm45"), ("glm47", "deepseek_r1"),
    ("deepseek_v3", "deepseek_r1"), ("deepseek_v31", "deepseek_v3"), ("deepseek_v32", "deepseek_v3"),
    ("deepseek_v41", None), ("minimax_m2", "minimax_m2"), ("kimi_k2", "kimi_k2"), ("kimi_k3", "kimi_k3"),
    ("lfm2", "qwen3"), ("cohere_command3", "cohere_command3"),
    ("gemma4", "gemma4"), ("openai", "openai"), ("granite", None), ("jamba", None),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("family", "reasoning"), PAIRS)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_parser_gives_equal_results_for_any_pieces_and_invents_no_text(read_in_pieces, family, reasoning, data):
    text = data.draw(texts_of(family))
    inside = data.draw(st.sampled_from([None, True, False]))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = read_in_pieces([text], family, reasoning, begins_inside=inside)
    assert read_in_pieces(pieces, family, reasoning, begins_inside=inside) == whole
    assert read_in_pieces(list(text), family, reasoning, begins_inside=inside) == whole
    for shown in (whole.content, whole.reasoning):  # All shown text must be a subsequence of the response's text.
        rest = iter(text)
        assert all(character in rest for character in shown)


@pytest.mark.parametrize("family", sorted(TOOL_FAMILIES))
@settings(max_examples=15, deadline=None)
@given(text=st.text(alphabet="ab é.\t\n", max_size=60))
@example(text=" ")
def test_text_without_markers_is_shown_at_once_and_unchanged(family, text):
    parser = make_response_parser(family, None, tools=[OfferedTool(name="a", parameters={})])
    shown = ""
    for at, character in enumerate(text, 1):
        shown += "".join(part.text for part in parser.feed(character) if isinstance(part, ContentText))
        assert text[:at].startswith(shown)
        if not character.isspace() and TOOL_FAMILIES[family].whole is None:
            assert shown == text[:at]
    shown += "".join(part.text for part in parser.end() if isinstance(part, ContentText))
    assert shown == text


@pytest.mark.parametrize("reasoning", sorted(REASONING_FAMILIES))
def test_reasoning_is_shown_at_once(reasoning):
    parser = make_response_parser(None, reasoning, begins_inside=True)
    shown = ""
    for word in ("I", " see", " that", " 1 < 2", ".\nSo"):
        shown += "".join(part.text for part in parser.feed(word) if isinstance(part, ReasoningText))
    assert shown.rstrip() == "I see that 1 < 2.\nSo"


@pytest.mark.parametrize("family", sorted(TOOL_FAMILIES))
@settings(max_examples=15, deadline=None)
@given(
    arguments=st.fixed_dictionaries(
        {},
        optional={
            "city": st.text(alphabet="aé\"'\\\n<>{}[](),:=|/ ", max_size=20),
            "days": st.integers(-5, 10**20),
            "path": st.text(max_size=20),
            "lines": st.lists(
                st.integers() | st.booleans() | st.none() | st.text(alphabet="a b", max_size=5), max_size=4
            ),
        },
    )
)
def test_parsed_tool_calls_equal_written_calls_for_any_arguments(read_in_pieces, family, arguments):
    both = OfferedTool(
        name="both",
        parameters={
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "path": {"type": "string"},
                "lines": {"type": "array"},
            },
        },
    )
    call = WholeCall("both", json.dumps(arguments, ensure_ascii=False))
    text = TOOL_FAMILIES[family].call_format.written([call, call])
    found = read_in_pieces([text], family, tools=[both])
    assert found.calls == [("both", arguments)] * 2
    assert found.content == ""
