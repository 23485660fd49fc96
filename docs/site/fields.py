"""What mkdocstrings reads docstrings through: sentences that begin with a field's name become a list.

Docstrings here say `text: may be empty. token_ids: since the last delta.` in one paragraph. That is short beside the
code and hard to read on a page.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

__all__ = ["FieldList"]


class FieldList(griffe.Extension):
    """Of a class its attributes are fields, of a function its parameters."""

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        names = {name for name, member in cls.members.items() if member.is_attribute}
        if "__init__" in cls.members:
            names |= {parameter.name for parameter in cls.members["__init__"].parameters}
        _list_fields(cls.docstring, names)

    def on_function_instance(self, *, func: griffe.Function, **_: Any) -> None:
        _list_fields(func.docstring, {parameter.name for parameter in func.parameters})


def _list_fields(docstring: griffe.Docstring | None, names: set[str]) -> None:
    if docstring is None or not names:
        return
    paragraphs = [_with_list(paragraph, names) for paragraph in docstring.value.split("\n\n")]
    docstring.value = "\n\n".join(paragraphs)


def _with_list(paragraph: str, names: set[str]) -> str:
    """One paragraph, with a list from the first field that begins a sentence to the last."""
    text = " ".join(line.strip() for line in paragraph.splitlines())
    name = "|".join(sorted(map(re.escape, names)))
    field = re.compile(rf"(?:^|(?<=[.;] ))(?P<names>(?:{name})(?:, (?:{name}))*): ")
    starts = [found.start() for found in field.finditer(text)]
    if not starts:
        return paragraph
    before = text[: starts[0]].strip()
    items = []
    for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
        heads, _, words = text[start:end].partition(": ")
        items.append(f"- {', '.join(f'`{head}`' for head in heads.split(', '))}: {words.strip().rstrip(';')}")
    return "\n\n".join(filter(None, [before, "\n".join(items)]))
