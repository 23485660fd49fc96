"""Draws adapters that are loaded and unloaded during requests, and images for which the encoder has little memory.

This is not part of plan.py on purpose. A line leaves out a value that is the same object as the default of its field,
and Python shares equal numbers within a file. Lines are seeds of further draws, so in one file with Stage, every seed
would give another plan.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

__all__ = [
    "IMAGE_BLOCKS",
    "LENDING_CLIENTS_MIN",
    "LENDING_SHARE",
    "drawn_images",
    "drawn_loads",
    "drawn_name",
    "drawn_room",
    "drawn_shelf",
    "drawn_unloads",
]

LENDING_SHARE = 0.5
LENDING_CLIENTS_MIN = 5  # with fewer clients, requests rarely meet
IMAGE_BLOCKS = 18  # enough for two images and a short text, in addition to the smallest pool
NAMES = ("a", "b")
CONTENTS = ("x", "y", "z")
ROOMS = (10, 10, 13, 40)  # tiles, of which two images have at most ten

Moment = Callable[[float], float]
"""Draws a time within a number of seconds."""


def drawn_shelf(rng: Random) -> dict[str, Any]:
    """Draw a stage's settings for adapters.

    Args:
        rng: source of randomness.
    """
    return {"adapters_max": rng.choice((1, 2, 2)), "load_seconds": rng.choice((0.0, 0.0, 0.01))}


def drawn_room(rng: Random) -> dict[str, Any]:
    """Draw a stage's settings for images.

    Args:
        rng: source of randomness.
    """
    return {"room_tiles": rng.choice(ROOMS), "tile_seconds": rng.choice((0.0, 0.001, 0.005))}


def drawn_name(rng: Random) -> str:
    """Draw the adapter of a client: none, an adapter that is loaded and unloaded, or rarely an adapter that never
    exists.

    Args:
        rng: source of randomness.
    """
    return rng.choice(("", *3 * NAMES, "nobody's"))


def drawn_images(rng: Random) -> tuple[int, ...]:
    return tuple(rng.randrange(4) for _ in range(rng.choice((0, 1, 1, 2))))


def drawn_loads(rng: Random, moment: Moment, span: float) -> list[dict[str, Any]]:
    """Draw loads of adapters: each name at the start, and later more, some of them with a name that is in use.

    Args:
        rng: source of randomness.
        moment: draws a time within a number of seconds.
        span: seconds in which everything begins.
    """
    loads = [{"at": 0.0, "name": name, "content": rng.choice(CONTENTS)} for name in NAMES]
    for _ in range(rng.randint(0, 4)):
        at, name, content = moment(span), rng.choice(NAMES), rng.choice(CONTENTS)
        loads.append({"at": at, "name": name, "content": content, "replaces": rng.random() < 0.7})
    return loads


def drawn_unloads(rng: Random, moment: Moment, span: float) -> list[dict[str, Any]]:
    seconds = (None, None, 0.0, 0.005, 0.05)
    return [
        {"at": moment(span), "name": rng.choice(NAMES), "seconds": rng.choice(seconds)}
        for _ in range(rng.randint(0, 3))
    ]
