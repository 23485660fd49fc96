"""Planned calls of operators: abort, drain, pause, resume, sleep, wake up, and replace weights.

The calls are drawn from a seed before the run. Their times are on a coarse grid, so that many calls happen at the same
time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Literal

import msgspec

__all__ = [
    "GRID_SECONDS",
    "Halt",
    "Moments",
    "Order",
    "Pause",
    "Resume",
    "Sleep",
    "Swap",
    "Wake",
    "drawn_halts",
    "drawn_swaps",
    "with_retraction",
]

GRID_SECONDS = 0.005


class Order(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="order"):
    """A planned call of the operator: abort ids, drain, or end all remaining requests as after too long a drain.

    Attributes:
        at: time of the call, in seconds.
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
        span: all parts of the plan begin within this many seconds.
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
        """Draw the calls of a drain, or no calls. In some plans, all remaining requests are ended after the drain.

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


PAUSE_SHARE = 0.45
HALTS_MAX = 7
SWAP_SHARE = 0.6
SWAPS_MAX = 5

Mode = Literal["abort", "wait", "keep"]
MODES: tuple[Mode, ...] = ("abort", "wait", "keep")
RETRACTED_SHARE = 0.4  # fraction of the pauses with mode "keep" that become pauses with mode "retract"
CLEARING_SHARE = 0.3


class Pause(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="pause"):
    """The operator pauses the engine.

    Attributes:
        at: time.
        mode: effect on running requests, as in the engine's `pause_generation`.
        clears: True if computed blocks must not be reused afterwards.
        patience: seconds until the operator leaves. None: never.
    """

    at: float
    mode: Mode | Literal["retract"] = "keep"
    clears: bool = False
    patience: float | None = None


class Resume(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="resume"):
    at: float


class Sleep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="sleep"):
    """The operator puts the engine to sleep. The other attributes are as in Pause.

    Attributes:
        level: 1 keeps the weights.
    """

    at: float
    level: int = 1
    mode: Mode = "keep"
    patience: float | None = None


class Wake(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="wake"):
    at: float
    patience: float | None = None


class Swap(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="swap"):
    """The operator replaces the weights.

    Attributes:
        at: time.
        number: number of the weights, and of their version.
        in_flight: effect on running requests, as in the engine's `update_weights`.
        seconds: seconds to write the weights.
        breaks: True if writing fails after a part of the weights.
        patience: seconds until the operator leaves. None: never.
    """

    at: float
    number: int
    in_flight: Literal["keep", "recompute", "abort"] = "keep"
    seconds: float = 0.0
    breaks: bool = False
    patience: float | None = None


Halt = Pause | Resume | Sleep | Wake | Swap


def drawn_halts(
    rng: Random, moment: Callable[[float], float], span: float, *, levels: Sequence[int] = (1, 2)
) -> list[Halt]:
    """Draw pauses and sleeps. Most plans have none.

    Args:
        rng: source of randomness.
        moment: draws a time within a number of seconds.
        span: all parts of the plan begin within this many seconds.
        levels: sleep levels to draw from.
    """
    if rng.random() >= PAUSE_SHARE:
        return []
    sleeps = rng.random() < 0.6
    halts: list[Halt] = []
    for _ in range(rng.randint(1, HALTS_MAX)):
        at, mode = moment(1.5 * span), rng.choice(MODES)
        patience = round(moment(span / 2), 3) if rng.random() < 0.3 else None
        what = rng.choice(("pause", "pause", "resume", "sleep", "wake") if sleeps else ("pause", "pause", "resume"))
        if what == "pause":
            halts.append(Pause(at=at, mode=mode, patience=patience))
        elif what == "resume":
            halts.append(Resume(at=at))
        elif what == "sleep":
            halts.append(Sleep(at=at, level=rng.choice(levels), mode=mode, patience=patience))
        else:
            halts.append(Wake(at=at, patience=patience))
    return halts


def with_retraction(halt: Halt) -> Halt:
    """Change some pauses so that they retract requests or clear the prefix cache, as only a text engine can.

    Args:
        halt: the planned call.
    """
    if not isinstance(halt, Pause):
        return halt
    rng = Random(f"{halt.at} {halt.mode}")
    retracts = halt.mode == "keep" and rng.random() < RETRACTED_SHARE
    clears = rng.random() < CLEARING_SHARE
    return msgspec.structs.replace(halt, mode="retract" if retracts else halt.mode, clears=clears)


def drawn_swaps(rng: Random, moment: Callable[[float], float], span: float) -> list[Halt]:
    """Draw replacements of weights for a plan whose responses are checked token by token.

    Args:
        rng: source of randomness.
        moment: draws a time within a number of seconds.
        span: all parts of the plan begin within this many seconds.
    """
    if rng.random() >= SWAP_SHARE:
        return []
    return [
        Swap(
            at=moment(1.2 * span),
            number=rng.randint(1, 4),
            in_flight=rng.choice(("keep", "keep", "recompute", "abort")),
            seconds=rng.choice((0.0, 0.005, 0.03)),
            breaks=rng.random() < 0.1,
            patience=moment(span / 4) if rng.random() < 0.2 else None,
        )
        for _ in range(rng.randint(1, SWAPS_MAX))
    ]
