"""The fields of a body that ask for structured output. At most one of them can be set.

They are OpenAI's response_format, vLLM's structured_outputs and guided_*, and the names that SGLang, llama.cpp and
Ollama have for the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal, cast

import msgspec

from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.structured_output import CHOICES_MAX, StructuredOutput
from trioserve.text.chat_messages import check_shape

__all__ = ["FormFields", "JsonSchemaFormat", "ResponseFormat", "StructuredOutputs", "form_of"]

Schema = dict[str, Any] | bool | str
"""As a JSON object, or as JSON in a text."""

NAME_CHARACTERS_MAX = 64  # as in OpenAI's API
Choices = Annotated[list[str], msgspec.Meta(min_length=1, max_length=CHOICES_MAX)]


class JsonSchemaFormat(msgspec.Struct, frozen=True, kw_only=True):
    """strict: true refuses a schema with keywords that cannot be kept to. Otherwise they are ignored, and named in the
    response's head."""

    name: Annotated[str, msgspec.Meta(max_length=NAME_CHARACTERS_MAX)] | None = None
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's response_format, and what other servers write there. An unknown member is refused.

    type: "text", "json_object", "json_schema", "structural_tag", "regex" or "grammar", or "json", which is
    json_object. json_object and json_schema may have their schema in `schema` (llama.cpp, Together) or `value` (TGI).
    structural_tag has structures and triggers, or format. regex has its pattern in `regex`, `pattern` or `value`.
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
    """Exactly one of these, and settings of vLLM's backends. WHITESPACE are refused."""

    json: Schema | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None


class FormFields(msgspec.Struct, frozen=True, kw_only=True):
    """A part of every body that asks for text."""

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
"""Settings in structured_outputs that would change what is allowed."""


def form_of(body: FormFields) -> StructuredOutput | None:
    """None: it is free. Raises InvalidRequest, naming the field by its path."""
    for place, value in _trees(body):
        check_shape(value, place)  # what follows walks them
    forms: dict[str, StructuredOutput] = {}
    if body.response_format is not None:
        form = _response_format(body.response_format)
        if form is not None:
            forms["response_format"] = form
    if body.structured_outputs is not None:
        wanted = msgspec.structs.asdict(body.structured_outputs)
        for name in WHITESPACE:
            if wanted.pop(name):
                raise InvalidRequest(
                    f"structured_outputs.{name} is not supported: say it in the schema, or send a regex or a grammar",
                    param=f"structured_outputs.{name}",
                )
        own = _by_kind(wanted, "structured_outputs.")
        if len(own) != 1:
            raise InvalidRequest(
                f"structured_outputs has {len(own)} of {', '.join(wanted)}: exactly one of them has to be set",
                param="structured_outputs",
            )
        forms |= own
    guided = {name.removeprefix(GUIDED): getattr(body, name) for name in FormFields.__struct_fields__ if GUIDED in name}
    forms |= _by_kind(guided, GUIDED)
    for name, form_kind in OTHER_NAMES.items():
        if (source := getattr(body, name)) not in (None, ""):
            forms[name] = _made(form_kind, source, name)
    if body.format:
        forms["format"] = (
            StructuredOutput.json_object(param="format")
            if isinstance(body.format, str)
            else StructuredOutput.json(body.format, param="format", strict=False)
        )
    if len(forms) > 1:
        first, second, *_ = forms
        raise InvalidRequest(f"{first} and {second} both say what form the response is to have: send one", param=second)
    return next(iter(forms.values()), None)


def _trees(body: FormFields) -> Iterable[tuple[str, Any]]:
    """Values that may have any depth, by their place."""
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
            return StructuredOutput.regex(_given_text(place, pattern), param=place)
        case "grammar":
            place, grammar = _first_of(wanted, "grammar", "value")
            return StructuredOutput.grammar(_given_text(place, grammar), param=place)
        case "structural_tag":
            names = ("structures", "triggers", "format")
            tag = {name: value for name in names if (value := getattr(wanted, name)) is not None}
            return StructuredOutput.structural_tag(tag, param="response_format", strict=False)
    raise InvalidRequest(
        f'response_format.type is "{wanted.type[:80]}", allowed are {FORMATS}', param="response_format.type"
    )


def _first_of(wanted: ResponseFormat, *names: str) -> tuple[str, Any]:
    """The first of these members that is set, with its path; without any, the first path and None."""
    name = next((name for name in names if getattr(wanted, name) is not None), names[0])
    return f"response_format.{name}", getattr(wanted, name)


def _given_text(place: str, value: object) -> str:
    """Raises InvalidRequest if it is not a text."""
    if not isinstance(value, str):
        raise InvalidRequest(f"{place} has to be a text", param=place)
    return value


def _json_schema(wanted: JsonSchemaFormat | None) -> StructuredOutput:
    if wanted is None or wanted.schema is None:
        place = "response_format.json_schema" + ("" if wanted is None else ".schema")
        raise InvalidRequest(f'{place} is missing: with the type "json_schema" it has to be there', param=place)
    return StructuredOutput.json(
        wanted.schema, param="response_format.json_schema.schema", strict=wanted.strict is True
    )


def _by_kind(values: dict[str, Any], prefix: str) -> dict[str, StructuredOutput]:
    """By the field that it came in. Those that are null, or false where nothing else can be said, are not set."""
    forms: dict[str, StructuredOutput] = {}
    for kind, value in values.items():
        if value is not None and not (kind == "json_object" and value is False):
            param = f"{prefix}{kind}"
            if kind == "json_object":
                forms[param] = StructuredOutput.json_object(param=param)
            else:
                forms[param] = _made(kind, value, param)
    return forms


def _made(kind: str, value: Any, param: str) -> StructuredOutput:
    """No API has `strict` for these fields: it is false."""
    if kind in ("json", "structural_tag"):
        return cast(StructuredOutput, getattr(StructuredOutput, kind)(value, param=param, strict=False))
    return cast(StructuredOutput, getattr(StructuredOutput, kind)(value, param=param))
