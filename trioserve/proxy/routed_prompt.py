"""Extraction of the prompt from a request body that the router forwards, to compute the names of its blocks.

A body that an engine would refuse yields no names and no error: the engine itself reports the error to the client.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from trioserve.api.openai.chat_prompt import chat_prompt
from trioserve.api.openai.request_types import ChatBody, CompletionBody, GenerationBody, decode_body
from trioserve.contracts.adapter import adapter_salt
from trioserve.contracts.block_hash import BlockHash
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.prompt import Prompt

if TYPE_CHECKING:
    from trioserve.proxy.prompt_blocks import PromptBlocks

__all__ = ["CHAT_PATH", "COMPLETIONS_PATH", "named_blocks"]

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
    # prompt log probabilities need every token computed, also cached ones
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
