"""The commands `requests`, `abort`, `endpoints` and `drain`. Each command sends one call to a running server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import msgspec

from trioserve.commands.program_end import EXIT_FAILED
from trioserve.commands.remote import RemoteServer

__all__ = ["run_abort", "run_drain", "run_endpoints", "run_requests"]

REQUEST_COLUMNS = (
    *("id", "state", "age_seconds", "prompt_tokens", "completion_tokens", "tenant"),
    *("pictures", "steps_done", "step_count"),
)
"""Columns of the table. A column without any value is left out."""
ENDPOINT_COLUMNS = ("id", "url", "health", "role", "leases", "leases_max", "in_flight", "moved_from", "moved_to")


def run_requests(server: RemoteServer, *, as_json: bool) -> int:
    """Print the unfinished requests that the caller's API key may see.

    Args:
        server: running server.
        as_json: True prints the JSON of the response instead of a table.
    """
    return _show(server.call("GET", "/v1/requests"), REQUEST_COLUMNS, as_json=as_json, nothing="no unfinished requests")


def run_endpoints(server: RemoteServer, *, as_json: bool) -> int:
    return _show(server.call("GET", "/endpoints"), ENDPOINT_COLUMNS, as_json=as_json, nothing="no endpoints")


def run_abort(server: RemoteServer, ids: Sequence[str], *, as_json: bool) -> int:
    """Abort requests, and print the result for each request.

    Args:
        server: running server.
        ids: ids of the requests.
        as_json: True prints the JSON of the response.

    Returns:
        1 if the server does not know one of the requests, otherwise 0.
    """
    answer = server.call("POST", "/v1/requests/abort", {"ids": list(ids)})
    if as_json:
        print(msgspec.json.encode(answer).decode())
    else:
        for result in answer["data"]:
            print(f"{result['id']}: {result['result']}")
    return EXIT_FAILED if any(result["result"] == "unknown" for result in answer["data"]) else 0


def run_drain(server: RemoteServer, name: str, *, move: bool, as_json: bool) -> int:
    """Drain an endpoint of a router: the router sends it no new requests, and removes it once it is idle.

    Args:
        server: running router.
        name: id of the endpoint.
        move: True moves running requests to other endpoints instead of waiting for their end.
        as_json: True prints the JSON of the response.
    """
    query = "?move=true" if move else ""
    answer = server.call("POST", f"/endpoints/{quote(name, safe='')}/drain{query}", {})
    if as_json:
        print(msgspec.json.encode(answer).decode())
    else:
        print(f"{name} gets no new requests, and is removed once its last request has ended or moved")
    return 0


def _show(answer: Mapping[str, Any], columns: Sequence[str], *, as_json: bool, nothing: str) -> int:
    rows: list[Mapping[str, Any]] = answer["data"]
    if as_json:
        print(msgspec.json.encode(answer).decode())
        return 0
    if not rows:
        print(nothing)
        return 0
    shown = [column for column in columns if any(row.get(column) is not None for row in rows)]
    cells = [shown, *([_cell(row.get(column)) for column in shown] for row in rows)]
    widths = [max(len(line[place]) for line in cells) for place in range(len(shown))]
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    return 0


def _cell(value: object) -> str:
    if value is None:
        return "-"
    text = f"{value:.1f}" if isinstance(value, float) else str(value)
    return "".join(character if character.isprintable() else "?" for character in text)
