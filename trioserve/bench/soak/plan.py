"""Who asks what in a soak, who leaves when and how, and what the control does instead. All of it from the seed.

The load is cut into rounds, each a slice in which clients leave and a shorter one of the control in which nobody does.
They follow each other without a pause, so that a machine that is slower for a minute is so for both.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Iterator
from typing import Any

import msgspec

from trioserve.bench.load import SPECIAL_TOKENS_MAX, PlannedRequest
from trioserve.bench.soak.settings import SoakSettings

__all__ = ["Leave", "Moment", "Slice", "SoakPlan", "SoakRequest", "Way"]

LONG_PROMPT_SHARE = 0.03
SLICE_REQUESTS = 500  # about half a minute of a small model on two cores
CONTROL_SHARE = 0.3  # the control's requests, beside those of the slice before it
CONTROL_FULL_LINES_MIN = 4  # but at least so many times the concurrency, since its beginning does not count

HTTP2_SHARE = 0.5
HALF_CLOSE_SHARE = 0.25  # of those who leave over HTTP/1.1
HANG_UP_SHARE = 0.1  # of those who leave over HTTP/2


class Moment(enum.Enum):
    """When a client leaves."""

    BODY = "before its body is complete"
    WAIT = "a time after it was sent"  # most often in the queue
    HEAD = "a time after its head"  # which trioserve sends when the request first runs: while its prompt is computed
    TOKENS = "after some tokens"


MOMENT_WEIGHTS = {Moment.BODY: 0.1, Moment.WAIT: 0.35, Moment.HEAD: 0.2, Moment.TOKENS: 0.35}
DELAYS_MAX = {Moment.BODY: 0.5, Moment.WAIT: 1.5, Moment.HEAD: 0.2, Moment.TOKENS: 0.0}
"""The longest a client waits before it leaves, in typical times to the first token, as the warm-up shows them."""


class Way(enum.Enum):
    """How a client leaves."""

    CLOSE = "HTTP/1.1, close"
    HALF_CLOSE = "HTTP/1.1, half-close"
    RESET = "HTTP/2, reset"
    HANG_UP = "HTTP/2, close of the connection, with all that runs on it"


class Leave(msgspec.Struct, frozen=True, kw_only=True):
    """delay: in typical times to the first token. after_tokens: None unless the moment is TOKENS."""

    moment: Moment
    way: Way
    delay: float
    after_tokens: int | None


class SoakRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One client. leave: None for one that stays. planned: None for one that asks nothing and only lets the delay pass.
    withheld_bytes: of its body, never sent. is_survivor: it stays, in the control too."""

    planned: PlannedRequest | None
    http: int
    leave: Leave | None
    delay: float
    withheld_bytes: int
    is_survivor: bool


class Slice(msgspec.Struct, frozen=True, kw_only=True):
    """request_indices: the clients of this slice, in their order."""

    is_control: bool
    is_warmup: bool = False
    request_indices: range


class SoakPlan:
    """The same settings give the same clients, whatever the server does. They are made while they are taken."""

    def __init__(self, settings: SoakSettings, *, model: str) -> None:
        self._settings = settings
        self._model = model

    def warmup(self) -> Slice:
        return Slice(is_control=False, is_warmup=True, request_indices=range(self._settings.warmup_requests))

    def slices(self) -> list[Slice]:
        """In their order, the control's after each of the others."""
        settings = self._settings
        round_count = max(2, round(settings.requests / SLICE_REQUESTS))
        begin = settings.warmup_requests
        slices = []
        for number in range(round_count):
            count = settings.requests * (number + 1) // round_count - settings.requests * number // round_count
            control_count = max(round(count * CONTROL_SHARE), CONTROL_FULL_LINES_MIN * settings.concurrency)
            for is_control, request_count in ((False, count), (True, control_count)):
                slices.append(Slice(is_control=is_control, request_indices=range(begin, begin + request_count)))
                begin += request_count
        return slices

    def requests(self, piece: Slice) -> Iterator[SoakRequest]:
        for index in piece.request_indices:
            request = self._request(index)
            yield self._stand_in(request) if piece.is_control else request

    def _request(self, index: int) -> SoakRequest:
        settings = self._settings
        draws = random.Random(f"{settings.seed}/soak/{index}")
        is_long = draws.random() < LONG_PROMPT_SHARE
        longest = settings.long_prompt_tokens
        prompt_count = (
            draws.randint((longest + 1) // 2, longest) if is_long else draws.randint(1, settings.prompt_tokens)
        )
        output_count = draws.randint(1, settings.output_tokens)
        leaves = draws.random() < settings.abort_fraction
        http = 2 if draws.random() < HTTP2_SHARE else 1
        leave = self._leave(draws, http) if leaves else None
        if leave is not None:
            output_count = settings.output_tokens  # so that the response does not end before its client leaves
        body = self._body(draws, prompt_count, output_count)
        withheld_bytes = 0
        if leave is not None and leave.moment is Moment.BODY:
            withheld_bytes = draws.randint(1, len(body))
        return SoakRequest(
            planned=PlannedRequest(
                index=index,
                arrival_seconds=None,
                body=body,
                prompt_token_count=prompt_count,
                abort_after_tokens=None if leave is None else leave.after_tokens,
            ),
            http=http,
            leave=leave,
            delay=0.0 if leave is None else leave.delay,
            withheld_bytes=withheld_bytes,
            is_survivor=leave is None,
        )

    def _leave(self, draws: random.Random, http: int) -> Leave:
        moment = draws.choices(list(MOMENT_WEIGHTS), list(MOMENT_WEIGHTS.values()))[0]
        if http == 2:
            way = Way.HANG_UP if draws.random() < HANG_UP_SHARE else Way.RESET
        else:
            way = Way.HALF_CLOSE if draws.random() < HALF_CLOSE_SHARE else Way.CLOSE
        return Leave(
            moment=moment,
            way=way,
            delay=draws.uniform(0.0, DELAYS_MAX[moment]),
            after_tokens=draws.randint(1, self._settings.output_tokens - 1) if moment is Moment.TOKENS else None,
        )

    def _stand_in(self, request: SoakRequest) -> SoakRequest:
        """The same client in the control: it asks for no more than it would have had when it left, and stays for that.

        So both slices give the server about the same work, and what they differ in is what leaving costs. One that
        leaves before its body is complete, or sooner than its first token is to be expected, is taken to have had
        nothing: here it only lets that time pass, in its place among those in flight. One that leaves while its prompt
        is computed, or later without counting tokens, asks for one token, which takes the whole prompt.
        """
        leave, planned = request.leave, request.planned
        if leave is None or planned is None:
            return request
        stand_in: PlannedRequest | None = None
        if leave.moment in (Moment.HEAD, Moment.TOKENS) or (leave.moment is Moment.WAIT and leave.delay >= 1.0):
            body = msgspec.json.decode(planned.body)
            body["max_tokens"] = leave.after_tokens or 1
            stand_in = msgspec.structs.replace(planned, body=msgspec.json.encode(body), abort_after_tokens=None)
        return msgspec.structs.replace(
            request, planned=stand_in, leave=None, delay=0.0 if stand_in else leave.delay, withheld_bytes=0
        )

    def _body(self, draws: random.Random, prompt_count: int, output_count: int) -> bytes:
        settings = self._settings
        low = min(SPECIAL_TOKENS_MAX, settings.vocab_size // 2)
        content: dict[str, Any] = {
            "model": self._model,
            "prompt": [draws.randrange(low, settings.vocab_size) for _ in range(prompt_count)],
            "max_tokens": output_count,
            "temperature": settings.temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return msgspec.json.encode(content)
