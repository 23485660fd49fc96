"""Rebuilds the state of a server from the events for its live page: a snapshot, then changes to it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["BLOCK_STATES", "FeedState"]

BLOCK_STATES = ("free", "cached", "used", "held")
POINTS_MAX = 180  # the same as in the server: 15 minutes


class FeedState:
    """State of a server after the events so far.

    Attributes:
        fields: fields of the snapshot, without blocks, requests, endpoints and history.
        blocks: state of each block, as an index into BLOCK_STATES.
        requests: by id.
        endpoints: by id.
        series: latest points of each series by name, oldest first.
    """

    def __init__(self) -> None:
        self.fields: dict[str, Any] = {}
        self.blocks: bytearray = bytearray()
        self.requests: dict[str, dict[str, Any]] = {}
        self.endpoints: dict[str, dict[str, Any]] = {}
        self.series: dict[str, list[float | None]] = {}

    def take_snapshot(self, snapshot: Mapping[str, Any]) -> None:
        fields = dict(snapshot)
        self.blocks = bytearray()
        for count, state in fields.pop("blocks", None) or ():
            self.blocks += bytes([state]) * count
        self.requests = {id: dict(request) for id, request in (fields.pop("requests", None) or {}).items()}
        self.endpoints = {id: dict(endpoint) for id, endpoint in (fields.pop("endpoints", None) or {}).items()}
        history = fields.pop("history", None) or {}
        self.series = {name: list(points) for name, points in history.get("series", {}).items()}
        self.fields = fields

    def take_change(self, change: Mapping[str, Any]) -> None:
        for name, value in change.items():
            if name == "blocks":
                for first, count, state in value or ():
                    self.blocks[first : first + count] = bytes([state]) * count
                block_count = (change.get("server") or self.fields.get("server") or {}).get("block_count")
                if block_count is not None:
                    del self.blocks[block_count:]
            elif name == "requests":
                _merge(self.requests, value or {})
            elif name == "endpoints":
                _merge(self.endpoints, value or {})
            elif name == "history":
                for series, new_points in value["points"].items():
                    points = self.series.setdefault(series, [])
                    points.extend(new_points)
                    del points[:-POINTS_MAX]
            else:
                self.fields[name] = value


def _merge(known: dict[str, dict[str, Any]], changes: Mapping[str, Mapping[str, Any] | None]) -> None:
    for id, fields in changes.items():
        if fields is None:
            known.pop(id, None)
        else:
            known.setdefault(id, {}).update(fields)
