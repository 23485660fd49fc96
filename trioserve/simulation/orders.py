"""Acts of operators in a plan, and random times.

Times are on a coarse grid, so that many things happen at the same moment.
"""

from __future__ import annotations

from random import Random

import msgspec

__all__ = ["GRID_SECONDS", "Moments", "Order"]

GRID_SECONDS = 0.005


class Order(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="order"):
    """An act of the operator: it aborts ids, drains, or ends all that still runs, as after too long a drain.

    Attributes:
        at: time of the act, in seconds.
        ids: ids to abort.
        drains: True: drain.
        ends_all: True: end all requests.
    """

    at: float
    ids: tuple[str, ...] = ()
    drains: bool = False
    ends_all: bool = False


class Moments:
    """Draws random times for one plan.

    Args:
        rng: source of randomness.
        span: seconds in which everything begins.
    """

    def __init__(self, rng: Random, *, span: float) -> None:
        self.span = span
        self._rng = rng

    def moment(self, seconds_max: float) -> float:
        return round(self._rng.randint(0, round(seconds_max / GRID_SECONDS)) * GRID_SECONDS, 3)

    def maybe(self, chance: float) -> float | None:
        """Draw the seconds after which a client gives up, or None for a client that does not.

        Args:
            chance: probability that it gives up.
        """
        return round(self.moment(self.span) + GRID_SECONDS, 3) if self._rng.random() < chance else None

    def drains(self, chance: float) -> list[Order]:
        """Draw the acts of a drain. They may be none, and sometimes all remaining requests are ended later.

        Args:
            chance: probability of a drain.
        """
        orders = []
        if self._rng.random() < chance:
            at = self.moment(self.span)
            orders.append(Order(at=at, drains=True))
            if self._rng.random() < 0.5:
                orders.append(Order(at=round(at + self.moment(self.span), 3), ends_all=True))
        return orders
