"""Body fields that ask for structured output. At most one of them may be set.

They are OpenAI's response_format, vLLM's structured_outputs and guided_*, and the names that SGLang, llama.cpp and
Ollama have for the same purpose.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal, cast

import msgspec

from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.structured_output import CHOICES_MAX, StructuredOutput
from trioserve.text.chat_messages import check_shape

__all__ = ["StructuredFields", "JsonSchemaFormat", "ResponseFormat", "StructuredOutputs", "structured_output_of"]

Schema = dict[str, Any] | bool | str
"""A JSON schema, as an object or as JSON in a text."""

NAME_CHARACTERS_MAX = 64  # OpenAI's API has the same limit.
Choices = Annotated[list[str], msgspec.Meta(min_length=1, max_length=CHOICES_MAX)]


class JsonSchemaFormat(msgspec.Struct, frozen=True, kw_only=True):
    """JSON schema in OpenAI's response_format.

    Attributes:
        strict: true: a schema with unsupported keywords is refused. Otherwise they are ignored, and a response header
            lists them.
    """

    name: Annotated[str, msgspec.Meta(max_length=NAME_CHARACTERS_MAX)] | None = None
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's response_format, with the members of other servers. An unknown member is refused.

    Attributes:
        type: kind of output: "text", "json_object", "json_schema", "structural_tag", "regex" or "grammar". "json" is
            another name of "json_object".
        json_schema: schema in OpenAI's format.
        schema: schema for json_object and json_schema, as in llama.cpp and Together.
        value: schema, regex or grammar, as in TGI.
        regex: pattern for regex.
        pattern: pattern for regex.
        grammar: grammar for grammar.
        structures: tags for structural_tag, together with triggers.
        triggers: beginnings of tags for structural_tag.
        format: description of the tags for structural_tag, in place of structures and triggers.
    """

    type: str
    json_schema: JsonSchemaFormat | None = None
    schema: Schema | None = None
    value: Schema | None = None
    regex: str | None = None
    pattern: str | None = None
    grammar: str | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's structured_outputs: exactly one kind of output, and settings of vLLM's backends.

    The settings in WHITESPACE are refused.
    """

    json: Schema | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None


class StructuredFields(msgspec.Struct, frozen=True, kw_only=True):
    """Structured output in every body that asks for text."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    regex: str | None = None  # SGLang
    ebnf: str | None = None  # SGLang
    grammar: str | None = None  # llama.cpp
    json_schema: Schema | None = None  # SGLang, llama.cpp
    format: Literal["", "json"] | dict[str, Any] | None = None  # Ollama


FORMATS = '"text", "json_object", "json_schema", "structural_tag", "regex" and "grammar"'
GUIDED = "guided_"
OTHER_NAMES = {"regex": "regex", "ebnf": "grammar", "grammar": "grammar", "json_schema": "json"}
"""Fields of SGLang and llama.cpp, and the kind of structured output that each asks for."""
WHITESPACE = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
"""Settings in structured_outputs that would change the allowed output."""


def structured_output_of(body: StructuredFields) -> StructuredOutput | None:
    """Read the structured output that a body asks for.

    Args:
        body: body of the request.

    Returns:
        The structured output, or None if the output is free text.

    Raises:
        InvalidRequest: several fields are set, or one is not valid. The error names the field by its path.
    """
    for name in StructuredFields.__struct_fields__:
        if getattr(body, name) is not None:
            break
    else:
        return None
    for place, value in _trees(body):
        check_shape(value, place)  # The check refuses deep nesting, because the code below is recursive.
    found: dict[str, StructuredOutput] = {}
    if body.response_format is not None:
        output = _response_format(body.response_format)
        if output is not None:
            found["response_format"] = output
    if body.structured_outputs is not None:
        wanted = msgspec.structs.asdict(body.structured_outputs)
        for name in WHITESPACE:
            if wanted.pop(name):
                raise InvalidRequest(
                    f"structured_outputs.{name} is not supported: put it into the schema, or send a regex or a grammar",
                    param=f"structured_outputs.{name}",
                )
        own = _by_kind(wanted, "structured_outputs.")
        if len(own) != 1:
            raise InvalidRequest(
                f"structured_outputs has {len(own)} of {', '.join(wanted)}: set exactly one of them",
                param="structured_outputs",
            )
        found |= own
    guided = {
        name.removeprefix(GUIDED): getattr(body, name) for name in StructuredFields.__struct_fields__ if GUIDED in name
    }
    found |= _by_kind(guided, GUIDED)
    for name, kind in OTHER_NAMES.items():
        if (source := getattr(body, name)) not in (None, ""):
            found[name] = _made(kind, source, name)
    if body.format:
        found["format"] = (
            StructuredOutput.json_object(param="format")
            if isinstance(body.format, str)
            else StructuredOutput.json(body.format, param="format", strict=False)
        )
    if len(found) > 1:
        first, second, *_ = found
        raise InvalidRequest(f"{first} and {second} both ask for structured output: send one", param=second)
    return next(iter(found.values()), None)


def _trees(body: StructuredFields) -> Iterable[tuple[str, Any]]:
    """Yield values that may be deeply nested, each with its path."""
    wanted = body.response_format
    if wanted is not None:
        if wanted.json_schema is not None:
            yield "response_format.json_schema.schema", wanted.json_schema.schema
        yield "response_format.schema", wanted.schema
        yield "response_format.value", wanted.value
        yield "response_format.structures", wanted.structures
        yield "response_format.format", wanted.format
    if body.structured_outputs is not None:
        yield "structured_outputs.json", body.structured_outputs.json
        yield "structured_outputs.structural_tag", body.structured_outputs.structural_tag
    yield "guided_json", body.guided_json
    yield "json_schema", body.json_schema
    yield "format", body.format


def _response_format(wanted: ResponseFormat) -> StructuredOutput | None:
    match wanted.type:
        case "text":
            return None
        case "json_object" | "json":
            place, schema = _first_of(wanted, "schema", "value")
            if schema is None:
                return StructuredOutput.json_object(param="response_format")
            return StructuredOutput.json(schema, param=place, strict=False)
        case "json_schema":
            place, schema = _first_of(wanted, "schema", "value")
            if schema is None or wanted.json_schema is not None:
                return _json_schema(wanted.json_schema)
            return StructuredOutput.json(schema, param=place, strict=False)
        case "regex":
            place, pattern = _first_of(wanted, "regex", "pattern", "value")
            return StructuredOutput.regex(_checked_text(place, pattern), param=place)
        case "grammar":
            place, grammar = _first_of(wanted, "grammar", "value")
            return StructuredOutput.grammar(_checked_text(place, grammar), param=place)
        case "structural_tag":
            names = ("structures", "triggers", "format")
            tag = {name: value for name in names if (value := getattr(wanted, name)) is not None}
            return StructuredOutput.structural_tag(tag, param="response_format", strict=False)
    raise InvalidRequest(
        f'response_format.type is "{wanted.type[:80]}", allowed are {FORMATS}', param="response_format.type"
    )


def _first_of(wanted: ResponseFormat, *names: str) -> tuple[str, Any]:
    """Return path and value of the first member that is set. If none is set, return the first path and None."""
    name = next((name for name in names if getattr(wanted, name) is not None), names[0])
    return f"response_format.{name}", getattr(wanted, name)


def _checked_text(place: str, value: object) -> str:
    """Raise InvalidRequest unless the value is a text."""
    if not isinstance(value, str):
        raise InvalidRequest(f"{place} must be a text", param=place)
    return value


def _json_schema(wanted: JsonSchemaFormat | None) -> StructuredOutput:
    if wanted is None or wanted.schema is None:
        place = "response_format.json_schema" + ("" if wanted is None else ".schema")
        raise InvalidRequest(f'{place} is missing: the type "json_schema" needs it', param=place)
    return StructuredOutput.json(
        wanted.schema, param="response_format.json_schema.schema", strict=wanted.strict is True
    )


def _by_kind(values: dict[str, Any], prefix: str) -> dict[str, StructuredOutput]:
    """Make the structured output of each field that is set. null means not set, and so does false for json_object."""
    found: dict[str, StructuredOutput] = {}
    for kind, value in values.items():
        if value is not None and not (kind == "json_object" and value is False):
            param = f"{prefix}{kind}"
            if kind == "json_object":
                found[param] = StructuredOutput.json_object(param=param)
            else:
                found[param] = _made(kind, value, param)
    return found


def _made(kind: str, value: Any, param: str) -> StructuredOutput:
    """Make one structured output. `strict` is False, because no API has `strict` for these fields."""
    if kind in ("json", "structural_tag"):
        return cast(StructuredOutput, getattr(StructuredOutput, kind)(value, param=param, strict=False))
    return cast(StructuredOutput, getattr(StructuredOutput, kind)(value, param=param))
