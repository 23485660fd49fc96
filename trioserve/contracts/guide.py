"""What restrains the tokens of one sequence while it is made, and what writes its masks.

A guide is asked in the order in which a step goes: which tokens may come (fill_masks), what came (accept), and what
has to come now (forced_tokens). It belongs to one sequence, and to the thread of the core. Only fill_masks is called in
another thread, and from `MaskMaker.begin` until the masks are filled nothing else is asked of that guide.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from trioserve.contracts.token_masks import TokenMasks

__all__ = ["Guide", "GuidedRows", "MaskMaker"]


class Guide(Protocol):
    """Nothing here waits or raises.

    is_over: no token may come any more, but one that ends the sequence. fault: why it cannot go on, as a sentence for
    the client; None while it can. is_free_ahead: whatever the next token is, the one behind it is free: it can be
    sampled before anybody has told of the next one. What is asked of the guide meanwhile waits for one token more.
    """

    @property
    def is_free_ahead(self) -> bool: ...

    @property
    def is_over(self) -> bool: ...

    @property
    def fault(self) -> str | None: ...

    def accept(self, token_id: int) -> bool:
        """This token has come. False: it may not, and the guide has a fault from now on."""
        ...

    def forced_tokens(self, count_max: int) -> tuple[int, ...]:
        """The tokens that must come now, whatever the model would say, at most count_max of them. They have not come
        by this: accept is to be told of each."""
        ...

    def acceptable_count(self, token_ids: Sequence[int]) -> int:
        """How many of these may come now, one after the other. None of them has come by this."""
        ...

    def wants_mask(self, draft: Sequence[int]) -> bool:
        """Whether the next token, or one behind these draft tokens, is not free."""
        ...

    def fill_masks(self, address: int, words_per_row: int, draft: Sequence[int]) -> None:
        """Write rows of a TokenMasks: at `address` which tokens may come now, and in each row behind it which may come
        after one more token of the draft. The guide is the same afterwards. What it cannot fill it leaves without any
        bit. Takes as long as it takes, in a thread of its own."""
        ...


class GuidedRows(msgspec.Struct, frozen=True):
    """One guide's rows of a step: 1 + len(draft), from `row` on."""

    guide: Guide
    row: int
    draft: tuple[int, ...] = ()


class MaskMaker(Protocol):
    """Makes the masks of one step after another."""

    def begin(self, guided: Sequence[GuidedRows], row_count: int) -> TokenMasks:
        """Have the masks of a step filled; never waits. They have row_count rows, which `guided` cover."""
        ...

    def end(self, masks: TokenMasks) -> None:
        """The step has come back, or was given up: nobody reads these masks any more. They may still be filled: what
        that needs is kept until it is over."""
        ...
