"""How a request ended, in one line of the log: what operators search for. Never what was asked or answered."""

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
    """Cancelled: the client left or took nothing, or the server did not wait any longer."""
    REFUSED = "refused"
    """The response was an error, with a status of its own."""
    DEADLINE = "deadline"
    """A deadline of the request passed, whatever it had by then."""
    FAILED = "failed"
    """It broke off: an error came when the head of the response was out."""


DEADLINE_REASONS = frozenset({*(deadline.value for deadline in Deadline), "deadline_exceeded"})


def outcome_of_error(status: int, reason: str | None, *, has_begun: bool) -> Outcome:
    """Classify a request that ended with an error, its own or an endpoint's.

    Args:
        status: of the error.
        reason: its code, or what the header for programs says.
        has_begun: the head of a response was sent before the error.
    """
    if status == 504 or reason in DEADLINE_REASONS:
        return Outcome.DEADLINE
    return Outcome.FAILED if has_begun else Outcome.REFUSED


def end_line(fields: Mapping[str, object]) -> str:
    """`request ended key=value ...`, without the fields that are None. A value that would not be one word is quoted, as
    JSON does it: clients choose ids and paths, and must not be able to write fields of their own."""
    return " ".join(
        ["request ended", *(f"{name}={_word(str(value))}" for name, value in fields.items() if value is not None)]
    )


def _word(value: str) -> str:
    return value if PLAIN.fullmatch(value) and not QUOTED.search(value) else json.dumps(value)
