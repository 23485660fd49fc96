"""`python -m trioserve.commands.ray_watch GROUP ADDRESS`: writes where the engines of a group serve, a line of JSON for
each change and now and then. `trioserve route --endpoints-ray` starts it so; it ends when its standard input does.
ADDRESS may be empty, for the cluster of this machine.

An actor is asked for its state once, and answers when that changes. So a new place is known when it is there, and an
actor that dies when its answer fails; nothing is asked again and again but which actors there are.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Hashable, Sequence
from typing import Any, BinaryIO, Protocol

import msgspec

from trioserve.commands.program_end import EXIT_FAILED
from trioserve.contracts.errors import StartupError
from trioserve.proxy.discovery.ray import SIGN_SECONDS, GroupTold

__all__ = ["GroupWatch", "Lost", "PlacedEngines", "main"]

LOOK_SECONDS = 1.0  # between two questions for the names
AGAIN_SECONDS = 0.25  # before an actor that is lost is asked again; Ray answers at once that it is
UNHEARD_SECONDS_MAX = 10.0  # then those that do not answer, such as a process that stands still, are left out
POLL_SECONDS = 30.0  # an actor answers by then in any case: who asked may be gone, and is not to be waited for for ever


class Lost(Exception):
    """There is no such actor now. There may be again."""


class PlacedEngines(Protocol):
    """What Ray knows of a group. A question is an object that is told apart from others."""

    def names(self) -> Sequence[str]:
        """Of the actors that are there, or are to be again."""

    def ask(self, name: str, known: object) -> Hashable:
        """For the state of an actor that is other than `known`, or after a while the same. Raises Lost."""

    def wait(self, questions: Sequence[Hashable], seconds_max: float) -> Sequence[Hashable]:
        """Those that are answered, as soon as one is; maybe none."""

    def answer(self, question: Hashable) -> tuple[object, str | None]:
        """The state, and the URL in it; None: it does not serve. Raises Lost."""


class GroupWatch:
    """Which engines of a group serve, and where."""

    def __init__(self, engines: PlacedEngines) -> None:
        self._engines = engines
        self._known: dict[str, object] = {}
        self._urls: dict[str, str] = {}
        self._asked: dict[Hashable, str] = {}
        self._again_at: dict[str, float] = {}
        self._heard: set[str] = set()
        self._names: set[str] | None = None

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(sorted(self._urls.values()))

    @property
    def knows_all(self) -> bool:
        """Whether all of them have been heard of. Before that, who is not among the urls may well serve."""
        return self._names is not None and self._names <= self._heard

    def look(self, now: float) -> None:
        """Returns when something is other than it was, and after LOOK_SECONDS at most."""
        self._names = names = set(self._engines.names())
        self._heard &= names
        for name in {*self._urls, *self._known} - names:
            self._forget(name)
        for name in sorted(names - set(self._asked.values())):
            if now >= self._again_at.get(name, now):
                self._again_at.pop(name, None)
                try:
                    self._asked[self._engines.ask(name, self._known.get(name))] = name
                except Lost:
                    self._lose(name, now)
        seconds_max = AGAIN_SECONDS if self._again_at else LOOK_SECONDS
        for question in self._engines.wait(list(self._asked), seconds_max):
            name = self._asked.pop(question)
            if name not in names:
                continue
            try:
                self._known[name], url = self._engines.answer(question)
            except Lost:
                self._lose(name, now)
                continue
            self._heard.add(name)
            if url is None:
                self._urls.pop(name, None)
            else:
                self._urls[name] = url

    def _lose(self, name: str, now: float) -> None:
        self._forget(name)
        self._heard.add(name)
        self._again_at[name] = now + AGAIN_SECONDS

    def _forget(self, name: str) -> None:
        for held in (self._known, self._urls, self._again_at):
            held.pop(name, None)


class RayEngines:
    """The group as Ray really has it. To be made inside of a connection."""

    def __init__(self, group: str) -> None:
        import ray

        from trioserve import ray_engines

        self._ray = ray
        self._engines = ray_engines
        self._group = group

    def names(self) -> Sequence[str]:
        return self._engines.engines_of(self._group)

    def ask(self, name: str, known: Any) -> Hashable:
        handle = self._engines.handle_of(name)
        if handle is None:
            raise Lost(name)
        question: Hashable = handle.state.remote(known, POLL_SECONDS)
        return question

    def wait(self, questions: Sequence[Hashable], seconds_max: float) -> Sequence[Hashable]:
        if not questions:
            time.sleep(seconds_max)
            return []
        answered: Sequence[Hashable] = self._ray.wait(list(questions), timeout=seconds_max)[0]
        return answered

    def answer(self, question: Any) -> tuple[object, str | None]:
        try:
            state = self._ray.get(question)
        except self._ray.exceptions.RayActorError as error:
            raise Lost(str(error)) from None
        return state, state.url


def main(group: str, address: str) -> int:
    """Until the standard input ends; then the process is over. Returns an exit code if Ray cannot be asked."""
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    # Ray waits so long for the reason of an actor's death before it tells of it. Nobody asks for the reason here.
    os.environ.setdefault("RAY_timeout_ms_task_wait_for_death_info", "50")
    from trioserve.ray_engines import connected

    lines = sys.stdout.buffer
    try:
        with connected(address or None):
            _watch(GroupWatch(RayEngines(group)), lines)
    except StartupError as error:
        _write(lines, GroupTold(failure=str(error)))
    return EXIT_FAILED


def _watch(watch: GroupWatch, lines: BinaryIO) -> None:
    told: tuple[str, ...] | None = None
    told_at = 0.0
    unheard_until = time.monotonic() + UNHEARD_SECONDS_MAX
    while True:
        watch.look(time.monotonic())
        # The reader believes that who is not named is gone. When Ray is asked anew, those whom it knows still serve.
        if not watch.knows_all and told is None and time.monotonic() < unheard_until:
            continue
        if watch.urls != told or time.monotonic() >= told_at + SIGN_SECONDS:
            told, told_at = watch.urls, time.monotonic()
            _write(lines, GroupTold(urls=told))


def _write(lines: BinaryIO, told: GroupTold) -> None:
    lines.write(msgspec.json.encode(told) + b"\n")
    lines.flush()


def _end_with_parent() -> None:
    """In a thread: a call of Ray's that hangs is to end, too. The kernel tells of the parent's end, even by SIGKILL."""
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os._exit(EXIT_FAILED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
