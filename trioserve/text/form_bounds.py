"""Bounds on what forms may hold, so that compiling one takes a second at most, and a mask some milliseconds.

The library has bounds of its own for most of it (form_compiler.LIMITS). Where it has none, or looks at them too late,
these were found by trying: intersections of patterns take cubic time, an object's optional properties quadratic time
and a parser's item for each; and text without a choice in it is walked to its end again and again, whenever it is asked
what is forced. All are counted without recursion.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from trioserve.contracts.errors import InvalidRequest

__all__ = [
    "COMPILE_STACK_BYTES",
    "FIXED_TEXT_CHARACTERS_MAX",
    "JOINED_PATTERNS_MAX",
    "OPTIONAL_PROPERTIES_MAX",
    "PATTERN_CHARACTERS_MAX",
    "REPEATS_MAX",
    "check_fixed_text",
    "check_lark",
    "check_pattern",
    "check_schema",
    "check_schemas_within",
    "schemas_within",
]

# A chain of 6,000 rules, as many as a grammar has room for, takes less than half of it. Only what is used is claimed.
COMPILE_STACK_BYTES = 512 * 2**20
FIXED_TEXT_CHARACTERS_MAX = 8192  # of one text without a choice in it
PATTERN_CHARACTERS_MAX = 8192
REPEATS_MAX = 10_000  # of one part of a pattern; of parts within parts, multiplied
JOINED_PATTERNS_MAX = 32  # of the members of an allOf, theirs included
OPTIONAL_PROPERTIES_MAX = 480  # of one object; each is four of the 2,000 items that a parser may have at a place

_REPEAT = re.compile(r"\{(\d+)(,(\d*))?\}")
_LARK_SCHEMA = re.compile(r"%json\s*")
# Comments, texts and patterns. One without an end matches, too: otherwise each of its quotes would be a new beginning.
_LARK_TOKEN = re.compile(r'//[^\n]*|"(?:[^"\\\n]|\\.)*"?|/(?:[^/\\\n]|\\.)*/?')
_LARK_REPEAT = re.compile(r"\{\s*(\d+)?\s*(?:,\s*(\d+)?\s*)?\}|~\s*(\d+)(?:\s*\.\.\s*(\d+))?")


def check_schema(schema: Any, *, param: str) -> None:
    """Raises InvalidRequest for a JSON schema that is beyond these bounds."""
    for node in _nodes(schema):
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
        if isinstance(node.get("allOf"), list):
            _check_joined(node, schema, param)


def check_fixed_text(text: str, what: str, *, param: str) -> None:
    if len(text) > FIXED_TEXT_CHARACTERS_MAX:
        raise InvalidRequest(
            f"{what} has {len(text)} characters, at most {FIXED_TEXT_CHARACTERS_MAX} are allowed: shorten it",
            param=param,
        )


def check_pattern(pattern: str, *, param: str) -> None:
    """Raises InvalidRequest for a regular expression that is long, or repeats something too often."""
    if len(pattern) > PATTERN_CHARACTERS_MAX:
        raise InvalidRequest(
            f"a pattern has {len(pattern)} characters, at most {PATTERN_CHARACTERS_MAX} are allowed: shorten it",
            param=param,
        )
    if (repeats := _repeats(pattern)) > REPEATS_MAX:
        raise _too_many_repeats(repeats, param)


def check_lark(grammar: str, *, param: str) -> None:
    """Raises InvalidRequest for a grammar with a long text, a repetition of many, or a schema beyond its bounds."""
    grammar = check_schemas_within(grammar, param=param)
    for found in _LARK_TOKEN.finditer(grammar):
        if found[0].startswith('"'):
            check_fixed_text(found[0][1:-1], "a text of the grammar", param=param)
    for found in _LARK_REPEAT.finditer(grammar):
        for number in found.groups():
            if number and (len(number) > 9 or int(number) > REPEATS_MAX):
                raise _too_many_repeats(number if len(number) > 9 else int(number), param)


def check_schemas_within(grammar: str, *, param: str) -> str:
    """Raises InvalidRequest for a schema of a Lark grammar beyond its bounds. Returns the rest of the grammar."""
    rest, end = [], 0
    for schema, begin, schema_end in _schemas_within(grammar, param=param):
        check_schema(schema, param=param)
        rest.append(grammar[end:begin])
        end = schema_end
    return "".join((*rest, grammar[end:]))


def schemas_within(grammar: str, *, param: str) -> list[str]:
    """The schemas of a Lark grammar, each once, as JSON. Raises InvalidRequest for one that nests too deeply."""
    return list(dict.fromkeys(json.dumps(schema) for schema, _, _ in _schemas_within(grammar, param=param)))


def _schemas_within(grammar: str, *, param: str) -> Iterator[tuple[Any, int, int]]:
    """Each schema, where what names it begins, and where it ends."""
    end = 0
    for found in _LARK_SCHEMA.finditer(grammar):
        if found.start() < end:
            continue
        try:
            schema, end = json.JSONDecoder().raw_decode(grammar, found.end())
        except RecursionError:
            raise InvalidRequest("a schema of the grammar is nested too deeply", param=param) from None
        except ValueError:
            continue  # the library says what is wrong with it
        yield schema, found.start(), end


def _too_many_repeats(count: int | str, param: str) -> InvalidRequest:
    return InvalidRequest(f"something is repeated {count} times, at most {REPEATS_MAX} are allowed", param=param)


def _nodes(schema: Any) -> Iterator[dict[str, Any]]:
    """Every object in it: schemas, and some that are none, which look like none."""
    left = [schema]
    while left:
        node = left.pop()
        if isinstance(node, dict):
            yield node
            left.extend(value for key, value in node.items() if key not in ("const", "enum", "default", "examples"))
        elif isinstance(node, list):
            left.extend(node)


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


def _check_joined(node: dict[str, Any], root: Any, param: str) -> None:
    """How many patterns one text has to match: those of an allOf's members, of their allOf's, of what they refer to."""
    count = 0
    left: list[Any] = [node]
    seen: set[str] = set()
    while left:
        member = left.pop()
        if not isinstance(member, dict):
            continue
        reference = member.get("$ref")
        if isinstance(reference, str):
            if reference in seen:
                continue
            seen.add(reference)
            left.append(_pointed_at(root, reference))
        patterns = member.get("patternProperties")
        count += ("pattern" in member) + ("format" in member) + (len(patterns) if isinstance(patterns, dict) else 0)
        members = member.get("allOf")
        left.extend(members if isinstance(members, list) else ())
        if count > JOINED_PATTERNS_MAX:
            raise InvalidRequest(
                f"an allOf joins more than {JOINED_PATTERNS_MAX} patterns, which is the most: say it with fewer",
                param=param,
            )


def _pointed_at(root: Any, reference: str) -> Any:
    """Within the schema; None for what leads elsewhere, which the library refuses."""
    if not reference.startswith("#"):
        return None
    found: Any = root
    for part in reference.split("/")[1:]:
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found


def _repeats(pattern: str) -> int:
    """How often its most repeated part may, or has to, be repeated; of a part within a part, both numbers multiplied.
    Not of `*` and `+`, which count nothing."""
    most = [1]  # of each group that is open, of what it holds so far
    last = 1  # of the part that ended last
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
