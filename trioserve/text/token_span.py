"""How much of a text one token can stand for at most, so that a text which cannot fit is known before it is tokenized.

The reasoning: a tokenizer takes a text, normalizes it, cuts it and spells each part by tokens, leaving nothing out. So
a text of b bytes has at least b / L tokens if its longest token spells L bytes. What this rests on is looked up in the
tokenizer at hand, and without it nothing is claimed:
- Nothing is left out: no step of the cutting removes what it cuts at, and every byte has a token of its own. Bytes that
  have none, as control characters in some vocabularies, may vanish or become one "unknown" together: not counted.
- Normalizing does not shorten, or by a known factor: NFC writes at most 3.5 bytes as one (U+1FBE U+0308 U+0301 as
  U+0390). What SentencePiece does with spaces only lengthens.
- A special token stands for its own text. Where one takes the spaces around it along, spaces are not counted.
Tokens that are put around the text come on top.
"""

from __future__ import annotations

import json
from typing import Any

import tokenizers
from tokenizers import models

from trioserve.text.token_pieces import byte_alphabet

__all__ = ["TokenSpan", "steps_of"]

NFC_SHRINKS_AT_MOST = 4  # times, in bytes of UTF-8
SLICE_CHARACTERS = 65_536  # looked at in one go, a tenth of a millisecond: other threads are let in between

_BYTES_OUTSIDE_UTF8 = bytes([0xC0, 0xC1, *range(0xF5, 0x100)])

# Steps of cutting that keep every character; Split and Punctuation do so unless told to remove what they cut at.
_KEEPING_CUTS = frozenset({"ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "Split", "Punctuation"})


class TokenSpan:
    """bytes_max: what one token of this tokenizer stands for at most, in bytes of UTF-8; None: nothing is certain."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._counts_spaces = not any(token.lstrip or token.rstrip for token in _added_tokens(backend))
        self._uncounted = b""
        self.bytes_max: int | None = None
        shrinks = _shrinks_at_most(backend)
        cuts = steps_of(backend.pre_tokenizer, "pretokenizers")
        is_keeping = all(step["type"] in _KEEPING_CUTS and step.get("behavior") != "Removed" for step in cuts)
        model = backend.model
        if shrinks is None or not is_keeping or not isinstance(model, models.BPE):
            return
        if model.continuing_subword_prefix or model.end_of_word_suffix:
            return
        vocabulary = backend.get_vocab(with_added_tokens=False)
        if not vocabulary:
            return
        if any(step["type"] == "ByteLevel" for step in cuts):
            longest = max(map(len, vocabulary))  # a character a byte
            missing = bytes(byte for character, byte in byte_alphabet().items() if character not in vocabulary)
            self._uncounted = missing.translate(None, _BYTES_OUTSIDE_UTF8)
            if self._uncounted and backend.normalizer is not None:
                return  # it might write them for others
        else:
            longest = max(len(token.encode()) for token in vocabulary)
            if not model.byte_fallback or any(f"<0x{byte:02X}>" not in vocabulary for byte in range(0x100)):
                return
        self.bytes_max = shrinks * max([longest, *(_added_bytes(backend, token) for token in _added_tokens(backend))])

    def token_count_min(self, text: str) -> int:
        """So many tokens the text has at least. Two milliseconds a megabyte at most."""
        if self.bytes_max is None:
            return 0
        return -(-self._byte_count(text) // self.bytes_max)

    def _byte_count(self, text: str) -> int:
        byte_count = 0
        for first in range(0, len(text), SLICE_CHARACTERS):
            part = text[first : first + SLICE_CHARACTERS]
            if not self._counts_spaces:
                part = "".join(part.split())
            # Half surrogates pass here: encode says what is wrong with them.
            byte_count += len(part.encode("utf-8", "surrogatepass").translate(None, self._uncounted))
        return byte_count


def _shrinks_at_most(backend: tokenizers.Tokenizer) -> int | None:
    """By which factor normalizing shortens a text at most; None: that is not known."""
    factor = 1
    for step in steps_of(backend.normalizer, "normalizers"):
        if step["type"] == "NFC":
            factor *= NFC_SHRINKS_AT_MOST
        elif step["type"] != "Prepend" and not _replaces_by_no_less(step):
            return None
    return factor


def _added_tokens(backend: tokenizers.Tokenizer) -> list[tokenizers.AddedToken]:
    return list(backend.get_added_tokens_decoder().values())


def _added_bytes(backend: tokenizers.Tokenizer, token: tokenizers.AddedToken) -> int:
    """Of the text that is taken for this token, which may be looked for before or after normalizing."""
    content: str = token.content
    if token.normalized and backend.normalizer is not None:
        content = max(content, backend.normalizer.normalize_str(content), key=lambda text: len(text.encode()))
    return len(content.encode())


def _replaces_by_no_less(step: dict[str, Any]) -> bool:
    if step["type"] != "Replace" or "String" not in step["pattern"]:
        return False
    return len(step["content"].encode()) >= len(step["pattern"]["String"].encode())


def steps_of(part: Any, inner: str) -> list[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, one after another, as its file writes them."""
    if part is None:
        return []
    waiting, steps = [json.loads(part.__getstate__())], []
    while waiting:
        step = waiting.pop(0)
        if step["type"] == "Sequence":
            waiting[:0] = step[inner]
        else:
            steps.append(step)
    return steps
