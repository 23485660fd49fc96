"""What client, router and engines tell each other about a transfer of KV blocks: the shape on the wire."""

from __future__ import annotations

import msgspec

__all__ = ["KVTransferParams"]


class KVTransferParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`kv_transfer_params` in requests and responses, in the shape of vLLM's NIXL flow. Fields that are not known are
    ignored.

    To the prefill side goes do_remote_decode: compute the prompt, and hold its blocks for somebody else. Its response
    has all the rest and do_remote_prefill, and is passed on to the decode side as it is.

    remote_engine_id: of the engine that holds the blocks, new with each start. remote_request_id: its name for the
    request. remote_block_ids: the blocks there, in order, 2147483647 where there is none behind a sliding window; a
    list for each cache group where there are groups.
    remote_host, remote_port: where its connector listens. remote_block_size, remote_num_tokens: tokens in a block
    there, and tokens whose KV is in the blocks. tp_size: how many machines share its heads. traceparent: of the request
    there, where it is traced (W3C Trace Context), so that whoever takes the KV is found in the same trace.
    remote_signature: by it a connector of ours sees that an engine of its own group has named host, port, engine and
    request; see connectors/stream/signature.
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
