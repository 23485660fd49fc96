"""Log probabilities in the three shapes that clients know: OpenAI's for chats and for text, vLLM's for prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trioserve.api.resume_body import LOGPROB_MIN
from trioserve.contracts.events import TokenLogprob

if TYPE_CHECKING:
    from trioserve.text.tokenizer import Tokenizer

__all__ = ["CompletionLogprobs", "chat_logprobs", "chat_tokens", "prompt_logprobs"]


def chat_tokens(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob]) -> list[object]:
    """The tokens of chat completions, each with its alternatives."""
    return [
        {
            **_chat_token(tokenizer, logprob.token_id, logprob.logprob),
            "top_logprobs": [_chat_token(tokenizer, token_id, value) for token_id, value in logprob.top],
        }
        for logprob in logprobs
    ]


def chat_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob]) -> dict[str, object]:
    """Chat completions: a list of tokens, each with its alternatives."""
    return {
        "content": chat_tokens(tokenizer, logprobs),
        "refusal": None,
    }


def _chat_token(tokenizer: Tokenizer, token_id: int, value: float) -> dict[str, object]:
    return {
        "token": tokenizer.token_text(token_id),
        "logprob": max(value, LOGPROB_MIN),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


class CompletionLogprobs:
    """The log probabilities of one text completion: four lists of equal length, piece by piece.

    `text_offset` is the place in the choice's text where a token begins, in characters. A token that begins inside a
    character has the offset of that character. A token of the prompt that is not in the echoed text, such as a token
    for the beginning, has the offset of what follows.

    Args:
        tokenizer: The model's.
        echo: The prompt as the choice's text repeats it.
        echo_tokens: How many tokens the prompt has; they come first. 0 if their log probabilities are not shown.
    """

    def __init__(self, tokenizer: Tokenizer, *, echo: str = "", echo_tokens: int = 0) -> None:
        self._tokenizer = tokenizer
        self._echo = echo.encode("utf-8", "surrogatepass")
        self._echo_characters = len(echo)
        self._echo_tokens = echo_tokens
        self._echo_place = 0  # in bytes
        self._begun = 0  # characters of the text that have begun

    def skip(self, token_ids: Sequence[int]) -> None:
        """Pass tokens that the client has."""
        for token_id in token_ids:
            self._offset_of(self._tokenizer.token_bytes(token_id))

    def take(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob | None]) -> dict[str, object]:
        """The next tokens and their log probabilities (None for the first token of a prompt)."""
        pieces = [self._tokenizer.token_bytes(token_id) for token_id in token_ids]
        return {
            "tokens": [_token_name(piece) for piece in pieces],
            "token_logprobs": [None if logprob is None else max(logprob.logprob, LOGPROB_MIN) for logprob in logprobs],
            "top_logprobs": [None if logprob is None else self._top(logprob) for logprob in logprobs],
            "text_offset": [self._offset_of(piece) for piece in pieces],
        }

    def take_pairs(self, tokens: Sequence[tuple[int, TokenLogprob | None]]) -> dict[str, object]:
        """The same for tokens with their log probabilities."""
        return self.take([token_id for token_id, _ in tokens], [logprob for _, logprob in tokens])

    def _offset_of(self, piece: bytes) -> int:
        """Where the next token begins; the text goes on behind it."""
        if self._echo_tokens:
            piece = self._in_echo(piece)
        offset = self._begun - 1 if self._begun and _continues(piece[:1]) else self._begun
        self._begun += sum(not _continues(piece[place : place + 1]) for place in range(len(piece)))
        if self._echo_tokens:
            self._echo_tokens -= 1
            if not self._echo_tokens:
                self._begun = self._echo_characters
        return offset

    def _in_echo(self, piece: bytes) -> bytes:
        """What the prompt's text has of a token: a tokenizer may add a space, or tokens without a text."""
        for shown in (piece, piece.removeprefix(b" ")):
            if self._echo.startswith(shown, self._echo_place):
                self._echo_place += len(shown)
                return shown
        return b""

    def _top(self, logprob: TokenLogprob) -> dict[str, float]:
        """The best tokens by their text, and the chosen one, which may be one more. Of two tokens with one text the
        better one is shown."""
        top: dict[str, float] = {}
        for token_id, value in (*logprob.top, (logprob.token_id, logprob.logprob)):
            top.setdefault(_token_name(self._tokenizer.token_bytes(token_id)), max(value, LOGPROB_MIN))
        return top


def _token_name(piece: bytes) -> str:
    """A token as text; one that is part of a character as OpenAI writes it, such as `bytes:\\xf0\\x9f`."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + piece.decode("utf-8", "backslashreplace")


def _continues(byte: bytes) -> bool:
    """Whether it is a byte of UTF-8 within a character."""
    return b"\x80" <= byte < b"\xc0"


def prompt_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob | None]) -> list[object]:
    """For each token of the prompt an object by token id: the token that stands there, and the best ones. The rank of
    the former is known only if it is among the latter."""
    return [None if logprob is None else _prompt_token(tokenizer, logprob) for logprob in logprobs]


def _prompt_token(tokenizer: Tokenizer, logprob: TokenLogprob) -> dict[str, object]:
    ranked = {token_id: (value, rank) for rank, (token_id, value) in enumerate(logprob.top, start=1)}
    here: dict[int, tuple[float, int | None]] = {
        logprob.token_id: ranked.get(logprob.token_id, (logprob.logprob, None))
    }
    return {
        str(token_id): {
            "logprob": max(value, LOGPROB_MIN),
            "rank": rank,
            "decoded_token": tokenizer.token_text(token_id),
        }
        for token_id, (value, rank) in (here | ranked).items()
    }
