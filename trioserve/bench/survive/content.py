"""The content of a stream without its division into events, to compare two streams.

The content leaves out the creation time, the number of cached tokens, comments and ids of events. Everything else is
compared, repetitions included: a role, an end or a token that comes twice is a difference.
"""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ["Content", "StreamFault", "content_of"]

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
            raise StreamFault(f"something came behind the end: {data[:200]!r}")
        event = _decoded(data)
        ids[event.get("id", "")] = None
        moments.add(event.get("created"))
        if event.get("usage"):
            if usage is not None:
                raise StreamFault("usage was said twice")
            usage = _without_cached(event["usage"])
        for choice in event.get("choices", ()):
            _take(choices.setdefault(choice["index"], {}), choice)
    if ends != 1:
        raise StreamFault(f"[DONE] came {ends} times")
    if len(moments) > 1:
        raise StreamFault(f"it says {len(moments)} moments of its making")
    return Content(response_ids=tuple(ids), choices=choices, usage=usage, ends=ends, continued=continued)


def _decoded(data: bytes) -> dict[str, Any]:
    try:
        event = msgspec.json.decode(data)
    except msgspec.MsgspecError:
        raise StreamFault(f"an event is no JSON: {data[:200]!r}") from None
    if not isinstance(event, dict):
        raise StreamFault(f"an event is no object: {data[:200]!r}")
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
            known.setdefault(name, []).append(value)  # a second one is a difference
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
