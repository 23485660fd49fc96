"""What operators do in a plan, and when anybody does something: times are on a coarse grid, so that much happens at the
same moment, and then the order decides."""

from __future__ import annotations

from random import Random

import msgspec

__all__ = ["GRID_SECONDS", "Moments", "Order"]

GRID_SECONDS = 0.005


class Order(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="order"):
    """What the operator does: abort by these ids, or drain, or end what still runs, as after too long a drain."""

    at: float
    ids: tuple[str, ...] = ()
    drains: bool = False
    ends_all: bool = False


class Moments:
    """Draws them for one plan. span: seconds in which everything begins."""

    def __init__(self, rng: Random, *, span: float) -> None:
        self.span = span
        self._rng = rng

    def moment(self, seconds_max: float) -> float:
        return round(self._rng.randint(0, round(seconds_max / GRID_SECONDS)) * GRID_SECONDS, 3)

    def maybe(self, chance: float) -> float | None:
        """Seconds that somebody has patience, or None."""
        return round(self.moment(self.span) + GRID_SECONDS, 3) if self._rng.random() < chance else None

    def drains(self, chance: float) -> list[Order]:
        """The server leaves, or does not; and sometimes what is left then is ended."""
        orders = []
        if self._rng.random() < chance:
            at = self.moment(self.span)
            orders.append(Order(at=at, drains=True))
            if self._rng.random() < 0.5:
                orders.append(Order(at=round(at + self.moment(self.span), 3), ends_all=True))
        return orders
