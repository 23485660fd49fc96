"""Converts token ids to text, one token at a time, and finds the most bytes of text that one token can represent.

The text never ends with part of a character. The decode stream of the tokenizers library has three faults. It decodes a
window of tokens again for each new token. It waits forever after a token whose text really is U+FFFD. At the end of a
sequence, it cannot return an incomplete character. This module passes the bytes of each token to one incremental UTF-8
decoder. The result is exact, and costs well under a microsecond per token.

One rule yields the bytes that each token adds. The rule is read once from the decoder of a tokenizer. Two kinds of
decoders cover the generative models: byte-level BPE (GPT-2, Llama 3, Qwen, Tekken), and SentencePiece with byte
fallback (Llama 2, Mistral). Encoder models have WordPiece (BERT) or SentencePiece without byte fallback (XLM-R). In all
these kinds, the bytes of a token do not depend on neighbouring tokens.

The most bytes of one token let a server refuse too long texts before tokenization. A tokenizer normalizes a text,
splits the text, and represents each part by tokens. It leaves nothing out. So a text of b bytes has at least b / L
tokens if the longest token has L bytes. This holds only under the following conditions, which are checked for the given
tokenizer. If a condition fails, no bound is claimed.

- Nothing is left out. No splitting step removes the separator, and every byte has a token. Some vocabularies have no
  token for some bytes, such as control characters. Such bytes may vanish, or several such bytes may become one
  "unknown" token, so they are not counted.
- Normalizing does not shorten a text, or only by a known factor. NFC writes at most 3.5 bytes as one byte (U+1FBE
  U+0308 U+0301 as U+0390). SentencePiece's handling of spaces only lengthens a text.
- A special token represents its own text. If a special token absorbs adjacent spaces, spaces are not counted.

Tokens that are added around the text only increase the count.
"""

from __future__ import annotations

import codecs
import functools
import json
from collections.abc import Callable, Set
from contextlib import suppress
from typing import Any

import tokenizers
from tokenizers import models

from trioserve.contracts.errors import ModelLoadError
from trioserve.text.request_texts import in_slices

__all__ = ["IncrementalDecoder", "TokenPieces", "TokenSpan", "byte_alphabet", "steps_of"]

TOKEN_ID_MAX = 2**32 - 1  # Largest token id that the tokenizers library can look up.


class TokenPieces(dict[int, bytes]):
    """Bytes of each token, by token id. An entry is added when its token is first used. An unknown id has empty bytes.

    Args:
        backend: The tokenizer.

    Attributes:
        whole_texts: Texts of the tokens used so far whose bytes are whole characters, by token id.
        leading_spaces_max: Maximum number of spaces that the tokenizer adds at the beginning of a text. These spaces
            are not part of the text.

    Raises:
        ModelLoadError: The kind of the tokenizer's decoder is not supported.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        super().__init__()
        self.whole_texts: dict[int, str] = {}
        self._backend = backend
        self._spell, self.leading_spaces_max = _spelling(backend)

    def __missing__(self, token_id: int) -> bytes:
        if not 0 <= token_id <= TOKEN_ID_MAX:
            return b""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""  # An unknown id is not stored, since the table would grow without bound.
        piece = self[token_id] = self._spell(token)
        with suppress(UnicodeDecodeError):
            self.whole_texts[token_id] = piece.decode("utf-8")
        return piece


def byte_alphabet() -> dict[str, int]:
    """Return the byte that each character in GPT-2's vocabulary files represents, by character."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


def _spelling(backend: tokenizers.Tokenizer) -> tuple[Callable[[str], bytes], int]:
    if backend.decoder is None:  # The vocabulary is a plain word list, whose words the library joins with spaces.
        return (lambda token: b" " + token.encode()), 1
    steps = _flat_steps(json.loads(backend.decoder.__getstate__()))
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _byte_level_spelling(), 0
    if kinds == ["WordPiece"]:
        return functools.partial(_spell_word_piece, steps[0]["prefix"]), 1
    if kinds == ["Metaspace"]:
        return functools.partial(_spell_metaspace, steps[0]["replacement"]), 1
    # The step Strip is allowed only after the step Fuse, where Strip applies to the whole text. Before Fuse, Strip
    # would apply to every token.
    replaces = [step for step in steps if step["type"] == "Replace" and "String" in step["pattern"]]
    rest = steps[len(replaces) :]
    if steps[: len(replaces)] == replaces and [step["type"] for step in rest] in _SENTENCE_PIECE_ENDINGS:
        strip: dict[str, Any] = {"content": " ", "start": 0, "stop": 0}
        if rest[-1]["type"] == "Strip":
            strip = rest[-1]
        if strip["content"] == " " and strip["stop"] == 0:
            pairs = [(step["pattern"]["String"], step["content"]) for step in replaces]
            return _sentence_piece_spelling(pairs), strip["start"]
    raise ModelLoadError(
        f"the tokenizer decodes with {' + '.join(kinds)}; supported are ByteLevel, WordPiece, Metaspace, and Replace + "
        "ByteFallback + Fuse, with or without a Strip of leading spaces"
    )


_SENTENCE_PIECE_ENDINGS = (["ByteFallback", "Fuse"], ["ByteFallback", "Fuse", "Strip"])


def _flat_steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for inner in decoder["decoders"] for step in _flat_steps(inner)]


def _byte_level_spelling() -> Callable[[str], bytes]:
    byte_of = byte_alphabet()

    def spell(token: str) -> bytes:
        try:
            return bytes([byte_of[character] for character in token])
        except KeyError:
            return token.encode()  # The text of an added token is not written in the byte alphabet.

    return spell


def _spell_word_piece(prefix: str, token: str) -> bytes:
    """Return the bytes of a WordPiece token. Spaces before punctuation are kept, unlike in the library."""
    return token.removeprefix(prefix).encode() if token.startswith(prefix) else b" " + token.encode()


def _spell_metaspace(replacement: str, token: str) -> bytes:
    return token.replace(replacement, " ").encode()


def _sentence_piece_spelling(replacements: list[tuple[str, str]]) -> Callable[[str], bytes]:
    byte_of = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(0x100)}

    def spell(token: str) -> bytes:
        for old, new in replacements:
            token = token.replace(old, new)
        return byte_of.get(token) or token.encode()

    return spell


_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class IncrementalDecoder:
    """Turns the tokens of one sequence into text.

    The joined results of all `push` calls and `flush` equal Tokenizer.decode of all ids. Bytes that are not UTF-8
    become U+FFFD, one per maximal invalid part, as the Unicode standard recommends (section 3.9). The last character of
    a sequence is held back until it is complete or `flush` is called.

    The result differs from that of the `tokenizers` library in one case: vocabularies with byte fallback. If one byte
    of a run of byte tokens is wrong, the library replaces the whole run by U+FFFD, valid characters included. Whether a
    byte is wrong is known only at the end of the run, and a stream cannot retract sent text. So this decoder replaces
    only the invalid part.

    Args:
        pieces: Bytes of each token.
        skipped_ids: Ids of tokens that add no text.
        continues_text: True if the tokens follow other text, so a leading space is part of the text.
    """

    __slots__ = ("_leading_spaces_left", "_pieces", "_skipped_ids", "_utf8", "_whole_texts")

    def __init__(self, pieces: TokenPieces, *, skipped_ids: Set[int], continues_text: bool) -> None:
        self._pieces = pieces
        self._whole_texts = pieces.whole_texts
        self._skipped_ids = skipped_ids
        self._leading_spaces_left = 0 if continues_text else pieces.leading_spaces_max
        self._utf8 = _Utf8Decoder("replace")

    def push(self, token_id: int) -> str:
        """Process one more token, and return the text that is now complete.

        The returned text is often empty. An unknown id adds nothing.
        """
        if token_id in self._skipped_ids:
            return ""
        text = self._whole_texts.get(token_id)
        if text is not None and not self._utf8.buffer and not self._leading_spaces_left:
            return text  # The code below gives the same result, but is slower.
        piece = self._pieces[token_id]
        if self._leading_spaces_left and piece:
            piece = self._without_leading_spaces(piece)
        return self._utf8.decode(piece)

    def flush(self) -> str:
        """End the text. Return U+FFFD if the last character is incomplete, otherwise ""."""
        return self._utf8.decode(b"", True)

    def _without_leading_spaces(self, piece: bytes) -> bytes:
        while self._leading_spaces_left and piece.startswith(b" "):
            piece = piece[1:]
            self._leading_spaces_left -= 1
        if piece:
            self._leading_spaces_left = 0
        return piece


NFC_SHRINKS_AT_MOST = 4  # Largest factor by which NFC shortens a text, in UTF-8 bytes.

_BYTES_OUTSIDE_UTF8 = bytes([0xC0, 0xC1, *range(0xF5, 0x100)])

# The detokenizer accepts these splitting steps, which keep every character. Split and Punctuation keep separators
# unless their behavior is "Removed".
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
