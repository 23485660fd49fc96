"""How strongly the prefix cache prefers to keep the blocks of a session between two turns."""

from __future__ import annotations

import math

import msgspec

from trioserve.contracts.arguments import to_float
from trioserve.contracts.errors import InvalidRequest

__all__ = ["DEFAULT_RETENTION", "RETENTION_IDLE_SECONDS_MAX", "RETENTION_WEIGHT_MAX", "Retention"]

RETENTION_WEIGHT_MAX = 4.0  # A session may be preferred to others, but no session may displace all others for long.
RETENTION_IDLE_SECONDS_MAX = 3600.0  # An agent that was silent for an hour rarely comes back.


class Retention(msgspec.Struct, frozen=True, kw_only=True):
    """Preference for the cached blocks of one session, while the session waits for its next turn.

    It is a preference and no pin: under pressure, every cached block is evicted.

    Attributes:
        weight: 0 to RETENTION_WEIGHT_MAX. Value of the session's blocks relative to other sessions. 0 for no
            preference: the blocks are evicted by recency, like blocks without a session.
        idle_seconds: Above 0, at most RETENTION_IDLE_SECONDS_MAX. The preference ends this many seconds after the last
            turn or hint.
        tenant: Name of the tenant whose share of the pool limits the retained blocks. None is a tenant, too.

    Raises:
        InvalidRequest: a value has a wrong type or is out of range. The message names the field.
    """

    weight: float = 1.0
    idle_seconds: float = 300.0
    tenant: str | None = None

    def __post_init__(self) -> None:
        for name, low, limit in (
            ("weight", "at least 0", RETENTION_WEIGHT_MAX),
            ("idle_seconds", "above 0", RETENTION_IDLE_SECONDS_MAX),
        ):
            value = to_float(name, getattr(self, name))
            msgspec.structs.force_setattr(self, name, value)
            is_low = value < 0 or (value == 0 and name == "idle_seconds")
            if is_low or not (math.isfinite(value) and value <= limit):
                raise InvalidRequest(f"{name} is {value}, allowed is {low} and at most {limit:g}", param=name)


DEFAULT_RETENTION = Retention()
"""Retention of a session that a request opens by its id."""
