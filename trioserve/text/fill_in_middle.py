"""Prompts for models that fill a gap in a text.

Special tokens separate the text before the gap from the text after it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from trioserve.text.tokenizer import Tokenizer

__all__ = ["FillInMiddle", "fill_in_middle"]


class FillInMiddle(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt format of one model family.

    Args:
        prompt_format: Prompt text, with {prefix} and {suffix} in place of the two texts.
        tokens: Tokens in `prompt_format`. Every vocabulary of the family has all these tokens.
        ends: Tokens that end the middle, in addition to the model's own end tokens. A vocabulary may lack some of these
            tokens.
    """

    prompt_format: str
    tokens: tuple[str, ...]
    ends: tuple[str, ...] = ("<|endoftext|>",)

    def prompt(self, prefix: str, suffix: str) -> str:
        """Return the prompt text. The model continues the prompt with the text for the gap.

        Args:
            prefix: Text before the gap.
            suffix: Text after the gap.
        """
        return self.prompt_format.format(prefix=prefix, suffix=suffix)

    def end_token_ids(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        ids = (tokenizer.added_token_id(token) for token in self.ends)
        return tuple(token_id for token_id in ids if token_id is not None)


def _family(prompt_format: str, *tokens: str, ends: tuple[str, ...] = ("<|endoftext|>",)) -> FillInMiddle:
    return FillInMiddle(prompt_format=prompt_format, tokens=tokens, ends=ends)


FORMATS = (
    # Format of Qwen2.5-Coder, Qwen3-Coder and CodeGemma.
    _family(
        "<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>",
        "<|fim_prefix|>",
        "<|fim_suffix|>",
        "<|fim_middle|>",
        ends=("<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>"),
    ),
    # Format of StarCoder and Granite Code.
    _family(
        "<fim_prefix>{prefix}<fim_suffix>{suffix}<fim_middle>",
        "<fim_prefix>",
        "<fim_suffix>",
        "<fim_middle>",
        ends=("<|endoftext|>", "<file_sep>"),
    ),
    # Format of DeepSeek-Coder.
    _family(
        "<｜fim▁begin｜>{prefix}<｜fim▁hole｜>{suffix}<｜fim▁end｜>",
        "<｜fim▁begin｜>",
        "<｜fim▁hole｜>",
        "<｜fim▁end｜>",
    ),
    # Format of Codestral. The suffix comes first in its prompt.
    _family("[SUFFIX]{suffix}[PREFIX]{prefix}", "[SUFFIX]", "[PREFIX]", ends=()),
)


def fill_in_middle(tokenizer: Tokenizer) -> FillInMiddle | None:
    """Return the prompt format whose tokens are all in the vocabulary, or None if there is no such format.

    Args:
        tokenizer: Tokenizer of the model.
    """
    for family in FORMATS:
        if all(tokenizer.added_token_id(token) is not None for token in family.tokens):
            return family
    return None
