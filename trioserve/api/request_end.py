"""Log line at the end of a request, which operators search. It never has the text of prompts or responses."""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Mapping

from trioserve.contracts.deadlines import Deadline

__all__ = ["Outcome", "end_line", "outcome_of_error"]

PLAIN = re.compile(r"[!-~]+")
QUOTED = re.compile(r"[\"=\\]")


class Outcome(enum.StrEnum):
    FINISHED = "finished"
    LEFT = "left"
    """Cancelled: the client left or stopped reading, or the server stopped waiting at its shutdown."""
    REFUSED = "refused"
    """The response was an error with its own status."""
    DEADLINE = "deadline"
    """A deadline of the request passed, before or after its response began."""
    FAILED = "failed"
    """An error ended the response after its head was sent."""


DEADLINE_REASONS = frozenset({*(deadline.value for deadline in Deadline), "deadline_exceeded"})


def outcome_of_error(status: int, reason: str | None, *, has_begun: bool) -> Outcome:
    """Classify a request that ended with an error.

    Args:
        status: status of the error.
        reason: code of the error, or value of the header X-Trioserve-Reason.
        has_begun: True: the head of a response was sent before the error.
    """
    if status == 504 or reason in DEADLINE_REASONS:
        return Outcome.DEADLINE
    return Outcome.FAILED if has_begun else Outcome.REFUSED


def end_line(fields: Mapping[str, object]) -> str:
    """Write `request ended key=value ...`, without the fields that are None.

    A value that is not a single word is quoted as in JSON. Clients choose ids and paths, and must not forge fields.

    Args:
        fields: values by name.
    """
    return " ".join(
        ["request ended", *(f"{name}={_word(str(value))}" for name, value in fields.items() if value is not None)]
    )


def _word(value: str) -> str:
    return value if PLAIN.fullmatch(value) and not QUOTED.search(value) else json.dumps(value)
