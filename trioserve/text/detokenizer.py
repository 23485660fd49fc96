"""Token ids, one after another, to text that is safe to show: never half a character.

The library's own decode stream decodes a window of tokens again for each new one, waits for ever behind a token whose
text really is U+FFFD, and cannot give out what is left at the end. Here each token's bytes go through one incremental
UTF-8 decoder instead, which is exact and costs well under a microsecond a token.
"""

from __future__ import annotations

import codecs
from collections.abc import Set

from trioserve.text.token_pieces import TokenPieces

__all__ = ["IncrementalDecoder"]

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class IncrementalDecoder:
    """Turns one sequence of tokens into text.

    The pieces of all pushes and of flush, joined, are Tokenizer.decode of all the ids. Bytes that are not UTF-8 become
    U+FFFD, one per maximal broken part as the Unicode standard recommends (section 3.9); the last character of a
    sequence is held back until it is complete or flush gives up on it.
    It differs from the `tokenizers` library in one place: in a vocabulary with byte fallback the library turns a whole
    run of byte tokens into U+FFFD when one of its bytes is wrong, valid characters included, which can only be known at
    the end of the run. A stream cannot take back what it has shown, so here only the broken part is replaced.

    skipped_ids: tokens that add nothing. continues_text: the tokens follow other text, so a leading space is text.
    """

    __slots__ = ("_leading_spaces_left", "_pieces", "_skipped_ids", "_utf8", "_whole_texts")

    def __init__(self, pieces: TokenPieces, *, skipped_ids: Set[int], continues_text: bool) -> None:
        self._pieces = pieces
        self._whole_texts = pieces.whole_texts
        self._skipped_ids = skipped_ids
        self._leading_spaces_left = 0 if continues_text else pieces.leading_spaces_max
        self._utf8 = _Utf8Decoder("replace")

    def push(self, token_id: int) -> str:
        """The text that became certain with this token; often empty. An unknown id adds nothing."""
        if token_id in self._skipped_ids:
            return ""
        text = self._whole_texts.get(token_id)
        if text is not None and not self._utf8.buffer and not self._leading_spaces_left:
            return text  # the same, without the way through Python code of the decoder
        piece = self._pieces[token_id]
        if self._leading_spaces_left and piece:
            piece = self._without_leading_spaces(piece)
        return self._utf8.decode(piece)

    def flush(self) -> str:
        """What is left of an incomplete last character, as U+FFFD."""
        return self._utf8.decode(b"", True)

    def _without_leading_spaces(self, piece: bytes) -> bytes:
        while self._leading_spaces_left and piece.startswith(b" "):
            piece = piece[1:]
            self._leading_spaces_left -= 1
        if piece:
            self._leading_spaces_left = 0
        return piece
