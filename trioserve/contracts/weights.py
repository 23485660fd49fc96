"""Which weights computed what: an engine's weights have a version, and every token knows the one that sampled it."""

from __future__ import annotations

from typing import TypeAlias

__all__ = ["INITIAL_WEIGHTS", "WeightVersions", "joined_versions"]

INITIAL_WEIGHTS = "default"
"""The version of the weights that an engine was opened with, as SGLang calls it."""

WeightVersions: TypeAlias = tuple[tuple[str, int], ...]
"""Of tokens in a row: a version and how many of them it sampled, again and again. Versions are compared by equality
only. The counts add up to the number of tokens; or it is empty: all of them are of INITIAL_WEIGHTS, as nearly all
responses are."""


def joined_versions(
    first: WeightVersions, first_count: int, second: WeightVersions, second_count: int
) -> WeightVersions:
    """Of tokens and those that follow them, with how many there are of each."""
    if not first and not second:
        return ()
    joined: list[tuple[str, int]] = []
    for version, count in (*_runs(first, first_count), *_runs(second, second_count)):
        if joined and joined[-1][0] == version:
            joined[-1] = (version, joined[-1][1] + count)
        elif count:
            joined.append((version, count))
    return tuple(joined)


def _runs(versions: WeightVersions, count: int) -> WeightVersions:
    return versions or ((INITIAL_WEIGHTS, count),)
