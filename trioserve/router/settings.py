"""The bounds of the router, each with its unit and its reason."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from trioserve.contracts.errors import StartupError

__all__ = ["RouterSettings", "SilenceSettings"]


class RouterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """queue_requests_max, queue_prompt_tokens_max: what may wait for one model in each of its queues: that of requests
        whose prompt is computed apart from their response, and that of the others. 0 requests: nothing waits, who finds
        no free endpoint is refused at once.
    queue_seconds_max: how long anybody waits in the queue.
    leases_max: sequences at one endpoint, unless the endpoint has a limit of its own.
    sequences_max: of one request, its n times its prompts. They are all at one endpoint, where those that find no slot
        at first wait before everybody who comes later; so this is how many slots others may have to wait for.
    waiting_depth_max: sequences that may wait inside an endpoint, those of one large request apart. A shallow queue
        there keeps the order here, where a waiter that left costs nothing and another endpoint can still take it.
    lease_until: when a lease goes back; at the first token it bounds prefills, at the end it bounds answers.
    load_seconds_max: how old a report of load may be; what is older says nothing.
    failures_max: this many checks, or requests, that fail in a row eject an endpoint. sends_probes: an endpoint that
        failed requests gets a tiny one of the router's own after its ejection, and a client's only if that is served.
        failed_load_seconds: so long a failed request counts as load of its endpoint. ejection_seconds: how long the
        first time; it doubles with each probe that fails, up to ejection_seconds_max.
    slow_start_seconds: in which an endpoint that came (back) gets its whole share.
    retry_share_max, retries_per_second_min: requests that an endpoint answered with an error before their first token,
        or had no room for, may be tried elsewhere as long as retries are at most this share of the requests, and this
        many a second in any case; when everything fails, retrying everything would double the load. A request whose
        endpoint was lost is lost work, not a failing request, and is not counted.
    attempts_max: endpoints that may answer one request with an error before its first token. After as many that were
        lost with it in a row, the request is taken for the cause and ends; twice as many, where other such requests
        were there each time, too: machines may fail several times in a row.
    handover_waiting_max: of requests that are disaggregated, so many of a model may wait for a decode endpoint, their
        prompt computed. Beyond it no further prompt is begun: each that waits keeps KV blocks where it was computed.
    continuations_max: how often one stream may go on elsewhere. continuations_per_second_max: of all streams; who has
        to wait for that waits in the queue, so that one endpoint's end is not the others' flood.
    continuations_in_a_row_max: while newcomers of no better priority wait, so many streams go on, or requests that lost
        their endpoints, before one of them.
    continuation_seconds_max: how long a stream waits for an endpoint to go on at. A request that lost its endpoint
        before its first token waits at least as long, if its own deadlines let it.
    breaks_max: a stream at which so many endpoints broke in a row is the cause of that, and ends; one more, where
        others were there each time, too. progress_tokens_min:
        those in a row between which its client got fewer tokens. As many may be lost on their way from an endpoint
        that breaks; a bystander gets more, where endpoints do not die all the time.
    moves_at_once_max: streams that are on their way from endpoints that are emptied to others, not answered there yet.
    """

    queue_requests_max: int = 256
    queue_prompt_tokens_max: int = 1_000_000
    queue_seconds_max: float = 60.0
    leases_max: int = 64
    sequences_max: int = 256
    waiting_depth_max: int = 4
    lease_until: Literal["first_token", "end"] = "end"
    load_seconds_max: float = 2.0
    failures_max: int = 3
    sends_probes: bool = False
    failed_load_seconds: float = 10.0
    ejection_seconds: float = 1.0
    ejection_seconds_max: float = 30.0
    slow_start_seconds: float = 10.0
    retry_share_max: float = 0.2
    retries_per_second_min: float = 3.0
    attempts_max: int = 3
    handover_waiting_max: int = 8
    continuations_max: int = 16
    continuations_per_second_max: float = 100.0
    continuations_in_a_row_max: int = 3
    continuation_seconds_max: float = 30.0
    breaks_max: int = 2
    progress_tokens_min: int = 4
    moves_at_once_max: int = 16

    def __post_init__(self) -> None:
        for name, low in (
            ("queue_requests_max", 0),
            ("queue_prompt_tokens_max", 1),
            ("leases_max", 1),
            ("sequences_max", 1),
            ("waiting_depth_max", 0),
            ("failures_max", 1),
            ("attempts_max", 1),
            ("handover_waiting_max", 1),
            ("continuations_max", 0),
            ("continuations_in_a_row_max", 1),
            ("breaks_max", 1),
            ("progress_tokens_min", 1),
            ("moves_at_once_max", 1),
            ("retry_share_max", 0),
            ("retries_per_second_min", 0),
        ):
            value = getattr(self, name)
            if not value >= low:
                raise StartupError(f"{name} is {value}, it must be at least {low}")
        for name in (
            "queue_seconds_max",
            "load_seconds_max",
            "failed_load_seconds",
            "ejection_seconds",
            "ejection_seconds_max",
            "continuation_seconds_max",
        ):
            value = getattr(self, name)
            if not 0 < value <= 86_400:
                raise StartupError(f"{name} is {value}, it must be above 0 and at most 86400 seconds")
        if not 0 < self.continuations_per_second_max < math.inf:
            raise StartupError(
                f"continuations_per_second_max is {self.continuations_per_second_max}, it must be above 0 and finite"
            )
        if not 0 <= self.slow_start_seconds <= 86_400:
            raise StartupError(f"slow_start_seconds is {self.slow_start_seconds}, it must be 0 to 86400 seconds")
        if self.ejection_seconds_max < self.ejection_seconds:
            raise StartupError(
                f"ejection_seconds_max is {self.ejection_seconds_max}, less than ejection_seconds of "
                f"{self.ejection_seconds}"
            )
        if self.lease_until not in ("first_token", "end"):
            raise StartupError(f'lease_until is "{self.lease_until}", it may be "first_token" or "end"')


class SilenceSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds between the bytes of a response.

    Args:
        beat_seconds: how often an endpoint is asked for a byte within a response. 0: never.
        silent_seconds_max: how long nothing may come from an endpoint that sends beats. At least three beats, or two
            and 1 s.
        stalled_seconds_max: the same of an endpoint that sends none, once the response has begun. 0: as long as it
            likes.
    """

    beat_seconds: float = 5.0
    silent_seconds_max: float = 20.0
    stalled_seconds_max: float = 600.0

    def __post_init__(self) -> None:
        for name in ("beat_seconds", "stalled_seconds_max"):
            value = getattr(self, name)
            if not 0 <= value <= 86_400:
                raise StartupError(f"{name} is {value}, it must be 0 to 86400 seconds")
        # An endpoint may skip a beat just after another byte, so two intervals are an honest pause. The first look of a
        # router that was suspended adds up to a second before it has read the beats that came meanwhile.
        least = 2 * self.beat_seconds + max(1.0, self.beat_seconds)
        if not least <= self.silent_seconds_max <= 86_400:
            raise StartupError(
                f"the silence timeout is {self.silent_seconds_max:g} s, allowed are three heartbeat intervals or more, "
                f"or two and 1 s where that is more, here {least:g} to 86400 s: raise --silence-timeout, or lower "
                f"--heartbeat-interval"
            )
