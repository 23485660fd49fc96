"""Fields of a request body that the router reads or replaces. All other bytes are forwarded unchanged."""

from __future__ import annotations

from collections.abc import Collection
from hashlib import blake2b

import msgspec

from trioserve.api.openai.request_types import Int32
from trioserve.contracts.block_hash import BlockHash, root_hash
from trioserve.contracts.endpoint import PREFIX_BLOCK_TOKENS

__all__ = ["TRANSFER_PARAMS", "RoutedBody", "prefix_of", "rewritten", "without_transfer_params"]

TOKEN_BYTES = 4  # average for English text and JSON: the router does not tokenize
PREFIX_BLOCK_BYTES = PREFIX_BLOCK_TOKENS * TOKEN_BYTES
PREFIX_BLOCKS_MAX = 1024  # 128 KiB of prompt; later blocks do not influence the choice of an endpoint
TRANSFER_PARAMS = "kv_transfer_params"

_NOTHING = msgspec.Raw()


class RoutedBody(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that decide which endpoint gets a request and how long it may take. The endpoint checks the others."""

    model: str | None = None
    stream: bool | None = None
    n: Int32 | None = None
    priority: Int32 | None = None
    cache_salt: str | None = None
    queue_timeout: float | None = None
    ttft_timeout: float | None = None
    timeout: float | None = None
    prompt: msgspec.Raw = _NOTHING
    messages: msgspec.Raw = _NOTHING
    input: msgspec.Raw = _NOTHING
    system: msgspec.Raw = _NOTHING
    instructions: msgspec.Raw = _NOTHING
    query: msgspec.Raw = _NOTHING
    documents: msgspec.Raw = _NOTHING
    previous_response_id: str | None = None
    return_partial: bool | None = None
    kv_transfer_params: msgspec.Raw = _NOTHING
    resume: msgspec.Raw = _NOTHING

    @property
    def content(self) -> bytes:
        """JSON text of the prompt, with its parts in the order in which they become tokens."""
        said = bytes(self.messages) or bytes(self.prompt) or bytes(self.input) or bytes(self.documents)
        before = bytes(self.system) or bytes(self.instructions) or bytes(self.query)
        return before + said if before else said

    @property
    def known_token_count(self) -> int:
        """Estimated number of known tokens in a request that resumes a response. They are computed like a prompt."""
        return bytes(self.resume).count(b",")

    @property
    def prompt_count(self) -> int:
        """Number of prompts: a list of texts, or a list of lists of token ids, has several."""
        if bytes(memoryview(self.prompt)[:1]) != b"[":
            return 1
        # The first item tells what the list contains. Any amount of white space may come before the first item.
        if not bytes(self.prompt)[1:].lstrip().startswith((b'"', b"[")):
            return 1
        return max(1, len(msgspec.json.decode(self.prompt, type=list[msgspec.Raw])))


def prefix_of(content: bytes, model: str, salt: str | None) -> tuple[BlockHash, ...]:
    """Compute the names of the full blocks at the beginning of a prompt.

    Each name also depends on all blocks before. Two prompts with the same beginning therefore share names. The blocks
    consist of bytes, because only an endpoint knows the tokens.

    Args:
        content: JSON text of the prompt.
        model: Model that computes the request.
        salt: Cache salt of the request. None without a salt.

    Returns:
        At most PREFIX_BLOCKS_MAX names, in order.
    """
    name = blake2b(root_hash(salt) + model.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    names = []
    end = min(len(content) // PREFIX_BLOCK_BYTES, PREFIX_BLOCKS_MAX) * PREFIX_BLOCK_BYTES
    for begin in range(0, end, PREFIX_BLOCK_BYTES):
        name = blake2b(name + content[begin : begin + PREFIX_BLOCK_BYTES], digest_size=16).digest()
        names.append(BlockHash(name))
    return tuple(names)


def rewritten(raw: bytes, fields: dict[str, object], *, without: Collection[str] = ()) -> bytes:
    """Replace and remove fields of a JSON object. The bytes of all other fields stay unchanged.

    Args:
        raw: The JSON object.
        fields: New values by field name. A field that the object lacks is added.
        without: Names of fields to remove.
    """
    if not fields and not without:
        return raw
    parsed = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    for name in without:
        parsed.pop(name, None)
    return msgspec.json.encode({**parsed, **fields})


def without_transfer_params(raw: bytes, body: RoutedBody, fields: dict[str, object]) -> bytes:
    """Replace fields of a client's body and remove its kv_transfer_params.

    kv_transfer_params names the host and port from which an engine fetches KV. A client that could set them could make
    servers connect to any address, and read the KV of other clients. Only the router sets them.

    Args:
        raw: Body as the client sent it.
        body: Fields that the router has read from `raw`.
        fields: New values by field name.
    """
    return rewritten(raw, fields, without=(TRANSFER_PARAMS,) if bytes(body.kv_transfer_params) else ())
