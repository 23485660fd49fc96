"""Translates structured output to a grammar that llguidance compiles."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.structured_output import FormKind, StructuredOutput
from trioserve.text.grammar_bounds import (
    check_fixed_text,
    check_lark,
    check_pattern,
    check_schema,
    check_schemas_within,
    with_kept_schemas,
)
from trioserve.text.schema_keywords import KeptSchema
from trioserve.text.structural_tag import StructuralTagGrammar, with_json_options

__all__ = ["grammar_source"]


def grammar_source(
    structured: StructuredOutput, special_ids: Mapping[str, int], end_token_ids: Collection[int], ignored: list[str]
) -> str:
    """Return the source of the grammar.

    Args:
        structured: Schema, regex, choices or grammar of the request.
        special_ids: Ids of the model's special tokens by their text, end tokens included.
        end_token_ids: End tokens of the model.
        ignored: Receives the paths of schema keywords that are left out.

    Raises:
        InvalidRequest: `structured` is not valid, exceeds a bound, or is a strict schema with a keyword that cannot be
            enforced.
    """
    match structured.kind:
        case FormKind.JSON_OBJECT:
            return LLMatcher.grammar_from_json_schema(with_json_options({"type": "object"}))
        case FormKind.JSON_SCHEMA:
            return LLMatcher.grammar_from_json_schema(with_json_options(_schema_of(structured, ignored)))
        case FormKind.REGEX:
            check_pattern(structured.source, param=structured.param)
            return LLMatcher.grammar_from_regex(structured.source)
        case FormKind.CHOICE:
            # Use one terminal for all choices. The parser has an item per rule, and can have 2,000 items.
            choices = " | ".join(map(json.dumps, _choices_of(structured)))
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")
        case FormKind.GRAMMAR:
            return LLMatcher.grammar_from_lark(_lark_of(structured))
        case FormKind.TOOL_CALLS:
            check_schemas_within(structured.source, param=structured.param)
            return LLMatcher.grammar_from_lark(with_kept_schemas(structured.source, ignored, param=structured.param))
        case FormKind.STRUCTURAL_TAG:
            tag = StructuralTagGrammar(
                _parsed(structured), special_ids, end_token_ids, param=structured.param, lenient=not structured.strict
            )
            ignored += tag.ignored
            return tag.grammar if tag.grammar.startswith("{") else LLMatcher.grammar_from_lark(tag.grammar)


def _parsed(structured: StructuredOutput) -> Any:
    try:
        return json.loads(structured.source)
    except RecursionError:
        raise InvalidRequest(f"the {structured.kind.value} is nested too deeply", param=structured.param) from None
    except ValueError as error:
        raise InvalidRequest(f"the {structured.kind.value} is not JSON: {error}", param=structured.param) from None


def _schema_of(structured: StructuredOutput, ignored: list[str]) -> dict[str, Any]:
    schema = _parsed(structured)
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise InvalidRequest("a JSON schema must be an object", param=structured.param)
    check_schema(schema, param=structured.param)
    kept = KeptSchema(schema, param=structured.param, lenient=not structured.strict)
    ignored += kept.ignored
    check_schema(kept.schema, param=structured.param)
    if kept.schema is False:
        raise InvalidRequest("nothing can satisfy the schema", param=structured.param)
    return dict(kept.schema)


def _choices_of(structured: StructuredOutput) -> list[str]:
    choices = _parsed(structured)
    if (
        not isinstance(choices, list)
        or not choices
        or not all(isinstance(choice, str) and choice for choice in choices)
    ):
        raise InvalidRequest("choices must be a list of texts that are not empty", param=structured.param)
    for choice in choices:
        check_fixed_text(choice, "a choice", param=structured.param)
    return choices


def _lark_of(structured: StructuredOutput) -> str:
    try:
        lark: str = any_to_lark(structured.source)
    except RecursionError:
        raise InvalidRequest("the grammar is nested too deeply", param=structured.param) from None
    except Exception as error:  # the library's GBNF reader raises various exceptions
        raise InvalidRequest(f"the grammar is neither Lark nor GBNF: {error}", param=structured.param) from None
    check_lark(lark, param=structured.param)
    return lark
