"""Reads JSON schemas from files, in the layouts of common sets of schemas.

A file has one schema, or an object with a schema in `schema` or `json_schema`. That field is an object or JSON text
(MaskBench, tables of JSONSchemaBench). Or the file has a list of such objects (JSON Schema Test Suite), or one of them
per line if its name ends in .jsonl. The group of a schema is the folder of its file, or the file if it has several
schemas.
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
    """A schema and its name.

    Attributes:
        name: its file, and its index if the file has several schemas.
        group: folder of its file, relative to the folder that was read.
        schema: the JSON schema.
    """

    name: str
    group: str
    schema: Any  # an object, True or False

    @property
    def title(self) -> str:
        """Title or description of the schema, or else the name of its file."""
        text = self.schema.get("title") or self.schema.get("description") if isinstance(self.schema, dict) else None
        return text[:200] if isinstance(text, str) else Path(self.name).stem.replace("_", " ")


def read_schemas(path: Path) -> list[NamedSchema]:
    """Read a file, or all files below a folder in order of their names.

    Args:
        path: the file or folder.

    Raises:
        StartupError: a file cannot be read, or there is no schema.
    """
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
    """Return the schema of an entry.

    An object with schema keywords is itself the schema, also if it has a field `schema`.
    """
    if isinstance(entry, dict) and not {"type", "properties", "$schema"} & entry.keys():
        for field in FIELDS:
            inner = entry.get(field)
            if isinstance(inner, str):
                return json.loads(inner)
            if isinstance(inner, dict | bool):
                return inner
    return entry
