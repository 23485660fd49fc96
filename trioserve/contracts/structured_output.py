"""What form a response is to have, as its caller says it. What a form means token by token is decided in text."""

from __future__ import annotations

import enum

import msgspec

__all__ = ["FormKind", "StructuredOutput"]


class FormKind(enum.Enum):
    JSON_OBJECT = "json_object"  # any JSON object
    JSON_SCHEMA = "json_schema"  # JSON that a schema accepts
    REGEX = "regex"
    CHOICE = "choice"  # one of some texts
    GRAMMAR = "grammar"  # Lark, llguidance's dialect, or GBNF
    STRUCTURAL_TAG = "structural_tag"  # free text, and after each trigger what a schema accepts


class StructuredOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One form. Hashable: equal values share one compiled grammar.

    source: the schema or the structural tag as JSON text; the regex or grammar itself; the choices as a JSON array of
    texts; empty for JSON_OBJECT. free_until: the response is free until it has written this text, and has the form
    from there on (the end of a thought); empty: from its first token.
    """

    kind: FormKind
    source: str = ""
    free_until: str = ""
