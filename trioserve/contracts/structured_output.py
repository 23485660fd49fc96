"""Structured output as a caller requests it: a schema, a regex, choices, a grammar. The package text compiles it."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol, Self

import msgspec

from trioserve.contracts.arguments import is_list, refuse, to_str
from trioserve.contracts.errors import InvalidRequest

__all__ = ["CHOICES_MAX", "FREE_UNTIL_CHARACTERS_MAX", "SOURCE_CHARACTERS_MAX", "SchemaKind", "StructuredOutput"]

CHOICES_MAX = 10_000
FREE_UNTIL_CHARACTERS_MAX = 256


class SchemaKind(enum.Enum):
    """Kind of structured output. The value is its name in the API or in messages."""

    JSON_OBJECT = "json_object"  # The output is any JSON object.
    JSON_SCHEMA = "json_schema"  # The output is JSON that a schema accepts.
    REGEX = "regex"
    CHOICE = "choice"  # The output is one of several given texts.
    GRAMMAR = "grammar"  # The grammar is written in llguidance's dialect of Lark, or in GBNF.
    TOOL_CALLS = "grammar of tool calls"  # The server makes this Lark grammar. Clients cannot send this kind.
    # The output is free text, except that a schema restrains the text after each trigger.
    STRUCTURAL_TAG = "structural_tag"


# Compiling takes up to 10 microseconds per character. Each rule takes one level of the compiler's stack.
SOURCE_CHARACTERS_MAX = {
    SchemaKind.JSON_OBJECT: 0,
    SchemaKind.JSON_SCHEMA: 262_144,
    SchemaKind.REGEX: 8192,
    SchemaKind.CHOICE: 262_144,
    SchemaKind.GRAMMAR: 65_536,
    # A higher limit is safe for tool calls, because they consist mostly of schemas and have few rules.
    SchemaKind.TOOL_CALLS: 262_144,
    SchemaKind.STRUCTURAL_TAG: 262_144,
}


class HasJsonSchema(Protocol):
    """A class that can describe itself as a JSON schema, such as a pydantic model."""

    @classmethod
    def model_json_schema(cls) -> dict[str, object]: ...


class StructuredOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One schema or grammar. Values are hashable: equal values share one compiled grammar.

    Constructors check only lengths. Compile errors are found when the request enters.

    Attributes:
        kind: Kind of structured output that `source` describes.
        source: Schema or structural tag as JSON text, the regex or grammar itself, or the choices as a JSON array.
            Empty for JSON_OBJECT.
        free_until: The output is unrestrained until it contains this text, such as the end of reasoning. Empty to
            restrain it from the first token.
        param: Name of the request's field in error messages.
        strict: True to refuse a JSON schema with keywords that a grammar cannot express. False to ignore such keywords.

    Raises:
        InvalidRequest: `source` is empty or too long, or `free_until` is too long.
    """

    kind: SchemaKind
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
        if not self.source and self.kind is not SchemaKind.JSON_OBJECT:
            raise InvalidRequest(
                f"the {self.kind.value} is empty: describe the structure of the response", param=self.param
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
        """Return the structured output for JSON that matches a schema.

        Args:
            schema: JSON text, a dict, True or False, or a pydantic class.
            free_until: See StructuredOutput.
            param: See StructuredOutput.
            strict: See StructuredOutput.

        Raises:
            InvalidRequest: the schema cannot be written as JSON, is empty, or is too long.
        """
        if isinstance(schema, type):
            schema = schema.model_json_schema()
        source = schema if isinstance(schema, str) else _as_json("the schema", schema, param)
        return cls(kind=SchemaKind.JSON_SCHEMA, source=source, free_until=free_until, param=param, strict=strict)

    @classmethod
    def json_object(cls, *, free_until: str = "", param: str = "structured") -> Self:
        """Return the structured output for any JSON object.

        Args:
            free_until: See StructuredOutput.
            param: See StructuredOutput.
        """
        return cls(kind=SchemaKind.JSON_OBJECT, free_until=free_until, param=param)

    @classmethod
    def regex(cls, pattern: str, *, free_until: str = "", param: str = "structured") -> Self:
        """Return the structured output for text that matches a regular expression as a whole.

        Args:
            pattern: Regular expression in the syntax of Rust's regex crate.
            free_until: See StructuredOutput.
            param: See StructuredOutput.
        """
        return cls(kind=SchemaKind.REGEX, source=to_str(param, pattern), free_until=free_until, param=param)

    @classmethod
    def choice(cls, choices: Sequence[str], *, free_until: str = "", param: str = "structured") -> Self:
        """Return the structured output for one of several texts.

        Args:
            choices: 1 to CHOICES_MAX texts. None of them may be empty.
            free_until: See StructuredOutput.
            param: See StructuredOutput.

        Raises:
            InvalidRequest: there is no choice, an empty choice, or too many.
        """
        allowed = f"a list of 1 to {CHOICES_MAX} texts (str), none of them empty"
        if not is_list(choices) or not 1 <= len(choices) <= CHOICES_MAX:
            refuse(param, choices, allowed)
        for choice in choices:
            if not to_str(param, choice, allowed, verb="holds"):
                refuse(param, choice, allowed, verb="holds")
        source = _as_json("the list of choices", list(choices), param)
        return cls(kind=SchemaKind.CHOICE, source=source, free_until=free_until, param=param)

    @classmethod
    def grammar(cls, grammar: str, *, free_until: str = "", param: str = "structured") -> Self:
        """Return the structured output for text of a context-free grammar.

        Args:
            grammar: Lark in llguidance's dialect, or GBNF.
            free_until: See StructuredOutput.
            param: See StructuredOutput.
        """
        return cls(kind=SchemaKind.GRAMMAR, source=to_str(param, grammar), free_until=free_until, param=param)

    @classmethod
    def structural_tag(
        cls,
        tag: str | dict[str, object],
        *,
        free_until: str = "",
        param: str = "structured",
        strict: bool = True,
    ) -> Self:
        """Return the structured output for free text with restrained parts. Each restrained part begins with a trigger.

        Args:
            tag: {"structures": [{"begin", "schema", "end"}], "triggers": [...]}, as a dict or JSON text.
            free_until: See StructuredOutput.
            param: See StructuredOutput.
            strict: See StructuredOutput.
        """
        source = tag if isinstance(tag, str) else _as_json("the structural tag", tag, param)
        return cls(kind=SchemaKind.STRUCTURAL_TAG, source=source, free_until=free_until, param=param, strict=strict)


def _as_json(name: str, value: object, param: str) -> str:
    """Encode a value as JSON. The order of keys is kept, because the response has the same order."""
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        raise InvalidRequest(f"{name} cannot be written as JSON: {error}", param=param) from None
