"""The prompt in a body that a router passes on, as an engine will read it: for naming its blocks.

What an engine would refuse has no prompt here, and no error: the engine tells its client.
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
    """By block size, the names of the leading blocks of what the body asks to be continued; empty if they cannot be
    told, or do not matter. adapter_digest: of the LoRA adapter that it is to be computed with. tenant: whose it is."""
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
    if prompt is None or body.prompt_logprobs is not None:  # whose tokens are all computed, cached or not
        return {}
    salt = adapter_salt(body.cache_salt, adapter_digest)
    return await naming.names(prompt, block_sizes, salt=salt, add_special_tokens=adds_special_tokens, tenant=tenant)


def _chat(body: ChatBody) -> Prompt | None:
    # A template that came with the request may take any time; whether the engine trusts it is not known here.
    return None if body.chat_template is not None else chat_prompt(body, trust_chat_template=False)


def _first(body: CompletionBody) -> Prompt | None:
    """Of several prompts the first. None if it is none."""
    if body.echo and body.logprobs is not None:
        return None
    prompt = body.prompt
    if isinstance(prompt, str):
        return prompt
    first = prompt[0] if prompt else None
    if isinstance(first, int):
        return prompt if all(type(item) is int for item in prompt) else None  # type: ignore[return-value]
    return first or None
