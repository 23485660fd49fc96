"""How an engine will name the blocks of a prompt, found out at a router: the same tokens, salt and chain of hashes.

A name is a help and nothing more. What cannot be named soon, or not at all, has no names, and goes where it would go
without; the endpoint tells its client what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import trio

from trioserve.admission.prompt_encoder import PromptEncoder
from trioserve.admission.text_threads import TextRunner, TextThreads
from trioserve.contracts.block_hash import BlockHash, hash_block, root_hash
from trioserve.contracts.errors import InvalidRequest, Overloaded
from trioserve.contracts.prompt import Prompt
from trioserve.text.tokenizer import Tokenizer

__all__ = ["PROMPT_TOKENS_MAX", "PromptBlocks", "block_names"]

PROMPT_TOKENS_MAX = 262_144  # a second of tokenizing; beyond it a prompt has no names
NAMED_TOKENS_MAX = 32_768  # leading ones: 100 KB of names in blocks of 16; what lies behind them decides little
NAMING_SECONDS_MAX = 1.0  # behind the texts of others, too: a hit saves seldom more, and waiting here is certain
INLINE_TOKENS_MAX = 4096  # a quarter of a millisecond


class PromptBlocks:
    """texts: where long ones are tokenized, and many tokens named."""

    def __init__(self, tokenizer: Tokenizer, texts: TextThreads) -> None:
        self._texts = texts
        self._encoder = PromptEncoder(
            tokenizer, texts, vocab_size=tokenizer.vocab_size, context_tokens_max=PROMPT_TOKENS_MAX
        )

    async def names(
        self,
        prompt: Prompt,
        block_sizes: Iterable[int],
        *,
        salt: str | None,
        add_special_tokens: bool,
        tenant: str | None = None,
    ) -> dict[int, tuple[BlockHash, ...]]:
        """Name the prompt's leading blocks, by block size.

        Args:
            add_special_tokens: as the engine is asked to.
            tenant: whose prompt it is; a long one is tokenized in turn with those of other tenants.

        Returns:
            Nothing if the names cannot be had within NAMING_SECONDS_MAX, or the prompt is wrong.
        """
        texts = self._texts.of_tenant(tenant)
        with trio.move_on_after(NAMING_SECONDS_MAX):
            try:
                token_ids = await self._token_ids(prompt, texts, add_special_tokens=add_special_tokens)
                sizes = tuple(block_sizes)
                if len(token_ids) <= INLINE_TOKENS_MAX:
                    return _named(token_ids, sizes, salt)
                size = min(len(token_ids), NAMED_TOKENS_MAX)
                return await texts.run(lambda: _named(token_ids, sizes, salt), size=size)
            except (InvalidRequest, Overloaded):
                pass
        return {}

    async def _token_ids(self, prompt: Prompt, texts: TextRunner, *, add_special_tokens: bool) -> Sequence[int]:
        if isinstance(prompt, Sequence) and not isinstance(prompt, str):
            return prompt  # taken as they are, and an id that the model does not have finds no block
        return await self._encoder.within(texts).encode(prompt, add_special_tokens=add_special_tokens)


def _named(token_ids: Sequence[int], block_sizes: Iterable[int], salt: str | None) -> dict[int, tuple[BlockHash, ...]]:
    return {size: block_names(token_ids, size, salt) for size in block_sizes}


def block_names(token_ids: Sequence[int], block_size: int, salt: str | None) -> tuple[BlockHash, ...]:
    """The names of the leading blocks that can be a hit: a request computes at least one token, so the block that its
    last token fills is none of them. Of many, the first NAMED_TOKENS_MAX tokens' ones."""
    end = min(len(token_ids) - 1, NAMED_TOKENS_MAX) // block_size * block_size
    if end > 0 and not 0 <= min(token_ids[:end]) <= max(token_ids[:end]) < 2**32:
        return ()
    name = root_hash(salt)
    names = []
    for begin in range(0, end, block_size):
        name = hash_block(name, token_ids[begin : begin + block_size])
        names.append(name)
    return tuple(names)
