"""What clients of a simulation of the stack borrow: adapters that come and go under them, and what the model has made
of images, for which there is little room."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

__all__ = [
    "IMAGE_BLOCKS",
    "LENDING_CLIENTS_MIN",
    "LENDING_SHARE",
    "drawn_loads",
    "drawn_name",
    "drawn_pictures",
    "drawn_room",
    "drawn_shelf",
    "drawn_unloads",
]

LENDING_SHARE = 0.5
LENDING_CLIENTS_MIN = 5  # fewer do not meet
IMAGE_BLOCKS = 18  # two images and a short text, also of the smallest pool
NAMES = ("a", "b")
CONTENTS = ("x", "y", "z")
ROOMS = (10, 10, 13, 40)  # tiles; two images have ten at most

Moment = Callable[[float], float]
"""A moment in so many seconds."""


def drawn_shelf(rng: Random) -> dict[str, Any]:
    """What a stage has for adapters."""
    return {"adapters_max": rng.choice((1, 2, 2)), "load_seconds": rng.choice((0.0, 0.0, 0.01))}


def drawn_room(rng: Random) -> dict[str, Any]:
    """And for images."""
    return {"room_tiles": rng.choice(ROOMS), "tile_seconds": rng.choice((0.0, 0.001, 0.005))}


def drawn_name(rng: Random) -> str:
    """Of the adapter that a client asks for: none, one of those that come and go, or rarely one that never is."""
    return rng.choice(("", *3 * NAMES, "nobody's"))


def drawn_pictures(rng: Random) -> tuple[int, ...]:
    return tuple(rng.randrange(4) for _ in range(rng.choice((0, 1, 1, 2))))


def drawn_loads(rng: Random, moment: Moment, span: float) -> list[dict[str, Any]]:
    """Each name at the beginning, and more in between, some of them under a name that is taken."""
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
