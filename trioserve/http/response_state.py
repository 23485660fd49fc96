"""Progress of one response. It rejects calls in the wrong order. All protocols use this class."""

from __future__ import annotations

__all__ = ["ResponseState"]


class ResponseState:
    """Progress of one response: not started, started, finished. The state never goes back.

    Args:
        method: method of the request.

    Attributes:
        started: True once the handler has given the head to the connection.
        finished: True once the handler has given the whole body to the connection.
        bodiless: True if the connection drops the body (HEAD, 204, 304).
    """

    __slots__ = ("_is_head_request", "bodiless", "finished", "started")

    def __init__(self, *, method: str) -> None:
        self.started = False
        self.finished = False
        self.bodiless = False
        self._is_head_request = method == "HEAD"

    def start(self, status: int) -> None:
        if self.started:
            raise RuntimeError(f"the response has already started: a second one with status {status} is not possible")
        if not 200 <= status <= 599:
            raise ValueError(f"status is {status}, allowed is 200 to 599")
        self.started = True
        self.bodiless = self._is_head_request or status in (204, 304)

    def check_open(self) -> None:
        """Raise RuntimeError unless the response has started and is not finished."""
        if not self.started or self.finished:
            raise RuntimeError(
                "the response is already finished" if self.finished else "the response has not been started"
            )

    def finish(self) -> None:
        self.check_open()
        self.finished = True

    def check_body_readable(self) -> None:
        """Raise RuntimeError if the response has started: the connection may have dropped the rest of the body."""
        if self.started:
            raise RuntimeError("the response has already started: read the request body before it")
