"""Runs simulations from a seed or from a script, and reduces a failing simulation.

A failing history is reduced to the events and values that the failure needs. First, delta debugging (Zeller and
Hildebrandt, 2002) removes events: halves, then quarters, down to single events. Then the remaining events are
simplified: fewer choices, shorter prompts, no salt. The reduced history may fail at another event, but it must raise
the same error in the same function.

A script is readable text with one line for each tagged struct: the tag, and key=value for each field that differs from
its default.
"""

from __future__ import annotations

import importlib
import re
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar, get_args

import msgspec

from trioserve.contracts.errors import InvalidRequest, StartupError

__all__ = [
    "EventSimulation",
    "Failure",
    "Mode",
    "Runs",
    "Trace",
    "Verdict",
    "apply_events",
    "case_of",
    "cut",
    "failure_from",
    "line_of",
    "needs_assertions",
    "parts_of",
    "runs_of",
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

        Raises:
            AssertionError: a rule is broken. Exceptions of the simulated code pass through too.
        """
        raise NotImplementedError

    def run_to_end(self) -> None:
        """Run until every request has ended, then check that no state is left."""
        raise NotImplementedError

    def _count(self, what: str, count: int = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + count

    def _log_line(self, line: str) -> None:
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


Mode = Literal["core", "stack", "router", "routers", "pair", "lasting", "ranks", "iterative", "images", "models"]


class Runs(Protocol):
    """The functions of one kind of simulation."""

    def run_seed(self, seed: int, size: int, *, trace: Trace | None = None) -> Verdict:
        """Generate a simulation and run it to its end.

        Args:
            seed: seed of all random choices.
            size: number of events of a history, or number of clients of a plan.
            trace: receives lines about the run. None: no trace.
        """

    def run_script(self, script: str, *, trace: Trace | None = None) -> Verdict:
        """Run a script to its end.

        Args:
            script: text of a history or a plan.
            trace: receives lines about the run. None: no trace.
        """

    def shrunk(self, failure: Failure, *, replays_max: int) -> Failure:
        """Return the smallest failure of the same kind that was found.

        Args:
            replays_max: maximum number of runs.
        """


class _Parts(NamedTuple):
    """The classes and functions of one kind of simulation, each given as module:name below this package.

    Attributes:
        case: class of the histories or plans.
        source: class that generates events, or function that draws plans.
        simulation: class that runs a history or a plan.
    """

    case: str
    source: str
    simulation: str


_EVENT_MODES: dict[Mode, _Parts] = {
    "core": _Parts("core.history:History", "core.generator:Generator", "core.simulator:Simulation"),
    "router": _Parts(
        "router.history:RouterHistory", "router.generator:RouterGenerator", "router.simulator:RouterSimulation"
    ),
    "routers": _Parts(
        "router.routers_books:RoutersHistory",
        "router.routers_generator:RoutersGenerator",
        "router.routers_simulator:RoutersSimulation",
    ),
    "models": _Parts("models:ModelsHistory", "models:ModelsGenerator", "models:ModelsSimulation"),
    "pair": _Parts("pair.host:PairHistory", "pair.simulator:PairGenerator", "pair.simulator:PairSimulation"),
    "iterative": _Parts(
        "images.core_simulator:IterativeHistory",
        "images.core_simulator:IterativeGenerator",
        "images.core_simulator:IterativeSimulation",
    ),
}
_PLAN_MODES: dict[Mode, _Parts] = {
    "stack": _Parts("stack.plan:StackPlan", "stack.plan:drawn_stack_plan", "stack.simulator:StackSimulation"),
    "lasting": _Parts(
        "stack.stored_work:StoredPlan", "stack.stored_work:drawn_stored_plan", "stack.stored_simulator:StoredSimulation"
    ),
    "ranks": _Parts("ranks.plan:RanksPlan", "ranks.plan:drawn_ranks_plan", "ranks.simulator:RanksSimulation"),
    "images": _Parts("images.plan:ImagesPlan", "images.plan:drawn_images_plan", "images.simulator:ImagesSimulation"),
}


def runs_of(mode: Mode) -> Runs:
    """Return the functions of a kind of simulation.

    Each kind imports only the modules that it needs. So the core is simulated without trio, HTTP and the router.

    Args:
        mode: the kind of simulation.
    """
    if mode in _PLAN_MODES:
        return _PlanRuns(*map(_loaded, _PLAN_MODES[mode]))
    history, generator, simulation = map(_loaded, _EVENT_MODES[mode])
    plainer = _loaded("core.history:plainer_history") if mode == "core" else with_defaults
    return _EventRuns(history, generator, simulation, plainer)


def _loaded(part: str) -> Any:
    module, _, name = part.partition(":")
    return getattr(importlib.import_module(f"trioserve.simulation.{module}"), name)


class _EventRuns(NamedTuple):
    """Functions of a simulation whose case is a history: a world and its events.

    A generator draws the world, and then one event after another. An event may depend on the run so far.
    """

    history: type[msgspec.Struct]
    generator: Callable[[Random], Any]
    simulation: Callable[..., EventSimulation[Any]]
    plainer: Callable[..., Any]

    def run_seed(self, seed: int, size: int, *, trace: Trace | None = None) -> Verdict:
        generator = self.generator(Random(seed))
        simulation = self.simulation(generator.world, trace=trace)
        return self._run(simulation, (generator.next_event(simulation) for _ in range(size)), trace)

    def run_script(self, script: str, *, trace: Trace | None = None) -> Verdict:
        return self._run_history(case_of(script, self.history), trace)

    def shrunk(self, failure: Failure, *, replays_max: int) -> Failure:
        def replay(history: Any) -> Failure | None:
            return self._run_history(history, None).failure

        history = case_of(failure.script, self.history)
        return shrunk_failure(failure, history, replay, self.plainer, replays_max=replays_max)

    def _run_history(self, history: Any, trace: Trace | None) -> Verdict:
        return self._run(self.simulation(history.world, trace=trace), history.events, trace)

    def _run(self, simulation: EventSimulation[Any], events: Iterable[msgspec.Struct], trace: Trace | None) -> Verdict:
        def script(happened: tuple[Any, ...]) -> str:
            return script_of(self.history(simulation.world, happened))

        return apply_events(simulation, events, script, trace)


class _PlanRuns(NamedTuple):
    """Functions of a simulation whose case is a plan: a stage and parts, which are drawn before the run."""

    plan: type[msgspec.Struct]
    drawn_plan: Callable[[Random, int], Any]
    simulation: Callable[..., Any]

    def run_seed(self, seed: int, size: int, *, trace: Trace | None = None) -> Verdict:
        return self._run(self.drawn_plan(Random(seed), size), trace)

    def run_script(self, script: str, *, trace: Trace | None = None) -> Verdict:
        return self._run(case_of(script, self.plan), trace)

    def shrunk(self, failure: Failure, *, replays_max: int) -> Failure:
        """Remove parts of the failing plan while it fails in the same way. Return the failure of the smallest plan."""
        plan: Any = case_of(failure.script, self.plan)

        def replay(candidate: Any) -> Failure | None:
            return self._run(candidate, None).failure

        attempts = Attempts(failure, replay, replays_max)
        if attempts.fails(plan):
            cut(plan.parts, lambda parts: attempts.fails(self.plan(plan.stage, parts)))
        return attempts.plainest

    def _run(self, plan: Any, trace: Trace | None) -> Verdict:
        needs_assertions()
        simulation = self.simulation(plan, trace=trace)
        if trace is not None:
            trace(line_of(plan.stage))
            for part in plan.parts:
                trace(line_of(part))
        try:
            simulation.run()
        except Exception as error:  # The simulation searches for errors of all kinds.
            return Verdict(failure_from(error, script_of(plan)), simulation.counts, simulation.digest)
        return Verdict(None, simulation.counts, simulation.digest)


# --- Reduction of failures ---

Item = TypeVar("Item")
Tried = TypeVar("Tried")
Struct = TypeVar("Struct", bound=msgspec.Struct)
Eventful = TypeVar("Eventful", bound=msgspec.Struct)  # type of a history: a struct with a world and events


class Attempts(Generic[Tried]):
    """Runs reduced cases, and checks whether they fail in the same way as the first failure.

    Args:
        failure: the first failure.
        replay: runs a case, and returns its failure, or None if it does not fail.
        replays_max: maximum number of runs.

    Attributes:
        plainest: failure of the last case that failed in the same way as the first failure.
        left: number of remaining runs. At 0, no case counts as failing any more, so that the reduction ends.
    """

    def __init__(self, failure: Failure, replay: Callable[[Tried], Failure | None], replays_max: int) -> None:
        self.plainest = failure
        self.left = replays_max
        self._replay = replay

    def fails(self, case: Tried) -> bool:
        if self.left == 0:
            return False
        self.left -= 1
        failure = self._replay(case)
        if failure is None or not failure.is_like(self.plainest):
            return False
        self.plainest = failure
        return True


def cut(items: tuple[Item, ...], fails: Callable[[tuple[Item, ...]], bool]) -> tuple[Item, ...]:
    """Return a smallest found sublist of the items that still fails.

    Args:
        fails: returns True if items fail.
    """
    size = max(1, len(items) // 2)
    while True:
        begin, was_cut = 0, False
        while begin < len(items):
            candidate = items[:begin] + items[begin + size :]
            if fails(candidate):
                items, was_cut = candidate, True
            else:
                begin += size
        if size > 1:
            size //= 2
        elif not was_cut:
            return items


def shrunk_failure(
    failure: Failure,
    history: Eventful,
    replay: Callable[[Eventful], Failure | None],
    plainer: Callable[[Eventful, Callable[[Eventful], bool]], Eventful],
    *,
    replays_max: int,
) -> Failure:
    """Return the smallest failure of the same kind that was found.

    Args:
        history: the history that failed.
        replay: runs a history, and returns its failure, or None if it does not fail.
        plainer: simplifies the events of a failing history. Its second argument returns whether a history fails. The
            result is a failing history with the same number of events.
        replays_max: maximum number of runs.
    """
    attempts = Attempts(failure, replay, replays_max)
    if not attempts.fails(history):
        # The history did not fail a second time, so the failure depends on state outside of the history.
        return failure
    while True:
        before = history
        history = _fewer_events(history, attempts.fails)
        history = plainer(history, attempts.fails)
        if history == before:
            return attempts.plainest


def _fewer_events(history: Eventful, fails: Callable[[Eventful], bool]) -> Eventful:
    fewer: Any = history
    events = cut(fewer.events, lambda events: fails(msgspec.structs.replace(history, events=events)))
    return msgspec.structs.replace(history, events=events)


def with_defaults(history: Eventful, fails: Callable[[Eventful], bool]) -> Eventful:
    """Replace values of the history's fields by their defaults, as far as the history still fails.

    Args:
        history: the failing history.
        fails: returns True if a history fails.
    """
    whole: Any = history
    world, events = whole.world, list(whole.events)

    def world_fails(world: msgspec.Struct) -> bool:
        return fails(msgspec.structs.replace(history, world=world))

    history = msgspec.structs.replace(history, world=_with_defaults(world, world_fails))
    for index, event in enumerate(events):

        def event_fails(event: msgspec.Struct, index: int = index) -> bool:
            return fails(msgspec.structs.replace(history, events=(*events[:index], event, *events[index + 1 :])))

        events[index] = _with_defaults(event, event_fails)
    return msgspec.structs.replace(history, events=tuple(events))


def _with_defaults(part: Struct, fails: Callable[[Struct], bool]) -> Struct:
    for field in msgspec.structs.fields(part):
        if field.default is not msgspec.NODEFAULT and getattr(part, field.name) != field.default:
            try:
                plainer = msgspec.structs.replace(part, **{field.name: field.default})
            except StartupError:
                continue  # The default is invalid together with another setting.
            if fails(plainer):
                part = plainer
    return part
