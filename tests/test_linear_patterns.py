"""Tests that every regular expression of the product takes time linear in the length of its text.

The tests find the patterns in the source. Each pattern runs on texts that repeat the literals and classes of the
pattern, with a beginning and an end that can prevent a match. Python's `re` backtracks: a pattern that can match one
text in two ways, or that reads far from each start position, takes quadratic time or more.
"""

from __future__ import annotations

import ast
import importlib
import itertools
import re
import time
from collections.abc import Iterator
from pathlib import Path
from re import _constants, _parser  # type: ignore[attr-defined]  # parsed parts of a pattern
from types import SimpleNamespace
from typing import Any

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "trioserve"
SEARCHES = frozenset(("search", "finditer", "findall", "sub", "split"))
FUNCTIONS = frozenset(("compile", "match", "fullmatch")) | SEARCHES
# These packages never process text of a client or a model.
NOT_SERVED = ("simulation", "bench")
MARKERS = ("<tool_call>", "</tool_call>", "[", "\n")
# Values for the variables in patterns that are built at run time, by file.
LOCALS: dict[str, dict[str, Any]] = {
    "api/route_table.py": {"operation": SimpleNamespace(id_has_slashes=False), "parts": ["/v1/", "/a"]},
    "model/loading/default_model.py": {"stem": "model", "model": SimpleNamespace(versions=r"[0-9.]+")},
    "testing/scripted_model.py": {"rule": SimpleNamespace(says="hello")},
    "text/reasoning_state.py": {"markers": "<think>|</think>"},
    "text/request_texts.py": {"first": "\U000f0000", "last": "\U000ffffd", "tokens": MARKERS},
    "text/restraints.py": {"names": MARKERS},
    "text/response_parsers/python_literal.py": {"quote": "'"},
    "text/response_parsers/raw_values.py": {"tags": MARKERS},
    "text/response_parsers/scripts.py": {"markers": MARKERS},
    "text/response_parsers/content_script.py": {"firsts": "<["},
    "text/structural_tag.py": {"special": MARKERS},
}
SHORT, GROWTH = 500, 4
SHORTEST = 22  # At this length, a pattern that takes exponential time already takes milliseconds.
SECONDS_MIN = 0.003  # A pattern that takes less time for 2,000 characters counts as linear.
# If the text is GROWTH times as long, linear patterns take 4 times as long, and quadratic patterns 16 times.
GROWTH_MAX = 9.0
LETTERS_MAX = 5


def test_every_regular_expression_matches_in_linear_time() -> None:
    patterns = list(found())
    assert len(patterns) > 80, "patterns are not found any more"
    assert [f"{place}: {why}" for place, pattern, uses in patterns if (why := superlinear(pattern, uses))] == []


@pytest.mark.parametrize(
    ("pattern", "use"),
    [
        (r"([+-]?)0*([0-9]+)", "fullmatch"),
        (r'"(?:[^"\\\n]|\\.)*"', "finditer"),
        (r"\s+$", "search"),
        (r"(?:[a-z]+)*x", "match"),
        (r"[a-z]+@", "search"),
        (r"<!--.*?-->", "sub"),
        (r"(\w+)=(\w+)", "findall"),
    ],
)
def test_superlinear_pattern_is_detected(pattern: str, use: str) -> None:
    assert superlinear(re.compile(pattern), {use})


# --- find patterns -------------------------------------------------------------------------------------------------


def found() -> Iterator[tuple[str, re.Pattern[Any], set[str]]]:
    """Yield each pattern with its file and line, and the names of the methods that may be called on it."""
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        source = path.read_text()
        if name.startswith(NOT_SERVED) or "import re\n" not in source:
            continue
        tree = ast.parse(source)
        names = {
            id(node.value): ast.unparse(node.targets[0]) for node in ast.walk(tree) if isinstance(node, ast.Assign)
        }
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id == "re"
                and node.func.attr in FUNCTIONS
            ):
                uses = {node.func.attr}
                if uses == {"compile"}:
                    variable = names.get(id(node), "")
                    uses = {use for use in (FUNCTIONS - {"compile"}) if f"{variable}.{use}(" in source} or {
                        "match",
                        "fullmatch",
                    }
                if len(uses & SEARCHES) > 1:  # Finding all matches takes at least as long as finding the first match.
                    uses = uses - SEARCHES | {"finditer"}
                yield f"{name}:{node.lineno}", compiled(name, node), uses


def compiled(name: str, call: ast.Call) -> re.Pattern[Any]:
    def value(node: ast.expr, names: dict[str, Any]) -> Any:
        return eval(compile(ast.Expression(node), name, "eval"), {"re": re, **names})

    names = LOCALS.get(name, {})
    try:
        pattern = value(call.args[0], names)
    except NameError:  # The pattern uses constants of its module.
        module = importlib.import_module("trioserve." + name.removesuffix(".py").replace("/", "."))
        names = {**vars(module), **names}
        pattern = value(call.args[0], names)
    flags = [node for node in call.args[1:] if "re." in ast.unparse(node)]
    flags += [keyword.value for keyword in call.keywords if keyword.arg == "flags"]
    return re.compile(pattern, value(flags[0], names) if flags else 0)


# --- measure patterns -------------------------------------------------------------------------------------------------


def superlinear(pattern: re.Pattern[Any], uses: set[str]) -> str:
    """Describe a text for which the pattern takes too long, or return "" if there is none.

    Args:
        pattern: the compiled pattern.
        uses: names of its methods to run.
    """
    letters = letters_of(pattern)
    units = [*letters, *map("".join, itertools.permutations(letters, 2)), "".join(letters)]
    begins = {"", literals_of(pattern)}
    units += [*begins - {""}]
    for use, unit, begin, end in itertools.product(sorted(uses), units, sorted(begins), ("", "\x01x")):
        run = runner(pattern, use)
        if run(begin, unit, end, SHORTEST) > SECONDS_MIN:
            return f"{use} of {pattern.pattern!r} on a few characters: {begin!r} + {unit!r} * n + {end!r}"
        if run(begin, unit, end, SHORT * GROWTH) > SECONDS_MIN:
            growths = [run(begin, unit, end, SHORT * GROWTH) / run(begin, unit, end, SHORT) for _ in range(3)]
            if min(growths) > GROWTH_MAX:
                return f"{use} of {pattern.pattern!r} on {begin!r} + {unit!r} * n + {end!r}"
    return ""


def runner(pattern: re.Pattern[Any], use: str) -> Any:
    def run(begin: str, unit: str, end: str, size: int) -> float:
        text: Any = begin + unit * (size // len(unit)) + end
        if isinstance(pattern.pattern, bytes):
            text = text.encode("latin-1", "replace")
        method = getattr(pattern, use)
        began_at = time.process_time()
        if use == "sub":
            method(text[:0], text)
        elif use == "finditer":
            for _ in method(text):
                pass
        else:
            method(text)
        return time.process_time() - began_at

    return run


def letters_of(pattern: re.Pattern[Any]) -> list[str]:
    """Return a character for each literal and class of the pattern, at most LETTERS_MAX, those in repetitions first."""
    repeated: dict[str, None] = {}
    others: dict[str, None] = {}

    def look(tokens: Any, *, is_repeated: bool) -> None:
        for kind, value in tokens:
            into = repeated if is_repeated else others
            if kind is _constants.LITERAL:
                into[chr(value)] = None
            elif kind in (_constants.ANY, _constants.NOT_LITERAL):
                into["b"] = None
            elif kind is _constants.IN:
                into[letter_in(value)] = None
            elif kind in (_constants.MAX_REPEAT, _constants.MIN_REPEAT, _constants.POSSESSIVE_REPEAT):
                look(value[2], is_repeated=is_repeated or value[1] > 16)
            elif kind is _constants.SUBPATTERN:
                look(value[3], is_repeated=is_repeated)
            elif kind is _constants.BRANCH:
                for branch in value[1]:
                    look(branch, is_repeated=is_repeated)
            elif kind in (_constants.ASSERT, _constants.ASSERT_NOT):
                look(value[1], is_repeated=is_repeated)

    look(_parser.parse(pattern.pattern, pattern.flags & ~re.DEBUG), is_repeated=False)
    return list({**repeated, **others})[:LETTERS_MAX]


def letter_in(items: Any) -> str:
    """Return a common character that a class matches, or "~" if the class matches no common character."""
    pattern = re.compile("".join(("[", *map(class_item, items), "]")), re.DOTALL)
    return next((letter for letter in '0 a\tB-_.,"\\\n' if pattern.match(letter)), "~")


def class_item(item: Any) -> str:
    kind, value = item
    if kind is _constants.NEGATE:
        return "^"
    if kind is _constants.LITERAL:
        return re.escape(chr(value))
    if kind is _constants.RANGE:
        return f"{re.escape(chr(value[0]))}-{re.escape(chr(value[1]))}"
    return {"CATEGORY_DIGIT": r"\d", "CATEGORY_SPACE": r"\s", "CATEGORY_WORD": r"\w"}.get(str(value), r"\S")


def literals_of(pattern: re.Pattern[Any]) -> str:
    """Return the literal text at the beginning of the pattern."""
    text = ""
    for kind, value in _parser.parse(pattern.pattern, pattern.flags & ~re.DEBUG):
        if kind is not _constants.LITERAL:
            break
        text += chr(value)
    return text
