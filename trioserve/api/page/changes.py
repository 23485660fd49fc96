"""JSON of a snapshot, the change between two snapshots, and the application of a change to a snapshot.

A reader who applies every change to its first snapshot has the same state as a new snapshot.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from trioserve.contracts.page import HISTORY_POINTS_MAX, HistoryShown, PageSnapshot, RequestShown

__all__ = ["change_between", "fold", "snapshot_fields"]

SAME = re.compile(rb"(.)\1*", re.DOTALL)
DIFFERENT = re.compile(rb"[^\x00]+")
REQUEST_FIELDS = tuple(field.name for field in msgspec.structs.fields(RequestShown))
WHOLE_FIELDS = ("server", "request_count", "stats", "steps", "transfers", "queues")
"""Fields that are sent completely if they change."""

Fields = dict[str, Any]


def snapshot_fields(snapshot: PageSnapshot) -> Fields:
    """Convert a snapshot to values that JSON can express.

    Args:
        snapshot: state of the server.
    """
    history = snapshot.history
    return {
        "now": snapshot.now,
        **{name: getattr(snapshot, name) for name in WHOLE_FIELDS},
        "blocks": None if snapshot.blocks is None else [[count, state] for _, count, state in _runs(snapshot.blocks)],
        "requests": snapshot.requests,
        "history": history
        and {"interval_seconds": history.interval_seconds, "at": history.at, "series": history.series},
        "endpoints": snapshot.endpoints,
    }


def change_between(before: PageSnapshot, after: PageSnapshot) -> Fields | None:
    """Compare two snapshots.

    Args:
        before: earlier state.
        after: later state.

    Returns:
        Changed fields for JSON, or None if only the time differs.
    """
    change: Fields = {
        name: getattr(after, name) for name in WHOLE_FIELDS if getattr(before, name) != getattr(after, name)
    }
    if before.blocks != after.blocks:
        change["blocks"] = _changed_blocks(before.blocks, after.blocks)
    requests = _changed_requests(before.requests, after.requests)
    if requests:
        change["requests"] = requests
    if after.history is not None and after.history is not before.history:
        new = _new_points(before.history, after.history)
        if new is not None:
            change["history"] = new
    if before.endpoints != after.endpoints:
        change["endpoints"] = _changed_endpoints(before.endpoints or {}, after.endpoints or {})
    return {"now": after.now, **change} if change else None


def fold(shown: Fields, change: Fields) -> None:
    """Apply a change to the state of a reader.

    Args:
        shown: state of the reader, decoded from JSON. It is modified.
        change: change, decoded from JSON.
    """
    # The field `server` precedes `blocks`, whose code needs the server's block count.
    for name, value in change.items():
        if name == "blocks":
            shown["blocks"] = value and _folded_blocks(shown["blocks"], value, shown["server"]["block_count"])
        elif name in ("requests", "endpoints"):
            shown[name] = shown[name] or {}
            for key, fields in value.items():
                if fields is None:
                    shown[name].pop(key, None)
                else:
                    shown[name].setdefault(key, {}).update(fields)
        elif name == "history":
            _fold_history(shown["history"], value)
        else:
            shown[name] = value


# --- blocks ---


def _runs(states: bytes, start: int = 0, end: int | None = None) -> list[tuple[int, int, int]]:
    """Return (first, count, state) of each run of equal block states. A regular expression is faster than a loop."""
    found = SAME.finditer(states, start, len(states) if end is None else end)
    return [(run.start(), run.end() - run.start(), states[run.start()]) for run in found]


def _changed_blocks(before: bytes | None, after: bytes | None) -> list[tuple[int, int, int]] | None:
    if after is None or before is None or len(before) != len(after):
        return None if after is None else _runs(after)
    difference = int.from_bytes(before, "big") ^ int.from_bytes(after, "big")
    runs = []
    for changed in DIFFERENT.finditer(difference.to_bytes(len(after), "big")):
        runs += _runs(after, changed.start(), changed.end())
    return runs


def _folded_blocks(shown: list[list[int]] | None, changed: list[list[int]], block_count: int) -> list[list[int]]:
    states = bytearray().join(bytes([state]) * count for count, state in shown or ())
    states = states[:block_count] + bytes(max(0, block_count - len(states)))
    for first, count, state in changed:
        states[first : first + count] = bytes([state]) * count
    return [[count, state] for _, count, state in _runs(bytes(states))]


# --- requests, endpoints and history ---


def _changed_requests(
    before: Mapping[str, RequestShown], after: Mapping[str, RequestShown]
) -> dict[str, Fields | RequestShown | None]:
    changed: dict[str, Fields | RequestShown | None] = dict.fromkeys(before.keys() - after.keys())
    for key, request in after.items():
        known = before.get(key)
        if known is None:
            changed[key] = request
        elif known is not request and known != request:
            changed[key] = {
                name: value for name in REQUEST_FIELDS if (value := getattr(request, name)) != getattr(known, name)
            }
    return changed


def _changed_endpoints(
    before: Mapping[str, Mapping[str, object]], after: Mapping[str, Mapping[str, object]]
) -> dict[str, Fields | None]:
    changed: dict[str, Fields | None] = dict.fromkeys(before.keys() - after.keys())
    for key, endpoint in after.items():
        known = before.get(key, {})
        fields = {name: value for name, value in endpoint.items() if name not in known or known[name] != value}
        if fields:
            changed[key] = fields
    return changed


def _new_points(before: HistoryShown | None, after: HistoryShown) -> Fields | None:
    """Return the points of the history after the reader's last point, or all points if that point is no longer kept."""
    count = after.number - (-1 if before is None else before.number)
    if count <= 0:
        return None
    return {"at": after.at, "points": {name: values[-count:] for name, values in after.series.items()}}


def _fold_history(shown: Fields, new: Fields) -> None:
    shown["at"] = new["at"]
    for name, values in new["points"].items():
        shown["series"][name] = (shown["series"].get(name, []) + values)[-HISTORY_POINTS_MAX:]
