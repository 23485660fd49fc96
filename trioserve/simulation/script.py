"""Tagged structs as readable text: one line each, with the tag and the fields that differ from their defaults as
key=value.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from trioserve.contracts.errors import InvalidRequest

__all__ = ["line_of", "parts_of"]

_SPACE = re.compile(r"\s")


def line_of(part: msgspec.Struct) -> str:
    """Return the line of a struct. Values are JSON without spaces: a space in a text is written as an escape.

    Args:
        part: the struct.
    """
    fields = msgspec.to_builtins(part)
    words = [fields.pop("type"), *(f"{name}={_word(value)}" for name, value in fields.items())]
    return " ".join(words)


def _word(value: object) -> str:
    return _SPACE.sub(lambda found: f"\\u{ord(found[0]):04x}", msgspec.json.encode(value).decode())


def parts_of(script: str, kinds: Any) -> list[Any]:
    """Read lines of structs. Empty lines and lines that begin with # are comments.

    Args:
        script: the lines.
        kinds: union of the allowed structs.

    Raises:
        InvalidRequest: a line cannot be read. The message names the line.
    """
    parts = []
    for number, line in enumerate(script.splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        tag, *words = line.split()
        try:
            fields = {
                key: msgspec.json.decode(value) for key, _equals, value in (word.partition("=") for word in words)
            }
            parts.append(msgspec.convert({"type": tag, **fields}, kinds))
        except msgspec.MsgspecError as error:
            raise InvalidRequest(f"line {number} of the script, {line!r}, cannot be read: {error}") from error
    return parts
