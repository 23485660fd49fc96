"""A model that says what a test tells it to: a text, a function of the prompt's text, or a function of the tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from trioserve.contracts.request import EngineRequest
from trioserve.testing.byte_tokenizer import BYTE_VOCAB_SIZE, END_TOKEN_ID
from trioserve.testing.fake_executor import FakeModel

__all__ = ["Response", "NextToken", "answering", "following"]

Response = str | Callable[[str], str]
"""What every request is answered, or a function of the prompt's text (of a chat: as its template renders it)."""

NextToken = Callable[[Sequence[int]], int]
"""Token ids, the prompt's and what was answered so far, to the id that comes next. It must depend on nothing else: a
preempted request is computed again."""

PROMPTS_MAX = 1024  # whose responses are remembered; a function of the prompt is called once for each


def answering(response: Response) -> FakeModel:
    """A model whose response is this text in UTF-8, a token a byte, and then the end token."""

    @lru_cache(maxsize=PROMPTS_MAX)
    def said(prompt_token_ids: tuple[int, ...]) -> bytes:
        if isinstance(response, str):
            return response.encode()
        return response(
            bytes(token_id for token_id in prompt_token_ids if token_id < 256).decode(errors="replace")
        ).encode()

    def choose(request: EngineRequest, tokens: Sequence[int]) -> int:
        text = said(request.prompt_token_ids)
        position = len(tokens) - len(request.prompt_token_ids)
        return text[position] if position < len(text) else END_TOKEN_ID

    return _ScriptedModel(choose)


def following(next_token: NextToken) -> FakeModel:
    """A model that says what the function says. What is no token id is a fault of the engine."""

    def choose(request: EngineRequest, tokens: Sequence[int]) -> int:
        token_id = next_token(tokens)
        assert 0 <= token_id < BYTE_VOCAB_SIZE, f"next_token gave {token_id}, token ids are 0 to {BYTE_VOCAB_SIZE - 1}"
        return token_id

    return _ScriptedModel(choose)


class _ScriptedModel(FakeModel):
    """The request's sampling changes nothing of what is said, only where it ends."""

    def __init__(self, choose: Callable[[EngineRequest, Sequence[int]], int]) -> None:
        super().__init__(vocab_size=BYTE_VOCAB_SIZE)
        self._choose = choose

    def next_token_id(self, request: EngineRequest, tokens: Sequence[int], digest: int) -> int:
        return self._choose(request, tokens)
