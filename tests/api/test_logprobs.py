"""Tests log probabilities of text completions: the offsets of tokens, and the names of tokens that are parts of
characters.
"""

from __future__ import annotations

from typing import Any

import pytest

from trioserve.api.openai.response_types import LogprobsWriter
from trioserve.contracts.events import TokenLogprob


class Pieces:
    """A tokenizer whose token ids are indices into a list."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces

    def token_bytes(self, token_id: int) -> bytes:
        return self._pieces[token_id]


def taken(pieces: list[bytes], *, chunk: int = 100, **echo: Any) -> tuple[list[str], list[int]]:
    logprobs = LogprobsWriter(Pieces(pieces), **echo)  # type: ignore[arg-type]
    tokens: list[str] = []
    offsets: list[int] = []
    for begin in range(0, len(pieces), chunk):
        ids = list(range(len(pieces)))[begin : begin + chunk]
        made: Any = logprobs.take(ids, [TokenLogprob(token_id=token_id, logprob=-1.0, top=()) for token_id in ids])
        tokens += made.tokens
        offsets += made.text_offset
    return tokens, offsets


BIRD = "\N{PARROT}".encode()


@pytest.mark.parametrize("chunk", [1, 2, 100])
def test_part_of_a_character_has_the_characters_offset_and_is_named_by_its_bytes(chunk: int) -> None:
    tokens, offsets = taken([b"a", b" " + BIRD[:2], BIRD[2:3], BIRD[3:] + b"!", b"b"], chunk=chunk)
    assert tokens == ["a", "bytes: \\xf0\\x9f", "bytes:\\xa6", "bytes:\\x9c!", "b"]
    assert offsets == [0, 1, 2, 2, 4]


@pytest.mark.parametrize("chunk", [1, 100])
def test_offsets_in_an_echo_refer_to_its_text(chunk: int) -> None:
    pieces = [b"<s>", b" The", b" sun", b"<|end|>", b"\n", b" is", b" hot"]
    _, offsets = taken(pieces, chunk=chunk, echo="The sun\n is", echo_tokens=6)
    assert offsets == [0, 0, 3, 7, 7, 8, 11]


def test_special_tokens_written_in_the_prompt_are_part_of_its_text() -> None:
    _, offsets = taken([b"<|start|>", b"user", b"x"], echo="<|start|>user", echo_tokens=2)
    assert offsets == [0, 9, 13]


def test_alternatives_that_are_parts_of_characters_have_different_names() -> None:
    logprobs = LogprobsWriter(Pieces([b"\xf0", b"\xe6", b"a"]))  # type: ignore[arg-type]
    made: Any = logprobs.take([0], [TokenLogprob(token_id=0, logprob=-1.0, top=((0, -1.0), (1, -2.0), (2, -3.0)))])
    assert made.top_logprobs == [{"bytes:\\xf0": -1.0, "bytes:\\xe6": -2.0, "a": -3.0}]
