"""Reads JSON schemas from files, in the layouts of common sets of schemas, and judges responses against them.

A file has one schema, or an object with a schema in `schema` or `json_schema`. That field is an object or JSON text
(MaskBench, tables of JSONSchemaBench). Or the file has a list of such objects (JSON Schema Test Suite), or one of them
per line if its name ends in .jsonl. The group of a schema is the folder of its file, or the file if it has several
schemas.

The judge is the library `jsonschema`, which no measured server uses. A response that max_tokens ended early is not JSON
yet, but must be a valid beginning. A grammar over single bytes checks that. It knows nothing of the model's tokens.
"""

from __future__ import annotations

import enum
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from llguidance import LLMatcher, LLTokenizer

from trioserve.contracts.errors import StartupError
from trioserve.contracts.extras import install_command

__all__ = ["Judge", "NamedSchema", "Verdict", "read_schemas"]

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
    schema: Any  # A JSON schema is an object, True or False.

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


REASON_CHARACTERS_MAX = 200


class Verdict(enum.Enum):
    VALID = "valid"
    CUT = "incomplete, valid so far"
    REFUSED = "refused"  # The server responded with status 400 before any output.
    INVALID = "INVALID"
    FAILED = "FAILED"  # There was no response, or the server ended the response early.


class Judge:
    """Checks responses against their JSON schemas. Raises StartupError if jsonschema is not installed."""

    def __init__(self) -> None:
        try:
            self._jsonschema: Any = importlib.import_module("jsonschema")
        except ModuleNotFoundError:
            raise StartupError(f"judging responses needs jsonschema: {install_command('bench')}") from None
        self._bytes = LLTokenizer("byte")

    def judge(self, schema: Any, text: str, *, is_cut: bool) -> tuple[Verdict, str]:
        """Judge a response.

        Args:
            schema: the requested JSON schema.
            text: the response.
            is_cut: True if max_tokens ended the response.

        Returns:
            The verdict, and the reason if the response is not valid.
        """
        if is_cut:
            return self._judge_beginning(schema, text)
        try:
            value = json.loads(text)
        except ValueError as error:
            return Verdict.INVALID, f"not JSON: {error}"
        validators = self._jsonschema.validators
        try:
            validator = validators.validator_for(schema, default=validators.Draft202012Validator)(schema)
            wrong = self._jsonschema.exceptions.best_match(validator.iter_errors(value))
        except Exception as fault:  # The schema is invalid, or has a reference that cannot be resolved.
            return Verdict.INVALID, f"cannot be judged: {fault}"[:REASON_CHARACTERS_MAX]
        if wrong is not None:
            return Verdict.INVALID, f"{wrong.json_path}: {wrong.message}"[:REASON_CHARACTERS_MAX]
        return Verdict.VALID, ""

    def _judge_beginning(self, schema: Any, text: str) -> tuple[Verdict, str]:
        # If the text ends within a character, its last character is a replacement character.
        data = text.removesuffix("\ufffd").encode()
        matcher = LLMatcher(self._bytes, LLMatcher.grammar_from_json_schema(json.dumps(schema)), log_level=0)
        if matcher.is_error():
            return Verdict.INVALID, f"cannot be judged: {matcher.get_error()}"[:REASON_CHARACTERS_MAX]
        accepted = matcher.validate_tokens(list(data))
        if accepted < len(data):
            return Verdict.INVALID, f"incomplete, and wrong from byte {accepted} on: {text[-80:]!r}"
        return Verdict.CUT, ""
