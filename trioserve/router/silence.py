"""Which responses are lost although their connections are open and their endpoint may be well.

A NAT or load balancer forgets a flow, a machine loses power, another machine takes the address: nothing is closed, and
the reader of the response waits for ever. A response is given up for one of these reasons:

    silent          its endpoint promised beats (a byte every few seconds), and none comes
    replaced        another process answers at the endpoint's address, and this one's process says nothing any more
    not_running     the endpoint reports, again and again, that nothing runs or waits there
    overtaken       the endpoint reports thousands of tokens for each sequence, and none has come here
    stalled         an endpoint without beats has begun the response, and says nothing more for very long

The last three are for servers that send no beats, such as vLLM's. None of them touches a prompt that takes long, unless
the endpoint itself reports that it has nothing to do.

Silence counts only while somebody reads: a response whose client is slow may wait in the kernel. It counts by looks,
each of which adds at most two intervals, so a router that was suspended itself gives up nothing when it wakes up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec
from msgspec import UNSET

from trioserve.contracts.endpoint import EndpointLoad
from trioserve.router.settings import SilenceSettings

__all__ = ["LOOK_SECONDS", "AwaitedResponse", "Loss", "SilenceWatch"]

LOOK_SECONDS = 0.5  # between two looks at all responses: what they cost is a comparison for each
SETTLE_SECONDS = 1.0  # in which a process whose address answers for another one may show that it is still there
INSTANCES_KNOWN_MAX = 8
REPORTS_IDLE_MIN = 3  # reports in a row without any request, before a response that is waited for is lost
IDLE_SECONDS_MIN = 60.0  # a server may read images for a request before it counts it
TOKENS_OVERTAKEN_MIN = 4096  # for each sequence: parsers of tool calls hold back hundreds


class AwaitedResponse:
    """One response that is read from an endpoint. Its connection writes what it hears, and SilenceWatch looks at it.

    Attributes:
        sent_at: when the request was sent; seconds of the router's clock.
        computes: it runs at the endpoint, and is in its reports of load.
        is_waiting: a reader waits for bytes.
        is_sending: the request itself is on its way, which every server takes without delay.
        pieces: how often bytes came, or were taken.
        has_body: a byte of the body has come.
        beats: the endpoint promised beats in the head.
        instance: the process that answers, if it says so.
        silent_seconds: how long nothing has come while somebody waited.
        is_lost: it was given up.
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
        self.tokens_seen = 0.0  # by a sequence of the endpoint, when the last byte came


class Loss(msgspec.Struct, frozen=True):
    """A response that is given up, and why: see the top of this file."""

    response: AwaitedResponse
    reason: str


class SilenceWatch:
    """Judges the responses of one endpoint.

    Attributes:
        sends_beats: the endpoint was heard to send beats before the head of a response.
        is_hung: the endpoint itself says that its step hangs. Its health checks decide then, and silence says nothing.
        is_shared: several processes answer at its address, so that a new one replaces none.
    """

    def __init__(self, settings: SilenceSettings) -> None:
        self.sends_beats = False
        self.is_hung = False
        self.is_shared = False
        self._settings = settings
        self._looked_at = math.inf
        self._instance: str | None = None
        self._instance_at = -math.inf  # when it was asked last, and answered
        self._former: list[str] = []
        self._doubted: dict[AwaitedResponse, int] = {}  # and their pieces when another process answered
        self._doubted_until = math.inf
        self._idle_reports = 0
        self._idle_since = math.inf
        self._tokens: float | None = None  # a sequence of it got by now, by its reports
        self._generated: float | None = None

    def note_load(self, load: EndpointLoad, responses: Iterable[AwaitedResponse], asked_at: float, now: float) -> None:
        """Take a report of the endpoint's load.

        Args:
            responses: all that are read from it now.
            asked_at: when it was asked; a request that was sent later may not be in the report.
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
        """A response says which process it comes from. sent_at: of its request."""
        self._note_instance(instance, responses, sent_at, now)

    def look(self, responses: Iterable[AwaitedResponse], now: float) -> list[Loss]:
        """Returns those that are lost. To be called every LOOK_SECONDS; the caller ends what is lost."""
        passed = max(0.0, min(now - self._looked_at, 2 * LOOK_SECONDS))
        self._looked_at = now
        if any(response.pieces != pieces for response, pieces in self._doubted.items()):
            self._note_shared()  # the process that was thought to be gone is there
        losses: list[Loss] = []
        for response in responses:
            reason = None if response.is_lost else self._reason(response, passed, now)
            if reason is not None:
                response.is_lost = True
                losses.append(Loss(response, reason))
                self._doubted.pop(response, None)
        return losses

    def forget(self, response: AwaitedResponse) -> None:
        """It is read no more."""
        self._doubted.pop(response, None)

    # --- which process ---

    def _note_instance(self, instance: str, responses: Iterable[AwaitedResponse], asked_at: float, now: float) -> None:
        if instance == self._instance:
            self._instance_at = max(self._instance_at, asked_at)
            return
        before, before_at = self._instance, self._instance_at
        if before is not None and asked_at < before_at:
            return  # an answer of the former process that comes late
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

    # --- silence ---

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
