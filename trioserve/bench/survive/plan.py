"""Requests and interruptions of a survival run, drawn from its seed."""

from __future__ import annotations

import enum
import random
from collections.abc import Iterator
from typing import Any

import msgspec

from trioserve.bench.survive.settings import SurviveSettings

__all__ = ["Interruption", "InterruptionKind", "SurviveRequest", "interruptions", "requests"]

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TOPICS = ("the sea", "a small town", "how bread is made", "the history of glass", "a long journey", "rivers", "winter")
WORDS = ("and", "then", "they", "went", "over", "the", "old", "bridge", "with", "some", "of", "their", "friends", "who")
SYSTEM = "You are a patient teacher. You answer in full sentences and give examples where they help."
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"enum": [1, 2, 3]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 24}, "count": {"type": "integer", "maximum": 99}},
    "required": ["name", "count"],
    "additionalProperties": False,
}


class SurviveRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request.

    Attributes:
        index: position in the run.
        id: request id, equal in both runs. Ids of responses and tool calls derive from it.
        path: path of the API.
        kinds: words for the report that describe the request.
        body: JSON.
    """

    index: int
    id: str
    path: str
    kinds: tuple[str, ...]
    body: bytes


class InterruptionKind(enum.Enum):
    KILL = "killed (-9)"
    STOP = "stopped (SIGSTOP)"
    DROP = "cut off"
    SILENCE = "silent"
    DRAIN = "drained, its streams moved"


class Interruption(msgspec.Struct, frozen=True, kw_only=True):
    """One interruption of an endpoint.

    Attributes:
        kind: what happens to the endpoint.
        after_seconds: time since the interruption before it.
        choice: 0 <= choice < 1, chooses among the endpoints without an interruption.
        seconds: duration. A killed endpoint is also down until it has started again.
    """

    kind: InterruptionKind
    after_seconds: float
    choice: float
    seconds: float


SECONDS = {
    InterruptionKind.KILL: (0.0, 0.5),
    InterruptionKind.STOP: (2.0, 12.0),
    InterruptionKind.DROP: (0.2, 4.0),
    InterruptionKind.SILENCE: (2.0, 12.0),
    InterruptionKind.DRAIN: (1.0, 4.0),
}


def requests(settings: SurviveSettings) -> list[SurviveRequest]:
    return [_request(settings, index) for index in range(settings.requests)]


def interruptions(settings: SurviveSettings) -> Iterator[Interruption]:
    """Yield interruptions without end. Each five contain every kind once, in random order.

    Args:
        settings: settings of the run.
    """
    draws = random.Random(f"{settings.seed}/survive/interruptions")
    while True:
        for kind in draws.sample(list(InterruptionKind), len(InterruptionKind)):
            yield Interruption(
                kind=kind,
                after_seconds=min(draws.expovariate(1.0 / settings.period_seconds), 4 * settings.period_seconds),
                choice=draws.random(),
                seconds=draws.uniform(*SECONDS[kind]),
            )


def _request(settings: SurviveSettings, index: int) -> SurviveRequest:
    draws = random.Random(f"{settings.seed}/survive/{index}")
    is_chat = draws.random() < 0.55
    kinds = ["chat" if is_chat else "completions"]
    body: dict[str, Any] = {"stream": True, "max_tokens": draws.randint(8, settings.output_tokens)}
    body["seed"] = draws.randrange(2**31)  # also for greedy requests: ids of tool calls derive from the seed
    if draws.random() < 0.8:
        body["stream_options"] = {"include_usage": True}
    words = [draws.choice(WORDS) for _ in range(draws.randint(0, 60))]
    text = f"Tell me about {draws.choice(TOPICS)}, {draws.randint(1, 10_000)}: {' '.join(words)}"
    if is_chat:
        messages = [{"role": "user", "content": text}]
        if draws.random() < 0.5:
            messages.insert(0, {"role": "system", "content": SYSTEM})
        body["messages"] = messages
    else:
        body["prompt"] = text
    if draws.random() < 0.5:
        kinds.append("greedy")
        body["temperature"] = 0.0
    else:
        kinds.append("sampled")
        body["temperature"] = draws.choice((0.7, 1.0))
        if draws.random() < 0.5:
            body["top_p"] = 0.9
    _specialize(draws, body, kinds, is_chat=is_chat)
    return SurviveRequest(
        index=index,
        id=f"survive-{settings.seed}-{index}",
        path=CHAT if is_chat else COMPLETIONS,
        kinds=tuple(kinds),
        body=msgspec.json.encode(body),
    )


def _specialize(draws: random.Random, body: dict[str, Any], kinds: list[str], *, is_chat: bool) -> None:
    form = draws.random()
    if is_chat and form < 0.15:
        kinds.append("tools")
        body |= {"tools": [TOOL], "tool_choice": draws.choice(("auto", "required"))}
    elif is_chat and form < 0.3:
        kinds.append("schema")
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
    elif not is_chat and form < 0.15:
        kinds.append("regex")
        body["structured_outputs"] = {"regex": "([a-z]{2,8} ){2,12}[0-9]{3}"}
    if draws.random() < 0.25:
        kinds.append("stop strings")
        body["stop"] = draws.sample(["the end", ". A", "\n\n", " zz", " in the"], 2)
    if draws.random() < 0.25:
        kinds.append("logprobs")
        body |= {"logprobs": True, "top_logprobs": 2} if is_chat else {"logprobs": 2}
    if draws.random() < 0.2:
        kinds.append("n = 2")
        body["n"] = 2
    if draws.random() < 0.2:
        kinds.append("penalties")
        body |= {"presence_penalty": 0.4, "frequency_penalty": 0.3}
    if draws.random() < 0.15:
        kinds.append("min_tokens")
        body["min_tokens"] = min(6, body["max_tokens"])
