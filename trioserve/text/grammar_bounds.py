"""Bounds of schemas and grammars, so that compiling takes at most a second, and filling a mask some milliseconds.

The library has its own bounds for most costs (grammar_compiler.LIMITS). The bounds here cover costs that the library
does not limit, or limits too late. The bounds were found by experiment. Intersections of patterns take cubic time.
Optional properties of an object take quadratic time. A text without alternatives is walked to its end in each
computation of forced tokens. All bounds are checked without recursion.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urljoin

from trioserve.contracts.errors import InvalidRequest
from trioserve.text.schema_keywords import KeptSchema

__all__ = [
    "COMPILE_STACK_BYTES",
    "FIXED_TEXT_CHARACTERS_MAX",
    "JOINED_PATTERNS_MAX",
    "OPTIONAL_PROPERTIES_MAX",
    "PATTERN_CHARACTERS_MAX",
    "REPEATS_MAX",
    "SCHEMAS_MAX",
    "URI_CHARACTERS_MAX",
    "check_fixed_text",
    "check_lark",
    "check_pattern",
    "check_schema",
    "check_schemas_within",
    "schemas_within",
    "with_kept_schemas",
]

# A grammar has at most 6,000 rules. A chain of 6,000 rules takes less than half of this stack. Only used pages of the
# stack take memory.
COMPILE_STACK_BYTES = 512 * 2**20
FIXED_TEXT_CHARACTERS_MAX = 8192  # Longest text in which a grammar allows no alternatives.
PATTERN_CHARACTERS_MAX = 8192
# Maximum number of repetitions of one part of a pattern. The repetitions of nested parts are multiplied.
REPEATS_MAX = 10_000
JOINED_PATTERNS_MAX = 32  # Maximum number of patterns in all members of an allOf together, nested members included.
# Limit for one object. Each property takes four of the 2,000 items that the parser may have at one position.
OPTIONAL_PROPERTIES_MAX = 480
SCHEMAS_MAX = 1000  # Limit for one grammar. A request may offer 128 tools.
URI_CHARACTERS_MAX = 512  # Longest `$id`. Each reference within the schema is joined with the `$id`.

_HOLD_NAMES = frozenset(("properties", "$defs", "definitions", "patternProperties", "dependentSchemas", "dependencies"))
_HOLD_VALUES = frozenset(("const", "enum", "default", "examples"))
_LIBRARY_URI = "json-schema:///"  # The library gives this URI to a schema without $id.
# This module uses another URI for such a schema, since urljoin does not support the library's URI.
_ROOT_URI = "http://schema.invalid/"
_INDEX_DIGITS_MAX = 9
_REPEAT = re.compile(r"\{(\d+)(,(\d*))?\}")
_LARK_SCHEMA = re.compile(r"%json\s*")
# Matches comments, texts and patterns in a Lark grammar. An unterminated text also matches, otherwise each of its
# quotes would begin a new text.
_LARK_TOKEN = re.compile(r'//[^\n]*|"(?:[^"\\\n]|\\.)*"?|/(?:[^/\\\n]|\\.)*/?')
_LARK_REPEAT = re.compile(r"\{\s*(\d+)?\s*(?:,\s*(\d+)?\s*)?\}|~\s*(\d+)(?:\s*\.\.\s*(\d+))?")


def check_schema(schema: Any, *, param: str) -> None:
    """Check a JSON schema against the bounds of this module, in linear time.

    Args:
        param: Field of the request, for error messages.

    Raises:
        InvalidRequest: The schema exceeds a bound.
    """
    rules = _Rules(schema, param)
    for node in rules.nodes:
        values = node.get("enum")
        for value in (*(values if isinstance(values, list) else ()), *((node["const"],) if "const" in node else ())):
            if isinstance(value, str | list | dict):
                check_fixed_text(json.dumps(value, ensure_ascii=False), "a value of const or enum", param=param)
        _check_properties(node, param)
        pattern = node.get("pattern")
        if isinstance(pattern, str):
            check_pattern(pattern, param=param)
        patterns = node.get("patternProperties")
        for key in patterns if isinstance(patterns, dict) else ():
            check_pattern(key, param=param)
        joins = isinstance(node.get("allOf"), list) or ("$ref" in node and _own_patterns(node) > 0)
        if joins and rules.joined_patterns(node) > JOINED_PATTERNS_MAX:
            raise InvalidRequest(
                f"an allOf joins more than {JOINED_PATTERNS_MAX} patterns, which is the limit: use fewer patterns",
                param=param,
            )


def check_fixed_text(text: str, what: str, *, param: str) -> None:
    if len(text) > FIXED_TEXT_CHARACTERS_MAX:
        raise InvalidRequest(
            f"{what} has {len(text)} characters, at most {FIXED_TEXT_CHARACTERS_MAX} are allowed: shorten it",
            param=param,
        )


def check_pattern(pattern: str, *, param: str) -> None:
    """Check the length of a regular expression and its number of repetitions.

    Args:
        pattern: The expression.
        param: Field of the request, for error messages.

    Raises:
        InvalidRequest: The expression is too long, or repeats a part too often.
    """
    if len(pattern) > PATTERN_CHARACTERS_MAX:
        raise InvalidRequest(
            f"a pattern has {len(pattern)} characters, at most {PATTERN_CHARACTERS_MAX} are allowed: shorten it",
            param=param,
        )
    if (repeats := _repeats(pattern)) > REPEATS_MAX:
        raise _too_many_repeats(repeats, param)


def check_lark(grammar: str, *, param: str) -> None:
    """Check the texts, repetitions and schemas of a Lark grammar.

    Args:
        param: Field of the request, for error messages.

    Raises:
        InvalidRequest: A text is too long, a part is repeated too often, or a schema exceeds a bound.
    """
    grammar = check_schemas_within(grammar, param=param)
    for found in _LARK_TOKEN.finditer(grammar):
        if found[0].startswith('"'):
            check_fixed_text(found[0][1:-1], "a text of the grammar", param=param)
    for found in _LARK_REPEAT.finditer(grammar):
        for number in found.groups():
            if number and (len(number) > 9 or int(number) > REPEATS_MAX):
                raise _too_many_repeats(number if len(number) > 9 else int(number), param)


def check_schemas_within(grammar: str, *, param: str) -> str:
    """Check the schemas in a Lark grammar.

    Args:
        param: Field of the request, for error messages.

    Returns:
        The grammar without its schemas.

    Raises:
        InvalidRequest: A schema exceeds a bound.
    """
    rest, end = [], 0
    for schema, begin, schema_end in _schemas_within(grammar, param=param):
        check_schema(schema, param=param)
        rest.append(grammar[end:begin])
        end = schema_end
    return "".join((*rest, grammar[end:]))


def with_kept_schemas(grammar: str, ignored: list[str], *, param: str) -> str:
    """Return a Lark grammar with its schemas rewritten for the library.

    Args:
        ignored: Receives the paths of keywords that are left out.
        param: Field of the request, for error messages.

    Raises:
        InvalidRequest: A strict schema has a keyword that cannot be enforced.
    """
    parts, end = [], 0
    for schema, begin, schema_end in _schemas_within(grammar, param=param):
        kept = KeptSchema(schema, param=param)
        ignored += kept.ignored
        check_schema(kept.schema, param=param)
        parts += [grammar[end:begin], f"%json {json.dumps(kept.schema)}"]
        end = schema_end
    return "".join((*parts, grammar[end:]))


def schemas_within(grammar: str, *, param: str) -> list[str]:
    """Return the schemas in a Lark grammar as JSON, each once.

    Args:
        param: Field of the request, for error messages.

    Raises:
        InvalidRequest: A schema is nested too deeply, or there are too many schemas.
    """
    return list(dict.fromkeys(json.dumps(schema) for schema, _, _ in _schemas_within(grammar, param=param)))


def _schemas_within(grammar: str, *, param: str) -> Iterator[tuple[Any, int, int]]:
    """Iterate over the schemas in a Lark grammar.

    Returns:
        For each schema: the schema itself, the index of the preceding `%json`, and the index of the end of the schema.
    """
    end = count = 0
    for found in _LARK_SCHEMA.finditer(grammar):
        if found.start() < end:
            continue
        count += 1
        if count > SCHEMAS_MAX:
            raise InvalidRequest(f"the grammar has more than {SCHEMAS_MAX} schemas, which is the limit", param=param)
        try:
            schema, end = json.JSONDecoder().raw_decode(grammar, found.end())
        except RecursionError:
            raise InvalidRequest("a schema of the grammar is nested too deeply", param=param) from None
        except ValueError:
            continue  # The library will report this error in the schema.
        yield schema, found.start(), end


def _too_many_repeats(count: int | str, param: str) -> InvalidRequest:
    return InvalidRequest(f"a part is repeated {count} times, at most {REPEATS_MAX} are allowed", param=param)


def _check_properties(node: dict[str, Any], param: str) -> None:
    properties, required = node.get("properties"), node.get("required")
    if not isinstance(properties, dict):
        return
    needed = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    if (count := len(properties.keys() - needed)) > OPTIONAL_PROPERTIES_MAX:
        raise InvalidRequest(
            f"an object has {count} properties that are not required, at most {OPTIONAL_PROPERTIES_MAX} are allowed: "
            "require some, or leave them out",
            param=param,
        )
    for name in properties:
        check_fixed_text(name, "the name of a property", param=param)


class _Rules:
    """All schemas within one schema, and the schemas to which their references lead.

    Each schema is identified by its object identity. So a schema is walked only once, for any number of references to
    it and any spelling of the references.

    Attributes:
        nodes: All schemas within the schema, and all objects that a reference treats as a schema.
    """

    def __init__(self, schema: Any, param: str) -> None:
        self._root = schema
        self._param = param
        self._bases: dict[int, str] = {}  # Base URI of the references in a schema, by the schema's object identity.
        self._resources: dict[str, Any] = {_ROOT_URI: schema}
        self._anchors: dict[tuple[str, str], dict[str, Any]] = {}
        self._joined: dict[int, int] = {}  # Number of patterns of a schema, by the schema's object identity.
        self._walked: set[tuple[int, bool]] = set()
        self.nodes: list[dict[str, Any]] = []
        self._walk(schema, _ROOT_URI)
        for node in self.nodes:  # The loop itself appends to `nodes`.
            if (target := self.target(node)) is not None:
                self._walk(target, self._bases.get(id(target), _ROOT_URI))

    def target(self, node: dict[str, Any]) -> dict[str, Any] | None:
        """Return the schema that a `$ref` leads to. None if there is no `$ref`, or if it leads out of the root schema.

        The library refuses references that lead out of the root schema.
        """
        reference = node.get("$ref")
        if not isinstance(reference, str):
            return None
        base = self._bases.get(id(node), _ROOT_URI)
        uri, _, fragment = (base + reference if reference.startswith("#") else _joined_uri(base, reference)).partition(
            "#"
        )
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            return self._anchors.get((uri, fragment))
        found: Any = self._resources.get(uri)
        for part in fragment.split("/")[1:]:
            if isinstance(found, dict):
                found = found.get(part.replace("~1", "/").replace("~0", "~"))
            elif isinstance(found, list) and len(part) <= _INDEX_DIGITS_MAX and part.isdecimal():
                found = found[int(part)] if int(part) < len(found) else None
            else:
                return None
        return found if isinstance(found, dict) else None

    def joined_patterns(self, rule: dict[str, Any]) -> int:
        """Return how many patterns a text must match.

        These are the patterns of a schema, of its allOf members, and of the schemas that they refer to.

        A schema whose references lead back to itself counts once. The library refuses such a schema.
        """
        counts = self._joined
        if id(rule) in counts:
            return counts[id(rule)]
        counts[id(rule)] = _own_patterns(rule)
        open_rules = [(rule, self._members(rule))]
        while open_rules:
            rule, members = open_rules[-1]
            if members:
                member = members.pop()
                if id(member) not in counts:
                    counts[id(member)] = _own_patterns(member)
                    open_rules.append((member, self._members(member)))
                    continue
                self._add_joined(rule, member)
            else:
                open_rules.pop()
                if open_rules:
                    self._add_joined(open_rules[-1][0], rule)
        return counts[id(rule)]

    def _add_joined(self, rule: dict[str, Any], member: dict[str, Any]) -> None:
        counts = self._joined
        counts[id(rule)] = min(counts[id(rule)] + counts[id(member)], JOINED_PATTERNS_MAX + 1)

    def _members(self, rule: dict[str, Any]) -> list[dict[str, Any]]:
        members = rule.get("allOf")
        joined = [member for member in members if isinstance(member, dict)] if isinstance(members, list) else []
        target = self.target(rule)
        return joined if target is None else [*joined, target]

    def _walk(self, schema: Any, base: str) -> None:
        """Add all schemas within a schema to `nodes`.

        Values, such as the value of `const`, are skipped unless a reference leads to them.
        """
        left: list[tuple[Any, str, bool]] = [(schema, base, False)]
        while left:
            node, base, holds_names = left.pop()
            if isinstance(node, list):
                left.extend((member, base, False) for member in node)
            if not isinstance(node, dict) or (id(node), holds_names) in self._walked:
                continue
            self._walked.add((id(node), holds_names))
            if holds_names:
                left.extend((value, base, False) for value in node.values())
                continue
            base = self._named(node, base)
            self.nodes.append(node)
            left.extend((value, base, key in _HOLD_NAMES) for key, value in node.items() if key not in _HOLD_VALUES)

    def _named(self, node: dict[str, Any], base: str) -> str:
        """Register the `$id` and `$anchor` of a schema. Return the base URI of the references within the schema."""
        name, anchor = node.get("$id"), node.get("$anchor")
        if isinstance(name, str):
            if len(name) > URI_CHARACTERS_MAX:
                raise InvalidRequest(
                    f"an $id has {len(name)} characters, at most {URI_CHARACTERS_MAX} are allowed: shorten it",
                    param=self._param,
                )
            base = _joined_uri(base, name).partition("#")[0]
            self._resources[base] = node
        if isinstance(anchor, str):
            self._anchors[base, anchor] = node
        self._bases[id(node)] = base
        return base


def _joined_uri(base: str, reference: str) -> str:
    try:
        return urljoin(base, reference.replace(_LIBRARY_URI, _ROOT_URI, 1))
    except ValueError:  # The reference is not a URI, so it leads to no schema.
        return reference


def _own_patterns(rule: dict[str, Any]) -> int:
    patterns = rule.get("patternProperties")
    return ("pattern" in rule) + ("format" in rule) + (len(patterns) if isinstance(patterns, dict) else 0)


def _repeats(pattern: str) -> int:
    """Return the largest number of repetitions of a part of a pattern.

    The numbers of nested parts are multiplied. `*` and `+` do not count as repetitions.
    """
    most = [1]  # Largest number so far in each open group, the outermost first.
    last = 1  # Number of repetitions of the last complete part.
    index = 0
    while index < len(pattern):
        character = pattern[index]
        index += 1
        if character == "\\":
            index, last = index + 1, 1
        elif character == "[":
            index, last = _end_of_class(pattern, index), 1
        elif character == "(":
            most.append(1)
            last = 1
        elif character == ")" and len(most) > 1:
            last = most.pop()
            most[-1] = max(most[-1], last)
        elif character == "{" and (found := _REPEAT.match(pattern, index - 1)) is not None:
            index = found.end()
            numbers = [number for number in (found[1], found[3]) if number]
            if any(len(number) > 9 for number in numbers):
                return 10**9
            last *= max(map(int, numbers))
            most[-1] = max(most[-1], last)
        elif character not in "*+?":
            last = 1
    return max(most)


def _end_of_class(pattern: str, index: int) -> int:
    while index < len(pattern) and pattern[index] != "]":
        index += 2 if pattern[index] == "\\" else 1
    return index + 1
