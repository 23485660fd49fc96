"""Finds the most bytes of text that one token can represent. So too long texts are refused before tokenization.

A tokenizer normalizes a text, splits the text, and represents each part by tokens. It leaves nothing out. So a text of
b bytes has at least b / L tokens if the longest token has L bytes. This holds only under the following conditions,
which are checked for the given tokenizer. If a condition fails, no bound is claimed.

- Nothing is left out. No splitting step removes the separator, and every byte has a token. Some vocabularies have no
  token for some bytes, such as control characters. Such bytes may vanish, or several such bytes may become one
  "unknown" token, so they are not counted.
- Normalizing does not shorten a text, or only by a known factor. NFC writes at most 3.5 bytes as one byte (U+1FBE
  U+0308 U+0301 as U+0390). SentencePiece's handling of spaces only lengthens a text.
- A special token represents its own text. If a special token absorbs adjacent spaces, spaces are not counted.

Tokens that are added around the text only increase the count.
"""

from __future__ import annotations

import json
from typing import Any

import tokenizers
from tokenizers import models

from trioserve.text.detokenizer import byte_alphabet
from trioserve.text.request_texts import in_slices

__all__ = ["TokenSpan", "steps_of"]

NFC_SHRINKS_AT_MOST = 4  # Largest factor by which NFC shortens a text, in UTF-8 bytes.

_BYTES_OUTSIDE_UTF8 = bytes([0xC0, 0xC1, *range(0xF5, 0x100)])

# These splitting steps keep every character. Split and Punctuation keep separators unless their behavior is "Removed".
_KEEPING_CUTS = frozenset({"ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "Split", "Punctuation"})


class TokenSpan:
    """Bound of the text that one token of a tokenizer represents.

    Args:
        backend: The tokenizer.

    Attributes:
        bytes_max: Maximum number of UTF-8 bytes that one token represents, or None if no bound is certain.
    """

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
            longest = max(map(len, vocabulary))  # Each character of a byte-level token represents one byte.
            missing = bytes(byte for character, byte in byte_alphabet().items() if character not in vocabulary)
            self._uncounted = missing.translate(None, _BYTES_OUTSIDE_UTF8)
            if self._uncounted and backend.normalizer is not None:
                return  # The normalizer might turn counted text into these bytes.
        else:
            longest = max(len(token.encode()) for token in vocabulary)
            if not model.byte_fallback or any(f"<0x{byte:02X}>" not in vocabulary for byte in range(0x100)):
                return
        self.bytes_max = shrinks * max([longest, *(_added_bytes(backend, token) for token in _added_tokens(backend))])

    def token_count_min(self, text: str) -> int:
        """Return a lower bound of a text's token count. The bound is 0 if no other bound is certain.

        Args:
            text: The text.

        Cost: at most 2 ms per megabyte.
        """
        if self.bytes_max is None:
            return 0
        return -(-self._byte_count(text) // self.bytes_max)

    def _byte_count(self, text: str) -> int:
        byte_count = 0
        for part in in_slices(text):  # Other threads can run between two slices.
            if not self._counts_spaces:
                part = "".join(part.split())
            # Lone surrogates are allowed in this count, since `encode` will refuse them with a better message.
            byte_count += len(part.encode("utf-8", "surrogatepass").translate(None, self._uncounted))
        return byte_count


def _shrinks_at_most(backend: tokenizers.Tokenizer) -> int | None:
    """Return the largest factor by which normalizing shortens a text, or None if this factor is not known."""
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
    """Return the length of the longest text that is recognized as a given token, before or after normalizing."""
    content: str = token.content
    if token.normalized and backend.normalizer is not None:
        content = max(content, backend.normalizer.normalize_str(content), key=lambda text: len(text.encode()))
    return len(content.encode())


def _replaces_by_no_less(step: dict[str, Any]) -> bool:
    if step["type"] != "Replace" or "String" not in step["pattern"]:
        return False
    return len(step["content"].encode()) >= len(step["pattern"]["String"].encode())


def steps_of(part: Any, inner: str) -> list[dict[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer in order, in the notation of tokenizer.json.

    Args:
        part: The normalizer or pre-tokenizer, or None.
        inner: Key of the inner steps of a "Sequence": "normalizers" or "pretokenizers".
    """
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
