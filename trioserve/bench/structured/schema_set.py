"""JSON schemas from files, in the layouts that sets of them have.

A file holds one schema; or an object with one in `schema` or `json_schema`, as an object or as JSON text (MaskBench,
JSONSchemaBench's tables); or a list of such objects (the JSON Schema Test Suite); or, with the ending .jsonl, one of
them a line. The folder that a file lies in is its group, or, of a file with several, the file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from trioserve.contracts.errors import StartupError

__all__ = ["NamedSchema", "read_schemas"]

ENDINGS = (".json", ".jsonl")
FIELDS = ("schema", "json_schema")


class NamedSchema(msgspec.Struct, frozen=True):
    """name: its file, and its place there if the file has several. group: the file's folder, below what was read."""

    name: str
    group: str
    schema: Any  # an object, or true or false

    @property
    def title(self) -> str:
        """What it says of itself, in a few words."""
        said = self.schema.get("title") or self.schema.get("description") if isinstance(self.schema, dict) else None
        return said[:200] if isinstance(said, str) else Path(self.name).stem.replace("_", " ")


def read_schemas(path: Path) -> list[NamedSchema]:
    """Of a file, or of all files below a folder, by name. Raises StartupError for what cannot be read."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.suffix in ENDINGS)
    root = path.parent if path.is_file() else path
    schemas = [schema for file in files for schema in _schemas_of(file, root)]
    if not schemas:
        raise StartupError(f"--schemas {path} holds no schema: files end in {' or '.join(ENDINGS)}")
    return schemas


def _schemas_of(file: Path, root: Path) -> Iterator[NamedSchema]:
    name = str(file.relative_to(root))
    group = str(file.parent.relative_to(root))
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".jsonl":
            entries = [json.loads(line) for line in text.splitlines() if line.strip()]
        else:
            content = json.loads(text)
            entries = content if isinstance(content, list) else [content]
        for index, entry in enumerate(entries):
            if len(entries) > 1:
                yield NamedSchema(f"{name}[{index}]", name.removesuffix(file.suffix), _schema_of(entry))
            else:
                yield NamedSchema(name, group if group != "." else root.name, _schema_of(entry))
    except (OSError, ValueError, RecursionError) as error:
        raise StartupError(f"{file} cannot be read as JSON: {error}") from None


def _schema_of(entry: Any) -> Any:
    """A schema with a property named `schema` has no `schema` field that is one: keywords tell."""
    if isinstance(entry, dict) and not {"type", "properties", "$schema"} & entry.keys():
        for field in FIELDS:
            inner = entry.get(field)
            if isinstance(inner, str):
                return json.loads(inner)
            if isinstance(inner, dict | bool):
                return inner
    return entry
