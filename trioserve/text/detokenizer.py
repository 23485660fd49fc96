"""Converts token ids to text, one token at a time. The text never ends with part of a character.

The decode stream of the tokenizers library has three faults. It decodes a window of tokens again for each new token. It
waits forever after a token whose text really is U+FFFD. It cannot return the rest at the end. Here the bytes of each
token go through one incremental UTF-8 decoder. The result is exact, and costs well under a microsecond per token.
"""

from __future__ import annotations

import codecs
from collections.abc import Set

from trioserve.text.token_pieces import TokenPieces

__all__ = ["IncrementalDecoder"]

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class IncrementalDecoder:
    """Turns the tokens of one sequence into text.

    The joined results of all `push` calls and `flush` equal Tokenizer.decode of all ids. Bytes that are not UTF-8
    become U+FFFD, one per maximal invalid part, as the Unicode standard recommends (section 3.9). The last character of
    a sequence is held back until it is complete or `flush` is called.

    The result differs from the `tokenizers` library in one case: vocabularies with byte fallback. If one byte of a run
    of byte tokens is wrong, the library replaces the whole run by U+FFFD, valid characters included. This is only known
    at the end of the run, and a stream cannot retract sent text. So only the invalid part is replaced here.

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
        """Return the text that is complete after one more token. It is often empty. An unknown id adds nothing.

        Args:
            token_id: The token.
        """
        if token_id in self._skipped_ids:
            return ""
        text = self._whole_texts.get(token_id)
        if text is not None and not self._utf8.buffer and not self._leading_spaces_left:
            return text  # the result is the same as below, and faster
        piece = self._pieces[token_id]
        if self._leading_spaces_left and piece:
            piece = self._without_leading_spaces(piece)
        return self._utf8.decode(piece)

    def flush(self) -> str:
        """Return U+FFFD if the last character is incomplete, otherwise ""."""
        return self._utf8.decode(b"", True)

    def _without_leading_spaces(self, piece: bytes) -> bytes:
        while self._leading_spaces_left and piece.startswith(b" "):
            piece = piece[1:]
            self._leading_spaces_left -= 1
        if piece:
            self._leading_spaces_left = 0
        return piece
