"""Checks that a draft model fits a target model: the same token ids, and no state that cannot be rolled back."""

from __future__ import annotations

from typing import Protocol

from trioserve.contracts.errors import StartupError
from trioserve.model.model_config import ModelConfig

__all__ = ["check_draft", "check_same_tokens"]


class TokenNames(Protocol):
    vocab_size: int

    def token_text(self, token_id: int) -> str: ...


def check_draft(config: ModelConfig, draft: ModelConfig, name: str) -> None:
    """Check that a draft model can propose tokens for a model.

    Args:
        config: description of the target model.
        draft: description of the draft model.
        name: name of the draft model for error texts.

    Raises:
        StartupError: the vocabularies differ in size, or the draft model has layers with a state.
    """
    if draft.state_bytes:
        raise StartupError(
            f"the draft model {name} has layers that keep a state, which cannot be undone after a rejected token: "
            "name another draft model"
        )
    if draft.vocab_size != config.vocab_size:
        raise StartupError(
            f"the draft model {name} has a vocabulary of {draft.vocab_size} tokens, but the model has one of "
            f"{config.vocab_size}: name a draft model with the same tokenizer"
        )


def check_same_tokens(tokenizer: TokenNames, draft: TokenNames, name: str) -> None:
    """Compare the texts of all tokens. This takes some hundredths of a second.

    Args:
        tokenizer: tokenizer of the target model.
        draft: tokenizer of the draft model.
        name: name of the draft model for error texts.

    Raises:
        StartupError: a token differs. The error names the first one.
    """
    for token_id in range(min(tokenizer.vocab_size, draft.vocab_size)):
        ours, theirs = tokenizer.token_text(token_id), draft.token_text(token_id)
        if ours != theirs:
            raise StartupError(
                f"token {token_id} is {ours!r} for the model and {theirs!r} for the draft model {name}: name a draft "
                "model with the same tokenizer"
            )
