"""Checks the language of docstrings and comments in the folders that follow CONTRIBUTING.md."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# A folder is added once all of its files follow CONTRIBUTING.md, and is never removed.
PLAIN_FOLDERS: tuple[str, ...] = (
    "examples",
    "kernels",
    "tests",
    "trioserve",
)

OPENING = re.compile(r"(?:What|Who|Whoever|Whether|Which|Of|The same|As|These|Those)\b")
AVOIDED = {
    "anew": "again, or restart",
    "cut_off": "partial",
    "farewell": "client-left notice",
    "farewells": "client-left notices",
    "nap": "sleep",
    "told": "notified, or reported",
    "thought": "reasoning",
    "what there is of": "partial result",
    "whoever": "the caller, the client, or another noun",
    "whosoever": "the caller, the client, or another noun",
    "wish": "request, or option",
    "wishes": "requests, or options",
}
AVOIDED_WORD = re.compile(rf"\b(?:{'|'.join(map(re.escape, sorted(AVOIDED)))})\b", re.IGNORECASE)

DESCRIBED = re.compile(r"^ {4}\*{0,2}(\w+): (.+\.)$", re.MULTILINE)

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def plain_files() -> Iterator[Path]:
    for folder in PLAIN_FOLDERS:
        path = ROOT / folder
        assert path.exists(), folder
        yield from (path,) if path.is_file() else sorted(path.rglob("*.py"))


def documented(tree: ast.Module) -> Iterator[tuple[Documented, bool]]:
    """Yield each node that can have a docstring.

    Returns:
        The node, and whether readers outside of its module may use it.
    """

    def below(node: ast.AST, public: bool) -> Iterator[tuple[Documented, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                visible = public and not child.name.startswith("_")
                yield child, visible
                yield from below(child, visible and isinstance(child, ast.ClassDef))
            else:
                yield from below(child, public)

    yield tree, True
    yield from below(tree, True)


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    arguments = node.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    return [argument.arg for argument in named if argument is not None and argument.arg not in ("self", "cls")]


def words_of(text: str) -> set[str]:
    """Return the words of a text or of a name, in lower case and without a plural's "s"."""
    return {word.removesuffix("s") for word in re.findall(r"[a-z]+", text.lower().replace("_", " "))}


def is_named(parameter: str, docstring: str) -> bool:
    """Return True if a docstring mentions a parameter, or refers to another docstring."""
    return docstring.startswith("See ") or bool(words_of(parameter) & words_of(docstring))


def repeats_its_name(parameter: str, description: str) -> bool:
    """Return True if a description adds nothing to a parameter's name, such as "request: the request."."""
    if re.search(r"\d|^its ", description, re.IGNORECASE):
        return False
    return words_of(description) - {"the", "a", "an", "of", "thi", "that", "for", "in"} <= words_of(parameter)


def comments(source: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def faults(source: str, *, has_public_api: bool) -> Iterator[str]:
    """Find sentences that readers would have to read twice.

    Args:
        source: Python code of one module.
        has_public_api: True for a module of the product, whose public functions document their parameters.

    Returns:
        Line, name, and what is wrong, for each fault.
    """
    texts = list(comments(source))
    for node, is_public in documented(ast.parse(source)):
        docstring = ast.get_docstring(node)
        if docstring is None:
            continue
        name, line = getattr(node, "name", "module"), getattr(node, "lineno", 1)
        texts.append((line, docstring))
        if OPENING.match(docstring):
            yield f"{line}: {name}: the docstring begins with {docstring.split()[0]!r}, not with a verb or a noun"
        if (
            has_public_api
            and is_public
            and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and "Args:" not in docstring
            and not all(is_named(parameter, docstring) for parameter in parameters(node))
        ):
            yield f"{line}: {name}: the docstring has no section Args:"
        for parameter, description in DESCRIBED.findall(docstring.partition("Args:\n")[2].partition("\n\n")[0]):
            if has_public_api and repeats_its_name(parameter, description):
                yield f"{line}: {name}: the line of {parameter} only repeats the name: give the meaning, or delete it"
    for line, text in texts:
        for word in AVOIDED_WORD.findall(text):
            yield f"{line}: write {AVOIDED[word.lower()]} instead of {word!r}"


@pytest.mark.parametrize("path", tuple(plain_files()), ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_and_comments_are_plain(path):
    has_public_api = path.relative_to(ROOT).parts[0] in ("trioserve", "kernels")
    found = list(faults(path.read_text(encoding="utf-8"), has_public_api=has_public_api))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source, found",
    [
        ('"""Of one request."""', "begins with 'Of'"),
        ('def f():\n    """Whether it is told."""', "begins with 'Whether'"),
        ('def f():\n    """Return what is told."""', "instead of 'told'"),
        ("x = 1  # whoever comes", "instead of 'whoever'"),
        ('def f(b):\n    """Return a."""', "no section Args:"),
        ('class C:\n    def f(self, *, b):\n        """Return a."""', "no section Args:"),
        ('def f(a):\n    """Return a.\n\n    Args:\n        a: the a.\n    """', "only repeats the name"),
    ],
)
def test_unclear_docstring_or_comment_is_found(source, found):
    assert found in "\n".join(faults(source, has_public_api=True))


@pytest.mark.parametrize(
    "source",
    [
        'def _f(a):\n    """Return a."""',
        'class _C:\n    def f(self, a):\n        """Return a."""',
        'def f(a):\n    def g(b):\n        """Return b."""\n    return g',
        'def f(a):\n    """Return a.\n\n    Args:\n        a: a number.\n    """',
        'class C:\n    def f(self):\n        """Return nothing."""',
        'def f(lines):\n    """Return the longest line."""',
        'def f(a):\n    """See `g`."""',
        "x = 'told'",
    ],
)
def test_plain_docstring_or_comment_is_accepted(source):
    assert not list(faults(source, has_public_api=True))
