"""Which weights computed what: an engine's weights have a version, every token knows the one that sampled it, and no
block of KV is found by requests of another one."""

from __future__ import annotations

import enum
from typing import TypeAlias

import msgspec

__all__ = [
    "INITIAL_WEIGHTS",
    "WEIGHT_GROUP",
    "BroadcastWeights",
    "ReplacementState",
    "SharedWeights",
    "WeightGroup",
    "WeightSource",
    "WeightVersions",
    "add_versions",
    "joined_versions",
    "kept_salt",
    "weights_salt",
]

INITIAL_WEIGHTS = "default"
"""The version of the weights that an engine was opened with, as SGLang calls it."""

_WEIGHTS = "weights:"

WEIGHT_GROUP = "weight_update_group"
"""What SGLang calls a group that has no other name."""

WeightVersions: TypeAlias = tuple[tuple[str, int], ...]
"""Of tokens in a row: a version and how many of them it sampled, again and again. Versions are compared by equality
only. The counts add up to the number of tokens; or it is empty: all of them are of INITIAL_WEIGHTS, as nearly all
responses are."""


class ReplacementState(enum.Enum):
    """How far new weights are in the places of the old ones. BEGUN: what is there is of both, if it ends so. GONE: what
    computes with them has ended, and nothing is there any more."""

    CHECKED = "checked"
    BEGUN = "begun"
    WHOLE = "whole"
    GONE = "gone"


class SharedWeights(msgspec.Struct, frozen=True):
    """In a segment of shared memory on this machine, as trioserve.rollouts.publish_weights makes one, by its name."""

    name: str


class BroadcastWeights(msgspec.Struct, frozen=True, kw_only=True):
    """Sent by rank 0 of a torch.distributed group that the engine has joined, one after the other in this order. names:
    those of the model's checkpoint. dtypes: bfloat16, float16 or float32, of each."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    group_name: str = WEIGHT_GROUP


class WeightGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group to be joined, as its rank: rank 0 is the trainer, which listens at this address. seconds_max: how long
    the others may be waited for, and each tensor later on."""

    master_address: str
    master_port: int
    rank: int
    world_size: int
    group_name: str = WEIGHT_GROUP
    seconds_max: float = 60.0


WeightSource: TypeAlias = str | SharedWeights | BroadcastWeights
"""A path is that of a directory or file from which the model could be opened."""


def joined_versions(
    first: WeightVersions, first_count: int, second: WeightVersions, second_count: int
) -> WeightVersions:
    """Of tokens and those that follow them, with how many there are of each."""
    if not first and not second:
        return ()
    joined = [*first]
    add_versions(joined, first_count, second, second_count)
    return tuple(joined)


def add_versions(runs: list[tuple[str, int]], count: int, more: WeightVersions, more_count: int) -> None:
    """The same in place, of `count` tokens and `more_count` that follow them. However many runs there are, it takes as
    long as there is more: a client may say that each of its tokens is of another version."""
    if not runs and not more:
        return
    if not runs and count:
        runs.append((INITIAL_WEIGHTS, count))
    for version, own_count in _runs(more, more_count):
        if runs and runs[-1][0] == version:
            runs[-1] = (version, runs[-1][1] + own_count)
        elif own_count:
            runs.append((version, own_count))


def weights_salt(salt: str | None, version: str | None) -> str | None:
    """The salt of blocks that are computed by weights of this version; None: by those that an engine was opened with,
    and nearly every salt stays as it is. No two pairs give the same, whatever salts callers choose."""
    if version is None:
        return f"{_WEIGHTS}none:{salt}" if salt is not None and salt.startswith(_WEIGHTS) else salt
    own = f"{_WEIGHTS}{len(version)}:{version}"
    return own if salt is None else f"{own}={salt}"


def kept_salt(request_id: str) -> str:
    """The salt of what weights of several versions have computed for one request, which nobody else is to find."""
    return f"{_WEIGHTS}kept:{request_id}"


def _runs(versions: WeightVersions, count: int) -> WeightVersions:
    return versions or ((INITIAL_WEIGHTS, count),)
