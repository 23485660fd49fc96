"""The JSON fields by which client, router and engines agree on a transfer of KV blocks."""

from __future__ import annotations

import msgspec

__all__ = ["KVTransferParams"]


class KVTransferParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Value of `kv_transfer_params` in requests and responses, compatible with vLLM's NIXL connector.

    Unknown fields are ignored. A request to the prefill engine sets do_remote_decode. The response of that engine sets
    do_remote_prefill and the remaining fields. The router or client copies this response into the request to the decode
    engine.

    Attributes:
        do_remote_prefill: True if another engine holds the blocks of the prompt.
        do_remote_decode: True to compute the prompt and hold its blocks for another engine.
        remote_engine_id: Id of the engine that holds the blocks. The id changes with each start of that engine.
        remote_request_id: Id of the request in that engine.
        remote_block_ids: Indices of the blocks in that engine, in order. 2147483647 stands for a block that a sliding
            window no longer needs. A list for each cache group if there are groups.
        remote_host: Host where that engine's connector listens.
        remote_port: Port where that engine's connector listens.
        remote_block_size: Tokens in a block of that engine.
        remote_num_tokens: Number of tokens whose KV is in the blocks.
        tp_size: Machines that share that engine's attention heads.
        traceparent: Trace of the request in that engine (W3C Trace Context), so that the transfer joins the trace.
        remote_signature: Proof that an engine of the same group set host, port, engine and request. See
            connectors/stream/signature.
    """

    do_remote_prefill: bool = False
    do_remote_decode: bool = False
    remote_engine_id: str | None = None
    remote_request_id: str | None = None
    remote_block_ids: tuple[int | tuple[int, ...], ...] | None = None
    remote_host: str | None = None
    remote_port: int | None = None
    remote_block_size: int | None = None
    remote_num_tokens: int | None = None
    tp_size: int = 1
    traceparent: str | None = None
    remote_signature: str | None = None
