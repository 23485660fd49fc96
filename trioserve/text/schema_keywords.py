"""Rewrites JSON schemas into keywords that llguidance compiles, and finds keywords that cannot be enforced.

`if`, `not`, `oneOf`, dependencies and similar keywords become `anyOf` with several cases. If the values of a schema can
be listed, they are listed. The result accepts the same JSON as the original schema. A keyword that cannot be rewritten
is left out and reported. A strict schema with such a keyword is refused. The rewritten schema has at most CASES_MAX
cases per schema, and NODES_MAX schemas in total.
"""

from __future__ import annotations

import itertools
import json
import math
from functools import lru_cache
from typing import Any, Final

from llguidance import LLMatcher, LLTokenizer

from trioserve.contracts.errors import InvalidRequest
from trioserve.text.schema_logic import ANNOTATIONS, SchemaLogic, texts_of_pattern

__all__ = ["KeptSchema"]

CASES_MAX: Final = 64  # Limit for one schema: the product of the case counts of its keywords.
NODES_MAX: Final = 20_000
CONTAINS_ITEMS_MAX: Final = 8  # Longest array for which `contains` is rewritten.
LISTS_MAX: Final = 256  # Maximum number of arrays that are listed for a schema with unique items.
PATTERNS_MAX: Final = 200  # Maximum number of patterns that the library checks. Further patterns are not checked.
LENIENT: Final = "lenient"
OPTIONS: Final = "x-guidance"

_FORMATS: Final = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "unknown")
)
"""Formats that the library enforces."""
_FORMAT_NOTES: Final = frozenset(
    (
        *("path", "file-path", "directory-path", "new-path", "binary", "byte", "base64", "base64url", "password"),
        *("json-string", "string", "int32", "int64", "float", "double", "decimal", "multi-host-uri"),
        *("ipvanyaddress", "ipvanynetwork", "ipvanyinterface", "ipv4interface", "ipv6interface", "ipv4network"),
        *("ipv6network", "color", "phone", "payment-card-number"),
    )
)
"""Formats that OpenAPI and pydantic write as a note for other programs. They reject no text."""
_SUBSCHEMAS: Final = (
    *("items", "additionalItems", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else"),
)
_LISTS_OF_SCHEMAS: Final = ("anyOf", "oneOf", "allOf", "prefixItems")
_NAMED_SCHEMAS: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
# The key is the pattern that pydantic writes for a Decimal, whose look-ahead requires a digit. The value replaces the
# pattern, since the library supports no look-ahead.
_PATTERNS: Final = {r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(?:\d+\.?\d*|\.\d+)$"}
_UNENFORCEABLE: Final = (
    "contains",
    "unevaluatedItems",
    "unevaluatedProperties",
    "$dynamicRef",
    "$recursiveRef",
    "uniqueItems",
)


def _is_lenient(schema: Any) -> bool:
    options = schema.get(OPTIONS) if isinstance(schema, dict) else None
    return isinstance(options, dict) and options.get(LENIENT) is True


class KeptSchema:
    """One schema, rewritten for the library.

    Args:
        schema: The schema. It is not changed.
        param: Field of the request, for error messages.
        lenient: True to leave out keywords that cannot be enforced. The key `x-guidance` in the schema has the same
            effect.

    Attributes:
        schema: The rewritten schema.
        ignored: Paths of the keywords that were left out, such as `properties.a.contains`.

    Raises:
        InvalidRequest: The schema is strict and has a keyword that cannot be enforced, or it is nested too deeply or
            too large.
    """

    def __init__(self, schema: Any, *, param: str, lenient: bool = False) -> None:
        self._logic = SchemaLogic(schema)
        self._param = param
        self._is_lenient = lenient or _is_lenient(schema)
        self._nodes_left = NODES_MAX
        self._patterns_left = PATTERNS_MAX
        self.ignored: list[str] = []
        try:
            self.schema = self._rewritten(schema, "")
            if self._is_lenient and isinstance(self.schema, dict):
                options = self.schema.get(OPTIONS)
                self.schema[OPTIONS] = {**(options if isinstance(options, dict) else {}), LENIENT: True}
        except RecursionError:
            raise InvalidRequest("a schema is nested too deeply", param=param) from None

    def _rewritten(self, schema: Any, path: str) -> Any:
        if not isinstance(schema, dict):
            return schema
        self._nodes_left -= 1
        if self._nodes_left < 0:
            raise InvalidRequest(
                f"the schema, with its cases written out, has more than {NODES_MAX} parts: make it smaller",
                param=self._param,
            )
        if "const" in schema or "enum" in schema:
            values = self._logic.values(schema)
            if values is not None:
                return {"enum": values} | {key: value for key, value in schema.items() if key in _KEYS_BESIDE_VALUES}
        lists = self._lists_without_repeats(schema)
        if lists is not None:
            return lists | {key: value for key, value in schema.items() if key in _KEYS_BESIDE_VALUES}
        # The cases are made from the original schema. Schemas within the cases are rewritten below, together with the
        # rest.
        node = dict(schema)
        cases: list[list[Any]] = []
        for rewrite in (self._one_of, self._not, self._if, self._dependencies, self._contains):
            rewrite(node, cases, path)
        self._fill_in(node, path, has_cases=bool(cases))
        self._counts_of_listed(node, cases, path)
        if cases:
            members = node.get("allOf")
            added = [{"anyOf": case} if len(case) != 1 else case[0] for case in cases]
            node["allOf"] = [*(members if isinstance(members, list) else []), *added]
        for key in _SUBSCHEMAS:
            if key in node:
                node[key] = self._rewritten(node[key], f"{path}.{key}")
        if isinstance(node.get("items"), list):
            node["items"] = [self._rewritten(one, f"{path}.items[{place}]") for place, one in enumerate(node["items"])]
        for key in _LISTS_OF_SCHEMAS:
            if isinstance(node.get(key), list):
                node[key] = [self._rewritten(one, f"{path}.{key}[{place}]") for place, one in enumerate(node[key])]
        for key in _NAMED_SCHEMAS:
            if isinstance(node.get(key), dict):
                node[key] = {name: self._rewritten(one, f"{path}.{key}.{name}") for name, one in node[key].items()}
        return node

    # --- keywords that become cases ---

    def _one_of(self, node: dict[str, Any], cases: list[list[Any]], path: str) -> None:
        members = node.get("oneOf")
        if not isinstance(members, list):
            return
        del node["oneOf"]
        if len(members) > CASES_MAX and not self._is_lenient:
            raise self._unenforceable("oneOf", path, "it has too many members")
        exclusive = self._exclusive(node, members) if len(members) <= CASES_MAX else None
        if exclusive is None:
            self._ignore("oneOf", path, "two of its members may accept one value")
            exclusive = members  # The response then matches at least one of the members, perhaps several.
        if "anyOf" not in node:
            node["anyOf"] = exclusive
        else:
            cases.append(exclusive)

    def _exclusive(self, node: dict[str, Any], members: list[Any]) -> list[Any] | None:
        exclusive = []
        for place, member in enumerate(members):
            others = []
            for index, other in enumerate(members):
                if index == place or self._logic.are_disjoint(member, other):
                    continue
                other = self._logic.resolved(other)
                if isinstance(other, dict) and other.get("type") == _type_in(member, node):
                    # Both members have the same type, so the type cannot make the members disjoint.
                    other = {key: value for key, value in other.items() if key != "type"}
                negated = self._logic.negated(other)
                if negated is None:
                    return None
                others.append(negated)
            exclusive.append({"allOf": [member, *others]} if others else member)
        return exclusive

    def _not(self, node: dict[str, Any], cases: list[list[Any]], path: str) -> None:
        if "not" not in node:
            return
        negated = self._logic.negated(node.pop("not"))
        self._add_case(cases, None if negated is None else [negated], "not", path)

    def _if(self, node: dict[str, Any], cases: list[list[Any]], path: str) -> None:
        condition = node.pop("if", None)
        then, other = node.pop("then", True), node.pop("else", True)
        if condition is None or (then is True and other is True):
            return
        negated = self._logic.negated(condition)
        found = None
        if negated is not None:
            found = [_both(condition, then), _both(negated, other)]
        self._add_case(cases, found, "if", path)

    def _dependencies(self, node: dict[str, Any], cases: list[list[Any]], path: str) -> None:
        for keyword in ("dependencies", "dependentRequired", "dependentSchemas"):
            wanted = node.pop(keyword, None)
            if not isinstance(wanted, dict):
                continue
            for name, needed in wanted.items():
                if isinstance(needed, list):
                    needed = {"required": needed} if needed else True
                if needed is not True:
                    present = {"type": "object", "required": [name]}
                    absent = self._logic.negated(present)
                    self._add_case(cases, [_both(present, needed), absent], keyword, f"{path}.{keyword}.{name}")

    def _contains(self, node: dict[str, Any], cases: list[list[Any]], path: str) -> None:
        least, most = node.pop("minContains", 1), node.pop("maxContains", None)
        if "contains" not in node:
            return
        wanted = node.pop("contains")
        if least == 0 and most is None:
            return
        count, items = node.get("maxItems", CONTAINS_ITEMS_MAX + 1), node.get("items")
        found: list[Any] | None = None
        is_one = most is None and least == 1 and isinstance(count, int) and count <= CONTAINS_ITEMS_MAX
        if is_one and node.get("type") == "array" and "prefixItems" not in node and not isinstance(items, list):
            found = [
                {"type": "array", "prefixItems": [*[True] * place, wanted], "minItems": place + 1}
                for place in range(count)
            ]
        self._add_case(cases, found, "contains", path)

    def _add_case(self, cases: list[list[Any]], found: list[Any] | None, keyword: str, path: str) -> None:
        if found is None:
            self._ignore(keyword, path, "it cannot be written as cases")
            return
        product = len(found)
        for case in cases:
            product *= len(case)
        if product > CASES_MAX:
            self._ignore(keyword, path, f"the schema would have more than {CASES_MAX} cases")
            return
        cases.append(found)

    # --- keywords that become other keywords, or nothing ---

    def _fill_in(self, node: dict[str, Any], path: str, *, has_cases: bool) -> None:
        self._format(node, path)
        self._pattern(node, path)
        if node.get("uniqueItems") is False or node.get("maxItems") in (0, 1):
            node.pop("uniqueItems", None)
        if node.get("$recursiveRef") == "#" and "$ref" not in node:
            node["$ref"] = node.pop("$recursiveRef")
        evaluates_more = has_cases or any(key in node for key in ("$ref", "anyOf", "allOf"))
        if "unevaluatedProperties" in node and not evaluates_more:
            node.setdefault("additionalProperties", node.pop("unevaluatedProperties"))
        if node.get("unevaluatedProperties") is True:
            del node["unevaluatedProperties"]
        if node.get("unevaluatedItems") is True:
            del node["unevaluatedItems"]
        self._names(node, path)
        self._listed_names(node)
        for key in _UNENFORCEABLE:
            if key in node:
                del node[key]
                self._ignore(key, path, "no grammar can enforce it")

    def _format(self, node: dict[str, Any], path: str) -> None:
        name = node.get("format")
        if not isinstance(name, str) or name in _FORMATS:
            return
        del node["format"]
        if name not in _FORMAT_NOTES:
            self._ignore("format", path, f'the format "{name[:40]}" is not known')

    def _pattern(self, node: dict[str, Any], path: str) -> None:
        pattern = node.get("pattern")
        if isinstance(pattern, str):
            node["pattern"] = pattern = _PATTERNS.get(pattern, pattern)
            if not self._can_compile(pattern):
                del node["pattern"]
                self._ignore("pattern", path, "it is not a regular expression without look-around and backreferences")
        patterns = node.get("patternProperties")
        if isinstance(patterns, dict):
            node["patternProperties"] = dict(patterns)
            for pattern in patterns:
                if not self._can_compile(pattern):
                    del node["patternProperties"][pattern]
                    self._ignore("patternProperties", path, "its pattern has look-around or backreferences")

    def _can_compile(self, pattern: str) -> bool:
        if "\\" not in pattern and "(?" not in pattern and "[" not in pattern:
            return True
        self._patterns_left -= 1
        return self._patterns_left < 0 or _is_known_to_library(pattern)

    def _names(self, node: dict[str, Any], path: str) -> None:
        """Replace propertyNames: filter the listed properties, or use patternProperties or properties instead."""
        if "propertyNames" not in node:
            return
        wanted = self._logic.resolved(node.pop("propertyNames"))
        if wanted is True:
            return
        properties = node.get("properties")
        properties = dict(properties) if isinstance(properties, dict) else {}
        answers = {name: self._logic.accepts(wanted, name) for name in properties}
        others = node.get("additionalProperties", True)
        values = self._logic.values(wanted)
        if values is not None:
            names = [name for name in values if isinstance(name, str)]
            if "patternProperties" not in node:
                node["properties"] = {
                    **{name: schema if name in names else False for name, schema in properties.items()},
                    **{name: others for name in names if name not in properties},
                }
                node["additionalProperties"] = False
                return
        pattern = _pattern_of_names(wanted)
        if pattern is not None and "patternProperties" not in node:
            known = {name: _matches(pattern, name) if answer is None else answer for name, answer in answers.items()}
            if None not in known.values():
                node["properties"] = {name: one if known[name] else False for name, one in properties.items()}
                if others is not False:
                    if pattern:
                        node["patternProperties"] = {pattern: others}
                        node["additionalProperties"] = False
                    else:
                        node["additionalProperties"] = others
                return
        self._ignore("propertyNames", path, "only listed names and one pattern are supported")

    def _listed_names(self, node: dict[str, Any]) -> None:
        """Convert patterns that match few texts to properties, so that each name is written at most once."""
        patterns = node.get("patternProperties")
        if not isinstance(patterns, dict):
            return
        properties = node.get("properties")
        listed = dict(properties) if isinstance(properties, dict) else {}
        left = {}
        for pattern, schema in patterns.items():
            texts = texts_of_pattern(pattern)
            if texts is None:
                left[pattern] = schema
                continue
            for text in texts:
                if text in listed and listed[text] is not schema:
                    listed[text] = {"allOf": [listed[text], schema]}
                else:
                    listed[text] = schema
        if left:  # If a listed name matches one of the remaining patterns, the schema of that pattern applies, too.
            return
        node["properties"] = listed
        del node["patternProperties"]

    def _counts_of_listed(self, node: dict[str, Any], cases: list[list[Any]], path: str) -> None:
        """Replace minProperties of an object that lists all its names by cases with different required names."""
        listed, least, most = node.get("properties"), node.get("minProperties", 0), node.get("maxProperties")
        if not isinstance(listed, dict) or not isinstance(least, int) or node.get("patternProperties"):
            return
        if node.get("additionalProperties") is not False or node.get("type") != "object":
            return
        names = [name for name, schema in listed.items() if schema is not False]
        required = node.get("required")
        required = [name for name in required if name in names] if isinstance(required, list) else []
        optional = [name for name in names if name not in required]
        if isinstance(most, int) and most >= len(names):
            del node["maxProperties"]  # The limit excludes no object.
        missing = least - len(set(required))
        if (
            "maxProperties" in node
            or least < 2
            or not optional
            or math.comb(len(optional), max(missing, 0)) > CASES_MAX
        ):
            return  # The library enforces the keyword, or refuses the schema.
        del node["minProperties"]
        found: list[Any] = [{"required": list(one)} for one in itertools.combinations(optional, max(missing, 0))]
        self._add_case(cases, found or [False], "minProperties", path)

    def _lists_without_repeats(self, schema: dict[str, Any]) -> dict[str, Any] | None:
        """List all arrays that a schema with unique items accepts. Return None if they cannot be listed."""
        if schema.get("uniqueItems") is not True or schema.get("type") != "array" or "items" not in schema:
            return None
        items = self._logic.values(schema["items"])
        if items is None:
            return None
        most = schema.get("maxItems")
        most = min(len(items), most) if isinstance(most, int) else len(items)
        lists: list[list[Any]] = []
        for count in range(most + 1):
            for one in itertools.permutations(items, count):
                if len(lists) >= LISTS_MAX:
                    return None
                lists.append(list(one))
        answers = [self._logic.accepts(schema, one) for one in lists]
        if None in answers:
            return None
        return {"enum": [one for one, is_kept in zip(lists, answers, strict=True) if is_kept]}

    # --- keywords that cannot be enforced ---

    def _ignore(self, keyword: str, path: str, reason: str) -> None:
        if not self._is_lenient:
            raise self._unenforceable(keyword, path, reason)
        self.ignored.append(f"{path}.{keyword}".removeprefix("."))

    def _unenforceable(self, keyword: str, path: str, reason: str) -> InvalidRequest:
        place = f"{path}.{keyword}".removeprefix(".")
        return InvalidRequest(
            f'the schema has the keyword "{keyword}" at {place[:200]}, which cannot be enforced: {reason}; remove it, '
            "or send strict false to ignore it",
            param=self._param,
        )


_KEYS_BESIDE_VALUES: Final = ANNOTATIONS | {OPTIONS}


def _type_in(schema: Any, around: dict[str, Any]) -> Any:
    """Return the type that a member of a schema names.

    If it names none, return the type that the surrounding schema names.
    """
    return schema["type"] if isinstance(schema, dict) and "type" in schema else around.get("type")


def _both(one: Any, other: Any) -> Any:
    if one is True or other is True:
        return other if one is True else one
    return {"allOf": [one, other]}


def _pattern_of_names(wanted: Any) -> str | None:
    """Return a pattern for the names that a schema accepts.

    "" if the schema accepts any name. None if no pattern can express the names.
    """
    if not isinstance(wanted, dict):
        return None
    left = {key: value for key, value in wanted.items() if key not in ANNOTATIONS and key != "type"}
    if wanted.get("type", "string") != "string":
        return None
    if not left:
        return ""
    if set(left) == {"pattern"} and isinstance(left["pattern"], str):
        return str(left["pattern"])
    if set(left) <= {"minLength", "maxLength"}:
        return rf"^[\s\S]{{{left.get('minLength', 0)},{left.get('maxLength', '')}}}$"
    return None


def _is_known_to_library(pattern: str) -> bool:
    return not LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema({"type": "string", "pattern": pattern}))


def _matches(pattern: str, name: str) -> bool | None:
    """Match a name against a pattern with the library, which takes linear time.

    Returns None if the library refuses the pattern.
    """
    matcher = LLMatcher(_byte_library(), LLMatcher.grammar_from_json_schema({"type": "string", "pattern": pattern}))
    text = list(json.dumps(name, ensure_ascii=False).encode())
    return None if matcher.is_error() else matcher.try_consume_tokens(text) == len(text) and matcher.is_accepting()


@lru_cache(maxsize=1)
def _byte_library() -> LLTokenizer:
    return LLTokenizer("byte")
