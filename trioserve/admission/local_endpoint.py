"""The local engine as the only endpoint of a router. The router's queue is also the queue of the engine.

The router's counts are copied into metrics at every scrape, so that the router core does not depend on metrics.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trioserve.admission.dispatch import Dispatch
from trioserve.admission.settings import AdmissionSettings
from trioserve.contracts.audio import AudioPrompt
from trioserve.contracts.endpoint import EndpointId, RoutedRequest
from trioserve.contracts.pooling import LabelledPrompt, PoolingInput, TextPair
from trioserve.contracts.prompt import ChatPrompt
from trioserve.metrics.registry import CATALOGUE, Metrics
from trioserve.router.policies import RoundRobin
from trioserve.router.settings import RouterSettings
from trioserve.vision.image_prompt import image_count

__all__ = ["LOCAL_ENDPOINT", "LOCAL_MODEL", "WAITING_DEPTH_MAX", "local_dispatch", "local_request", "show_router"]


LOCAL_ENDPOINT = EndpointId("local")
LOCAL_MODEL = "local"
"""The only model name in this router: an engine has one queue for all names of its model."""

# Number of requests that are tokenized before the batch has space for them, so that a free batch slot is used at once.
WAITING_DEPTH_MAX = 4
TOKEN_CHARACTERS = 4  # Average number of characters per token of English text.
AUDIO_TOKENS = 1500  # Positions that half a minute of sound takes in Whisper.
# Estimate for one image: a thousand tokens, as for twelve tiles and the whole image in small models.
IMAGE_CHARACTERS = 4000


def local_dispatch(max_num_seqs: int, settings: AdmissionSettings, *, lent_max: int = 0) -> Dispatch:
    """Create a router whose only endpoint is the local engine.

    The router accepts max_num_seqs + waiting_requests_max requests with one sequence each. This counts requests in the
    engine and in the queue.

    Args:
        max_num_seqs: Highest number of sequences that run at the same time.
        settings: Limits of the queue.
        lent_max: Number of additional leases that may be lent (Dispatch.lend).
    """
    waiting_depth = min(WAITING_DEPTH_MAX, settings.waiting_requests_max // 2)
    dispatch = Dispatch(
        RouterSettings(
            queue_requests_max=settings.waiting_requests_max - waiting_depth,
            queue_prompt_tokens_max=settings.waiting_prompt_tokens_max,
            queue_seconds_max=settings.waiting_seconds_max,
            leases_max=max_num_seqs + waiting_depth + lent_max,
            sequences_max=max_num_seqs + settings.waiting_requests_max,
        ),
        RoundRobin,
    )
    dispatch.add_endpoint(LOCAL_ENDPOINT, (LOCAL_MODEL,))
    if lent_max:
        dispatch.set_lease_share(LOCAL_ENDPOINT, max_num_seqs + waiting_depth)
    dispatch.note_health(LOCAL_ENDPOINT, True, hangs=False)
    return dispatch


def local_request(
    prompts: Iterable[PoolingInput], *, tenant: str, priority: int, sequences: int, known_tokens: int = 0
) -> RoutedRequest:
    """Return the routing properties of a request.

    The number of tokens is estimated from the length of the prompt, because the prompt is tokenized after the lease.

    Args:
        prompts: Prompts of the request.
        tenant: Tenant of the request.
        priority: A lower number runs sooner.
        sequences: Number of sequences of the request.
        known_tokens: Number of output tokens of a resumed response, which are computed like a prompt. 0 for a new
            response.
    """
    return RoutedRequest(
        model=LOCAL_MODEL,
        tenant=tenant,
        priority=priority,
        sequences=sequences,
        prompt_tokens=sum(map(_token_count, prompts)) + known_tokens,
    )


def _token_count(prompt: PoolingInput) -> int:
    if isinstance(prompt, TextPair):
        return _token_count(prompt.first) + _token_count(prompt.second)
    if isinstance(prompt, LabelledPrompt):
        return _token_count(prompt.prompt)
    if isinstance(prompt, ChatPrompt):
        return sum(map(_character_count, prompt.messages)) // TOKEN_CHARACTERS + 1
    if isinstance(prompt, str):
        return len(prompt) // TOKEN_CHARACTERS + 1
    if isinstance(prompt, AudioPrompt):
        return AUDIO_TOKENS + len(prompt.token_ids)
    return len(prompt)


def _character_count(message: dict[str, Any]) -> int:
    """Return the number of characters of a message's text. Malformed messages are accepted, and refused later."""
    content = message.get("content")
    if isinstance(content, str):
        return len(content)
    texts = [part.get("text") for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    return sum(len(text) for text in texts if isinstance(text, str)) + image_count([message]) * IMAGE_CHARACTERS


ENDPOINT_METRICS = tuple(
    metric.name for metric in CATALOGUE if any(label.name == "endpoint" for label in metric.labels)
)


def show_router(metrics: Metrics, dispatch: Dispatch) -> None:
    """Update the metrics from the router at every scrape. Call this function once for each router.

    Args:
        metrics: Metrics to update.
        dispatch: The router.
    """
    dispatch.on_wait_over = metrics.queue_wait_seconds.observe
    dispatch.on_paired = metrics.pair_handover_seconds.observe
    seen = dispatch.stats()
    reports_seen = dict(dispatch.load_reports_total)

    def show() -> None:
        nonlocal seen
        stats = dispatch.stats()
        metrics.queued_requests.set(stats.waiting)
        metrics.admissions_total.inc(stats.admissions_total - seen.admissions_total)
        metrics.retries_total.inc(stats.retries_total - seen.retries_total)
        metrics.stream_continuations_total.inc(stats.continuations_total - seen.continuations_total)
        metrics.continuing_requests.set(stats.continuing)
        metrics.stream_moves_total.inc(stats.moves_total - seen.moves_total)
        metrics.moving_requests.set(stats.moving)
        for reason, total in stats.continuations_refused_total.items():
            more = total - seen.continuations_refused_total.get(reason, 0)
            metrics.stream_continuations_refused_total.labels(reason).inc(more)
        for reason, total in stats.rejections_total.items():
            metrics.rejections_total.labels(reason).inc(total - seen.rejections_total.get(reason, 0))
        for how, total in dispatch.load_reports_total.items():
            metrics.endpoint_load_reports_total.labels(how).inc(total - reports_seen[how])
            reports_seen[how] = total
        for outcome, total in stats.pairs_total.items():
            metrics.pairs_total.labels(outcome.value).inc(total - seen.pairs_total[outcome])
        seen = stats
        for name in ENDPOINT_METRICS:
            # Remove the series of removed endpoints, because a fleet may add and remove any number of endpoints.
            getattr(metrics, name).clear()
        for state in dispatch.endpoints:
            metrics.endpoint_leases.labels(state.id).set(state.leases)
            metrics.endpoint_in_flight.labels(state.id).set(state.in_flight)
            metrics.endpoint_healthy.labels(state.id).set(state.accepts_requests)
            resident = dispatch.policy.resident_count(state.id)
            if resident is not None:
                metrics.endpoint_resident_blocks.labels(state.id).set(resident)
            metrics.endpoint_ejections_total.labels(state.id).inc(state.ejections_total)
            for reason, total in state.failures_total.items():
                metrics.endpoint_failures_total.labels(state.id, reason).inc(total)
            metrics.endpoint_hangs_total.labels(state.id).inc(state.hangs_total)

    metrics.on_scrape(show)
