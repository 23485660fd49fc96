"""Grammars in a simulation of the stack: one of a few texts, as the automaton that a response follows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random

from trioserve.contracts.structured_output import StructuredOutput
from trioserve.testing.automaton_guide import Automaton, AutomatonGuide
from trioserve.testing.fake_engine import byte_form_compiler

__all__ = ["compile_forms", "drawn_form", "guide_of", "is_whole"]

# BITS is for models that write only two tokens.
LETTERS = (("left", "right"), ("a", "ab", "abc"), ("no",), ("yes, indeed", "yes, perhaps"))
BITS = (("\x00\x01", "\x01"), ("\x00\x00\x00\x00",), ("\x01\x00\x01", "\x01\x00\x00"))
SHARE = 0.3


def drawn_form(rng: Random, vocab_size: int, *, share: float = SHARE) -> tuple[str, ...]:
    """Draw allowed texts, or () for free text.

    Args:
        rng: source of randomness.
        vocab_size: tokens that the model writes. With too few, there is no grammar.
        share: share of the requests with a grammar.
    """
    forms = LETTERS if vocab_size > 2 else BITS if vocab_size == 2 else ()
    return rng.choice(forms) if forms and rng.random() < share else ()


def compile_forms(forms: Iterable[Sequence[str]]) -> None:
    """Compile grammars, so that no request waits for them, whichever plan of this process used them first.

    Args:
        forms: allowed texts of each request. Empty ones are ignored.
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
    """Return True if an output is one of the texts, and no longer text begins with it.

    Args:
        form: the allowed texts.
        token_ids: the output.
    """
    text = bytes(token_ids)
    return any(text == whole.encode() for whole in form) and not _follow(form, text)


def _follow(form: Sequence[str], text: bytes) -> list[int]:
    """Return the bytes that may follow a beginning."""
    wholes = [whole.encode() for whole in form]
    return sorted({whole[len(text)] for whole in wholes if whole.startswith(text) and len(whole) > len(text)})


def _automaton(form: Sequence[str]) -> Automaton:
    texts = [b""]
    states = []
    for text in texts:  # The list grows during the loop.
        moves = []
        for token in _follow(form, text):
            moves.append((token, len(texts)))
            texts.append(text + bytes((token,)))
        states.append(tuple(moves))
    return tuple(states)
