"""Features of requests in a simulation of the stack: grammars, stop strings, known tokens, adapters and images.

A grammar is a list of allowed texts. It becomes an automaton that defines the allowed tokens. Tokens are bytes of UTF-8
text.

Do not move the draws of adapters and images to plan.py, where Stage is. The line of a stage omits a value that is the
same object as its field's default, and Python shares equal constants within one file. Such a line is the seed of
further draws. So the move would change the plan of every seed.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Any

from trioserve.contracts.structured_output import StructuredOutput
from trioserve.testing.automaton_guide import Automaton, AutomatonGuide
from trioserve.testing.fake_engine import byte_form_compiler

__all__ = [
    "FORM_SHARE",
    "IMAGE_BLOCKS",
    "LENDING_CLIENTS_MIN",
    "LENDING_SHARE",
    "compile_forms",
    "drawn_form",
    "drawn_images",
    "drawn_known_count",
    "drawn_loads",
    "drawn_name",
    "drawn_room",
    "drawn_shelf",
    "drawn_stops",
    "drawn_unloads",
    "guide_of",
    "is_whole",
    "shown",
    "stopped_at",
    "text_of",
]

# BITS has the texts for models that write only two different tokens.
LETTERS = (("left", "right"), ("a", "ab", "abc"), ("no",), ("yes, indeed", "yes, perhaps"))
BITS = (("\x00\x01", "\x01"), ("\x00\x00\x00\x00",), ("\x01\x00\x01", "\x01\x00\x00"))
SHARE = 0.3


def drawn_form(rng: Random, vocab_size: int, *, share: float = SHARE) -> tuple[str, ...]:
    """Draw the allowed texts of a request, or () for free text.

    Args:
        rng: source of randomness.
        vocab_size: number of different tokens that the model writes. If it is 1, no request has a grammar.
        share: fraction of the requests with a grammar.
    """
    forms = LETTERS if vocab_size > 2 else BITS if vocab_size == 2 else ()
    return rng.choice(forms) if forms and rng.random() < share else ()


def compile_forms(forms: Iterable[Sequence[str]]) -> None:
    """Compile grammars before a run, so that no request waits for them.

    Then a run does not depend on the plans that this process ran before.

    Args:
        forms: allowed texts of each request. Empty entries are ignored.
    """
    for form in filter(None, forms):
        byte_form_compiler().compile(StructuredOutput.choice(form))


def guide_of(form: Sequence[str]) -> AutomatonGuide | None:
    """Return the guide for allowed texts, or None for free text.

    Args:
        form: the allowed texts.
    """
    return AutomatonGuide(_automaton(form)) if form else None


def is_whole(form: Sequence[str], token_ids: Sequence[int]) -> bool:
    """Return True if an output is one of the allowed texts, and no longer allowed text begins with the output.

    Args:
        form: the allowed texts.
        token_ids: the output.
    """
    text = bytes(token_ids)
    return any(text == whole.encode() for whole in form) and not _follow(form, text)


def _follow(form: Sequence[str], text: bytes) -> list[int]:
    """Return the bytes that may follow the beginning of a text."""
    wholes = [whole.encode() for whole in form]
    return sorted({whole[len(text)] for whole in wholes if whole.startswith(text) and len(whole) > len(text)})


def _automaton(form: Sequence[str]) -> Automaton:
    texts = [b""]
    states = []
    for text in texts:  # The loop appends to this list.
        moves = []
        for token in _follow(form, text):
            moves.append((token, len(texts)))
            texts.append(text + bytes((token,)))
        states.append(tuple(moves))
    return tuple(states)


def text_of(tokens: Sequence[int], *, is_whole: bool) -> str:
    """Return the text of tokens. An incomplete character at the end is left out unless `is_whole` is True.

    Args:
        tokens: bytes of the text.
        is_whole: True if no more tokens come.
    """
    return codecs.getincrementaldecoder("utf-8")("replace").decode(bytes(tokens), is_whole)


FORM_SHARE, STOP_SHARE, KNOWN_SHARE = 0.15, 0.6, 0.4


def drawn_stops(rng: Random, form: Sequence[str]) -> tuple[str, ...]:
    """Draw the stop strings of a request. Most requests have none. With a grammar, they are pieces of its texts.

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
    """Draw the number of known tokens of a response. It is mostly 0, and rarely the length of the whole response.

    Args:
        rng: source of randomness.
        output: maximum number of tokens.
        form: the allowed texts. Empty: free text.
    """
    if rng.random() >= KNOWN_SHARE:
        return 0
    return rng.randint(1, min(output, *map(len, form)) if form else output)


def stopped_at(tokens: Sequence[int], stops: Sequence[str]) -> int | None:
    """Return the number of tokens after which a stop string is complete, or None. Tokens are bytes.

    Args:
        tokens: tokens of a response.
        stops: the stop strings.
    """
    for count in range(1, len(tokens) + 1):
        if any(stop in text_of(tokens[:count], is_whole=False) for stop in stops):
            return count
    return None


def shown(tokens: Sequence[int], stops: Sequence[str], *, is_whole: bool) -> str:
    """Return the text that a client has received.

    The text contains no stop string. It ends before a possible beginning of a stop string, unless `is_whole` is True.

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


LENDING_SHARE = 0.5
LENDING_CLIENTS_MIN = 5  # With fewer clients, requests rarely run at the same time.
IMAGE_BLOCKS = 18  # number of additional blocks, which is enough for two images and a short text
NAMES = ("a", "b")
CONTENTS = ("x", "y", "z")
# numbers of image tiles whose rows are kept. Two images have at most ten tiles.
ROOMS = (10, 10, 13, 40)

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
    """Draw the adapter name of a client.

    A client has no adapter, an adapter that operators load and unload, or rarely an adapter that never exists.

    Args:
        rng: source of randomness.
    """
    return rng.choice(("", *3 * NAMES, "nobody's"))


def drawn_images(rng: Random) -> tuple[int, ...]:
    return tuple(rng.randrange(4) for _ in range(rng.choice((0, 1, 1, 2))))


def drawn_loads(rng: Random, moment: Moment, span: float) -> list[dict[str, Any]]:
    """Draw loads of adapters. Each name is loaded at the start. Later loads may use a name that is in use.

    Args:
        rng: source of randomness.
        moment: draws a time within a number of seconds.
        span: all parts of the plan begin within this many seconds.
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
