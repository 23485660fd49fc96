"""Suggestions for misspelled names."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["closest_name"]

# Minimum similarity, from 0 to 1. A name with every fourth letter wrong is found, and unrelated names are not.
LIKENESS_MIN = 0.7


def closest_name(written: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most similar to a written name.

    Ignores upper and lower case, and treats - and _ as equal.

    Args:
        written: The misspelled name.
        known: Valid names.

    Returns:
        The similar name, or None if no name is similar.
    """
    import difflib  # difflib is imported late, because only errors need this module.

    spelled = {_plain(name): name for name in known}
    found = difflib.get_close_matches(_plain(written), spelled, n=1, cutoff=LIKENESS_MIN)
    return spelled[found[0]] if found else None


def _plain(name: str) -> str:
    return name.lower().replace("_", "-").lstrip("-")
