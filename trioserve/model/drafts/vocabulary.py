"""Whether one model may draft for another: both mean the same tokens by the same ids, and it can take tokens back."""

from __future__ import annotations

from typing import Protocol

from trioserve.contracts.errors import StartupError
from trioserve.model.model_config import ModelConfig

__all__ = ["check_draft", "check_same_tokens"]


class TokenNames(Protocol):
    vocab_size: int

    def token_text(self, token_id: int) -> str: ...


def check_draft(config: ModelConfig, draft: ModelConfig, name: str) -> None:
    """Raises StartupError if their token ids cannot be the same, or the draft model cannot go back behind a token."""
    if draft.state_bytes:
        raise StartupError(
            f"the draft model {name} has layers that keep a state, which a wrong token would have changed for good: "
            "name another one"
        )
    if draft.vocab_size != config.vocab_size:
        raise StartupError(
            f"the draft model {name} has a vocabulary of {draft.vocab_size} tokens, but the model has one of "
            f"{config.vocab_size}: name a draft model with the same tokenizer"
        )


def check_same_tokens(tokenizer: TokenNames, draft: TokenNames, name: str) -> None:
    """Raises StartupError, which names the first token that differs. Takes some hundredths of a second."""
    for token_id in range(min(tokenizer.vocab_size, draft.vocab_size)):
        ours, theirs = tokenizer.token_text(token_id), draft.token_text(token_id)
        if ours != theirs:
            raise StartupError(
                f"token {token_id} is {ours!r} for the model and {theirs!r} for the draft model {name}: name a draft "
                "model with the same tokenizer"
            )
