"""Metrics of an engine's KV: the pool, transfers between engines, host memory and files."""

from __future__ import annotations

from typing import Annotated

from prometheus_client import Counter, Gauge

from trioserve.contracts.kv_transfer import TransferFault
from trioserve.contracts.page import EvictionClass, PrefetchResult
from trioserve.metrics.metric import Label, Metric, Question

__all__ = ["CacheMetrics"]


class CacheMetrics:
    """Metrics of the KV cache, and of KV transfers from and to other engines, host memory and files."""

    kv_cache_usage_perc: Annotated[
        Gauge,
        Metric(
            Question.CACHE,
            "share, 0 to 1",
            "Share of the KV blocks that requests use or connectors hold. Unused cached blocks count as free.",
            vllm=True,
            others=("vllm:gpu_cache_usage_perc",),
        ),
    ]
    cache_config_info: Annotated[
        Gauge,
        Metric(
            Question.CACHE,
            "1",
            "Configuration of the KV cache, in labels. num_gpu_blocks is the number of blocks, also on a CPU.",
            labels=(
                Label("block_size"),
                Label("num_gpu_blocks"),
                Label("cache_dtype"),
                Label("enable_prefix_caching"),
            ),
            vllm=True,
        ),
    ]
    prompt_tokens_by_source_total: Annotated[
        Counter,
        Metric(
            Question.CACHE,
            "tokens",
            "Prompt tokens of started requests, by the source of their KV: computed here, found in the prefix "
            "cache, or loaded from elsewhere.",
            labels=(Label("source", ("local_compute", "local_cache_hit", "external_kv_transfer")),),
            vllm=True,
        ),
    ]
    prompt_tokens_cached_total: Annotated[
        Counter,
        Metric(
            Question.CACHE,
            "tokens",
            "Prompt tokens of started requests that were not computed here.",
            vllm=True,
        ),
    ]
    prefix_cache_queries_total: Annotated[
        Counter,
        Metric(
            Question.CACHE,
            "tokens",
            "Prompt tokens that were looked up in the prefix cache.",
            vllm=True,
            others=("vllm:gpu_prefix_cache_queries_total",),
        ),
    ]
    prefix_cache_hits_total: Annotated[
        Counter,
        Metric(
            Question.CACHE,
            "tokens",
            "Prompt tokens that were found in the prefix cache.",
            vllm=True,
            others=("vllm:gpu_prefix_cache_hits_total",),
        ),
    ]
    num_preemptions_total: Annotated[
        Counter,
        Metric(
            Question.CACHE,
            "preemptions",
            "Times that a running sequence lost its blocks to another one and must be computed again.",
            vllm=True,
        ),
    ]
    kv_blocks_given_back_total: Annotated[
        Counter,
        Metric(
            Question.CACHE,
            "blocks",
            "KV blocks that running sequences freed because no layer's sliding window reached them any more.",
        ),
    ]
    kv_blocks: Annotated[
        Gauge,
        Metric(
            Question.CACHE,
            "blocks",
            "KV blocks by state. Cached blocks are unused and reusable. The states add up to the pool.",
            labels=(Label("state", ("free", "cached", "used", "held")),),
        ),
    ]
    kv_blocks_retained: Annotated[
        Gauge,
        Metric(
            Question.CACHE,
            "blocks",
            "Cached blocks that are evicted later because a session retains them. Spared blocks would be evicted "
            "already if only recency counted.",
            labels=(Label("state", ("recent", "spared")),),
        ),
    ]
    kv_evictions_total: Annotated[
        Counter,
        Metric(
            Question.CACHE,
            "blocks",
            "Blocks that were evicted from the prefix cache, by class: of an ended session, by recency, or of a "
            "session that retained them.",
            labels=(Label("class", tuple(kind.value for kind in EvictionClass)),),
        ),
    ]
    kv_sessions: Annotated[
        Gauge,
        Metric(
            Question.CACHE,
            "sessions",
            "Open sessions in the engine: with a live request, or waiting for their next turn.",
            labels=(Label("state", ("active", "waiting")),),
        ),
    ]
    session_prefix_hits_total: Annotated[
        Counter,
        Metric(
            Question.CACHE,
            "sequences",
            "Sequences of sessions that started with tokens from the prefix cache.",
        ),
    ]
    session_prefix_hit_tokens_total: Annotated[
        Counter,
        Metric(
            Question.CACHE,
            "tokens",
            "Prompt tokens of sessions that were found in the prefix cache.",
        ),
    ]
    session_spared_tokens_total: Annotated[
        Counter,
        Metric(
            Question.CACHE,
            "tokens",
            "Prompt tokens that were found in the prefix cache only because a session retained their blocks.",
        ),
    ]
    session_turns_deferred_total: Annotated[
        Counter,
        Metric(
            Question.CACHE,
            "sequences",
            "Turns of sessions that had lost their blocks, and waited so that other sessions kept theirs.",
        ),
    ]
    session_prefetches_total: Annotated[
        Counter,
        Metric(
            Question.CACHE,
            "prefetches",
            "Loads of evicted blocks for sessions that waited for their next turn, by result: blocks arrived, nothing "
            "had to be loaded, the turn came first, there was no room, the load was cancelled or failed.",
            labels=(Label("result", tuple(result.value for result in PrefetchResult)),),
        ),
    ]
    session_prefetched_tokens_total: Annotated[
        Counter,
        Metric(
            Question.CACHE,
            "tokens",
            "Tokens that these prefetches loaded.",
        ),
    ]
    state_slots: Annotated[
        Gauge,
        Metric(
            Question.CACHE,
            "slots",
            "Slots for the layer state of a whole sequence: of running sequences, and of copies that the prefix "
            "cache can find. 0 if no layer keeps such a state.",
            labels=(Label("state", ("free", "used", "copies_free", "copies_kept")),),
        ),
    ]
    transfer_faults_total: Annotated[
        Counter,
        Metric(
            Question.TRANSFERS,
            "faults",
            "Faults of the KV connector that the engine survived, by kind.",
            labels=(Label("kind", tuple(fault.value for fault in TransferFault)),),
        ),
    ]
    kv_transfer_blocks_sent_total: Annotated[
        Counter, Metric(Question.TRANSFERS, "blocks", "KV blocks that other engines have read here.")
    ]
    kv_transfer_bytes_sent_total: Annotated[
        Counter, Metric(Question.TRANSFERS, "bytes", "Bytes of the KV blocks that other engines have read here.")
    ]
    kv_transfer_blocks_received_total: Annotated[
        Counter, Metric(Question.TRANSFERS, "blocks", "KV blocks received from other engines.")
    ]
    kv_transfer_bytes_received_total: Annotated[
        Counter, Metric(Question.TRANSFERS, "bytes", "Bytes of the KV blocks received from other engines.")
    ]
    kv_transfer_sends_completed_total: Annotated[
        Counter, Metric(Question.TRANSFERS, "requests", "Requests whose held blocks were read completely.")
    ]
    kv_transfer_sends_failed_total: Annotated[
        Counter,
        Metric(
            Question.TRANSFERS,
            "requests",
            "Requests whose held blocks were released before they were read completely.",
        ),
    ]
    kv_transfer_loads_completed_total: Annotated[
        Counter, Metric(Question.TRANSFERS, "requests", "Requests whose KV was loaded completely.")
    ]
    kv_transfer_load_seconds_total: Annotated[
        Counter,
        Metric(
            Question.TRANSFERS,
            "seconds",
            "Time of completed KV loads, from their turn until all KV was there.",
        ),
    ]
    kv_transfer_loads_failed_total: Annotated[
        Counter, Metric(Question.TRANSFERS, "requests", "Requests whose KV did not arrive, or was wrong.")
    ]
    kv_transfer_sends_unwanted_total: Annotated[
        Counter,
        Metric(
            Question.TRANSFERS,
            "requests",
            "Requests whose held blocks were released because the reader left.",
        ),
    ]
    kv_transfer_sends_aborted_total: Annotated[
        Counter,
        Metric(
            Question.TRANSFERS,
            "requests",
            "Requests whose held blocks were released because the request was aborted here.",
        ),
    ]
    kv_transfer_sends_expired_total: Annotated[
        Counter,
        Metric(
            Question.TRANSFERS,
            "requests",
            "Requests whose held blocks were released because no engine read them in time.",
        ),
    ]
    kv_transfer_loads_abandoned_total: Annotated[
        Counter, Metric(Question.TRANSFERS, "requests", "Requests that stopped waiting for their KV.")
    ]
    kv_transfer_transfers_resumed_total: Annotated[
        Counter, Metric(Question.TRANSFERS, "transfers", "Times that a broken KV load resumed over another connection.")
    ]
    kv_transfer_transfers_refused_total: Annotated[
        Counter,
        Metric(
            Question.TRANSFERS,
            "transfers",
            "Times that another engine asked for blocks that are not held, or not held for it.",
        ),
    ]
    kv_transfer_peers_refused_total: Annotated[
        Counter,
        Metric(
            Question.TRANSFERS,
            "connections",
            "Connections that did not prove in time that they belong to an engine, or were displaced by too many "
            "others.",
        ),
    ]
    kv_transfer_host_saved_total: Annotated[
        Counter,
        Metric(
            Question.HOST,
            "blocks",
            "Blocks that were copied to host memory when they left the prefix cache.",
        ),
    ]
    kv_transfer_host_saved_bytes_total: Annotated[
        Counter, Metric(Question.HOST, "bytes", "Bytes of the blocks that were copied to host memory.")
    ]
    kv_transfer_host_unsaved_total: Annotated[
        Counter,
        Metric(
            Question.HOST,
            "blocks",
            "Blocks that were not copied to host memory, because there was no room or too many copies were running.",
        ),
    ]
    kv_transfer_host_loaded_total: Annotated[
        Counter, Metric(Question.HOST, "blocks", "Blocks that were loaded back from host memory or files.")
    ]
    kv_transfer_host_loaded_bytes_total: Annotated[
        Counter, Metric(Question.HOST, "bytes", "Bytes of the blocks that were loaded back from host memory or files.")
    ]
    kv_transfer_host_loaded_from_files_total: Annotated[
        Counter, Metric(Question.HOST, "blocks", "Blocks that were loaded back from a file.")
    ]
    kv_transfer_host_written_total: Annotated[
        Counter, Metric(Question.HOST, "blocks", "Blocks that were written to files.")
    ]
    kv_transfer_host_unwritten_total: Annotated[
        Counter,
        Metric(
            Question.HOST,
            "blocks",
            "Blocks that were lost before they were in a file, because they left host memory or could not be written.",
        ),
    ]
    kv_transfer_host_evicted_total: Annotated[
        Counter, Metric(Question.HOST, "blocks", "Blocks that were evicted from host memory to make room for others.")
    ]
    kv_transfer_host_files_evicted_total: Annotated[
        Counter,
        Metric(
            Question.HOST,
            "blocks",
            "Block files that were evicted from the directory to make room for others.",
        ),
    ]
    kv_transfer_host_dropped_total: Annotated[
        Counter,
        Metric(
            Question.HOST,
            "blocks",
            "Blocks that were dropped because they were damaged, missing, or did not match their hash.",
        ),
    ]
    kv_transfer_host_write_failures_total: Annotated[
        Counter, Metric(Question.HOST, "failures", "Failed attempts to write a block to disk.")
    ]
    kv_transfer_host_read_failures_total: Annotated[
        Counter, Metric(Question.HOST, "failures", "Failed attempts to read a block from disk.")
    ]
    kv_transfer_host_memory_bytes_used: Annotated[
        Gauge, Metric(Question.HOST, "bytes", "Host memory that is used by blocks.")
    ]
    kv_transfer_host_directory_bytes_used: Annotated[
        Gauge, Metric(Question.HOST, "bytes", "Bytes of block files in the directory.")
    ]
    kv_transfer_heartbeats_sent_total: Annotated[
        Counter, Metric(Question.TRANSFERS, "messages", "Heartbeats sent to engines that hold blocks.")
    ]
    kv_transfer_heartbeats_received_total: Annotated[
        Counter, Metric(Question.TRANSFERS, "messages", "Heartbeats received for held blocks.")
    ]
    kv_transfer_loaded_tokens_total: Annotated[
        Counter, Metric(Question.TRANSFERS, "tokens", "Prompt tokens whose KV was loaded instead of computed.")
    ]
    kv_transfer_requests_held: Annotated[
        Gauge, Metric(Question.TRANSFERS, "sequences", "Answered sequences whose blocks are held for another engine.")
    ]
    kv_transfer_holds_refused_total: Annotated[
        Counter,
        Metric(
            Question.TRANSFERS,
            "sequences",
            "Sequences whose blocks could not be held for another engine, because the limit of held blocks was "
            "reached.",
        ),
    ]
