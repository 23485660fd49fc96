"""Fake models whose output a test writes: as a text, as a function of the prompt, or as a function of the token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from trioserve.contracts.request import EngineRequest
from trioserve.testing.byte_tokenizer import BYTE_VOCAB_SIZE, END_TOKEN_ID
from trioserve.testing.fake_executor import FakeModel

__all__ = ["Response", "NextToken", "answering", "following"]

Response = str | Callable[[str], str]
"""The text of every response, or a function from the prompt's text to it. A chat's prompt is its rendered template."""

NextToken = Callable[[Sequence[int]], int]
"""Function from the token ids of prompt and output so far to the next token id.

It must depend on nothing else, since a preempted request is computed again.
"""

PROMPTS_MAX = 1024  # Responses of this many prompts are remembered, so that a function is called once per prompt.


def answering(response: Response) -> FakeModel:
    """Return a model that writes a text in UTF-8, one token per byte, and then the end token.

    Args:
        response: the text, or a function from the prompt's text to it.
    """

    @lru_cache(maxsize=PROMPTS_MAX)
    def response_bytes(prompt_token_ids: tuple[int, ...]) -> bytes:
        if isinstance(response, str):
            return response.encode()
        return response(
            bytes(token_id for token_id in prompt_token_ids if token_id < 256).decode(errors="replace")
        ).encode()

    def choose(request: EngineRequest, tokens: Sequence[int]) -> int:
        text = response_bytes(request.prompt_token_ids)
        position = len(tokens) - len(request.prompt_token_ids)
        return text[position] if position < len(text) else END_TOKEN_ID

    return _ScriptedModel(choose)


def following(next_token: NextToken) -> FakeModel:
    """Return a model that chooses tokens with a function.

    Args:
        next_token: the function. A result that is not a token id is a fault of the engine.
    """

    def choose(request: EngineRequest, tokens: Sequence[int]) -> int:
        token_id = next_token(tokens)
        assert 0 <= token_id < BYTE_VOCAB_SIZE, (
            f"next_token returned {token_id}, allowed are 0 to {BYTE_VOCAB_SIZE - 1}"
        )
        return token_id

    return _ScriptedModel(choose)


class _ScriptedModel(FakeModel):
    """A model that ignores the sampling parameters, except for those that end a response."""

    def __init__(self, choose: Callable[[EngineRequest, Sequence[int]], int]) -> None:
        super().__init__(vocab_size=BYTE_VOCAB_SIZE)
        self._choose = choose

    def next_token_id(self, request: EngineRequest, tokens: Sequence[int], digest: int) -> int:
        return self._choose(request, tokens)
