"""Block names of the prompt in a request body, equal to the names that an engine computes.

The names only improve the choice of an endpoint. A prompt that cannot be named in time is routed without names. A body
that an engine would refuse has no names: the endpoint reports the error to the client.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

import trio

from trioserve.api.openai.chat_prompt import chat_prompt
from trioserve.api.openai.request_types import ChatBody, CompletionBody, GenerationBody, decode_body
from trioserve.contracts.errors import InvalidRequest, Overloaded
from trioserve.contracts.ids import BlockHash, hash_block, root_hash
from trioserve.contracts.prompt import Prompt
from trioserve.contracts.weights import adapter_salt

if TYPE_CHECKING:
    from trioserve.admission.text_threads import TextThreads
    from trioserve.text.tokenizer import Tokenizer

__all__ = ["CHAT_PATH", "COMPLETIONS_PATH", "PROMPT_TOKENS_MAX", "PromptBlocks", "block_names", "named_blocks"]

PROMPT_TOKENS_MAX = 262_144  # Tokenizing so many tokens takes about a second. A longer prompt gets no names.
# Only this many leading tokens get names. With 16 tokens in a block, the names take 100 KB. Later blocks hardly
# influence the choice of an endpoint.
NAMED_TOKENS_MAX = 32_768
# The time limit for naming includes the wait for the texts of other requests. A cache hit seldom saves more time.
NAMING_SECONDS_MAX = 1.0
INLINE_TOKENS_MAX = 4096  # Naming the blocks of this many tokens takes a quarter of a millisecond.


class PromptBlocks:
    """Names the blocks of prompts.

    Args:
        tokenizer: Tokenizer of the model.
        texts: Threads that tokenize long prompts and name the blocks of many tokens.
    """

    def __init__(self, tokenizer: Tokenizer, texts: TextThreads) -> None:
        # Imported here, because only a router that names prompts needs a tokenizer and Jinja.
        from trioserve.admission.prompt_encoder import PromptEncoder

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
        """Name the leading blocks of a prompt.

        Args:
            prompt: Text or token ids.
            block_sizes: Block sizes of the endpoints, in tokens.
            salt: Salt of the first block. None without a salt.
            add_special_tokens: Whether the tokenizer adds special tokens, as in the request to the engine.
            tenant: Tenant of the request. Long prompts of different tenants are tokenized in turn.

        Returns:
            Names in order, by block size. Empty if the prompt is invalid or naming takes longer than
            NAMING_SECONDS_MAX.
        """
        with trio.move_on_after(NAMING_SECONDS_MAX):
            try:
                token_ids = await self._token_ids(prompt, tenant, add_special_tokens=add_special_tokens)
                sizes = tuple(block_sizes)
                if len(token_ids) <= INLINE_TOKENS_MAX:
                    return _named(token_ids, sizes, salt)
                size = min(len(token_ids), NAMED_TOKENS_MAX)
                return await self._texts.run(lambda: _named(token_ids, sizes, salt), size=size, tenant=tenant)
            except (InvalidRequest, Overloaded):
                pass
        return {}

    async def _token_ids(self, prompt: Prompt, tenant: str | None, *, add_special_tokens: bool) -> Sequence[int]:
        if isinstance(prompt, Sequence) and not isinstance(prompt, str):
            return prompt  # The ids are not checked, because a token id that the model lacks matches no block.
        return await self._encoder.of_tenant(tenant).encode(prompt, add_special_tokens=add_special_tokens)


def _named(token_ids: Sequence[int], block_sizes: Iterable[int], salt: str | None) -> dict[int, tuple[BlockHash, ...]]:
    return {size: block_names(token_ids, size, salt) for size in block_sizes}


def block_names(token_ids: Sequence[int], block_size: int, salt: str | None) -> tuple[BlockHash, ...]:
    """Name the leading blocks of a prompt that the prefix cache can contain.

    A request computes at least its last token. So the block that the last token fills is left out.

    Args:
        token_ids: Tokens of the prompt.
        block_size: Tokens per block.
        salt: Salt of the first block. None without a salt.

    Returns:
        Names of full blocks in order, for at most NAMED_TOKENS_MAX tokens.
    """
    end = min(len(token_ids) - 1, NAMED_TOKENS_MAX) // block_size * block_size
    if end > 0 and not 0 <= min(token_ids[:end]) <= max(token_ids[:end]) < 2**32:
        return ()
    name = root_hash(salt)
    names = []
    for begin in range(0, end, block_size):
        name = hash_block(name, token_ids[begin : begin + block_size])
        names.append(name)
    return tuple(names)


CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"


async def named_blocks(
    naming: PromptBlocks,
    path: str,
    raw: bytes,
    block_sizes: Collection[int],
    adapter_digest: str | None = None,
    *,
    tenant: str | None = None,
) -> dict[int, tuple[BlockHash, ...]]:
    """Compute the names of a prompt's leading blocks, for each block size.

    Args:
        naming: Tokenizes the prompt and names its blocks.
        path: Path of the request. Only chat and text completions have names.
        raw: Body of the request.
        block_sizes: Block sizes of the endpoints, in tokens.
        adapter_digest: Digest of the LoRA adapter that computes the request. None without an adapter.
        tenant: Tenant of the request, for a fair share of the tokenizer threads.

    Returns:
        Names in order, by block size. Empty if the names cannot be computed, or if no cached block could be used.
    """
    try:
        body: GenerationBody
        if path == CHAT_PATH:
            chat = body = decode_body(raw, ChatBody)
            prompt: Prompt | None = _chat(chat)
            adds_special_tokens = False
        elif path == COMPLETIONS_PATH:
            completion = body = decode_body(raw, CompletionBody)
            prompt = _first(completion)
            adds_special_tokens = completion.add_special_tokens is not False
        else:
            return {}
    except InvalidRequest:
        return {}
    # Prompt log probabilities require that every token is computed, even tokens in the prefix cache.
    if prompt is None or body.prompt_logprobs is not None:
        return {}
    salt = adapter_salt(body.cache_salt, adapter_digest)
    return await naming.names(prompt, block_sizes, salt=salt, add_special_tokens=adds_special_tokens, tenant=tenant)


def _chat(body: ChatBody) -> Prompt | None:
    # A template from the request may run for any length of time. The router does not know whether the engine trusts it.
    return None if body.chat_template is not None else chat_prompt(body, trust_chat_template=False)


def _first(body: CompletionBody) -> Prompt | None:
    """Return the first prompt of the body, or None if there is none that the prefix cache can serve."""
    if body.echo and body.logprobs is not None:
        return None
    prompt = body.prompt
    if isinstance(prompt, str):
        return prompt
    first = prompt[0] if prompt else None
    if isinstance(first, int):
        return prompt if all(type(item) is int for item in prompt) else None  # type: ignore[return-value]
    return first or None
