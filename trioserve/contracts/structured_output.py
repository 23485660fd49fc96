"""What form a response is to have, as its caller says it. What a form means token by token is decided in text."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol, Self

import msgspec

from trioserve.contracts.arguments import is_list, refuse, to_str
from trioserve.contracts.errors import InvalidRequest

__all__ = ["CHOICES_MAX", "FREE_UNTIL_CHARACTERS_MAX", "SOURCE_CHARACTERS_MAX", "FormKind", "StructuredOutput"]

CHOICES_MAX = 10_000
FREE_UNTIL_CHARACTERS_MAX = 256


class FormKind(enum.Enum):
    JSON_OBJECT = "json_object"  # any JSON object
    JSON_SCHEMA = "json_schema"  # JSON that a schema accepts
    REGEX = "regex"
    CHOICE = "choice"  # one of some texts
    GRAMMAR = "grammar"  # Lark, llguidance's dialect, or GBNF
    TOOL_CALLS = "form of tool calls"  # as a grammar in Lark, which is made here and sent by nobody
    STRUCTURAL_TAG = "structural_tag"  # free text, and after each trigger what a schema accepts


# Compiling takes up to 10 microseconds a character, and a level of its stack for every rule.
SOURCE_CHARACTERS_MAX = {
    FormKind.JSON_OBJECT: 0,
    FormKind.JSON_SCHEMA: 262_144,
    FormKind.REGEX: 8192,
    FormKind.CHOICE: 262_144,
    FormKind.GRAMMAR: 65_536,
    FormKind.TOOL_CALLS: 262_144,  # schemas, most of it, and few rules
    FormKind.STRUCTURAL_TAG: 262_144,
}


class HasJsonSchema(Protocol):
    """Such as a class of pydantic."""

    @classmethod
    def model_json_schema(cls) -> dict[str, object]: ...


class StructuredOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One form. Hashable: equal values share one compiled grammar.

    source: the schema or the structural tag as JSON text; the regex or grammar itself; the choices as a JSON array of
    texts; empty for JSON_OBJECT. free_until: the response is free until it has written this text, and has the form
    from there on (the end of a thought); empty: from its first token. param: the field of the request that a fault in
    it is told of. strict: refuse a JSON schema that has a keyword which no grammar can express. Otherwise ignore the
    keyword.
    Raises InvalidRequest for a source or a free_until that is too long. Whether the source can be compiled is seen when
    the request is entered.
    """

    kind: FormKind
    source: str = ""
    free_until: str = ""
    param: str = "structured"
    strict: bool = True

    def __post_init__(self) -> None:
        source_max = SOURCE_CHARACTERS_MAX[self.kind]
        if len(self.source) > source_max:
            raise InvalidRequest(
                f"the {self.kind.value} has {len(self.source)} characters, at most {source_max} are allowed",
                param=self.param,
            )
        if not self.source and self.kind is not FormKind.JSON_OBJECT:
            raise InvalidRequest(
                f"the {self.kind.value} is empty: say what form the response is to have", param=self.param
            )
        if len(self.free_until) > FREE_UNTIL_CHARACTERS_MAX:
            raise InvalidRequest(
                f"free_until has {len(self.free_until)} characters, at most {FREE_UNTIL_CHARACTERS_MAX} are allowed",
                param=self.param,
            )

    @classmethod
    def json(
        cls,
        schema: str | dict[str, object] | bool | type[HasJsonSchema],
        *,
        free_until: str = "",
        param: str = "structured",
        strict: bool = True,
    ) -> Self:
        """JSON that a schema accepts.

        Args:
            schema: JSON text, a dict, or a class of pydantic.
            strict: refuse a schema that has a keyword which no grammar can express. False: ignore such keywords.
        """
        if isinstance(schema, type):
            schema = schema.model_json_schema()
        source = schema if isinstance(schema, str) else _as_json("the schema", schema, param)
        return cls(kind=FormKind.JSON_SCHEMA, source=source, free_until=free_until, param=param, strict=strict)

    @classmethod
    def json_object(cls, *, free_until: str = "", param: str = "structured") -> Self:
        """Any JSON object."""
        return cls(kind=FormKind.JSON_OBJECT, free_until=free_until, param=param)

    @classmethod
    def regex(cls, pattern: str, *, free_until: str = "", param: str = "structured") -> Self:
        """A text that all of a regular expression matches, in the syntax of Rust's regex crate."""
        return cls(kind=FormKind.REGEX, source=to_str(param, pattern), free_until=free_until, param=param)

    @classmethod
    def choice(cls, choices: Sequence[str], *, free_until: str = "", param: str = "structured") -> Self:
        """One of these texts. Raises InvalidRequest for none, an empty one, or too many."""
        allowed = f"a list of 1 to {CHOICES_MAX} texts (str), none of them empty"
        if not is_list(choices) or not 1 <= len(choices) <= CHOICES_MAX:
            refuse(param, choices, allowed)
        for choice in choices:
            if not to_str(param, choice, allowed, verb="holds"):
                refuse(param, choice, allowed, verb="holds")
        source = _as_json("the list of choices", list(choices), param)
        return cls(kind=FormKind.CHOICE, source=source, free_until=free_until, param=param)

    @classmethod
    def grammar(cls, grammar: str, *, free_until: str = "", param: str = "structured") -> Self:
        """What a context-free grammar makes: Lark in llguidance's dialect, or GBNF."""
        return cls(kind=FormKind.GRAMMAR, source=to_str(param, grammar), free_until=free_until, param=param)

    @classmethod
    def structural_tag(
        cls,
        tag: str | dict[str, object],
        *,
        free_until: str = "",
        param: str = "structured",
        strict: bool = True,
    ) -> Self:
        """Free text in which every trigger begins a part with a form: {"structures": [{"begin", "schema", "end"}],
        "triggers": [...]}. strict: as in json."""
        source = tag if isinstance(tag, str) else _as_json("the structural tag", tag, param)
        return cls(kind=FormKind.STRUCTURAL_TAG, source=source, free_until=free_until, param=param, strict=strict)


def _as_json(name: str, value: object, param: str) -> str:
    """The order of keys stays: it is that of the response."""
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise InvalidRequest(f"{name} cannot be written as JSON: {error}", param=param) from None
