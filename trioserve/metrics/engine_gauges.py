"""Copies an engine's counters into metrics at every scrape, so that the core does not depend on metrics."""

from __future__ import annotations

from trioserve.contracts.image_generation import IterativeStats
from trioserve.contracts.page import EngineStats
from trioserve.metrics.registry import Metrics

__all__ = ["EngineGauges", "ImageGauges", "ShellGauges"]


class ShellGauges:
    """The gauges that every kind of engine shows.

    Args:
        metrics: the metrics to update.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def show(
        self,
        *,
        running_count: int,
        waiting_count: int,
        deferred_count: int,
        live_count: int,
        task_count: int,
        step_seconds: float,
        step_seconds_max: float,
        no_progress_seconds: float,
    ) -> None:
        """Set the gauges.

        Args:
            running_count: number of sequences that are being computed.
            waiting_count: number of sequences that wait to be computed.
            deferred_count: number of waiting sequences that wait for something other than free blocks or slots.
            live_count: number of requests whose scope has begun and has not ended.
            task_count: number of Trio tasks of the whole program.
            step_seconds: time since the step in flight began, in seconds.
            step_seconds_max: limit on `step_seconds`.
            no_progress_seconds: time since a request last made progress, in seconds.
        """
        metrics = self._metrics
        metrics.num_requests_running.set(running_count)
        metrics.num_requests_waiting.set(waiting_count)
        metrics.num_requests_waiting_by_reason.labels("deferred").set(deferred_count)
        metrics.num_requests_waiting_by_reason.labels("capacity").set(waiting_count - deferred_count)
        metrics.live_requests.set(live_count)
        metrics.tasks.set(task_count)
        metrics.step_age_seconds.set(step_seconds)
        metrics.step_age_seconds_max.set(step_seconds_max)
        metrics.no_progress_seconds.set(no_progress_seconds)


class EngineGauges:
    """The metrics of a text engine.

    Args:
        metrics: the metrics to update.
        stats: the engine's first snapshot. Counts before this snapshot are not shown.
    """

    def __init__(self, metrics: Metrics, stats: EngineStats) -> None:
        self._metrics = metrics
        self._seen = stats

    def show(self, stats: EngineStats, *, held_count: int) -> None:
        """Update the metrics from a snapshot.

        Args:
            stats: the engine's current snapshot.
            held_count: number of finished sequences whose blocks are held for another engine.
        """
        metrics, seen = self._metrics, self._seen
        self._seen = stats
        metrics.kv_cache_usage_perc.set(stats.kv_usage)
        metrics.kv_blocks.labels("free").set(stats.blocks_free)
        metrics.kv_blocks.labels("cached").set(stats.blocks_cached)
        metrics.kv_blocks.labels("used").set(stats.blocks_used)
        metrics.kv_blocks.labels("held").set(stats.blocks_held)
        metrics.state_slots.labels("free").set(stats.states_total - stats.states_used)
        metrics.state_slots.labels("used").set(stats.states_used)
        metrics.state_slots.labels("copies_free").set(stats.snapshots_total - stats.snapshots_kept)
        metrics.state_slots.labels("copies_kept").set(stats.snapshots_kept)
        metrics.num_preemptions_total.inc(stats.preemptions_total - seen.preemptions_total)
        metrics.kv_blocks_given_back_total.inc(stats.blocks_given_back_total - seen.blocks_given_back_total)
        metrics.prefix_cache_queries_total.inc(stats.prefix_query_tokens_total - seen.prefix_query_tokens_total)
        metrics.prefix_cache_hits_total.inc(stats.prefix_hit_tokens_total - seen.prefix_hit_tokens_total)
        metrics.spec_decode_num_drafts_total.inc(stats.drafts_total - seen.drafts_total)
        metrics.spec_decode_num_draft_tokens_total.inc(stats.draft_tokens_total - seen.draft_tokens_total)
        metrics.spec_decode_num_accepted_tokens_total.inc(stats.accepted_tokens_total - seen.accepted_tokens_total)
        metrics.forced_tokens_total.inc(stats.forced_tokens_total - seen.forced_tokens_total)
        metrics.kv_blocks_retained.labels("recent").set(stats.blocks_retained - stats.blocks_spared)
        metrics.kv_blocks_retained.labels("spared").set(stats.blocks_spared)
        metrics.kv_sessions.labels("active").set(stats.sessions_active)
        metrics.kv_sessions.labels("waiting").set(stats.sessions_waiting)
        metrics.session_prefix_hits_total.inc(stats.session_hits_total - seen.session_hits_total)
        metrics.session_prefix_hit_tokens_total.inc(stats.session_hit_tokens_total - seen.session_hit_tokens_total)
        metrics.session_spared_tokens_total.inc(stats.spared_tokens_total - seen.spared_tokens_total)
        metrics.session_turns_deferred_total.inc(stats.turns_deferred_total - seen.turns_deferred_total)
        for kind, total in stats.evictions_total.items():
            metrics.kv_evictions_total.labels(kind.value).inc(total - seen.evictions_total.get(kind, 0))
        metrics.session_prefetched_tokens_total.inc(
            stats.session_prefetched_tokens_total - seen.session_prefetched_tokens_total
        )
        for result, total in stats.session_prefetches_total.items():
            seen_total = seen.session_prefetches_total.get(result, 0)
            metrics.session_prefetches_total.labels(result.value).inc(total - seen_total)
        metrics.kv_transfer_loads_waiting.set(stats.remote_kv_count)
        metrics.kv_transfer_requests_held.set(held_count)
        metrics.kv_transfer_loaded_tokens_total.inc(stats.loaded_tokens_total - seen.loaded_tokens_total)
        metrics.kv_transfer_holds_refused_total.inc(stats.holds_refused_total - seen.holds_refused_total)
        for fault, total in stats.transfer_faults_total.items():
            metrics.transfer_faults_total.labels(fault.value).inc(total - seen.transfer_faults_total[fault])


class ImageGauges:
    """The metrics of an image engine.

    Args:
        metrics: the metrics to update.
        stats: the engine's first snapshot. Counts before this snapshot are not shown.
    """

    def __init__(self, metrics: Metrics, stats: IterativeStats) -> None:
        self._metrics = metrics
        self._seen = stats

    def show(self, stats: IterativeStats) -> None:
        metrics, seen = self._metrics, self._seen
        self._seen = stats
        metrics.latent_slots.labels("free").set(stats.slots_total - stats.slots_used)
        metrics.latent_slots.labels("used").set(stats.slots_used)
        metrics.latent_slots.labels("kept_free").set(stats.kept_total - stats.kept_used)
        metrics.latent_slots.labels("kept_used").set(stats.kept_used)
        metrics.denoising_steps_total.inc(stats.denoised_total - seen.denoised_total)
        metrics.num_preemptions_total.inc(stats.preemptions_total - seen.preemptions_total)
