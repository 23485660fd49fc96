"""The result of a simulation: all rules held, or a rule was broken at a place."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec

from trioserve.contracts.errors import StartupError

__all__ = ["Failure", "Trace", "Verdict", "failure_from", "needs_assertions"]

Trace = Callable[[str], None]


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A broken rule.

    Attributes:
        script: the events up to the failure.
        kind: type of the error.
        site: function that raised it. Two failures are equal if `kind` and `site` are.
        message: text of the error.
    """

    script: str
    kind: str
    site: str
    message: str

    def __str__(self) -> str:
        return f"{self.kind} in {self.site}: {self.message}"

    def is_like(self, other: Failure) -> bool:
        return (self.kind, self.site) == (other.kind, other.site)


class Verdict(msgspec.Struct, frozen=True):
    """The result of a simulation.

    Attributes:
        failure: the broken rule. None: all rules held.
        counts: number of occurrences by name.
        digest: digest of the trace, or "" if this kind of simulation has none by default.
    """

    failure: Failure | None
    counts: dict[str, int]
    digest: str = ""


def needs_assertions() -> None:
    """Raise StartupError if Python runs without assertions."""
    if not __debug__:
        raise StartupError("a simulation without assertions finds nothing: run python without -O")


def failure_from(error: Exception, script: str) -> Failure:
    """Make a failure of an error. Of a group, the first failed assertion is used, since other errors may be its
    effects.

    Args:
        error: the error.
        script: the events so far.
    """
    while isinstance(error, ExceptionGroup):
        broken = error.subgroup(AssertionError)
        error = (error if broken is None else broken).exceptions[0]
    frame = traceback.extract_tb(error.__traceback__)[-1]
    sentence = str(error).partition("\n")[0]  # without the lines that pytest adds to an assertion
    has_sentence = isinstance(error, AssertionError) and sentence
    return Failure(
        script=script,
        kind=type(error).__name__,
        # without the line number, which changes with edits
        site=f"{Path(frame.filename).name}, {frame.name}",
        message=sentence if has_sentence else f"{sentence} at {frame.line!r}".strip(),
    )
