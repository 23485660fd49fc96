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
    """Text completions: four lists of equal length. One object for each choice, since offsets count on from piece to
    piece: each is the sum of the lengths of the tokens' own texts before it, as in vLLM."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def skip(self, token_ids: Sequence[int]) -> None:
        """Tokens that were told before."""
        self._offset += sum(len(self._tokenizer.token_text(token_id)) for token_id in token_ids)

    def take(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob | None]) -> dict[str, object]:
        """The next tokens and their log probabilities (None for the first token of a prompt)."""
        tokens = [self._tokenizer.token_text(token_id) for token_id in token_ids]
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [None if logprob is None else max(logprob.logprob, LOGPROB_MIN) for logprob in logprobs],
            "top_logprobs": [None if logprob is None else self._top(logprob) for logprob in logprobs],
            "text_offset": offsets,
        }

    def take_pairs(self, tokens: Sequence[tuple[int, TokenLogprob | None]]) -> dict[str, object]:
        """The same for tokens with their log probabilities."""
        return self.take([token_id for token_id, _ in tokens], [logprob for _, logprob in tokens])

    def _top(self, logprob: TokenLogprob) -> dict[str, float]:
        """The best ones by their text, and the chosen one, which may be one more. Of two tokens with one text (broken
        characters) the better one stands for both."""
        top: dict[str, float] = {}
        for token_id, value in (*logprob.top, (logprob.token_id, logprob.logprob)):
            top.setdefault(self._tokenizer.token_text(token_id), max(value, LOGPROB_MIN))
        return top


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
