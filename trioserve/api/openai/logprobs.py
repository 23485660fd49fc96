"""Log probabilities in three formats: OpenAI's for chats, OpenAI's for text, and vLLM's for prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trioserve.api.openai import response_types as types
from trioserve.api.openai.response_types import ChatLogprobs, ChatToken, PromptLogprobs, PromptToken, TopLogprob
from trioserve.api.streams.cursors import LOGPROB_MIN
from trioserve.contracts.events import TokenLogprob

if TYPE_CHECKING:
    from trioserve.text.tokenizer import Tokenizer

__all__ = ["CompletionLogprobs", "chat_logprobs", "chat_tokens", "prompt_logprobs"]


def chat_tokens(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob]) -> list[ChatToken]:
    """Write the tokens of a chat completion, each with its alternatives.

    Args:
        tokenizer: tokenizer of the model.
        logprobs: log probabilities of the tokens.
    """
    return [
        ChatToken(
            token=tokenizer.token_text(logprob.token_id),
            logprob=max(logprob.logprob, LOGPROB_MIN),
            bytes=list(tokenizer.token_bytes(logprob.token_id)),
            top_logprobs=[
                TopLogprob(
                    token=tokenizer.token_text(token_id),
                    logprob=max(value, LOGPROB_MIN),
                    bytes=list(tokenizer.token_bytes(token_id)),
                )
                for token_id, value in logprob.top
            ],
        )
        for logprob in logprobs
    ]


def chat_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob]) -> ChatLogprobs:
    """Write the field `logprobs` of a chat completion.

    Args:
        tokenizer: tokenizer of the model.
        logprobs: log probabilities of the tokens.
    """
    return ChatLogprobs(content=chat_tokens(tokenizer, logprobs), refusal=None)


class CompletionLogprobs:
    """Writes the log probabilities of one text completion piece by piece, as four lists of equal length.

    `text_offset` is the position in the choice's text where a token begins, in characters. A token that begins inside a
    character has the offset of that character. A token of the prompt that the echoed text does not contain, such as a
    token for the beginning, has the offset of the next text.

    Args:
        tokenizer: tokenizer of the model.
        echo: the prompt as the text of the choice repeats it.
        echo_tokens: number of tokens of the prompt, which come first. 0: their log probabilities are not shown.
    """

    def __init__(self, tokenizer: Tokenizer, *, echo: str = "", echo_tokens: int = 0) -> None:
        self._tokenizer = tokenizer
        self._echo = echo.encode("utf-8", "surrogatepass")
        self._echo_characters = len(echo)
        self._echo_tokens = echo_tokens
        self._echo_place = 0  # The position of the next token in the echoed text, in bytes.
        self._begun = 0  # The number of characters whose first byte has been read.

    def skip(self, token_ids: Sequence[int]) -> None:
        """Process tokens that the client already has, without writing them.

        Args:
            token_ids: next tokens.
        """
        for token_id in token_ids:
            self._offset_of(self._tokenizer.token_bytes(token_id))

    def take(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob | None]) -> types.CompletionLogprobs:
        """Write the next tokens, as slices of the four lists.

        Args:
            token_ids: next tokens.
            logprobs: log probability of each token. None for the first token of a prompt.
        """
        pieces = [self._tokenizer.token_bytes(token_id) for token_id in token_ids]
        return types.CompletionLogprobs(
            tokens=[_token_name(piece) for piece in pieces],
            token_logprobs=[None if logprob is None else max(logprob.logprob, LOGPROB_MIN) for logprob in logprobs],
            top_logprobs=[None if logprob is None else self._top(logprob) for logprob in logprobs],
            text_offset=[self._offset_of(piece) for piece in pieces],
        )

    def take_pairs(self, tokens: Sequence[tuple[int, TokenLogprob | None]]) -> types.CompletionLogprobs:
        """Write the next tokens, as slices of the four lists.

        Args:
            tokens: next tokens, each with its log probability. None for the first token of a prompt.
        """
        return self.take([token_id for token_id, _ in tokens], [logprob for _, logprob in tokens])

    def _offset_of(self, piece: bytes) -> int:
        """Return the offset of the next token, and advance by its text."""
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
        """Return the part of a token's text that the echoed prompt contains. A tokenizer may add a space, or tokens
        without text.
        """
        for shown in (piece, piece.removeprefix(b" ")):
            if self._echo.startswith(shown, self._echo_place):
                self._echo_place += len(shown)
                return shown
        return b""

    def _top(self, logprob: TokenLogprob) -> dict[str, float]:
        """Return the best tokens by their text, and the chosen token if it is not among them.

        If two tokens have the same text, the more probable token is shown.
        """
        top: dict[str, float] = {}
        for token_id, value in (*logprob.top, (logprob.token_id, logprob.logprob)):
            top.setdefault(_token_name(self._tokenizer.token_bytes(token_id)), max(value, LOGPROB_MIN))
        return top


def _token_name(piece: bytes) -> str:
    r"""Return the text of a token. A part of a character is written as in OpenAI's API, such as `bytes:\\xf0\\x9f`."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + piece.decode("utf-8", "backslashreplace")


def _continues(byte: bytes) -> bool:
    """Return True for a byte of UTF-8 inside a character."""
    return b"\x80" <= byte < b"\xc0"


def prompt_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob | None]) -> PromptLogprobs:
    """Write, for each token of a prompt, the token itself and the best tokens, by token id.

    Args:
        tokenizer: tokenizer of the model.
        logprobs: log probability of each token. None for the first token.

    Returns:
        One object for each token, or None. The rank of the token itself is null unless it is among the best.
    """
    return [None if logprob is None else _prompt_token(tokenizer, logprob) for logprob in logprobs]


def _prompt_token(tokenizer: Tokenizer, logprob: TokenLogprob) -> dict[str, PromptToken]:
    ranked = {token_id: (value, rank) for rank, (token_id, value) in enumerate(logprob.top, start=1)}
    here: dict[int, tuple[float, int | None]] = {
        logprob.token_id: ranked.get(logprob.token_id, (logprob.logprob, None))
    }
    return {
        str(token_id): PromptToken(
            logprob=max(value, LOGPROB_MIN), rank=rank, decoded_token=tokenizer.token_text(token_id)
        )
        for token_id, (value, rank) in (here | ranked).items()
    }
