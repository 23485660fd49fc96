"""Tests of structural tags in both notations: texts that the grammar accepts, and texts that the grammar refuses."""

from __future__ import annotations

import pytest

from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.structured_output import StructuredOutput
from trioserve.testing.byte_tokenizer import BYTE_VOCAB_SIZE, END_TOKEN_ID, byte_tokenizer
from trioserve.text.grammar_compiler import GrammarCompiler

COMPILER = GrammarCompiler(byte_tokenizer(), vocab_size=BYTE_VOCAB_SIZE, end_token_ids=(END_TOKEN_ID,))
NUMBER = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}


def check(tag, text: str, is_taken: bool) -> None:
    matcher = COMPILER.compile(StructuredOutput.structural_tag(tag)).new_matcher()
    tokens = list(text.encode())
    assert (matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()) is is_taken, text


STRUCTURES = {
    "structures": [
        {"begin": "<f=a>", "schema": NUMBER, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"type": "null"}, "end": "</f>"},
    ],
    "triggers": ["<f="],
}


@pytest.mark.parametrize(
    ("text", "is_taken"),
    [
        ("", True),
        ("free < text", True),
        ('so <f=a>{"x": 1}</f> it is', True),
        ('<f=a>{"x": 1}</f><f=b>null</f>', True),
        ('<f=a>{"y": 1}</f>', False),
        ('<f=b>{"x": 1}</f>', False),
        ("<f=c>", False),
        ('<f=a>{"x": 1}', False),
    ],
)
def test_notation_with_structures_and_triggers_restrains_text(text, is_taken):
    check(STRUCTURES, text, is_taken)


def tagged(**more):
    return {
        "type": "tag",
        "begin": "<t>",
        "content": {"type": "json_schema", "json_schema": NUMBER},
        "end": "</t>",
        **more,
    }


TRIGGERED = {"type": "triggered_tags", "triggers": ["<t>"], "tags": [tagged()]}
SEPARATED = {"type": "tags_with_separator", "tags": [tagged()], "separator": ", "}
ONE = '<t>{"x": 1}</t>'


@pytest.mark.parametrize(
    ("tag", "taken", "refused"),
    [
        ({"type": "const_string", "value": "a/b\n"}, ["a/b\n"], ["a/b"]),
        ({"type": "regex", "pattern": "a/+|\n"}, ["a//", "\n"], ["a"]),
        ({"type": "grammar", "grammar": 'start: "a" | "b"'}, ["a", "b"], ["ab"]),
        ({"type": "json_schema", "json_schema": NUMBER}, ['{"x": 1}'], ["{}"]),
        ({"type": "any_text"}, ["", "x\ny"], []),
        ({"type": "or", "elements": [{"type": "const_string", "value": c} for c in "ab"]}, ["a", "b"], ["", "c"]),
        (tagged(), [ONE], ["", ONE + "x"]),
        (tagged(content={"type": "any_text"}), ["<t>a<b</t>"], ["<t>a", "<t></t>x"]),
        (tagged(content={"type": "any_text"}, end=["</a>", "</b>"]), ["<t>x</b>", "<t></a>"], ["<t>x</t>"]),
        (TRIGGERED, ["", "hm", f"hm {ONE} so {ONE}"], ["<t>1</t>"]),
        ({**TRIGGERED, "at_least_one": True}, [ONE, f"{ONE} so {ONE}"], ["", "hm", f"hm {ONE}"]),
        ({**TRIGGERED, "stop_after_first": True}, [f"hm {ONE}", "hm"], [f"{ONE}{ONE}", f"{ONE}x"]),
        ({**TRIGGERED, "at_least_one": True, "stop_after_first": True}, [ONE], ["", f"{ONE}{ONE}"]),
        (SEPARATED, ["", ONE, f"{ONE}, {ONE}"], [ONE + ONE, ONE + ", "]),
        ({**SEPARATED, "at_least_one": True}, [ONE], [""]),
        ({**SEPARATED, "at_least_one": True, "stop_after_first": True}, [ONE], [f"{ONE}, {ONE}"]),
        (
            {"type": "sequence", "elements": [{"type": "any_text"}, {"type": "const_string", "value": "|"}, tagged()]},
            [f"x|{ONE}", f"|{ONE}"],
            [ONE, f"x||{ONE}"],
        ),
        (tagged(begin="<|end|><", end="<|end|>"), ['<{"x": 1}'], ['<|end|><{"x": 1}']),  # An end token is not text.
    ],
)
def test_each_format_of_a_structural_tag_restrains_text(tag, taken, refused):
    for text in taken:
        check({"format": tag}, text, True)
    for text in refused:
        check({"format": tag}, text, False)


DEEP: dict = {"type": "any_text"}
for _ in range(40):
    DEEP = {"type": "sequence", "elements": [DEEP]}


@pytest.mark.parametrize(
    ("tag", "param"),
    [
        ({}, "structures"),
        ({"structures": []}, "structures"),
        ({"structures": [{}], "triggers": ["a"]}, "structures[0].begin"),
        ({"structures": [{"begin": "b", "end": ""}], "triggers": ["a"]}, "structures[0].begin"),
        ({"structures": [{"begin": "a", "end": "", "schema": 3}], "triggers": ["a"]}, "structures[0].schema"),
        ({"structures": [{"begin": "a", "end": ""}], "triggers": [""]}, "triggers[0]"),
        ({"format": 3}, "format"),
        ({"format": {"type": "odd"}}, "format.type"),
        ({"format": {"type": "regex"}}, "format.pattern"),
        ({"format": {"type": "sequence", "elements": [{"type": "tag"}]}}, "format.elements[0].begin"),
        ({"format": {**TRIGGERED, "tags": [tagged(begin="x")]}}, "format.tags[0].begin"),
        ({"format": DEEP}, "format" + ".elements[0]" * 33),
    ],
)
def test_errors_in_a_structural_tag_name_the_path_of_the_field(tag, param):
    with pytest.raises(InvalidRequest) as raised:
        COMPILER.compile(StructuredOutput.structural_tag(tag))
    assert raised.value.param == f"structured.{param}"
