"""The local engine as the only endpoint of a router. The router's queue is also the queue of the engine.

The router's counts are copied into metrics at every scrape, so that the router core does not depend on metrics.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trioserve.admission.dispatch import Dispatch
from trioserve.contracts.endpoint import EndpointId, RoutedRequest
from trioserve.contracts.media import AudioPrompt
from trioserve.contracts.pooling import LabelledPrompt, PoolingInput, TextPair
from trioserve.contracts.prompt import ChatPrompt
from trioserve.router.policies import RoundRobin
from trioserve.router.settings import RouterSettings
from trioserve.vision.image_prompt import media_count

__all__ = ["LOCAL_ENDPOINT", "LOCAL_MODEL", "WAITING_DEPTH_MAX", "local_dispatch", "local_request"]


LOCAL_ENDPOINT = EndpointId("local")
LOCAL_MODEL = "local"
"""The only model name in this router: an engine has one queue for all names of its model."""

# Number of requests that are tokenized before the batch has space for them, so that a free batch slot is used at once.
WAITING_DEPTH_MAX = 4
TOKEN_CHARACTERS = 4  # Average number of characters per token of English text.
AUDIO_TOKENS = 1500  # Positions that half a minute of sound takes in Whisper.
# Estimate for one image: a thousand tokens, as for twelve tiles and the whole image in small models.
IMAGE_CHARACTERS = 4000


def local_dispatch(
    max_num_seqs: int,
    *,
    waiting_requests_max: int,
    waiting_prompt_tokens_max: int,
    waiting_seconds_max: float,
    lent_max: int = 0,
) -> Dispatch:
    """Create a router whose only endpoint is the local engine.

    The router accepts max_num_seqs + waiting_requests_max requests with one sequence each. This counts requests in the
    engine and in the queue.

    Args:
        max_num_seqs: Highest number of sequences that run at the same time.
        waiting_requests_max: Highest number of requests that wait, in addition to the running requests.
        waiting_prompt_tokens_max: Highest number of prompt tokens of all waiting requests together.
        waiting_seconds_max: Longest wait of a request in the queue, in seconds.
        lent_max: Number of additional leases that may be lent (Dispatch.lend).
    """
    waiting_depth = min(WAITING_DEPTH_MAX, waiting_requests_max // 2)
    dispatch = Dispatch(
        RouterSettings(
            queue_requests_max=waiting_requests_max - waiting_depth,
            queue_prompt_tokens_max=waiting_prompt_tokens_max,
            queue_seconds_max=waiting_seconds_max,
            leases_max=max_num_seqs + waiting_depth + lent_max,
            sequences_max=max_num_seqs + waiting_requests_max,
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
    return sum(len(text) for text in texts if isinstance(text, str)) + media_count([message]) * IMAGE_CHARACTERS
