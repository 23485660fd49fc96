"""The objects that all connections of one server share."""

from __future__ import annotations

import dataclasses

from trioserve.http.body_budget import BodyBudget
from trioserve.http.clock_and_ids import ClockAndIds
from trioserve.http.counters import Tally
from trioserve.http.exchange import Handler
from trioserve.http.exchange_slots import ExchangeSlots
from trioserve.http.flusher import Flusher
from trioserve.http.limits import FrontendLimits

__all__ = ["ConnectionSetup"]


@dataclasses.dataclass(frozen=True, slots=True)
class ConnectionSetup:
    handler: Handler
    limits: FrontendLimits
    tally: Tally
    slots: ExchangeSlots
    body_budget: BodyBudget
    clock_and_ids: ClockAndIds
    flusher: Flusher
