"""Versions of model weights, references to LoRA adapters, and the salts of blocks that are computed with them.

Each token records the version that sampled it. A request finds only KV blocks that were computed with its own version
and its own adapter.
"""

from __future__ import annotations

import enum
from typing import NewType, Protocol, TypeAlias

import msgspec

__all__ = [
    "AdapterContent",
    "AdapterId",
    "AdapterRef",
    "BroadcastWeights",
    "INITIAL_WEIGHTS",
    "ReplacementState",
    "SharedWeights",
    "WEIGHT_GROUP",
    "WeightGroup",
    "WeightSource",
    "WeightVersions",
    "adapter_salt",
    "add_versions",
    "joined_versions",
    "kept_salt",
    "weights_salt",
]

INITIAL_WEIGHTS = "default"
"""Version of the weights that the engine loaded at its start. SGLang's name."""

_WEIGHTS = "weights:"

WEIGHT_GROUP = "weight_update_group"
"""SGLang's name of the default group."""

WeightVersions: TypeAlias = tuple[tuple[str, int], ...]
"""Runs of consecutive tokens: a version, and the number of tokens that it sampled.

Versions are compared only for equality. The counts add up to the number of tokens. Empty if all tokens are from
INITIAL_WEIGHTS, as in most responses.
"""


class ReplacementState(enum.Enum):
    """Progress of replacing weights."""

    CHECKED = "checked"  # The new weights were checked, and the old weights are unchanged.
    BEGUN = "begun"  # A failure in this state leaves a mixture of old and new weights.
    WHOLE = "whole"  # All new weights are written.
    GONE = "gone"  # The executor has ended, so its weights are lost.


class SharedWeights(msgspec.Struct, frozen=True):
    """Weights in a segment of shared memory on this machine. trioserve.rollouts.publish_weights creates the segment.

    Attributes:
        name: Name of the segment.
    """

    name: str


class BroadcastWeights(msgspec.Struct, frozen=True, kw_only=True):
    """Weights that rank 0 of a torch.distributed group sends, one tensor after the other. The engine has joined the
    group.

    Attributes:
        names: Names in the model's checkpoint, in the order of sending.
        dtypes: dtype of each tensor: bfloat16, float16 or float32.
        shapes: Shape of each tensor.
        group_name: Name of the group.
    """

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    group_name: str = WEIGHT_GROUP


class WeightGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group for weight transfers, which the engine must join. Rank 0 is the trainer, which listens at the address.

    Attributes:
        master_address: Host of the trainer.
        master_port: Port of the trainer.
        rank: Rank of the engine in the group.
        world_size: Number of ranks.
        group_name: Name of the group.
        seconds_max: Longest wait for the other ranks, and later for each tensor.
    """

    master_address: str
    master_port: int
    rank: int
    world_size: int
    group_name: str = WEIGHT_GROUP
    seconds_max: float = 60.0


WeightSource: TypeAlias = str | SharedWeights | BroadcastWeights
"""A str is the path of a directory or file from which the model can be loaded."""


def joined_versions(
    first: WeightVersions, first_count: int, second: WeightVersions, second_count: int
) -> WeightVersions:
    """Return the versions of two consecutive parts of a response.

    Args:
        first: Versions of the first part.
        first_count: Tokens of the first part.
        second: Versions of the second part.
        second_count: Tokens of the second part.
    """
    if not first and not second:
        return ()
    joined = [*first]
    add_versions(joined, first_count, second, second_count)
    return tuple(joined)


def add_versions(runs: list[tuple[str, int]], count: int, more: WeightVersions, more_count: int) -> None:
    """Append the versions of more tokens to `runs`, in place.

    Args:
        runs: Versions of the tokens so far.
        count: Tokens so far.
        more: Versions of the new tokens.
        more_count: New tokens.

    Cost:
        Grows with the length of `more`, not of `runs`: a client may claim that each of its tokens has another version.
    """
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
    """Return the salt of blocks that are computed with one version of the weights.

    Different pairs of arguments give different salts, so callers cannot choose a salt that collides.

    Args:
        salt: Salt that the caller chose. None if there is none.
        version: Version of the weights. None for the initial weights: the salt is then returned unchanged, unless it
            looks like the salt of a version.
    """
    if version is None:
        return f"{_WEIGHTS}none:{salt}" if salt is not None and salt.startswith(_WEIGHTS) else salt
    own = f"{_WEIGHTS}{len(version)}:{version}"
    return own if salt is None else f"{own}={salt}"


def kept_salt(request_id: str) -> str:
    """Return the salt of blocks that several versions of weights computed for one request. No other request finds these
    blocks.

    Args:
        request_id: Id that the engine gave to the request.
    """
    return f"{_WEIGHTS}kept:{request_id}"


def _runs(versions: WeightVersions, count: int) -> WeightVersions:
    return versions or ((INITIAL_WEIGHTS, count),)


AdapterId = NewType("AdapterId", int)
"""Number of one load of an adapter. Counts from 1. Loading the same adapter again gives a new number."""

_ADAPTER = "adapter:"
_NONE = "none:"  # No digest equals this value, because a digest consists of hexadecimal digits.


class AdapterRef(msgspec.Struct, frozen=True):
    """A loaded adapter.

    Attributes:
        id: Number of this load of the adapter, unique in the engine.
        digest: Hash of the adapter's content, in hexadecimal. Equal content has an equal digest on every machine, under
            any name.
    """

    id: AdapterId
    digest: str


class AdapterContent(Protocol):
    """An adapter that was read into host memory."""

    @property
    def digest(self) -> str: ...
    @property
    def rank_max(self) -> int: ...
    @property
    def byte_count(self) -> int: ...


def adapter_salt(salt: str | None, digest: str | None) -> str | None:
    """Return the salt of blocks that are computed with an adapter, or without an adapter.

    Different pairs of arguments give different salts, so callers cannot choose a salt that collides.

    Args:
        salt: Salt that the caller chose. None if there is none.
        digest: Digest of the adapter. None without an adapter: the salt is then returned unchanged, unless it looks
            like the salt of an adapter.
    """
    if digest is None:
        return f"{_ADAPTER}{_NONE}{salt}" if salt is not None and salt.startswith(_ADAPTER) else salt
    return f"{_ADAPTER}{digest}" if salt is None else f"{_ADAPTER}{digest}={salt}"
