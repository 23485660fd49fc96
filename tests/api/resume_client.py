"""Functions for clients of resumable streams: split a stream into groups, make the request that resumes it, and merge
the events.
"""

from __future__ import annotations

import json
from typing import Any

__all__ = ["ASKED", "USAGE", "groups_of", "resume_after", "said", "merged_message", "merged_response"]

ASKED = {"x_trioserve_resumable": "1", "x_request_id": "mine"}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}


async def groups_of(api: Any, path: str, body: dict[str, Any], headers: dict[str, str] = ASKED) -> tuple[Any, list]:
    """Send a request. Returns the fields of the head, and the groups as (events, id at their end)."""
    exchange = await api.context("POST", path, body, **headers)
    assert exchange.status == 200, exchange.data
    groups: list[tuple[list[Any], str]] = []
    events: list[Any] = []
    for event in exchange.data.decode().removesuffix("\n\n").split("\n\n"):
        lines = event.split("\n")
        data = "".join(line.removeprefix("data: ") for line in lines if line.startswith("data: "))
        events.append(data if data == "[DONE]" else json.loads(data))
        ids = [line.removeprefix("id: ") for line in lines if line.startswith("id: ")]
        if ids:
            groups.append((events, *ids))
            events = []
    assert not events, "events after the last group"
    return exchange, groups


def resume_after(head: Any, groups: list, choice_count: int) -> dict[str, Any]:
    """Return the field `resume` of the request that continues the stream after these groups."""
    token_ids: list[list[int]] = [[] for _ in range(choice_count)]
    finished = [False] * choice_count
    resume = json.loads(head["x-trioserve-resume"])
    for _, group_id in groups:
        if group_id == ".":
            continue
        tokens, _, state = group_id.partition(" ")
        choice, _, ids = tokens.partition(":")
        resume |= {"state": state} if state else {}
        finished[int(choice)] |= ids.endswith("!")
        token_ids[int(choice)] += [int(token_id) for token_id in ids.removesuffix("!").split(",") if token_id]
    return {"token_ids": token_ids, "finished": finished, **resume}


def said(groups: list) -> dict[str, Any]:
    """Merge the events of a stream into the response that a client assembles. The result does not depend on how the
    text was split.
    """
    response: dict[str, Any] = {"usage": None, "done": False, "heads": set(), "choices": {}}
    for events, _ in groups:
        for event in events:
            assert not response["done"], "nothing follows the end"
            if event == "[DONE]":
                response["done"] = True
                continue
            assert "error" not in event, event
            response["heads"].add((event["id"], event["object"], event["created"], event["model"]))
            response["usage"] = event.get("usage") or response["usage"]
            for choice in event["choices"]:
                _say(response["choices"].setdefault(choice["index"], {"text": "", "roles": 0}), choice)
    if response["usage"]:
        response["usage"].pop("prompt_tokens_details")  # A resumed request may hit more cached tokens.
        response["usage"].pop(
            "completion_tokens_details", None
        )  # A token at the border between reasoning and content may be counted on either side.
    return response


def _say(made: dict[str, Any], choice: dict[str, Any]) -> None:
    assert "finish_reason" not in made, "a choice ends once"
    delta = choice.get("delta", {})
    made["text"] += choice.get("text") or delta.get("content") or ""
    made["roles"] += "role" in delta
    for name in ("token_ids", "prompt_token_ids"):
        made[name] = made.get(name, []) + choice.get(name, [])
    made["reasoning"] = made.get("reasoning", "") + (delta.get("reasoning_content") or "")
    for name, entries in (choice["logprobs"] or {}).items():
        made[name] = made.get(name, []) + (entries or [])
    for call in delta.get("tool_calls", ()):
        calls = made.setdefault("calls", {})
        own = calls.setdefault(call["index"], {"arguments": "", "name": "", "id": ""})
        own["arguments"] += call["function"].get("arguments", "")
        own["name"] += call["function"].get("name", "")
        own["id"] += call.get("id", "")
    if choice["finish_reason"] is not None:
        made["finish_reason"], made["stop_reason"] = choice["finish_reason"], choice.get("stop_reason")


def merged_message(groups: list) -> dict[str, Any]:
    """Merge the events of a stream in Anthropic's format, as `said` does."""
    made: dict[str, Any] = {"kinds": [], "texts": {}, "end": None}
    for events, _ in groups:
        for event in events:
            kind = event["type"]
            assert kind != "error", event
            assert made["end"] is None or kind == "message_stop", "nothing follows the end"
            if kind == "content_block_delta":
                delta = dict(event["delta"])
                name = delta.pop("type")
                text = "".join(delta.values())
                made["texts"][event["index"], name] = made["texts"].get((event["index"], name), "") + text
            elif kind == "message_delta":
                usage = event["usage"]
                usage["input_tokens"] += usage.pop("cache_read_input_tokens")
                del usage["output_tokens_details"]
                made["end"] = event
            elif kind != "ping":
                if kind == "message_start":
                    del event["message"]["usage"]
                made["kinds"].append(event)
    return made


def merged_response(groups: list) -> dict[str, Any]:
    """Merge the events of a stream of the Responses API, as `said` does."""
    made: dict[str, Any] = {"others": [], "texts": {}}
    number = 0
    for events, _ in groups:
        for event in events:
            assert event.pop("sequence_number") == number, event
            number += 1
            if event["type"].endswith(".delta"):
                place = (event["type"], event["item_id"], event["output_index"])
                made["texts"][place] = made["texts"].get(place, "") + event["delta"]
            else:
                response = event.get("response")
                if response is not None and response["usage"] is not None:
                    del response["completed_at"]
                    del response["usage"]["input_tokens_details"], response["usage"]["output_tokens_details"]
                made["others"].append(event)
    return made
