"""Record of a request for operators: the log line at its end, and HTTP metrics.

The record never contains the text of prompts or responses."""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from trioserve.contracts.deadlines import Deadline

if TYPE_CHECKING:
    from trioserve.metrics.metric import PlainHistogram
    from trioserve.metrics.registry import Metrics

__all__ = [
    "HttpCounts",
    "Outcome",
    "end_line",
    "outcome_of_error",
]

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


METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
OTHER_PATH = "other"
OTHER_METHOD = "other"
NO_HANDLER = "none"  # Metrics by handler usually have this label for an unknown route.
LEFT = "left"  # Requests whose client has left have this label instead of a status.


class HttpCounts:
    """Counts requests, and writes the counts to the metrics at every scrape.

    The counts of each request are kept in a dict, because updating a metric with labels costs more.

    Args:
        metrics: metrics of the server.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._open_count = self._open_shown = 0
        # The counts since the last scrape, by route, method, status and is_left_out.
        self._counts: dict[tuple[str | None, str, int | None, bool], int] = {}
        self._seconds: dict[tuple[str | None, str], PlainHistogram] = {}
        metrics.on_scrape(self._show)

    def begin(self) -> None:
        """Count a request whose handler starts."""
        self._open_count += 1

    def end(self, route: str | None, method: str, status: int | None, seconds: float, *, is_left_out: bool) -> None:
        """Count the end of a request.

        Args:
            route: path template of the route. None: unknown path.
            method: HTTP method.
            status: status of the response. None: there was no response.
            seconds: time since the request's head arrived.
            is_left_out: True: machines poll the route, or the server sent the request. It is left out of the metrics by
                handler.
        """
        self._open_count -= 1
        method = self.note(route, method, status, is_left_out=is_left_out)
        if is_left_out:
            return
        histogram = self._seconds.get((route, method))
        if histogram is None:
            histogram = self._metrics.http_request_duration_seconds.labels(route or NO_HANDLER, method)
            self._seconds[route, method] = histogram
        histogram.observe(seconds)
        self._metrics.http_request_duration_highr_seconds.observe(seconds)

    def note(self, route: str | None, method: str, status: int | None, *, is_left_out: bool) -> str:
        """Count a response, even if no handler ran for the request.

        Args:
            route: path template of the route. None: unknown path.
            method: HTTP method.
            status: status of the response. None: there was no response.
            is_left_out: see `end`.

        Returns:
            The method as the metrics name it.
        """
        method = method if method in METHODS else OTHER_METHOD
        key = (route, method, status, is_left_out)
        self._counts[key] = self._counts.get(key, 0) + 1
        return method

    def _show(self) -> None:
        metrics = self._metrics
        metrics.streams_open.inc(self._open_count - self._open_shown)
        self._open_shown = self._open_count
        for (route, method, status, is_left_out), count in self._counts.items():
            metrics.http_requests_total.labels(route or OTHER_PATH, str(status or LEFT)).inc(count)
            if not is_left_out:
                status_class = LEFT if status is None else f"{status // 100}xx"
                metrics.http_requests_by_handler_total.labels(route or NO_HANDLER, method, status_class).inc(count)
        self._counts.clear()
