"""Limits of the router, with units and reasons."""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from trioserve.contracts.errors import StartupError

__all__ = ["HostedModelsSettings", "RouterSettings", "SilenceSettings"]


class HostedModelsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a server with several models.

    Attributes:
        memory_bytes: memory for all models together.
        turn_seconds: a busy model keeps its memory for at least this time, and a model waits for at least this time
            before a busy one must give way.
        loads_max: number of models that load at the same time.
        stall_seconds: a load, sleep or wake-up without progress for this time is stopped.
    """

    memory_bytes: int
    turn_seconds: float = 10.0
    loads_max: int = 1
    stall_seconds: float = 300.0


class RouterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the router.

    Attributes:
        queue_requests_max: requests that may wait for one model in each of its queues. Disaggregated requests have
            queues of their own. If 0, no request waits: a request is refused at once if no endpoint has a free slot.
        queue_prompt_tokens_max: total prompt tokens of the requests that wait for one model, for each of its queues.
        queue_seconds_max: longest wait of a request in the queue.
        leases_max: sequences at one endpoint, unless the endpoint has its own limit.
        sequences_max: sequences of one request, that is `n` times the number of its prompts. All sequences of a request
            run at one endpoint. Sequences without a slot wait inside that endpoint before all later requests. So other
            requests may have to wait for this number of slots.
        waiting_depth_max: sequences that may wait inside an endpoint. The sequences of one large request do not count.
            With a low value, requests wait in the router's queue instead. In the router's queue, a waiting request
            costs nothing if it leaves, and any endpoint can still serve it.
        lease_until: when a lease ends. "first_token" limits concurrent prefills, "end" limits concurrent responses.
        load_seconds_max: age in seconds after which a load report is ignored.
        failures_max: failed checks, or failed requests, in a row that eject an endpoint.
        sends_probes: True: after an ejection for failed requests, the router sends a tiny request of its own. The
            endpoint gets requests of clients only if it serves that request.
        failed_load_seconds: how long a failed request counts as load of its endpoint.
        ejection_seconds: length of the first ejection. It doubles with each failed probe.
        ejection_seconds_max: longest ejection.
        slow_start_seconds: time in which a new or returned endpoint grows from few requests to its whole limit.
        retry_share_max: retries as a share of all requests. A retry counts if an endpoint answered the request with an
            error before the first token, or refused it because it was full. If everything fails, retrying everything
            would double the load. A retry does not count if the endpoint was lost, because the request is not at fault.
        retries_per_second_min: retries per second that are always allowed, whatever the share.
        attempts_max: number of endpoints that may answer one request with an error before its first token. Also the
            number of endpoints that may be lost in a row before the request is considered the cause and is ended. The
            second limit is doubled if the last endpoint also served other suspected requests, because machines may fail
            several times in a row.
        handover_waiting_max: disaggregated requests of a model that may wait for a decode endpoint with their prompt
            computed. Beyond this number no further prompt starts, because each waiting request keeps KV blocks at its
            prefill endpoint.
        continuations_max: how many times one stream may resume at another endpoint.
        continuations_per_second_max: streams that resume in a second. Further streams wait in the queue, so that the
            failure of one endpoint does not overload the rest.
        continuations_in_a_row_max: number of streams and of requests that lost their endpoints that get a lease in a
            row, before a newcomer of equal priority gets one.
        continuation_seconds_max: how long a stream waits for an endpoint at which it can resume. A request that lost
            its endpoint before its first token waits at least as long, unless its own deadline is earlier.
        breaks_max: endpoints that may fail in a row while serving one stream before the stream is considered the cause
            and is ended. One more endpoint is allowed if the last endpoint also served other suspected streams.
        progress_tokens_min: number of tokens between two failures that clear a stream of suspicion. A failing endpoint
            may lose fewer tokens than this on the way to the client. A stream that is not the cause usually gets more
            tokens between two failures.
        moves_at_once_max: number of streams that may move at the same time from endpoints that are being emptied.
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
    """Limits on the time between the bytes of a response.

    Args:
        beat_seconds: interval at which an endpoint should send a byte within a response (a heartbeat). 0: it sends
            none.
        silent_seconds_max: longest silence of an endpoint that sends heartbeats. At least three heartbeat intervals, or
            two intervals plus 1 s.
        stalled_seconds_max: longest silence of an endpoint that sends no heartbeats, once the response has begun. 0: no
            limit.
    """

    beat_seconds: float = 5.0
    silent_seconds_max: float = 20.0
    stalled_seconds_max: float = 600.0

    def __post_init__(self) -> None:
        for name in ("beat_seconds", "stalled_seconds_max"):
            value = getattr(self, name)
            if not 0 <= value <= 86_400:
                raise StartupError(f"{name} is {value}, it must be 0 to 86400 seconds")
        # An endpoint may skip a heartbeat just after another byte, so a pause of two intervals is normal. When the
        # router resumes after a suspension, its first look counts up to one second as silence. The router has not yet
        # read the heartbeats that arrived during the suspension.
        least = 2 * self.beat_seconds + max(1.0, self.beat_seconds)
        if not least <= self.silent_seconds_max <= 86_400:
            raise StartupError(
                f"the silence timeout is {self.silent_seconds_max:g} s, allowed are {least:g} to 86400 s: at least "
                f"three heartbeat intervals, or two intervals and 1 s if that is longer. Raise --silence-timeout, or "
                f"lower --heartbeat-interval"
            )
