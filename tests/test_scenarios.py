"""Checks the table of scenarios in README.md.

Each scenario has one line. Each test in a line exists, and its docstring names the scenario. Each test whose docstring
names a scenario is in the line of this scenario.
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent


def words(text: str) -> list[str]:
    return text.split()


SCENARIOS = words("""
    S01 S02 S03 S04 S05 S06 S07 S08 S10 S11 S13 S14 S17 S18 S19 S20 S21 S22 S25 S26 S28 S29 S30 S31 S32 S33 S35 S36 S37
    S42 S43 S47 S48 S49 S50 S51
""")

NUMBER = re.compile(r"\bS\d\d\b")
LINE = re.compile(r"^\| (?P<number>S\d\d) \| (?P<failed>[^|]+) \| (?P<holds>[^|]*) \| (?P<tests>[^|]+) \|$")
TEST = re.compile(r"`(tests/[\w/]+\.py::\w+)`")


def lines_of_the_table() -> dict[str, re.Match[str]]:
    lines: dict[str, re.Match[str]] = {}
    for text in (TESTS / "README.md").read_text(encoding="utf-8").splitlines():
        if not text.startswith("| S"):
            continue
        line = LINE.match(text)
        assert line is not None, f"this line has another shape: {text}"
        assert line["number"] not in lines, f"{line['number']} has two lines"
        lines[line["number"]] = line
    return lines


@functools.cache
def scenarios_by_test() -> dict[str, set[str]]:
    """Find the test functions whose docstrings name scenarios.

    Returns:
        Numbers of scenarios by `path::name` of the test.
    """
    found: dict[str, set[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        source = path.read_text(encoding="utf-8")
        if not NUMBER.search(source):
            continue
        place = path.relative_to(TESTS.parent).as_posix()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                found[f"{place}::{node.name}"] = set(NUMBER.findall(ast.get_docstring(node) or ""))
    return found


LINES = lines_of_the_table()


def test_every_scenario_has_one_line_in_order():
    assert list(LINES) == SCENARIOS


@pytest.mark.parametrize("number", SCENARIOS)
def test_each_line_names_existing_tests_or_what_is_missing(number):
    line = LINES[number]
    tests = TEST.findall(line["tests"])
    missing = [cell for cell in line["tests"].split("<br>") if cell.startswith("not yet: needs ")]
    assert tests or missing, f"{number} has no test, and does not say what it needs"
    assert len(tests) + len(missing) == len(line["tests"].split("<br>")), f"{number}: {line['tests']}"
    assert line["holds"].strip() or not tests, f"{number} does not say what holds here"
    for test in tests:
        assert number in scenarios_by_test().get(test, set()), f"no {test} names {number} in its docstring"


def test_every_test_that_names_a_scenario_is_listed_for_that_scenario():
    for test, numbers in scenarios_by_test().items():
        for number in numbers:
            assert number in LINES, f"{test} names {number}, which is not in the table"
            assert test in TEST.findall(LINES[number]["tests"]), f"{test} is missing in the line of {number}"
