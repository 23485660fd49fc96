"""`python -m trioserve.commands.ray_watch GROUP ADDRESS`: reports the URLs of a group's engines in lines of JSON.

The process writes a line after each change, and also every few seconds, to show that it still works.
`trioserve route --endpoints-ray` starts this process, which ends when its standard input ends. An empty ADDRESS means
the cluster of this machine.

This process calls each actor once, and the actor answers when its state changes (long polling). So this process learns
a new URL at once, and notices a dead actor when its call fails. Only the list of actors is polled.
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
from trioserve.proxy.discovery.ray import SIGN_SECONDS, GroupReport

__all__ = ["GroupWatch", "Lost", "PlacedEngines", "main"]

LOOK_SECONDS = 1.0  # interval at which the list of actors is polled
AGAIN_SECONDS = 0.25  # delay before a lost actor is called again, because Ray fails such calls at once
UNHEARD_SECONDS_MAX = 10.0  # longest wait of the first report for actors that do not answer
POLL_SECONDS = 30.0  # An actor answers after this time even without a change, because its caller may have ended.


class Lost(Exception):
    """Error: the actor does not exist at the moment. Ray may start the actor again."""


class PlacedEngines(Protocol):
    """The calls to Ray for one group of engines. A question is a hashable handle of a running call."""

    def names(self) -> Sequence[str]:
        """Return the names of actors that run, or that Ray will start again."""

    def ask(self, name: str, known: object) -> Hashable:
        """Begin a call that returns the next state of an actor. This method does not wait for the answer.

        Args:
            name: name of the actor.
            known: last known state. The actor answers when its state differs, or after POLL_SECONDS.

        Raises:
            Lost: the actor does not exist.
        """

    def wait(self, questions: Sequence[Hashable], seconds_max: float) -> Sequence[Hashable]:
        """Wait until at least one call has ended, and return the handles of ended calls.

        Args:
            questions: handles of running calls.
            seconds_max: longest wait. Afterwards, the result may be empty.
        """

    def answer(self, question: Hashable) -> tuple[object, str | None]:
        """Return the state and the URL from the answer of an actor. The URL is None if the engine accepts no requests.

        Args:
            question: handle of an ended call.

        Raises:
            Lost: the actor has ended.
        """


class GroupWatch:
    """Tracks the URLs of a group's engines.

    Args:
        engines: calls to Ray.
    """

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
        """True once each actor has answered or is lost. Until then, engines that accept requests may be missing in
        `urls`."""
        return self._names is not None and self._names <= self._heard

    def update(self, now: float) -> None:
        """Poll the list of actors and wait for answers. Return after a change, or after LOOK_SECONDS.

        Args:
            now: monotonic time in seconds.
        """
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
    """Calls to a real Ray cluster. The connection to Ray must be open.

    Args:
        group: name of the group.
    """

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
    """Report the URLs of a group. The process ends when standard input ends.

    Args:
        group: name of the group.
        address: address of the cluster, or empty for the cluster of this machine.

    Returns:
        EXIT_FAILED if Ray cannot be reached. Otherwise, the function does not return.
    """
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    # Ray delays the report of a dead actor by this number of milliseconds, to find the reason. This process does not
    # need the reason.
    os.environ.setdefault("RAY_timeout_ms_task_wait_for_death_info", "50")
    from trioserve.ray_engines import connected

    lines = sys.stdout.buffer
    try:
        with connected(address or None):
            _watch(GroupWatch(RayEngines(group)), lines)
    except StartupError as error:
        _write(lines, GroupReport(failure=str(error)))
    return EXIT_FAILED


def _watch(watch: GroupWatch, lines: BinaryIO) -> None:
    reported: tuple[str, ...] | None = None
    reported_at = 0.0
    unheard_until = time.monotonic() + UNHEARD_SECONDS_MAX
    while True:
        watch.update(time.monotonic())
        # The router removes engines that are missing in a report. So the first report waits until all actors have
        # answered.
        if not watch.knows_all and reported is None and time.monotonic() < unheard_until:
            continue
        if watch.urls != reported or time.monotonic() >= reported_at + SIGN_SECONDS:
            reported, reported_at = watch.urls, time.monotonic()
            _write(lines, GroupReport(urls=reported))


def _write(lines: BinaryIO, report: GroupReport) -> None:
    lines.write(msgspec.json.encode(report) + b"\n")
    lines.flush()


def _end_with_parent() -> None:
    """End this process when the parent ends. The kernel closes standard input even if the parent is killed.

    The function runs in a thread, so that it works even if a call to Ray hangs.
    """
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os._exit(EXIT_FAILED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
