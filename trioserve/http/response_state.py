"""Where one response stands, and what may come next: `start`, `send` any number of times, `finish`; the same on every
protocol. Whether the client is still there is not asked here."""

from __future__ import annotations

__all__ = ["ResponseState"]


class ResponseState:
    """started -> finished, never back. `bodiless`: the body is dropped (HEAD, 204, 304)."""

    __slots__ = ("_of_head", "bodiless", "finished", "started")

    def __init__(self, *, method: str) -> None:
        self.started = False
        self.finished = False
        self.bodiless = False
        self._of_head = method == "HEAD"

    def start(self, status: int) -> None:
        if self.started:
            raise RuntimeError(f"the response was started before; a second one with status {status} cannot follow")
        if not 200 <= status <= 599:
            raise ValueError(f"status is {status}, allowed is 200 to 599")
        self.started = True
        self.bodiless = self._of_head or status in (204, 304)

    def check_open(self) -> None:
        """Raises RuntimeError unless the response was started and not finished."""
        if not self.started or self.finished:
            raise RuntimeError("the response was finished before" if self.finished else "the response was not started")

    def finish(self) -> None:
        self.check_open()
        self.finished = True

    def check_body_readable(self) -> None:
        """Raises RuntimeError once the response was started: the rest of the body may have been dropped."""
        if self.started:
            raise RuntimeError("the body has to be read before the response starts")
