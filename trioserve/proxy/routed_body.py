"""What a router reads of a body, and how it changes it; all else goes on as it came."""

from __future__ import annotations

from collections.abc import Collection
from hashlib import blake2b

import msgspec

from trioserve.api.openai.request_types import Int32
from trioserve.contracts.block_hash import BlockHash, root_hash
from trioserve.contracts.endpoint import PREFIX_BLOCK_TOKENS

__all__ = ["TRANSFER_PARAMS", "RoutedBody", "prefix_of", "rewritten", "without_transfer_params"]

TOKEN_BYTES = 4  # of English text and JSON, on average: the router does not tokenize
PREFIX_BLOCK_BYTES = PREFIX_BLOCK_TOKENS * TOKEN_BYTES
PREFIX_BLOCKS_MAX = 1024  # 128 KiB of prompt; what lies behind them decides nothing
TRANSFER_PARAMS = "kv_transfer_params"

_NOTHING = msgspec.Raw()


class RoutedBody(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that decide where a request goes and how long it may take. The endpoint checks the others."""

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
        """The JSON of what is to be answered, in the order in which it becomes a prompt."""
        said = bytes(self.messages) or bytes(self.prompt) or bytes(self.input) or bytes(self.documents)
        before = bytes(self.system) or bytes(self.instructions) or bytes(self.query)
        return before + said if before else said

    @property
    def known_token_count(self) -> int:
        """Tokens of a response that goes on: those are computed as a prompt is. An estimate: the endpoint counts."""
        return bytes(self.resume).count(b",")

    @property
    def prompt_count(self) -> int:
        """How many prompts there are: a list of texts, or of lists of token ids, is several."""
        if bytes(memoryview(self.prompt)[:1]) != b"[":
            return 1
        # However much white space is before its first item: that tells what it is a list of.
        if not bytes(self.prompt)[1:].lstrip().startswith((b'"', b"[")):
            return 1
        return max(1, len(msgspec.json.decode(self.prompt, type=list[msgspec.Raw])))


def prefix_of(content: bytes, model: str, salt: str | None) -> tuple[BlockHash, ...]:
    """Names of the full blocks that the content begins with: equal for equal beginnings, each for all before it, too.
    The blocks are of bytes, since only an endpoint knows its tokens."""
    name = blake2b(root_hash(salt) + model.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    names = []
    end = min(len(content) // PREFIX_BLOCK_BYTES, PREFIX_BLOCKS_MAX) * PREFIX_BLOCK_BYTES
    for begin in range(0, end, PREFIX_BLOCK_BYTES):
        name = blake2b(name + content[begin : begin + PREFIX_BLOCK_BYTES], digest_size=16).digest()
        names.append(BlockHash(name))
    return tuple(names)


def rewritten(raw: bytes, fields: dict[str, object], *, without: Collection[str] = ()) -> bytes:
    """The JSON object with these fields in place of its own, and none of those `without`; the bytes of the others stay
    as they are."""
    if not fields and not without:
        return raw
    parsed = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    for name in without:
        parsed.pop(name, None)
    return msgspec.json.encode({**parsed, **fields})


def without_transfer_params(raw: bytes, body: RoutedBody, fields: dict[str, object]) -> bytes:
    """The body as clients may send it, with these fields in place of its own. What is left out names the host and port
    from which an engine fetches KV: a client that could choose them would have servers connect to wherever it likes,
    and read what others have asked. The router makes its own."""
    return rewritten(raw, fields, without=(TRANSFER_PARAMS,) if bytes(body.kv_transfer_params) else ())
