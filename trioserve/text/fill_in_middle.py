"""How models that fill gaps in texts are asked to: by tokens around what stands before the gap and behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from trioserve.text.tokenizer import Tokenizer

__all__ = ["FillInMiddle", "fill_in_middle"]


class FillInMiddle(msgspec.Struct, frozen=True, kw_only=True):
    """One family's way. form: with {prefix} and {suffix} in the place of the two texts; tokens: those in it, all of
    which a vocabulary of the family has. ends: tokens that end the middle, besides the model's own, where there are."""

    form: str
    tokens: tuple[str, ...]
    ends: tuple[str, ...] = ("<|endoftext|>",)

    def prompt(self, prefix: str, suffix: str) -> str:
        """The text that the middle is the continuation of."""
        return self.form.format(prefix=prefix, suffix=suffix)

    def end_token_ids(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        ids = (tokenizer.added_token_id(token) for token in self.ends)
        return tuple(token_id for token_id in ids if token_id is not None)


def _form(form: str, *tokens: str, ends: tuple[str, ...] = ("<|endoftext|>",)) -> FillInMiddle:
    return FillInMiddle(form=form, tokens=tokens, ends=ends)


FORMS = (
    # Qwen2.5-Coder and Qwen3-Coder; CodeGemma
    _form(
        "<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>",
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ends=("<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>"),
    ),
    # StarCoder, Granite Code
    _form(
        "<fim_prefix>{prefix}<fim_suffix>{suffix}<fim_middle>",
        "<fim_prefix>",
        "<fim_suffix>",
        "<fim_middle>",
        ends=("<|endoftext|>", "<file_sep>"),
    ),
    # DeepSeek-Coder
    _form(
        "<｜fim▁begin｜>{prefix}<｜fim▁hole｜>{suffix}<｜fim▁end｜>",
        "<｜fim▁begin｜>",
        "<｜fim▁hole｜>",
        "<｜fim▁end｜>",
    ),
    # Codestral, which is shown what stands behind first
    _form("[SUFFIX]{suffix}[PREFIX]{prefix}", "[SUFFIX]", "[PREFIX]", ends=()),
)


def fill_in_middle(tokenizer: Tokenizer) -> FillInMiddle | None:
    """What a model with this vocabulary was trained with; None if it has no such tokens."""
    for form in FORMS:
        if all(tokenizer.added_token_id(token) is not None for token in form.tokens):
            return form
    return None
