"""Creates the catalogue's metrics as prometheus_client instruments, and writes the page that scrapers read.

This module decides under which names and labels metrics are shown. Other packages decide when to count.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector
from prometheus_client.exposition import generate_latest

from trioserve.metrics.catalogue import CATALOGUE, ENGINE_LABEL, MODEL_LABEL, Metric, Part
from trioserve.metrics.plain_histogram import PlainHistogram
from trioserve.metrics.text_format import TextFormat

__all__ = ["Metrics", "IMAGE_SERVER_PARTS", "SERVER_PARTS"]

SERVER_PARTS: tuple[Part, ...] = ("engine", "frontend", "router")
IMAGE_SERVER_PARTS: tuple[Part, ...] = (*SERVER_PARTS, "images")
ENGINE_PARTS: tuple[Part, ...] = ("engine", "images")


class Metrics:
    """The metrics of a server or router. Each metric of the catalogue is an attribute:
    `metrics.step_seconds.observe(0.012)`.

    If a metric has labels, select their values first: `metrics.aborts_total.labels("decode").inc()`. A process can have
    several Metrics, each with its own registry. Any thread may use counters and gauges, but only one thread may use a
    histogram.

    Args:
        model_name: value of the label `model_name`, or None if there is not exactly one model.
        parts: parts of the program whose metrics exist. Metrics of other parts have no attribute. A server for image
            generation uses IMAGE_SERVER_PARTS.
    """

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    num_requests_running: Gauge
    num_requests_waiting: Gauge
    kv_cache_usage_perc: Gauge
    time_to_first_token_seconds: PlainHistogram
    inter_token_latency_seconds: PlainHistogram
    request_time_per_output_token_seconds: PlainHistogram
    e2e_request_latency_seconds: PlainHistogram
    request_queue_time_seconds: PlainHistogram
    request_prefill_time_seconds: PlainHistogram
    request_decode_time_seconds: PlainHistogram
    request_inference_time_seconds: PlainHistogram
    request_prompt_tokens: PlainHistogram
    request_prefill_kv_computed_tokens: PlainHistogram
    request_generation_tokens: PlainHistogram
    request_max_num_generation_tokens: PlainHistogram
    request_params_n: PlainHistogram
    request_params_max_tokens: PlainHistogram
    step_tokens: PlainHistogram
    num_requests_waiting_by_reason: Gauge
    engine_sleep_state: Gauge
    cache_config_info: Gauge
    prompt_tokens_total: Counter
    prompt_tokens_by_source_total: Counter
    prompt_tokens_cached_total: Counter
    adapters: Gauge
    adapter_bytes: Gauge
    adapter_requests: Gauge
    lora_requests_info: Gauge
    resumed_requests_total: Counter
    resumed_tokens_total: Counter
    generation_tokens_total: Counter
    prefix_cache_queries_total: Counter
    prefix_cache_hits_total: Counter
    spec_decode_num_drafts_total: Counter
    spec_decode_num_draft_tokens_total: Counter
    spec_decode_num_accepted_tokens_total: Counter
    forced_tokens_total: Counter
    form_preparation_seconds: PlainHistogram
    forms_compiled_total: Counter
    form_cache_hits_total: Counter
    mask_rows_total: Counter
    mask_seconds_total: Counter
    rank_step_seconds_total: Counter
    rank_together_seconds_total: Counter
    image_encoding_seconds: PlainHistogram
    image_decoders_killed_total: Counter
    image_queries_total: Counter
    image_hits_total: Counter
    image_output_bytes: Gauge
    request_success_total: Counter
    pooled_inputs_total: Counter
    num_preemptions_total: Counter
    kv_blocks_given_back_total: Counter
    aborts_total: Counter
    deadlines_passed_total: Counter
    cancel_to_free_seconds: PlainHistogram
    cancel_to_free_steps: PlainHistogram
    live_requests: Gauge
    batch_invariant: Gauge
    weights_info: Gauge
    step_weight_bytes: Gauge
    token_kv_bytes: Gauge
    token_flops: Gauge
    attended_token_flops: Gauge
    engine_restarts_total: Counter
    requests_poisoned_total: Counter
    large_response_bytes: Gauge
    tasks: Gauge
    step_seconds: PlainHistogram
    step_age_seconds: Gauge
    step_age_seconds_max: Gauge
    no_progress_seconds: Gauge
    kv_blocks: Gauge
    state_slots: Gauge
    transfer_faults_total: Counter
    kv_transfer_blocks_sent_total: Counter
    kv_transfer_bytes_sent_total: Counter
    kv_transfer_blocks_received_total: Counter
    kv_transfer_bytes_received_total: Counter
    kv_transfer_sends_completed_total: Counter
    kv_transfer_sends_failed_total: Counter
    kv_transfer_loads_completed_total: Counter
    kv_transfer_load_seconds_total: Counter
    kv_transfer_loads_failed_total: Counter
    kv_transfer_sends_unwanted_total: Counter
    kv_transfer_sends_aborted_total: Counter
    kv_transfer_sends_expired_total: Counter
    kv_transfer_loads_abandoned_total: Counter
    kv_transfer_transfers_resumed_total: Counter
    kv_transfer_transfers_refused_total: Counter
    kv_transfer_peers_refused_total: Counter
    kv_transfer_host_saved_total: Counter
    kv_transfer_host_saved_bytes_total: Counter
    kv_transfer_host_unsaved_total: Counter
    kv_transfer_host_loaded_total: Counter
    kv_transfer_host_loaded_bytes_total: Counter
    kv_transfer_host_loaded_from_files_total: Counter
    kv_transfer_host_written_total: Counter
    kv_transfer_host_unwritten_total: Counter
    kv_transfer_host_evicted_total: Counter
    kv_transfer_host_files_evicted_total: Counter
    kv_transfer_host_dropped_total: Counter
    kv_transfer_host_write_failures_total: Counter
    kv_transfer_host_read_failures_total: Counter
    kv_transfer_host_memory_bytes_used: Gauge
    kv_transfer_host_directory_bytes_used: Gauge
    kv_transfer_heartbeats_sent_total: Counter
    kv_transfer_heartbeats_received_total: Counter
    kv_transfer_loaded_tokens_total: Counter
    kv_transfer_loads_waiting: Gauge
    kv_transfer_requests_held: Gauge
    kv_transfer_holds_refused_total: Counter
    requests_rejected_total: Counter
    connections_open: Gauge
    connections_known_open: Gauge
    connections_max: Gauge
    accepts_failed_total: Counter
    connections_total: Counter
    connections_refused_total: Counter
    streams_refused_total: Counter
    clients_left_total: Counter
    clients_stalled_total: Counter
    clients_slow: Gauge
    answer_bytes_held: Gauge
    request_body_bytes_held: Gauge
    request_body_bytes_total: Counter
    streams_open: Gauge
    http_requests_total: Counter
    ignored_request_fields_total: Counter
    http_requests_by_handler_total: Counter
    http_request_duration_seconds: PlainHistogram
    http_request_duration_highr_seconds: PlainHistogram
    log_lines_dropped_total: Counter
    trace_spans_total: Counter
    batches_live: Gauge
    batch_lines_total: Counter
    queued_requests: Gauge
    queue_wait_seconds: PlainHistogram
    admissions_total: Counter
    rejections_total: Counter
    retries_total: Counter
    endpoint_load_reports_total: Counter
    stream_continuations_total: Counter
    stream_continuations_refused_total: Counter
    stream_moves_total: Counter
    moving_requests: Gauge
    continuing_requests: Gauge
    streams_continued_total: Counter
    silent_responses_total: Counter
    streams_not_resumable_total: Counter
    stream_pause_seconds: PlainHistogram
    continuation_bytes_held: Gauge
    pairs_total: Counter
    pair_handover_seconds: PlainHistogram
    endpoint_leases: Gauge
    endpoint_in_flight: Gauge
    endpoint_healthy: Gauge
    endpoint_resident_blocks: Gauge
    endpoint_ejections_total: Counter
    endpoint_failures_total: Counter
    endpoint_hangs_total: Counter
    images_total: Counter
    denoising_steps_total: Counter
    latent_slots: Gauge
    time_to_first_picture_seconds: PlainHistogram
    step_work: PlainHistogram
    store_bytes_used: Gauge
    store_objects: Gauge
    store_evicted_total: Counter
    store_refused_total: Counter
    store_write_failures_total: Counter
    store_unwritten_bytes: Gauge
    background_responses: Gauge
    detached_streams: Gauge
    detached_bytes_held: Gauge
    peers: Gauge
    peers_well: Gauge
    peers_lost_total: Counter
    streams_found_total: Counter
    streams_recomputed_total: Counter
    farewells_dropped_total: Counter
    router_streams: Gauge
    router_stream_bytes_held: Gauge
    router_streams_taken_over_total: Counter
    router_streams_expired_total: Counter

    def __init__(self, model_name: str | None, *, parts: Collection[Part] = SERVER_PARTS) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._metrics = tuple(metric for metric in CATALOGUE if metric.part in parts)
        self._names = frozenset(metric.name for metric in self._metrics)
        self._callbacks: list[Callable[[], None]] = []
        self._pages: dict[Part | None, TextFormat] = {}
        self._process = ProcessCollector(registry=None)
        for metric in self._metrics:
            setattr(self, metric.name, _instrument(metric, self.registry))

    def has(self, name: str) -> bool:
        """Return whether a metric exists.

        Args:
            name: name without prefix.
        """
        return name in self._names

    def on_scrape(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Register a callback that sets gauges from a snapshot before every page.

        Args:
            callback: called before every page. It must not wait.

        Returns:
            A function that ends the registration. It calls the callback one last time.
        """
        self._callbacks.append(callback)

        def end() -> None:
            callback()
            self._callbacks.remove(callback)

        return end

    def refresh(self) -> None:
        """Run all callbacks, as before every page."""
        for callback in self._callbacks:
            callback()

    def total(self, name: str) -> float:
        """Return the value of a counter or gauge, summed over its labels.

        Args:
            name: name without prefix.

        Returns:
            The current value of a counter, or the value that a gauge had at the last page or refresh. 0 if the metric
            does not exist.
        """
        if name not in self._names:
            return 0.0
        family = next(iter(getattr(self, name).collect()))
        return float(sum(sample.value for sample in family.samples if not sample.name.endswith("_created")))

    def expose(self, *, part: Part | None = None) -> bytes:
        """Write a page in Prometheus' text format 0.0.4. Send the page with the content type `content_type`.

        Each family is shown under our prefix and then under its aliases. Every series has the label model_name, and
        series of an engine also have the label engine. On Linux, the usual process metrics follow
        (`process_resident_memory_bytes`, ...).

        Args:
            part: if not None, write only the metrics of this part, without the process metrics, so that the result can
                be appended to another page. If None, write all metrics.
        """
        self.refresh()
        text = self._pages.get(part)
        if text is None:
            metrics = [metric for metric in self._metrics if part in (None, metric.part)]
            text = self._pages[part] = TextFormat(self.registry, metrics, [self._labels(metric) for metric in metrics])
        return text.write().encode() + (generate_latest(self._process) if part is None else b"")

    def _labels(self, metric: Metric) -> dict[str, str]:
        """Return the labels that all series of a metric have. They are added when a page is written, so that the
        instruments need not have them.
        """
        if metric.shown_as is not None:
            return {}
        model = {} if self._model_name is None else {MODEL_LABEL: self._model_name}
        return model | ({ENGINE_LABEL: "0"} if metric.part in ENGINE_PARTS else {})


def _instrument(metric: Metric, registry: CollectorRegistry) -> Gauge | Counter | PlainHistogram:
    label_names = [label.name for label in metric.labels]
    instrument: Gauge | Counter | PlainHistogram
    if metric.kind == "gauge":
        instrument = Gauge(metric.name, metric.meaning, label_names, registry=registry)
    elif metric.kind == "counter":
        instrument = Counter(metric.name, metric.meaning, label_names, registry=registry)
    else:
        instrument = PlainHistogram(metric.name, metric.meaning, label_names, buckets=metric.buckets, registry=registry)
    if len(metric.labels) == 1:
        for value in metric.labels[0].values:
            instrument.labels(value)
    return instrument
