"""What a simulation came to: whether every contract held, and if not, which one broke and where."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec

from trioserve.contracts.errors import StartupError

__all__ = ["Failure", "Trace", "Verdict", "failure_from", "needs_assertions"]

Trace = Callable[[str], None]


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """script: what happened, up to where it failed. kind and site, the function that objected, tell whether two
    failures are the same."""

    script: str
    kind: str
    site: str
    message: str

    def __str__(self) -> str:
        return f"{self.kind} in {self.site}: {self.message}"

    def is_like(self, other: Failure) -> bool:
        return (self.kind, self.site) == (other.kind, other.site)


class Verdict(msgspec.Struct, frozen=True):
    """failure: None when everything held. counts: what came to pass, by name. digest: of the trace, where there is
    one without being asked for."""

    failure: Failure | None
    counts: dict[str, int]
    digest: str = ""


def needs_assertions() -> None:
    """Raises StartupError where they are switched off."""
    if not __debug__:
        raise StartupError("a simulation without assertions finds nothing: run python without -O")


def failure_from(error: Exception, script: str) -> Failure:
    """Of a group of errors the first contract that broke is told: others may be what came of it."""
    while isinstance(error, ExceptionGroup):
        broken = error.subgroup(AssertionError)
        error = (error if broken is None else broken).exceptions[0]
    frame = traceback.extract_tb(error.__traceback__)[-1]
    said = str(error).partition("\n")[0]  # what pytest adds to an assertion's sentence is not the sentence
    is_said = isinstance(error, AssertionError) and said
    return Failure(
        script=script,
        kind=type(error).__name__,
        # not the line number, which differs between two edits
        site=f"{Path(frame.filename).name}, {frame.name}",
        message=said if is_said else f"{said} at {frame.line!r}".strip(),
    )
