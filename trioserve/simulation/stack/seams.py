"""Stop strings and resumed responses in a simulation of the stack: requests, and the text that a client must see."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from trioserve.simulation.stack.http_text import text_of

__all__ = ["FORM_SHARE", "drawn_known_count", "drawn_stops", "shown", "stopped_at"]

FORM_SHARE, STOP_SHARE, KNOWN_SHARE = 0.15, 0.6, 0.4


def drawn_stops(rng: Random, form: Sequence[str]) -> tuple[str, ...]:
    """Draw stop strings: pieces of the allowed texts if there is a grammar. Mostly there are none.

    Args:
        rng: source of randomness.
        form: the allowed texts. Empty: free text.
    """
    if not form or rng.random() >= STOP_SHARE:
        return ()
    stops = set()
    for _ in range(rng.randint(1, 2)):
        text = rng.choice(form)
        begin = rng.randrange(max(1, len(text) - 1))
        stops.add(text[begin : begin + rng.randint(1, 4)])
    return tuple(sorted(stops))


def drawn_known_count(rng: Random, output: int, form: Sequence[str]) -> int:
    """Draw the number of known tokens of a response. It is mostly 0, and rarely all of them.

    Args:
        rng: source of randomness.
        output: maximum number of tokens.
        form: the allowed texts. Empty: free text.
    """
    if rng.random() >= KNOWN_SHARE:
        return 0
    return rng.randint(1, min(output, *map(len, form)) if form else output)


def stopped_at(tokens: Sequence[int], stops: Sequence[str]) -> int | None:
    """Return the number of tokens with which a stop string is complete, or None. Tokens are bytes.

    Args:
        tokens: tokens of a response.
        stops: the stop strings.
    """
    for count in range(1, len(tokens) + 1):
        if any(stop in text_of(tokens[:count], is_whole=False) for stop in stops):
            return count
    return None


def shown(tokens: Sequence[int], stops: Sequence[str], *, is_whole: bool) -> str:
    """Return the text that a client has. It has no stop string, and no beginning of one as long as more may come.

    Args:
        tokens: tokens of a response so far.
        stops: the stop strings.
        is_whole: True if no more tokens come.
    """
    text = text_of(tokens, is_whole=is_whole)
    found = [text.index(stop) for stop in stops if stop in text]
    if found:
        return text[: min(found)]
    if is_whole:
        return text
    held = [count for stop in stops for count in range(1, len(stop)) if text.endswith(stop[:count])]
    return text[: len(text) - max(held, default=0)]
