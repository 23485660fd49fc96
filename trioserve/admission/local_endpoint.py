"""Our own engine as an endpoint: who waits before it, in which order, and how much may. What decides is the router."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trioserve.admission.dispatch import Dispatch
from trioserve.admission.settings import AdmissionSettings
from trioserve.contracts.endpoint import EndpointId, RoutedRequest
from trioserve.contracts.pooling import LabelledPrompt, PooledInput, TextPair
from trioserve.contracts.prompt import ChatPrompt
from trioserve.router.policies import RoundRobin
from trioserve.router.settings import RouterSettings
from trioserve.vision.chat_images import image_count

__all__ = ["LOCAL_ENDPOINT", "LOCAL_MODEL", "WAITING_DEPTH_MAX", "local_dispatch", "local_request"]

LOCAL_ENDPOINT = EndpointId("local")
LOCAL_MODEL = "local"
"""One engine has one queue, by whichever of its names its model is asked for."""

WAITING_DEPTH_MAX = 4  # prepared already when places in the batch come free, so that none waits for a tokenizer
TOKEN_CHARACTERS = 4  # of English text, on average
IMAGE_CHARACTERS = 4000  # a thousand tokens: twelve tiles and the whole, as small models have them


def local_dispatch(max_num_seqs: int, settings: AdmissionSettings, *, lent_max: int = 0) -> Dispatch:
    """A router with one endpoint, which takes as many sequences as may run and a few more. With those who wait in its
    queue they are max_num_seqs + waiting_requests_max, for requests of one sequence. lent_max: so many leases may be
    lent beyond that (see Dispatch.lend), and so many requests more there may be then."""
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
    prompts: Iterable[PooledInput], *, tenant: str, priority: int, sequences: int, known_tokens: int = 0
) -> RoutedRequest:
    """What the queue is told of a request. Its tokens are estimated from its length: nothing is tokenized before it has
    a lease. known_tokens: of a response that goes on, those that are computed as a prompt is."""
    return RoutedRequest(
        model=LOCAL_MODEL,
        tenant=tenant,
        priority=priority,
        sequences=sequences,
        prompt_tokens=sum(map(_token_count, prompts)) + known_tokens,
    )


def _token_count(prompt: PooledInput) -> int:
    if isinstance(prompt, TextPair):
        return _token_count(prompt.first) + _token_count(prompt.second)
    if isinstance(prompt, LabelledPrompt):
        return _token_count(prompt.prompt)
    if isinstance(prompt, ChatPrompt):
        return sum(map(_character_count, prompt.messages)) // TOKEN_CHARACTERS + 1
    if isinstance(prompt, str):
        return len(prompt) // TOKEN_CHARACTERS + 1
    return len(prompt)


def _character_count(message: dict[str, Any]) -> int:
    """Of its text; whether the message is one is not asked here."""
    content = message.get("content")
    if isinstance(content, str):
        return len(content)
    texts = [part.get("text") for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    return sum(len(text) for text in texts if isinstance(text, str)) + image_count([message]) * IMAGE_CHARACTERS
