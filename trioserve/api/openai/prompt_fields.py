"""Fields that change the prompt before the model sees it: truncation, and filling a gap."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.prompt import Cut
from trioserve.text.fill_in_middle import fill_in_middle

if TYPE_CHECKING:
    from trioserve.text.fill_in_middle import FillInMiddle
    from trioserve.text.tokenizer import Tokenizer

__all__ = ["AS_FITS", "gap_of", "prompt_cut"]

AS_FITS = -1


def prompt_cut(asked: int | None, context_tokens_max: int, response_tokens_max: int | None) -> Cut | None:
    """Read truncate_prompt_tokens: how many tokens at the prompt's end to keep.

    Args:
        asked: value of the field. -1: as many as fit beside the response. None: a prompt that is too long is refused.
        context_tokens_max: length of the model's context.
        response_tokens_max: longest response. None: no limit.

    Raises:
        InvalidRequest: the value is out of range.
    """
    if asked is None:
        return None
    if asked != AS_FITS and not 1 <= asked <= context_tokens_max:
        raise InvalidRequest(
            f"truncate_prompt_tokens is {asked}, allowed is 1 to {context_tokens_max}, or -1 for as many as fit",
            param="truncate_prompt_tokens",
        )
    # If the response alone is too long, a later check reports that to the client.
    fitting = max(1, context_tokens_max - max(1, response_tokens_max or 1))
    return Cut(fitting if asked == AS_FITS else asked, "left")


def gap_of(tokenizer: Tokenizer, suffix: str | None) -> FillInMiddle | None:
    """Return the format in which the model is asked to fill the gap before a suffix.

    Args:
        tokenizer: tokenizer of the model.
        suffix: text after the gap. None or empty: no gap.

    Returns:
        The format, or None if there is no gap.

    Raises:
        InvalidRequest: the model was not trained to fill gaps.
    """
    if not suffix:
        return None
    gap = fill_in_middle(tokenizer)
    if gap is None:
        raise InvalidRequest(
            "suffix is not supported by this model: its vocabulary has no tokens for filling gaps, such as "
            "<|fim_prefix|>; leave it out, or serve a model that was trained for it",
            param="suffix",
        )
    return gap
