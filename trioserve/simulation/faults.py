"""What can go wrong, and how often: drawn anew for each history, so that some are quiet and some are wild."""

from __future__ import annotations

from random import Random

import msgspec

__all__ = ["Faults", "drawn_faults"]


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """Each is the chance that the next event is of this kind; what is left over moves the step on.

    report: of a transfer that is out; strange_report: of one that is not, or a wrong one; break_calls: the connector
    raises from now on, or no longer. lost_share: of the transfers, those of which nothing is reported.
    timeout_share: of the requests that arrive, those with a deadline. slow_seconds_max: the longest pause.
    """

    abort: float
    fail: float
    wait: float
    drain: float
    report: float
    strange_report: float
    break_calls: float
    timeout_share: float
    lost_share: float
    slow_seconds_max: float


def drawn_faults(rng: Random, *, has_connector: bool) -> Faults:
    wildness = rng.random()
    return Faults(
        abort=rng.choice((0.0, 0.05, 0.1, 0.2)) * 2 * wildness,
        fail=rng.choice((0.0, 0.0, 0.03, 0.1)) * wildness,
        wait=0.08,
        drain=rng.choice((0.0, 0.0, 0.0, 0.02)),
        report=rng.choice((0.1, 0.2)) if has_connector else 0.0,
        strange_report=0.04 * wildness if has_connector else 0.0,
        break_calls=rng.choice((0.0, 0.0, 0.02)) if has_connector else 0.0,
        lost_share=rng.choice((0.0, 0.1, 0.5)),
        timeout_share=rng.choice((0.0, 0.0, 0.1, 0.4)),
        slow_seconds_max=rng.choice((0.05, 1.0)),
    )
