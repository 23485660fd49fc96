"""What every connection of one server shares."""

from __future__ import annotations

import dataclasses

from trioserve.frontend.body_budget import BodyBudget
from trioserve.frontend.counters import Tally
from trioserve.frontend.exchange import Handler
from trioserve.frontend.exchange_slots import ExchangeSlots
from trioserve.frontend.flusher import Flusher
from trioserve.frontend.limits import FrontendLimits
from trioserve.frontend.surroundings import Surroundings

__all__ = ["ConnectionSetup"]


@dataclasses.dataclass(frozen=True, slots=True)
class ConnectionSetup:
    handler: Handler
    limits: FrontendLimits
    tally: Tally
    slots: ExchangeSlots
    body_budget: BodyBudget
    surroundings: Surroundings
    flusher: Flusher
