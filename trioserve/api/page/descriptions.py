"""Descriptions of the live page's paths, for the OpenAPI document."""

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
        summary="Watch the server's blocks, requests and speed",
        description='Each event is a line "event: snapshot" or "event: change" and a line "data: JSON". The first is a '
        "snapshot, and each later event has the changes since the previous one. An API key sees its own requests, and "
        "the admin's key all requests. The format may change with any version.",
        response="text/event-stream",
        errors=(400, 404, 429, 503),
        query={
            "interval": (
                "shortest time between two events, in seconds",
                {"type": "number", "minimum": INTERVAL_SECONDS_MIN, "maximum": INTERVAL_SECONDS_MAX},
            )
        },
    ),
}
