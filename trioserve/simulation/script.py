"""The script and the verdict of a simulation, and the loop that applies events.

A script is readable text with one line for each tagged struct: the tag, and key=value for each field that differs from
its default.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args

import msgspec

from trioserve.contracts.errors import InvalidRequest, StartupError

__all__ = [
    "EventSimulation",
    "Failure",
    "Trace",
    "Verdict",
    "apply_events",
    "case_of",
    "failure_from",
    "line_of",
    "needs_assertions",
    "parts_of",
    "script_of",
]

_SPACE = re.compile(r"\s")


def line_of(part: msgspec.Struct) -> str:
    """Return the line for a struct. Values are JSON without spaces. A space in a string is written as an escape.

    Args:
        part: the struct.
    """
    fields = msgspec.to_builtins(part)
    words = [fields.pop("type"), *(f"{name}={_word(value)}" for name, value in fields.items())]
    return " ".join(words)


def _word(value: object) -> str:
    return _SPACE.sub(lambda found: f"\\u{ord(found[0]):04x}", msgspec.json.encode(value).decode())


def script_of(case: msgspec.Struct) -> str:
    """Return the script of a history or a plan: a line for its world or stage, then one line per event or part.

    Args:
        case: a struct of two fields, the first one a struct, the second one a tuple of structs.
    """
    first, parts = msgspec.structs.astuple(case)
    return "\n".join(line_of(part) for part in (first, *parts)) + "\n"


def case_of(script: str, kind: type[Case]) -> Case:
    """Read a script that `script_of` returned. Empty lines and lines that begin with # are ignored.

    Args:
        script: the text.
        kind: class of the history or plan.

    Raises:
        InvalidRequest: the script cannot be read.
    """
    fields = msgspec.structs.fields(kind)
    first_kind, [part_kinds, *_] = fields[0].type, get_args(fields[1].type)
    first, *parts = parts_of(script, first_kind | part_kinds) or [None]
    if not isinstance(first, first_kind) or any(isinstance(part, first_kind) for part in parts):
        tag = first_kind.__struct_config__.tag
        raise InvalidRequest(f"a script of this kind begins with '{tag} ...', and has only one such line: put it first")
    return kind(first, tuple(parts))


def parts_of(script: str, kinds: Any) -> list[Any]:
    """Read lines with one struct each. Empty lines and lines that begin with # are ignored.

    Args:
        script: the lines.
        kinds: union of the allowed structs.

    Raises:
        InvalidRequest: a line cannot be read. The message contains the line.
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


Trace = Callable[[str], None]


Case = TypeVar("Case", bound=msgspec.Struct)
World = TypeVar("World", bound=msgspec.Struct)


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """The failure of a simulation, which has broken a rule.

    Attributes:
        script: script with the events up to the failure.
        kind: type of the error.
        site: function that raised the error. Two failures are of the same kind if `kind` and `site` are equal.
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
        digest: digest of the trace, or "" if this kind of simulation computes none.
    """

    failure: Failure | None
    counts: dict[str, int]
    digest: str = ""


def needs_assertions() -> None:
    """Raise StartupError if Python runs without assertions."""
    if not __debug__:
        raise StartupError("a simulation without assertions finds nothing: run python without -O")


def failure_from(error: Exception, script: str) -> Failure:
    """Make a Failure from an error.

    From an exception group, the first failed assertion is used, since the other errors may be its effects.

    Args:
        error: the error.
        script: the events so far.
    """
    while isinstance(error, ExceptionGroup):
        broken = error.subgroup(AssertionError)
        error = (error if broken is None else broken).exceptions[0]
    frame = traceback.extract_tb(error.__traceback__)[-1]
    # The first lines are enough. pytest adds further lines to a failed assertion.
    sentence = str(error).partition("\n")[0]
    has_sentence = isinstance(error, AssertionError) and sentence
    return Failure(
        script=script,
        kind=type(error).__name__,
        # A site has no line number, since edits change it.
        site=f"{Path(frame.filename).name}, {frame.name}",
        message=sentence if has_sentence else f"{sentence} at {frame.line!r}".strip(),
    )


class EventSimulation(Generic[World]):
    """A simulation that applies the events of a history one after another.

    Args:
        world: settings of the simulation.
        trace: receives a line for each effect. None: no trace.

    Attributes:
        world: settings of the simulation.
        counts: number of occurrences by name.
    """

    def __init__(self, world: World, trace: Trace | None) -> None:
        self.world = world
        self.counts: dict[str, int] = {}
        self._trace = trace

    def apply(self, event: Any) -> None:
        """Apply one event.

        Args:
            event: the event.

        Raises:
            AssertionError: a rule is broken. Exceptions of the simulated code pass through too.
        """
        raise NotImplementedError

    def run_to_end(self) -> None:
        """Run until every request has ended, then check that no state is left."""
        raise NotImplementedError

    def _count(self, what: str, count: int = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + count

    def _tell(self, line: str) -> None:
        if self._trace is not None:
            self._trace(line)


def apply_events(
    simulation: EventSimulation[Any],
    events: Iterable[msgspec.Struct],
    script_of: Callable[[tuple[Any, ...]], str],
    trace: Trace | None,
) -> Verdict:
    """Apply events, then run the simulation to its end.

    Args:
        simulation: the simulation.
        events: the events.
        script_of: writes applied events as a script that can be run again.
        trace: receives a line for each event. None: no trace.
    """
    needs_assertions()
    happened: list[msgspec.Struct] = []
    if trace is not None:
        trace(line_of(simulation.world))
    try:
        for event in events:
            happened.append(event)
            if trace is not None:
                trace(line_of(event))
            simulation.apply(event)
        if trace is not None:
            trace("# to the end")
        simulation.run_to_end()
    except Exception as error:  # The simulation searches for errors of all kinds.
        return Verdict(failure_from(error, script_of(tuple(happened))), simulation.counts)
    return Verdict(None, simulation.counts)
