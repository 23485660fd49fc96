"""Where a request says that its KV is, as far as it can be believed."""

from __future__ import annotations

from typing import NamedTuple

from trioserve.connectors.stream.frames import ID_LENGTH_MAX
from trioserve.connectors.stream.options import StreamOptions
from trioserve.connectors.stream.signature import is_signed
from trioserve.contracts.kv_transfer_params import KVTransferParams

__all__ = ["Origin", "Source", "origin_of"]

TOKENS_MAX = 100_000_000  # no context is longer; a larger number is no number of tokens
BLOCKS_MAX = 100_000  # of a million tokens in small blocks; to look at them takes some milliseconds


class Source(NamedTuple):
    """An engine that holds blocks, and where it listens."""

    host: str
    port: int
    engine_id: str

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class Origin(NamedTuple):
    """request_id: the holder's name for the request. token_count: positions whose KV is held there; None: not said."""

    source: Source
    request_id: str
    token_count: int | None


def origin_of(params: KVTransferParams, options: StreamOptions, key: bytes) -> Origin | str:
    """Where KV is, from what came with a request, which anybody may have written.

    Args:
        key: with which engines of this group sign where they are.

    Returns:
        The origin, or what is wrong with it, as a sentence.
    """
    host, port = params.remote_host, params.remote_port
    if not host or len(host) > 255 or not host.isprintable():
        return "its kv_transfer_params name no remote_host that could be one"
    if port is None or not 0 < port <= 65_535:
        return f"its kv_transfer_params say remote_port {port}: it must be 1 to 65535"
    for name, value in (("engine", params.remote_engine_id), ("request", params.remote_request_id)):
        if not value or len(value) > ID_LENGTH_MAX:
            return f"its kv_transfer_params name no remote_{name}_id of 1 to {ID_LENGTH_MAX} characters"
    assert params.remote_engine_id is not None
    assert params.remote_request_id is not None
    if params.tp_size != 1:
        return f"its kv_transfer_params say that {params.tp_size} machines share the heads: this engine reads from one"
    token_count, block_size = params.remote_num_tokens, params.remote_block_size
    if token_count is not None and not 0 < token_count <= TOKENS_MAX:
        return f"its kv_transfer_params say remote_num_tokens {token_count}"
    if block_size is not None and not 0 < block_size <= TOKENS_MAX:
        return f"its kv_transfer_params say remote_block_size {block_size}"
    blocks = params.remote_block_ids
    if blocks is not None and len(blocks) > BLOCKS_MAX:
        return f"its kv_transfer_params name {len(blocks)} blocks: {BLOCKS_MAX} may be named"
    if blocks is not None and any(isinstance(block, tuple) for block in blocks):
        if len(blocks) != 1 or not isinstance(blocks[0], tuple):
            return "its kv_transfer_params have several groups of blocks: this engine has one"
        blocks = blocks[0]
    if blocks is not None and block_size is not None:
        # The holder goes by its own books; this only finds out early what cannot be.
        if token_count is None:
            token_count = len(blocks) * block_size
        elif not 0 <= len(blocks) * block_size - token_count < block_size:
            return (
                f"its kv_transfer_params say {token_count} tokens in {len(blocks)} blocks of {block_size}, which "
                "cannot be"
            )
    objection = options.objection_to(host)
    if objection is not None:
        return objection
    if not is_signed(params, key):
        return (
            "its kv_transfer_params have no remote_signature of an engine of this group: pass on all that the other "
            "engine's response has, and give both the same key"
        )
    return Origin(Source(host, port, params.remote_engine_id), params.remote_request_id, token_count)
