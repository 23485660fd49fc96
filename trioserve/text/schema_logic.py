"""Analyses JSON schemas: finds the values that a schema accepts, negates a schema, and detects disjoint schemas.

Every function returns None or False if it cannot decide. No function follows more than REFERENCES_MAX references, or
recurses deeper than DEPTH_MAX.
"""

from __future__ import annotations

import re
import re._constants as re_kinds  # type: ignore[import-not-found]
import re._parser as re_parser  # type: ignore[import-not-found]
from collections.abc import Callable, Iterable, Iterator
from itertools import islice, product
from typing import Any, Final

__all__ = [
    "ANNOTATIONS",
    "SchemaLogic",
    "same_value",
    "texts_of_pattern",
    "type_names",
]

Schema = Any  # A schema is a JSON object or a boolean.

ANNOTATIONS: Final = frozenset(
    (
        *("$id", "$schema", "$comment", "$anchor", "$defs", "definitions", "$vocabulary", "$dynamicAnchor", "id"),
        *("title", "description", "default", "deprecated", "readOnly", "writeOnly", "examples", "example"),
        *("contentEncoding", "contentMediaType", "contentSchema", "discriminator", "externalDocs", "xml"),
    )
)
"""Keywords that only describe. They do not change which values a schema accepts."""

DEPTH_MAX: Final = 8
REFERENCES_MAX: Final = 16
WORK_MAX: Final = 50_000  # Maximum number of recursive calls per root schema, since pairs of members multiply.
TEXTS_MAX: Final = 64  # Maximum number of texts that are listed for a pattern.
COMPLEMENT_CHARACTERS_MAX: Final = 512  # Limit for the total length of the texts in _complement.
TYPES: Final = ("null", "boolean", "number", "string", "array", "object")
_OF_TYPE: Final = {
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), "number"),
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format"), "string"),
    **dict.fromkeys(("minItems", "maxItems", "items", "prefixItems", "uniqueItems", "contains"), "array"),
    **dict.fromkeys(("minProperties", "maxProperties", "required", "properties"), "object"),
}
"""Type that a keyword applies to. Values of other types satisfy the keyword."""
_ABOVE: Final = {"minLength": "maxLength", "minItems": "maxItems", "minProperties": "maxProperties"}
_BELOW: Final = {most: least for least, most in _ABOVE.items()}
_OTHER_SIDE: Final = {
    "minimum": "exclusiveMaximum",
    "maximum": "exclusiveMinimum",
    "exclusiveMinimum": "maximum",
    "exclusiveMaximum": "minimum",
}
_SIZES: Final = (("minLength", "maxLength"), ("minItems", "maxItems"), ("minProperties", "maxProperties"))


class SchemaLogic:
    """Decides questions about the schemas within one root schema.

    Args:
        root: The root schema. Local references, such as `#/$defs/a`, lead into it.
    """

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._work_left = WORK_MAX

    def resolved(self, schema: Schema) -> Schema:
        """Follow a local reference if the schema has no other keyword.

        Return the schema itself if it has another keyword, or if the reference cannot be followed.
        """
        for _ in range(REFERENCES_MAX):
            if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
                return schema
            if any(key != "$ref" and key not in ANNOTATIONS for key in schema):
                return schema
            target = self._target(schema["$ref"])
            if target is None:
                return schema
            schema = target
        return schema

    def values(self, schema: Schema) -> list[Any] | None:
        """Return the values that a schema accepts, or None if they cannot be listed."""
        schema = self.resolved(schema)
        if schema is False:
            return []
        if not isinstance(schema, dict):
            return None
        if "const" in schema:
            found = [schema["const"]]
        elif isinstance(schema.get("enum"), list):
            found = schema["enum"]
        elif schema.get("type") == "boolean":
            found = [False, True]
        elif schema.get("type") == "null":
            found = [None]
        else:
            return None
        rest = {key: value for key, value in schema.items() if key not in ("const", "enum")}
        answers = [self.accepts(rest, value) for value in found]
        return None if None in answers else [value for value, is_one in zip(found, answers, strict=True) if is_one]

    def accepts(self, schema: Schema, value: Any, depth: int = 0) -> bool | None:
        """Return True if a schema accepts a value and False if it does not.

        Return None if the schema has a keyword that this class does not know.

        Args:
            value: The JSON value.
            depth: Current depth of recursion.
        """
        schema = self.resolved(schema)
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict) or depth > DEPTH_MAX or not self._may_work():
            return None
        return _all_of(self._accepts_by(key, schema, value, depth) for key in schema if key not in ANNOTATIONS)

    def negated(self, schema: Schema, depth: int = 0) -> Schema | None:
        """Return a schema that accepts exactly the values that the given schema refuses.

        None if no schema can express this.

        Args:
            depth: Current depth of recursion.
        """
        schema = self.resolved(schema)
        if isinstance(schema, bool):
            return not schema
        if not isinstance(schema, dict) or depth > DEPTH_MAX or not self._may_work():
            return None
        parts = []
        for key in schema:
            if key in ANNOTATIONS:
                continue
            part = self._negated_keyword(key, schema[key], depth + 1)
            if part is None:
                return None
            parts.append(part)
        return _any_of(parts)

    def are_disjoint(self, one: Schema, other: Schema, depth: int = 0) -> bool:
        """Return True if it is certain that no value is accepted by both schemas.

        Args:
            one: The first schema.
            other: The second schema.
            depth: Current depth of recursion.
        """
        one, other = self.resolved(one), self.resolved(other)
        if one is False or other is False:
            return True
        if not isinstance(one, dict) or not isinstance(other, dict) or depth > DEPTH_MAX or not self._may_work():
            return False
        for first, second in ((one, other), (other, one)):
            values = self.values(first)
            if values is not None and all(self.accepts(second, value) is False for value in values):
                return True
            members = first.get("allOf")
            if isinstance(members, list) and any(self.are_disjoint(part, second, depth + 1) for part in members):
                return True
            for key in ("anyOf", "oneOf"):
                members = first.get(key)
                if isinstance(members, list) and all(self.are_disjoint(part, second, depth + 1) for part in members):
                    return True
        types = type_names(one) & type_names(other)
        if not types:
            return True
        if types <= {"number", "integer"}:
            return self._are_disjoint_of("number", one, other, depth)
        return len(types) == 1 and self._are_disjoint_of(next(iter(types)), one, other, depth)

    # --- private ---

    def _may_work(self) -> bool:
        self._work_left -= 1
        return self._work_left >= 0

    def _target(self, reference: str) -> Schema | None:
        if reference == "#":
            return self._root
        if not reference.startswith("#/"):
            return None
        found: Any = self._root
        for part in reference[2:].split("/"):
            if not isinstance(found, dict):
                return None
            found = found.get(part.replace("~1", "/").replace("~0", "~"))
        return found if isinstance(found, dict | bool) else None

    def _are_disjoint_of(self, name: str, one: dict[str, Any], other: dict[str, Any], depth: int) -> bool:
        if name == "number":
            return _is_above(one, other) or _is_above(other, one)
        for least, most in _SIZES:
            if _OF_TYPE[least] == name and any(
                _is_below(second.get(most), first.get(least)) for first, second in ((one, other), (other, one))
            ):
                return True
        if name != "object":
            return False
        for first, second in ((one, other), (other, one)):
            for key in _texts(first.get("required")):
                here, there = _property(first, key), _property(second, key)
                if there is False or (key in _texts(second.get("required")) and here is False):
                    return True
                if key in _texts(second.get("required")) and self.are_disjoint(here, there, depth + 1):
                    return True
        return False

    def _accepts_by(self, key: str, schema: dict[str, Any], value: Any, depth: int) -> bool | None:
        wanted = schema[key]
        if key in _OF_TYPE and _OF_TYPE[key] != _type_of(value):
            return True
        down: Callable[[Schema, Any], bool | None] = lambda part, one: self.accepts(part, one, depth + 1)  # noqa: E731
        match key:
            case "type":
                names = [wanted] if isinstance(wanted, str) else _texts(wanted)
                return _type_of(value) in names or ("integer" in names and _is_whole(value))
            case "const":
                return same_value(wanted, value)
            case "enum":
                return isinstance(wanted, list) and any(same_value(one, value) for one in wanted)
            case "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum" if _is_number(wanted):
                is_below, is_above = bool(value < wanted), bool(value > wanted)
                if key.startswith("exclusive"):
                    return is_above if key == "exclusiveMinimum" else is_below
                return not is_below if key == "minimum" else not is_above
            case "multipleOf" if isinstance(wanted, int) and wanted and isinstance(value, int):
                return bool(value % wanted == 0)
            case "minLength" | "minItems" | "minProperties" if _is_number(wanted):
                return bool(len(value) >= wanted)
            case "maxLength" | "maxItems" | "maxProperties" if _is_number(wanted):
                return bool(len(value) <= wanted)
            case "required":
                return all(name in value for name in _texts(wanted))
            case "properties" if isinstance(wanted, dict):
                return _all_of(down(part, value[name]) for name, part in wanted.items() if name in value)
            case "items" if isinstance(wanted, dict | bool) and "prefixItems" not in schema:
                return _all_of(down(wanted, one) for one in value)
            case "uniqueItems":
                return wanted is False or not any(
                    same_value(one, other) for place, one in enumerate(value) for other in value[:place]
                )
            case "contains" if "minContains" not in schema and "maxContains" not in schema:
                return _negated(_all_of(_negated(down(wanted, one)) for one in value))
            case "allOf" if isinstance(wanted, list):
                return _all_of(down(part, value) for part in wanted)
            case "anyOf" if isinstance(wanted, list):
                return _negated(_all_of(_negated(down(part, value)) for part in wanted))
            case "oneOf" if isinstance(wanted, list):
                answers = [down(part, value) for part in wanted]
                return None if None in answers else answers.count(True) == 1
            case "not":
                return _negated(down(wanted, value))
            case "if":
                is_so = down(wanted, value)
                return None if is_so is None else down(schema.get("then" if is_so else "else", True), value)
            case "then" | "else":
                return True
        return None

    def _negated_keyword(self, key: str, wanted: Any, depth: int) -> Schema | None:
        name = _OF_TYPE.get(key)
        match key:
            case "type":
                names = [wanted] if isinstance(wanted, str) else _texts(wanted)
                if not names or ("integer" in names and "number" not in names):
                    return None  # No schema can express that a number is not whole.
                rest = [name for name in TYPES if name not in names]
                return {"type": rest} if rest else False
            case "const":
                return _without([wanted])
            case "enum":
                return _without(wanted) if isinstance(wanted, list) else None
            case "minLength" | "minItems" | "minProperties" if isinstance(wanted, int):
                return {"type": name, _ABOVE[key]: wanted - 1} if wanted > 0 else False
            case "maxLength" | "maxItems" | "maxProperties" if isinstance(wanted, int):
                return {"type": name, _BELOW[key]: wanted + 1}
            case "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum" if _is_number(wanted):
                return {"type": "number", _OTHER_SIDE[key]: wanted}
            case "required" if isinstance(wanted, list):
                return _any_of([{"type": "object", "properties": {one: False}} for one in _texts(wanted)])
            case "properties" if isinstance(wanted, dict):
                parts = []
                for one, schema in wanted.items():
                    part = self.negated(schema, depth)
                    if part is None:
                        return None
                    if part is not False:
                        parts.append({"type": "object", "properties": {one: part}, "required": [one]})
                return _any_of(parts)
            case "not":
                return wanted
            case "anyOf" if isinstance(wanted, list):
                members = [self.negated(part, depth) for part in wanted]
                return None if None in members else _all(members)
            case "allOf" if isinstance(wanted, list):
                members = [self.negated(part, depth) for part in wanted]
                return None if None in members else _any_of(members)
        return None


def type_names(schema: Schema) -> frozenset[str]:
    """Return the types that a schema accepts. If "number" is included, "integer" is included, too."""
    if not isinstance(schema, dict):
        return frozenset(TYPES) | {"integer"} if schema is not False else frozenset()
    wanted = schema.get("type")
    names = {wanted} if isinstance(wanted, str) else set(_texts(wanted)) if isinstance(wanted, list) else set(TYPES)
    if "number" in names:
        names.add("integer")  # Every integer is also a number, so schemas of both types are not disjoint.
    return frozenset(names)


def same_value(one: Any, other: Any) -> bool:
    """Return True if two JSON values are equal. The number 1 equals 1.0, but not the boolean true.

    Args:
        one: The first value.
        other: The second value.
    """
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_value, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_value(value, other[key]) for key, value in one.items())
    return bool(one == other)


def texts_of_pattern(pattern: str, texts_max: int = TEXTS_MAX) -> list[str] | None:
    """Return all texts that a pattern with both anchors matches.

    None if there are too many texts, or if they cannot be listed.

    Args:
        texts_max: Maximum number of texts to list.
    """
    try:
        parsed = list(re_parser.parse(pattern))
    except (re.error, RecursionError, OverflowError):
        return None
    if len(parsed) < 2 or parsed[0] != (re_kinds.AT, re_kinds.AT_BEGINNING):
        return None
    if parsed[-1] != (re_kinds.AT, re_kinds.AT_END):
        return None
    texts = _texts_of(parsed[1:-1], texts_max)
    return None if texts is None else list(dict.fromkeys(texts))


def _texts_of(parsed: Iterable[Any], texts_max: int) -> list[str] | None:
    parts = []
    for kind, argument in parsed:
        part = _texts_of_one(kind, argument, texts_max)
        if part is None:
            return None
        parts.append(part)
    texts = ["".join(texts) for texts in islice(product(*parts), texts_max + 1)]
    return texts if len(texts) <= texts_max else None


def _texts_of_one(kind: Any, argument: Any, texts_max: int) -> list[str] | None:
    if kind is re_kinds.LITERAL:
        return [chr(argument)]
    if kind is re_kinds.SUBPATTERN:
        return _texts_of(argument[3], texts_max)
    if kind is re_kinds.BRANCH:
        branches = [_texts_of(branch, texts_max) for branch in argument[1]]
        if any(branch is None for branch in branches):
            return None
        return [text for branch in branches for text in branch or ()]
    if kind is re_kinds.IN:
        found: list[str] = []
        for sort, value in argument:
            if sort is re_kinds.LITERAL:
                found.append(chr(value))
            elif sort is re_kinds.RANGE and value[1] - value[0] < texts_max:
                found += map(chr, range(value[0], value[1] + 1))
            else:
                return None
        return found
    if kind is re_kinds.MAX_REPEAT:
        least, most, part = argument
        if most is re_kinds.MAXREPEAT or most > texts_max:
            return None
        once = _texts_of(part, texts_max)
        if once is None:
            return None
        texts: list[str] = []
        for count in range(least, most + 1):
            texts += ("".join(texts) for texts in islice(product(once, repeat=count), texts_max + 1))
            if len(texts) > texts_max:
                return None
        return texts
    return None


def _without(values: list[Any]) -> Schema | None:
    """Return a schema that accepts all values except the given values, or None if no schema can express this."""
    left: list[Schema] = []
    names = {_type_of(value) for value in values}
    if names & {"array", "object"}:
        return None
    others = [name for name in TYPES if name not in names]
    if others:
        left.append({"type": others})
    if "boolean" in names:
        left += [{"const": value} for value in (False, True) if not any(value is one for one in values)]
    if "string" in names:
        pattern = _complement([value for value in values if isinstance(value, str)])
        if pattern is None:
            return None
        left.append({"type": "string", "pattern": pattern})
    numbers = sorted({value for value in values if _is_number(value)})
    for low, high in zip((None, *numbers), (*numbers, None), strict=True) if numbers else ():
        bounds = {"exclusiveMinimum": low, "exclusiveMaximum": high}
        left.append({"type": "number", **{key: bound for key, bound in bounds.items() if bound is not None}})
    return _any_of(left)


def _complement(texts: list[str]) -> str | None:
    """Return a pattern that matches all texts except the given texts, or None if the given texts are too long."""
    if sum(map(len, texts)) > COMPLEMENT_CHARACTERS_MAX:
        return None
    wanted = set(texts)
    prefixes = sorted({text[:end] for text in texts for end in range(len(text) + 1)})
    parts = []
    for prefix in prefixes:
        following = sorted({text[len(prefix)] for text in texts if text.startswith(prefix) and len(text) > len(prefix)})
        if prefix not in wanted:
            parts.append(_escaped(prefix))
        another = f"[^{''.join(map(_escaped_in_class, following))}]" if following else r"[\s\S]"
        parts.append(rf"{_escaped(prefix)}{another}[\s\S]*")
    return f"^(?:{'|'.join(parts)})$"


def _escaped(text: str) -> str:
    return re.sub(r"[\\^$.|?*+()\[\]{}/\-]", lambda found: "\\" + found[0], text)


def _escaped_in_class(character: str) -> str:
    return "\\" + character if character in "\\]^-[&~" else character


def _any_of(parts: list[Any]) -> Schema:
    if True in parts:
        return True
    parts = [part for part in parts if part is not False]
    return parts[0] if len(parts) == 1 else {"anyOf": parts} if parts else False


def _all(parts: list[Any]) -> Schema:
    if False in parts:
        return False
    parts = [part for part in parts if part is not True]
    return parts[0] if len(parts) == 1 else {"allOf": parts} if parts else True


def _all_of(answers: Iterator[bool | None]) -> bool | None:
    result: bool | None = True
    for answer in answers:
        if answer is False:
            return False
        if answer is None:
            result = None
    return result


def _negated(answer: bool | None) -> bool | None:
    return None if answer is None else not answer


def _property(schema: dict[str, Any], name: str) -> Schema:
    """Return the schema for the value that an object has under a name."""
    properties = schema.get("properties")
    if isinstance(properties, dict) and name in properties:
        return properties[name]
    if schema.get("patternProperties"):
        return True
    return schema.get("additionalProperties", True)


def _is_above(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return True if all numbers of the first schema are greater than all numbers of the second schema."""
    for least in ("minimum", "exclusiveMinimum"):
        for most in ("maximum", "exclusiveMaximum"):
            low, high = one.get(least), other.get(most)
            is_level = _is_number(low) and low == high and (least, most) != ("minimum", "maximum")
            if is_level or _is_below(high, low):
                return True
    return False


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def _is_below(one: Any, other: Any) -> bool:
    """Return True if both values are numbers and the first number is less than the second."""
    return _is_number(one) and _is_number(other) and bool(one < other)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return _is_number(value) and (isinstance(value, int) or value.is_integer())


def _texts(value: Any) -> list[str]:
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []
