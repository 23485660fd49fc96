"""Tests that the table of error codes has exactly the error codes that the source uses."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from trioserve.api import error_responses
from trioserve.api.error_responses import TABLE, coded_response
from trioserve.contracts.deadlines import Deadline

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "trioserve"
SERVERS = (
    "admission",
    "api",
    "contracts",
    "engine",
    "http",
    "proxy",
    "router",
    "store",
    "trio_tools",
    "asgi.py",
    "ray.py",
)
"""Packages and modules that make errors for clients."""

MARKS = re.compile(r"refusal\(|ErrorResponse|\bcode\b|stop_reason|NoEndpoint|Overloaded|coded_response|_CODE\b")
"""Files without any of these make no code."""

FIRST_ARGUMENT = {"refusal", "coded_response", "wrong"}
"""Functions whose first argument is a code."""

KEYWORDS = {"code", "stop_reason"}
FINAL_DELTAS = {"end_with_final_delta", "_end_begun", "_end_with_error"}
"""Functions whose stop_reason becomes a code."""

PASSED_ON = {
    "reason",  # This is the reason of NoEndpoint. Its values are found at the calls of NoEndpoint.
    "code",  # This is a parameter or a variable. Its values are found at its assignments.
    "stop_reason",
    "deadline.value",
    "error.code",
    "self.code",
    "told.code",
    "_code(told)",
    "str(delta.stop_reason or code)",
    "str(error['code'])",  # This is the code of an error that an endpoint sent.
    "error_code(data)",  # This is the code of an error that an endpoint sent.
}


@cache
def texts() -> dict[str, str]:
    paths = (
        path for part in SERVERS for path in ((SOURCE / part).rglob("*.py") if "." not in part else [SOURCE / part])
    )
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}


@cache
def nodes() -> list[tuple[str, ast.AST]]:
    """Return the syntax-tree nodes of the servers' source that can contain an error code, each with its file."""
    kinds = (ast.Call, ast.Dict, ast.Assign, ast.FunctionDef)
    return [
        (path, node)
        for path, text in texts().items()
        if MARKS.search(text)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, kinds)
    ]


def calls_of(name: str) -> Iterator[tuple[str, ast.Call]]:
    for path, node in nodes():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name:
            yield path, node


@cache
def constants() -> dict[str, set[str]]:
    """Return the module constants that are texts, by name."""
    found: dict[str, set[str]] = {}
    for text in texts().values():
        for name, value in re.findall(r'^([A-Z_]+) = "([a-z_]+)"$', text, re.MULTILINE):
            found.setdefault(name, set()).add(value)
    return found


def expressions_of_codes() -> Iterator[tuple[str, ast.expr]]:
    """Yield the expressions that give an error its code, each with its file."""
    for path, node in nodes():
        yield from ((path, value) for value in expressions_in(node))


def expressions_in(node: ast.AST) -> Iterator[ast.expr]:
    match node:
        case ast.Call(func=function, args=arguments, keywords=keywords):
            name = getattr(function, "attr", None) or getattr(function, "id", "")
            if isinstance(function, ast.Name) and name in FIRST_ARGUMENT and arguments:
                yield arguments[0]
            if name in FINAL_DELTAS:
                yield from (keyword.value for keyword in keywords if keyword.arg == "stop_reason")
                yield from arguments[1:] if name == "_end_begun" else ()
            if name == "NoEndpoint":
                yield from (keyword.value for keyword in keywords if keyword.arg == "reason")
            yield from (keyword.value for keyword in keywords if keyword.arg == "code")
        case ast.Dict(keys=keys, values=values):
            for key, value in zip(keys, values, strict=True):
                if isinstance(key, ast.Constant) and key.value == "code":
                    yield value
        case ast.Assign(targets=[ast.Name(id="code")], value=ast.Constant() | ast.IfExp() as value):
            yield value
        case ast.FunctionDef(args=ast.arguments(args=parameters, defaults=defaults, kwonlyargs=named)):
            pairs = [*zip(reversed(parameters), reversed(defaults), strict=False)]
            pairs += [
                (parameter, default)
                for parameter, default in zip(named, node.args.kw_defaults, strict=True)
                if default is not None
            ]
            yield from (default for parameter, default in pairs if parameter.arg in KEYWORDS)


def codes_in(value: ast.expr) -> Iterator[str | None]:
    """Return the possible values of an expression. None: the values cannot be determined."""
    match value:
        case ast.Constant(value=str(code)):
            yield code
        case ast.Constant(value=None | int()):
            pass
        case ast.Name(id=name) if name in constants():
            yield from constants()[name]
        case ast.IfExp(body=one, orelse=other):
            yield from codes_in(one)
            yield from codes_in(other)
        case ast.BoolOp(values=values):
            for one in values:
                yield from codes_in(one)
        case _ if ast.unparse(value) not in PASSED_ON:
            yield None


@cache
def codes_in_source() -> dict[str, str]:
    """Return all error codes in the source, each with a file that uses the code."""
    found: dict[str, str] = {}
    for path, value in expressions_of_codes():
        for code in codes_in(value):
            assert code is not None, f"{path}:{value.lineno}: {ast.unparse(value)} is neither a literal nor a constant"
            found.setdefault(code, path)
    return found


def test_every_code_in_the_source_is_in_the_table():
    missing = {code: path for code, path in codes_in_source().items() if code not in TABLE}
    assert not missing, f"add a row to error_responses.TABLE, and to docs/reference/errors.md: {missing}"


def test_every_code_of_the_table_is_in_the_source():
    of_errors = {code for _error, code in error_responses.CODES}
    known = {*codes_in_source(), *of_errors, *(deadline.value for deadline in Deadline), None}
    assert set(TABLE) <= known | {code for code, _message in error_responses._ENDED.values()}
    assert of_errors <= set(TABLE)


def test_only_error_responses_converts_codes_to_responses():
    assert {path for path, _call in calls_of("ErrorResponse")} == {
        "trioserve/api/error_responses.py",
        "trioserve/proxy/adapters.py",  # The status comes from the endpoints.
        "trioserve/proxy/proxied_request.py",  # The error comes from an endpoint.
    }


def test_page_lists_every_reason_of_overload():
    page = (ROOT / "docs/reference/errors.md").read_text(encoding="utf-8")
    for path, call in calls_of("Overloaded"):
        (reason,) = (keyword.value for keyword in call.keywords if keyword.arg == "reason")
        for code in codes_in(reason):
            assert code is not None, f"{path}:{call.lineno}"
            assert f"`{code}`" in page, f"{path}:{call.lineno}: {code}"


@pytest.mark.parametrize("code", TABLE)
def test_each_error_code_has_a_cause_and_advice(code):
    kind = TABLE[code]
    assert (kind.status is None) or 400 <= kind.status < 600
    assert kind.when
    assert kind.advice
    assert not re.search(r"[.|]$", kind.when + kind.advice)
    if kind.status is not None:
        response = coded_response(code, "what to do")
        assert (response.status, response.type, response.code) == (kind.status, kind.type, code)
