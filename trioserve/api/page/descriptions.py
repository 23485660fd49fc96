"""What the paths of the live page give, for the API's own description."""

from __future__ import annotations

from trioserve.api.described_operation import DescribedOperation
from trioserve.api.page.files import PAGE_PATH, UI_PATH
from trioserve.api.page.page import EVENTS_PATH, INTERVAL_SECONDS_MAX, INTERVAL_SECONDS_MIN

__all__ = ["OPERATIONS"]

OPERATIONS = {
    ("GET", PAGE_PATH): DescribedOperation(
        summary="Show the live page, unless the server was started with --no-ui", response="text/html"
    ),
    ("GET", UI_PATH + "{file}"): DescribedOperation(
        summary="Read a file of the live page",
        response="*/*",
        errors=(400, 404),
        path_parameter="the file's name",
    ),
    ("GET", EVENTS_PATH): DescribedOperation(
        summary="Watch what the server does: its blocks, its requests, its speed",
        description='Each event is a line "event: snapshot" or "event: change" and a line "data: JSON". The first is a '
        "snapshot, the others say what has changed since the one before. An API key sees its own requests, the admin's "
        "all of them. The form may change with any version.",
        response="text/event-stream",
        errors=(400, 404, 429, 503),
        query={
            "interval": (
                "seconds between two events, at least",
                {"type": "number", "minimum": INTERVAL_SECONDS_MIN, "maximum": INTERVAL_SECONDS_MAX},
            )
        },
    ),
}
