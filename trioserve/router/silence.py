"""Finds responses that will never continue, although their connections are open.

A NAT or load balancer may forget a flow, a machine may lose power, or another machine may take its address. Then no
connection is closed, and the reader of the response would wait forever. The router treats a response as lost for one of
these reasons:

    silent          its endpoint promised heartbeats (a byte every few seconds), and none arrives
    replaced        another process answers at the endpoint's address, and the process of this response is silent
    not_running     the endpoint reports several times in a row that nothing runs or waits there
    overtaken       the endpoint reports thousands of tokens for each sequence, and no byte has arrived here
    stalled         an endpoint without heartbeats began the response, and then was silent for very long

The last three reasons apply to servers that send no heartbeats, such as vLLM. None of these three reasons ends a long
prefill, unless the endpoint itself reports that it has no requests.

Silence counts only while a reader waits, because the bytes of a slow client's response may wait in the kernel. Silence
is added up at each look, at most two look intervals at a time. So a router that was suspended does not treat its
responses as lost when it resumes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec
from msgspec import UNSET

from trioserve.contracts.endpoint import EndpointLoad
from trioserve.router.settings import SilenceSettings

__all__ = ["LOOK_SECONDS", "AwaitedResponse", "Loss", "SilenceWatch"]

# The router looks at all responses at this interval. A look costs one comparison for each response.
LOOK_SECONDS = 0.5
SETTLE_SECONDS = 1.0  # After another process answered, the previous process has this time to show that it still runs.
INSTANCES_KNOWN_MAX = 8
REPORTS_IDLE_MIN = 3  # A response is treated as lost after this many reports in a row without any request.
IDLE_SECONDS_MIN = 60.0  # A server may read the images of a request for a long time before it counts the request.
# The limit is a number of tokens for each sequence. It is high because tool call parsers hold back hundreds of tokens.
TOKENS_OVERTAKEN_MIN = 4096


class AwaitedResponse:
    """One response that is read from an endpoint. Its connection updates the attributes, and SilenceWatch reads them.

    Args:
        sent_at: when the request was sent, in seconds of the router's clock.
        computes: True if the request runs at the endpoint and is counted in its load reports.

    Attributes:
        is_waiting: True while a reader waits for bytes.
        is_sending: True while the request is still being sent. Every server reads a request without delay.
        pieces: how many times bytes arrived, or were sent and accepted.
        has_body: True once a byte of the body has arrived.
        beats: True if the head of the response promised heartbeats.
        instance: name of the process that answers. None: not reported.
        silent_seconds: how long nothing has arrived while a reader waited.
        is_lost: True once the response is treated as lost.
        pieces_seen: `pieces` at the last look.
        tokens_seen: tokens per sequence that the endpoint had reported when the last byte of this response arrived.
    """

    __slots__ = (
        "beats",
        "computes",
        "has_body",
        "instance",
        "is_lost",
        "is_sending",
        "is_waiting",
        "pieces",
        "pieces_seen",
        "sent_at",
        "silent_seconds",
        "tokens_seen",
    )

    def __init__(self, sent_at: float, *, computes: bool = False) -> None:
        self.sent_at = sent_at
        self.computes = computes
        self.is_waiting = False
        self.is_sending = False
        self.pieces = 0
        self.has_body = False
        self.beats = False
        self.instance: str | None = None
        self.silent_seconds = 0.0
        self.is_lost = False
        self.pieces_seen = -1
        self.tokens_seen = 0.0


class Loss(msgspec.Struct, frozen=True):
    """A response that is treated as lost.

    Attributes:
        response: the response.
        reason: one of the reasons in the module's docstring.
    """

    response: AwaitedResponse
    reason: str


class SilenceWatch:
    """Decides which responses of one endpoint are lost.

    Args:
        settings: limits.

    Attributes:
        sends_beats: True if the endpoint has sent heartbeats before the head of a response.
        is_hung: True if the endpoint reports that its step hangs. Then silence is ignored, and the health checks
            decide.
        is_shared: True if several processes answer at the endpoint's address, so a new process does not replace
            another.
    """

    def __init__(self, settings: SilenceSettings) -> None:
        self.sends_beats = False
        self.is_hung = False
        self.is_shared = False
        self._settings = settings
        self._looked_at = math.inf
        self._instance: str | None = None
        self._instance_at = -math.inf  # The time at which the request was sent that `_instance` answered last.
        self._former: list[str] = []
        # For each response in doubt, the value of `pieces` at the moment when another process answered.
        self._doubted: dict[AwaitedResponse, int] = {}
        self._doubted_until = math.inf
        self._idle_reports = 0
        self._idle_since = math.inf
        self._tokens: float | None = None  # The number of tokens per sequence so far, according to load reports.
        self._generated: float | None = None

    def note_load(self, load: EndpointLoad, responses: Iterable[AwaitedResponse], asked_at: float, now: float) -> None:
        """Accept a load report of the endpoint.

        Args:
            load: the report.
            responses: all responses that are read from the endpoint now.
            asked_at: when the endpoint was asked. The report may lack requests that were sent later.
            now: time in seconds.
        """
        if load.instance is not UNSET:
            self._note_instance(load.instance, responses, asked_at, now)
        if load.running or load.waiting:
            self._idle_reports, self._idle_since = 0, math.inf
        else:
            self._idle_reports += 1
            self._idle_since = min(self._idle_since, asked_at)
        generated = None if load.generated is UNSET else load.generated
        if generated is not None and self._generated is not None and generated >= self._generated:
            self._tokens = (self._tokens or 0.0) + (generated - self._generated) / max(1, load.running)
        self._generated = generated

    def note_instance(self, instance: str, responses: Iterable[AwaitedResponse], sent_at: float, now: float) -> None:
        """Record which process a response comes from.

        Args:
            instance: name of the process.
            responses: all responses that are read from the endpoint now.
            sent_at: when the request of that response was sent.
            now: time in seconds.
        """
        self._note_instance(instance, responses, sent_at, now)

    def find_lost(self, responses: Iterable[AwaitedResponse], now: float) -> list[Loss]:
        """Return the responses that are lost. Call this every LOOK_SECONDS. The caller ends the lost responses.

        Args:
            responses: all responses that are read from the endpoint now.
            now: time in seconds.
        """
        passed = max(0.0, min(now - self._looked_at, 2 * LOOK_SECONDS))
        self._looked_at = now
        if any(response.pieces != pieces for response, pieces in self._doubted.items()):
            self._note_shared()  # The previous process still runs.
        losses: list[Loss] = []
        for response in responses:
            reason = None if response.is_lost else self._reason(response, passed, now)
            if reason is not None:
                response.is_lost = True
                losses.append(Loss(response, reason))
                self._doubted.pop(response, None)
        return losses

    def forget(self, response: AwaitedResponse) -> None:
        """Forget a response that is no longer read."""
        self._doubted.pop(response, None)

    # --- identity of the endpoint's process ---

    def _note_instance(self, instance: str, responses: Iterable[AwaitedResponse], asked_at: float, now: float) -> None:
        if instance == self._instance:
            self._instance_at = max(self._instance_at, asked_at)
            return
        before, before_at = self._instance, self._instance_at
        if before is not None and asked_at < before_at:
            return  # The previous process sent this answer late.
        self._instance, self._instance_at = instance, asked_at
        if instance in self._former:
            self._note_shared()
        if before is None:
            return
        self._former = [*self._former, before][-INSTANCES_KNOWN_MAX:]
        if not self.is_shared:
            for response in responses:
                if response.instance == before or (response.instance is None and response.sent_at <= before_at):
                    self._doubted.setdefault(response, response.pieces)
            self._doubted_until = now + SETTLE_SECONDS

    def _note_shared(self) -> None:
        self.is_shared = True
        self._doubted.clear()

    def _is_replaced(self, response: AwaitedResponse, now: float) -> bool:
        return response in self._doubted and now >= self._doubted_until and response.is_waiting

    # --- rules about silence ---

    def _reason(self, response: AwaitedResponse, passed: float, now: float) -> str | None:
        if self._is_replaced(response, now):
            return "replaced"
        if response.pieces != response.pieces_seen or not response.is_waiting:
            response.pieces_seen = response.pieces
            response.silent_seconds = 0.0
            response.tokens_seen = self._tokens or 0.0
            return None
        if self.is_hung:
            return None
        response.silent_seconds += passed
        settings, seconds = self._settings, response.silent_seconds
        if response.is_sending or response.beats or (self.sends_beats and not response.has_body):
            return "silent" if seconds >= settings.silent_seconds_max else None
        if not response.computes:
            return None
        if seconds >= IDLE_SECONDS_MIN:
            if self._idle_reports >= REPORTS_IDLE_MIN and self._idle_since <= now - IDLE_SECONDS_MIN:
                return "not_running"
            tokens = (self._tokens or 0.0) - response.tokens_seen
            if response.has_body and tokens >= TOKENS_OVERTAKEN_MIN:
                return "overtaken"
        if response.has_body and 0 < settings.stalled_seconds_max <= seconds:
            return "stalled"
        return None
