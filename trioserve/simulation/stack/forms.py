"""Forms in a simulation of the stack: one of a few texts, as the automaton that a response then follows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random

from trioserve.contracts.structured_output import StructuredOutput
from trioserve.testing.automaton_guide import Automaton, AutomatonGuide
from trioserve.testing.fake_engine import byte_form_compiler

__all__ = ["compile_forms", "drawn_form", "guide_of", "is_whole"]

# The second ones are for models that know two tokens alone.
LETTERS = (("left", "right"), ("a", "ab", "abc"), ("no",), ("yes, indeed", "yes, perhaps"))
BITS = (("\x00\x01", "\x01"), ("\x00\x00\x00\x00",), ("\x01\x00\x01", "\x01\x00\x00"))
SHARE = 0.3


def drawn_form(rng: Random, vocab_size: int, *, share: float = SHARE) -> tuple[str, ...]:
    """share: of those that have one; none where the model knows too few tokens."""
    forms = LETTERS if vocab_size > 2 else BITS if vocab_size == 2 else ()
    return rng.choice(forms) if forms and rng.random() < share else ()


def compile_forms(forms: Iterable[Sequence[str]]) -> None:
    """So that nobody waits for these, whichever plan of this process asked for them first. Empty ones are none."""
    for form in filter(None, forms):
        byte_form_compiler().compile(StructuredOutput.choice(form))


def guide_of(form: Sequence[str]) -> AutomatonGuide | None:
    """What restrains a response to one of these texts; None where there are none."""
    return AutomatonGuide(_automaton(form)) if form else None


def is_whole(form: Sequence[str], token_ids: Sequence[int]) -> bool:
    """Whether the text is complete, and no longer one begins with it."""
    text = bytes(token_ids)
    return any(text == whole.encode() for whole in form) and not _follow(form, text)


def _follow(form: Sequence[str], text: bytes) -> list[int]:
    """The bytes that may come behind this beginning."""
    wholes = [whole.encode() for whole in form]
    return sorted({whole[len(text)] for whole in wholes if whole.startswith(text) and len(whole) > len(text)})


def _automaton(form: Sequence[str]) -> Automaton:
    texts = [b""]
    states = []
    for text in texts:  # grows
        moves = []
        for token in _follow(form, text):
            moves.append((token, len(texts)))
            texts.append(text + bytes((token,)))
        states.append(tuple(moves))
    return tuple(states)
