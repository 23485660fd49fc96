"""Fields that change the prompt before the model sees it: cut to its last tokens, or laid around a gap."""

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
    """truncate_prompt_tokens: the prompt's last tokens are kept, so many or, with -1, as fit beside the response. None:
    a prompt that is too long is refused. Raises InvalidRequest."""
    if asked is None:
        return None
    if asked != AS_FITS and not 1 <= asked <= context_tokens_max:
        raise InvalidRequest(
            f"truncate_prompt_tokens is {asked}, allowed is 1 to {context_tokens_max}, or -1 for as many as fit",
            param="truncate_prompt_tokens",
        )
    # Where the response alone is too long, that is what the client is told.
    fitting = max(1, context_tokens_max - max(1, response_tokens_max or 1))
    return Cut(fitting if asked == AS_FITS else asked, "left")


def gap_of(tokenizer: Tokenizer, suffix: str | None) -> FillInMiddle | None:
    """How the model is asked for what stands before `suffix`; None if there is none. Raises InvalidRequest where it was
    not trained for that."""
    if not suffix:
        return None
    form = fill_in_middle(tokenizer)
    if form is None:
        raise InvalidRequest(
            "suffix is not supported by this model: its vocabulary has no tokens for filling gaps, such as "
            "<|fim_prefix|>; leave it out, or serve a model that was trained for it",
            param="suffix",
        )
    return form
