"""Requests and interruptions of a survival run, drawn from its seed, and the content of the responses."""

from __future__ import annotations

import enum
import random
from collections.abc import Iterator
from typing import Any

import msgspec

from trioserve.bench.server_settings import SurviveSettings

__all__ = [
    "Content",
    "Interruption",
    "InterruptionKind",
    "StreamFault",
    "SurviveRequest",
    "content_of",
    "interruptions",
    "requests",
]

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
    # Greedy requests also need a seed, because ids of tool calls derive from it.
    body["seed"] = draws.randrange(2**31)
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


CONTINUED = b": x-trioserve-continued"


class StreamFault(Exception):
    """The stream is not a complete response. The message says why."""


class Content(msgspec.Struct, frozen=True, kw_only=True):
    """Content of one stream.

    Attributes:
        response_ids: different ids of the response. A correct stream has one.
        choices: joined parts of each choice, by index.
        usage: token counts without cached tokens. None: the client did not ask for them.
        ends: number of [DONE] events.
        continued: number of comments that report a resumption. Not compared.
    """

    response_ids: tuple[str, ...]
    choices: dict[int, dict[str, Any]]
    usage: dict[str, Any] | None
    ends: int
    continued: int = 0

    def differences(self, other: Content, *, logprob_tolerance: float = 0.0) -> list[str]:
        """Compare two streams.

        Args:
            other: expected content.
            logprob_tolerance: allowed difference of log probabilities.

        Returns:
            One line for each part that differs. Empty: the streams are equal.
        """
        found = []
        for name in ("response_ids", "usage", "ends"):
            if getattr(self, name) != getattr(other, name):
                found.append(f"{name}: {getattr(self, name)!r} instead of {getattr(other, name)!r}")
        for index in sorted({*self.choices, *other.choices}):
            ours, theirs = self.choices.get(index, {}), other.choices.get(index, {})
            for part in sorted({*ours, *theirs}):
                if not _are_equal(ours.get(part), theirs.get(part), logprob_tolerance if part == "logprobs" else 0.0):
                    found.append(f"choice {index}, {part}: {_apart(ours.get(part), theirs.get(part))}")
        return found


def content_of(body: bytes) -> Content:
    """Parse a stream of server-sent events.

    Args:
        body: bytes of the whole response.

    Raises:
        StreamFault: the stream contains an error event or an invalid event, or does not end correctly.
    """
    choices: dict[int, dict[str, Any]] = {}
    ids: dict[str, None] = {}
    moments = set()
    usage: dict[str, Any] | None = None
    ends = continued = 0
    for block in body.split(b"\n\n"):
        data = b"\n".join(line[5:].strip() for line in block.split(b"\n") if line.startswith(b"data:"))
        continued += sum(line.startswith(CONTINUED) for line in block.split(b"\n"))
        if not data:
            continue
        if data == b"[DONE]":
            ends += 1
            continue
        if ends:
            raise StreamFault(f"data came after the end of the stream: {data[:200]!r}")
        event = _decoded(data)
        ids[event.get("id", "")] = None
        moments.add(event.get("created"))
        if event.get("usage"):
            if usage is not None:
                raise StreamFault("usage was sent twice")
            usage = _without_cached(event["usage"])
        for choice in event.get("choices", ()):
            _take(choices.setdefault(choice["index"], {}), choice)
    if ends != 1:
        raise StreamFault(f"[DONE] came {ends} times")
    if len(moments) > 1:
        raise StreamFault(f"events have {len(moments)} different creation times")
    return Content(response_ids=tuple(ids), choices=choices, usage=usage, ends=ends, continued=continued)


def _decoded(data: bytes) -> dict[str, Any]:
    try:
        event = msgspec.json.decode(data)
    except msgspec.MsgspecError:
        raise StreamFault(f"an event is not JSON: {data[:200]!r}") from None
    if not isinstance(event, dict):
        raise StreamFault(f"an event is not a JSON object: {data[:200]!r}")
    if "error" in event:
        error = event["error"]
        raise StreamFault(f"error event {error.get('code')}: {error.get('message')}")
    return event


def _take(known: dict[str, Any], choice: dict[str, Any]) -> None:
    said = {name: value for name, value in choice.items() if name not in ("index", "delta")} | choice.get("delta", {})
    for name, value in said.items():
        if value is None:
            continue
        if name == "tool_calls":
            for call in value:
                _take_call(known.setdefault(name, {}).setdefault(call["index"], {}), call)
        elif name == "logprobs":
            lists = known.setdefault(name, {})
            for part, entries in value.items():
                if isinstance(entries, list):
                    lists.setdefault(part, []).extend(entries)
        elif name in ("role", "finish_reason", "stop_reason"):
            known.setdefault(name, []).append(value)  # A second value is reported as a difference.
        elif isinstance(value, str):
            known[name] = known.get(name, "") + value
        else:
            known.setdefault(name, []).append(value)


def _take_call(known: dict[str, Any], call: dict[str, Any]) -> None:
    for name in ("id", "type"):
        if call.get(name) is not None:
            known.setdefault(name, []).append(call[name])
    for name, value in (call.get("function") or {}).items():
        if value is not None:
            known[name] = known.get(name, "") + value


def _without_cached(usage: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in usage.items() if name != "prompt_tokens_details"}


def _are_equal(ours: object, theirs: object, tolerance: float) -> bool:
    if not tolerance or ours == theirs:
        return ours == theirs
    if isinstance(ours, float) and isinstance(theirs, float):
        return abs(ours - theirs) <= tolerance
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(_are_equal(a, b, tolerance) for a, b in zip(ours, theirs, strict=True))
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(_are_equal(ours[key], theirs[key], tolerance) for key in ours)
    return False


def _apart(ours: object, theirs: object) -> str:
    """Describe the first difference of two values."""
    if isinstance(ours, str) and isinstance(theirs, str):
        shorter = min(len(ours), len(theirs))
        same = next((at for at in range(shorter) if ours[at] != theirs[at]), shorter)
        return f"from character {same} on {ours[same : same + 40]!r} instead of {theirs[same : same + 40]!r}"
    if isinstance(ours, list) and isinstance(theirs, list) and ours and len(ours) != len(theirs):
        return f"{len(ours)} entries instead of {len(theirs)}"
    return f"{str(ours)[:120]} instead of {str(theirs)[:120]}"
