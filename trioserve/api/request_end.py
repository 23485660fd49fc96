"""How a request ended, in one line of the log: what operators search for. Never what was asked or answered."""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Mapping

__all__ = ["Outcome", "end_line"]

PLAIN = re.compile(r"[!-~]+")
QUOTED = re.compile(r"[\"=\\]")


class Outcome(enum.StrEnum):
    FINISHED = "finished"
    LEFT = "left"
    """Cancelled: the client left or took nothing, or the server did not wait any longer."""
    REFUSED = "refused"
    """The response was an error, with a status of its own."""
    DEADLINE = "deadline"
    """A deadline of the request passed, whatever it had by then."""
    FAILED = "failed"
    """It broke off: an error came when the head of the response was out."""


def end_line(fields: Mapping[str, object]) -> str:
    """`request ended key=value ...`, without the fields that are None. A value that would not be one word is quoted, as
    JSON does it: clients choose ids and paths, and must not be able to write fields of their own."""
    return " ".join(
        ["request ended", *(f"{name}={_word(str(value))}" for name, value in fields.items() if value is not None)]
    )


def _word(value: str) -> str:
    return value if PLAIN.fullmatch(value) and not QUOTED.search(value) else json.dumps(value)
