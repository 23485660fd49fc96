"""A form as the grammar that llguidance compiles."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.structured_output import FormKind, StructuredOutput
from trioserve.text.form_bounds import (
    check_fixed_text,
    check_lark,
    check_pattern,
    check_schema,
    check_schemas_within,
    with_kept_schemas,
)
from trioserve.text.schema_keywords import KeptSchema
from trioserve.text.structural_tag import StructuralTagGrammar, with_json_options

__all__ = ["form_grammar"]


def form_grammar(
    form: StructuredOutput, special_ids: Mapping[str, int], end_token_ids: Collection[int], ignored: list[str]
) -> str:
    """Write the grammar of a form.

    Args:
        special_ids: The model's special tokens by their text, its end tokens among them.
        ignored: Gets the paths of the keywords of schemas that are left out.

    Raises:
        InvalidRequest: The form is not of its kind, or a strict schema has a keyword that cannot be kept to.
    """
    match form.kind:
        case FormKind.JSON_OBJECT:
            return LLMatcher.grammar_from_json_schema(with_json_options({"type": "object"}))
        case FormKind.JSON_SCHEMA:
            return LLMatcher.grammar_from_json_schema(with_json_options(_schema_of(form, ignored)))
        case FormKind.REGEX:
            check_pattern(form.source, param=form.param)
            return LLMatcher.grammar_from_regex(form.source)
        case FormKind.CHOICE:
            # One terminal: of rules a parser has an item each, and room for 2,000.
            choices = " | ".join(map(json.dumps, _choices_of(form)))
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")
        case FormKind.GRAMMAR:
            return LLMatcher.grammar_from_lark(_lark_of(form))
        case FormKind.TOOL_CALLS:
            check_schemas_within(form.source, param=form.param)
            return LLMatcher.grammar_from_lark(with_kept_schemas(form.source, ignored, param=form.param))
        case FormKind.STRUCTURAL_TAG:
            tag = StructuralTagGrammar(
                _parsed(form), special_ids, end_token_ids, param=form.param, lenient=not form.strict
            )
            ignored += tag.ignored
            return tag.grammar if tag.grammar.startswith("{") else LLMatcher.grammar_from_lark(tag.grammar)


def _parsed(form: StructuredOutput) -> Any:
    try:
        return json.loads(form.source)
    except RecursionError:
        raise InvalidRequest(f"the {form.kind.value} is nested too deeply", param=form.param) from None
    except ValueError as error:
        raise InvalidRequest(f"the {form.kind.value} is not JSON: {error}", param=form.param) from None


def _schema_of(form: StructuredOutput, ignored: list[str]) -> dict[str, Any]:
    schema = _parsed(form)
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise InvalidRequest("a JSON schema has to be an object", param=form.param)
    check_schema(schema, param=form.param)
    kept = KeptSchema(schema, param=form.param, lenient=not form.strict)
    ignored += kept.ignored
    check_schema(kept.schema, param=form.param)
    if kept.schema is False:
        raise InvalidRequest("nothing can satisfy the schema", param=form.param)
    return dict(kept.schema)


def _choices_of(form: StructuredOutput) -> list[str]:
    choices = _parsed(form)
    if (
        not isinstance(choices, list)
        or not choices
        or not all(isinstance(choice, str) and choice for choice in choices)
    ):
        raise InvalidRequest("choices have to be a list of texts, none of them empty", param=form.param)
    for choice in choices:
        check_fixed_text(choice, "a choice", param=form.param)
    return choices


def _lark_of(form: StructuredOutput) -> str:
    try:
        lark: str = any_to_lark(form.source)
    except RecursionError:
        raise InvalidRequest("the grammar is nested too deeply", param=form.param) from None
    except Exception as error:  # whatever its reader of GBNF stumbles over
        raise InvalidRequest(f"the grammar is neither Lark nor GBNF: {error}", param=form.param) from None
    check_lark(lark, param=form.param)
    return lark
