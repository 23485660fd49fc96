"""What somebody may have meant who wrote a name that there is not."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["closest_name"]

LIKENESS_MIN = 0.7  # of 1; a name with every fourth letter wrong is still found, another word is not


def closest_name(written: str, known: Iterable[str]) -> str | None:
    """The known name that is most like it; None if none is like it. - and _ are the same, and so are a and A."""
    import difflib  # for mistakes alone

    spelled = {_plain(name): name for name in known}
    found = difflib.get_close_matches(_plain(written), spelled, n=1, cutoff=LIKENESS_MIN)
    return spelled[found[0]] if found else None


def _plain(name: str) -> str:
    return name.lower().replace("_", "-").lstrip("-")
