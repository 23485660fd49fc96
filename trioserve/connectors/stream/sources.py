"""Checks the place that a request names as the holder of its KV."""

from __future__ import annotations

from typing import NamedTuple

from trioserve.connectors.stream.frames import ID_LENGTH_MAX
from trioserve.connectors.stream.options import StreamOptions
from trioserve.connectors.stream.signature import is_signed
from trioserve.contracts.kv_transfer_params import KVTransferParams

__all__ = ["Origin", "Source", "origin_of"]

TOKENS_MAX = 100_000_000  # longer than any context, so a larger value is an error
BLOCKS_MAX = 100_000  # one million tokens in small blocks; checking the list takes a few milliseconds


class Source(NamedTuple):
    """Engine that holds blocks, with the address where it listens."""

    host: str
    port: int
    engine_id: str

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class Origin(NamedTuple):
    """Place from which a request can load its KV.

    Attributes:
        source: Engine that holds the blocks.
        request_id: Id of the request at the holder.
        token_count: Number of positions whose KV is held. None if the request does not say it.
    """

    source: Source
    request_id: str
    token_count: int | None


def origin_of(params: KVTransferParams, options: StreamOptions, key: bytes) -> Origin | str:
    """Find the holder of a request's KV. Check every field, because a client may have written it.

    Args:
        params: kv_transfer_params of the request.
        options: Options of this connector. They say which hosts are allowed.
        key: Key with which the engines of this group sign their addresses.

    Returns:
        The origin, or a sentence that says which field is wrong.
    """
    host, port = params.remote_host, params.remote_port
    if not host or len(host) > 255 or not host.isprintable():
        return "its kv_transfer_params have no valid remote_host"
    if port is None or not 0 < port <= 65_535:
        return f"its kv_transfer_params have remote_port {port}: it must be 1 to 65535"
    for name, value in (("engine", params.remote_engine_id), ("request", params.remote_request_id)):
        if not value or len(value) > ID_LENGTH_MAX:
            return f"its kv_transfer_params have no remote_{name}_id of 1 to {ID_LENGTH_MAX} characters"
    assert params.remote_engine_id is not None
    assert params.remote_request_id is not None
    if params.tp_size != 1:
        return f"its kv_transfer_params have tp_size {params.tp_size}: this engine reads from engines with tp_size 1"
    token_count, block_size = params.remote_num_tokens, params.remote_block_size
    if token_count is not None and not 0 < token_count <= TOKENS_MAX:
        return f"its kv_transfer_params have remote_num_tokens {token_count}: it must be 1 to {TOKENS_MAX}"
    if block_size is not None and not 0 < block_size <= TOKENS_MAX:
        return f"its kv_transfer_params have remote_block_size {block_size}: it must be 1 to {TOKENS_MAX}"
    blocks = params.remote_block_ids
    if blocks is not None and len(blocks) > BLOCKS_MAX:
        return f"its kv_transfer_params name {len(blocks)} blocks: at most {BLOCKS_MAX} are allowed"
    if blocks is not None and any(isinstance(block, tuple) for block in blocks):
        if len(blocks) != 1 or not isinstance(blocks[0], tuple):
            return "its kv_transfer_params have several groups of blocks: this engine accepts one group"
        blocks = blocks[0]
    if blocks is not None and block_size is not None:
        # The holder checks its own records later. This check only finds contradictions early.
        if token_count is None:
            token_count = len(blocks) * block_size
        elif not 0 <= len(blocks) * block_size - token_count < block_size:
            return (
                f"its kv_transfer_params say {token_count} tokens in {len(blocks)} blocks of {block_size}: the "
                "numbers do not match"
            )
    objection = options.objection_to(host)
    if objection is not None:
        return objection
    if not is_signed(params, key):
        return (
            "its kv_transfer_params have no remote_signature of an engine of this group: pass on all fields of the "
            "other engine's response, and give both engines the same key"
        )
    return Origin(Source(host, port, params.remote_engine_id), params.remote_request_id, token_count)
