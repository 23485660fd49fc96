"""The bytes of a simulated client's request, and the check of its response.

A response is allowed if it is the correct response, a beginning of the correct response, or an error. HttpClients
checks whether there was a reason for an early end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from trioserve.contracts.ids import RequestId
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.engine.request_preparation import SEED_STRIDE
from trioserve.simulation.reference_engine import ReferenceEngine
from trioserve.simulation.stack.calls import TOOLS, CallChoice, message_of
from trioserve.simulation.stack.forms import guide_of, is_whole, shown, stopped_at
from trioserve.simulation.stack.http_connection import Ask, Response
from trioserve.testing.byte_tokenizer import END_TOKEN_ID
from trioserve.testing.fake_executor import FakeModel
from trioserve.trio_tools.http_client import Fields

__all__ = [
    "BROKEN_OFF",
    "COMPLETE",
    "KEY",
    "expected_tokens",
    "key_of",
    "outcome_of",
    "path_of",
    "request_of",
    "seed_of",
]

KEY = "x-simulated-client"  # header field with the simulation's name of the client


def key_of(ask: Ask) -> str:
    return f"h{ask.number}"


def request_of(ask: Ask, expected: Sequence[Sequence[int]]) -> tuple[bytes, Fields]:
    """Return the body and the header fields of a request.

    Args:
        ask: the request.
        expected: result of expected_tokens. The known tokens of a resumed response are taken from it.
    """
    body: dict[str, object] = {
        **_prompt_of(ask),
        "max_tokens": ask.output,
        "n": ask.choices,
        "stream": ask.streamed,
        "temperature": ask.temperature,
        "seed": ask.number,
        "priority": ask.priority,
        "cache_salt": ask.salt,
        "return_token_ids": ask.shows_tokens,
    }
    if ask.form:
        body["structured_outputs"] = {"choice": ask.form}
    if ask.stops:
        body["stop"] = ask.stops
    if ask.known_count:
        body["resume"] = {
            "token_ids": [tokens[: ask.known_count] for tokens in expected],
            "finished": [len(tokens) <= ask.known_count for tokens in expected],
            "seed": ask.number,
        }
        if len(ask.prompts) == 1:
            del body["seed"]  # A resumed response uses the seed in `resume`, so the request may omit its own seed.
    if ask.streamed and ask.shows_usage:
        body["stream_options"] = {"include_usage": True}
    fields = [("content-type", "application/json"), (KEY, key_of(ask))]
    if ask.id is not None:
        fields.append(("x-request-id", ask.id))
    deadlines = (("timeout", "x-request-timeout", ask.timeout), ("queue_timeout", "x-queue-timeout", ask.queue_timeout))
    for name, header, seconds in deadlines:
        if seconds is not None and ask.in_headers:
            fields.append((header, f"{seconds:g}"))
        elif seconds is not None:
            body[name] = seconds
    data = msgspec.json.encode(body)
    return data, [*fields, ("content-length", str(len(data)))]


def path_of(ask: Ask) -> str:
    return "/v1/chat/completions" if ask.has_tools else "/v1/completions"


def seed_of(ask: Ask, index: int) -> int:
    """Return the seed of a choice.

    Args:
        ask: the request.
        index: index of the choice.
    """
    return (ask.number + index * SEED_STRIDE) % 2**64


def _prompt_of(ask: Ask) -> dict[str, object]:
    if not ask.has_tools:
        return {"prompt": ask.prompts if len(ask.prompts) > 1 else ask.prompts[0]}
    [prompt] = ask.prompts
    return {"messages": [{"role": "user", "content": message_of(prompt)}], "tools": TOOLS}


def expected_tokens(ask: Ask, model: FakeModel) -> list[tuple[int, ...]]:
    """Return the tokens of every choice of every prompt, in order of the choices' indexes.

    The tokens end where a stop string is complete.

    Args:
        ask: the request.
        model: the fake model.
    """
    references = ReferenceEngine(model)
    responses = [
        references.response(_sequence(ask, prompt, index)).token_ids
        for prompt in ask.prompts
        for index in range(ask.choices)
    ]
    return [tokens[: stopped_at(tokens, ask.stops)] for tokens in responses]


def _sequence(ask: Ask, prompt: tuple[int, ...], index: int) -> EngineRequest:
    """Return the engine's request for a choice, with the fields that affect the response."""
    return EngineRequest(
        id=RequestId(f"{ask.number}/{index}"),
        prompt_token_ids=prompt,
        sampling=SamplingParams(temperature=ask.temperature),
        output_tokens_max=ask.output,
        stop_token_ids=frozenset((END_TOKEN_ID,) if ask.has_tools else ()),
        seed=seed_of(ask, index),
        guide=guide_of(ask.form),
    )


COMPLETE = "complete"
BROKEN_OFF = "broken off"


def outcome_of(ask: Ask, response: Response, expected: Sequence[Sequence[int]], *, family: str = "") -> str:
    """Check a response and return its outcome.

    Args:
        ask: the request.
        response: the received response.
        expected: tokens of every choice.
        family: format of tool calls.

    Returns:
        COMPLETE, BROKEN_OFF if the end of the response is missing, or the status and the reason of an error, such as
        "500 engine_fault". The error may be the whole response or an event of a stream.

    Raises:
        AssertionError: no client may receive this response.
    """
    if response.status is None:
        assert not response.body, f"{ask.id}: a body arrived without a head"
        return BROKEN_OFF
    is_unread = (
        response.status == 503 and response.headers.get("x-trioserve-reason") == "draining"
    )  # The front end refused the request before the app got it.
    is_named = ask.id is None or response.headers.get("x-request-id", ask.id if is_unread else None) == ask.id
    assert is_named, f"{ask.id}: {response.headers}"
    if response.status != 200:
        if not response.is_complete:
            return BROKEN_OFF
        error = msgspec.json.decode(response.body)["error"]
        assert error["message"], f"{ask.id}: an error has no message"
        if response.status == 429:
            assert int(response.headers["retry-after"]) >= 1
        return f"{response.status} {response.headers.get('x-trioserve-reason')}"
    choices = _choices(ask, expected, family)
    if ask.streamed:
        return _outcome_of_events(ask, response, choices)
    if not response.is_complete:
        return BROKEN_OFF
    whole = msgspec.json.decode(response.body)
    _take(whole, choices)
    _check_usage(ask, whole["usage"], choices)
    for choice in choices:
        choice.check_complete()
    return COMPLETE


def _choices(ask: Ask, expected: Sequence[Sequence[int]], family: str) -> Sequence[_Choice | CallChoice]:
    ids: set[str] = set()
    choices: list[_Choice | CallChoice] = []
    for index, tokens in enumerate(expected):
        name = f"{ask.id}, choice {index}"
        if ask.has_tools:
            choices.append(CallChoice(name, tokens, family, ask.prompts[0], seed_of(ask, index), ids))
        else:
            choices.append(_Choice(name, ask, tokens))
    return choices


def _outcome_of_events(ask: Ask, response: Response, choices: Sequence[_Choice | CallChoice]) -> str:
    assert response.headers["content-type"].startswith("text/event-stream"), response.headers
    *blocks, rest = bytes(response.body).split(b"\n\n")
    assert not (response.is_complete and rest), f"{ask.id}: half an event at the end of the response: {rest!r}"
    end = None
    for block in blocks:
        assert end is None, f"{ask.id}: {block!r} after the last event, {end}"
        if block == b": keep-alive":
            continue
        assert block.startswith(b"data: "), f"{ask.id}: {block!r} is not an event"
        value = block.removeprefix(b"data: ")
        if value == b"[DONE]":
            end = COMPLETE
            continue
        event = msgspec.json.decode(value)
        if "error" in event:
            end = f"200 {event['error']['code']}"
        elif event["choices"]:
            _take(event, choices)
        else:
            assert ask.shows_usage, f"{ask.id}: an event has no choices"
            _check_usage(ask, event["usage"], choices)
    for choice in choices:
        if end == COMPLETE:
            choice.check_complete()
        else:
            choice.check_prefix()
    if response.is_complete:
        assert end is not None, f"{ask.id}: the stream ends cleanly without [DONE] and without an error"
        return end
    return BROKEN_OFF


def _take(value: Any, choices: Sequence[_Choice | CallChoice]) -> None:
    for choice in value["choices"]:
        choices[choice["index"]].take(choice)


def _check_usage(ask: Ask, usage: Any, choices: Sequence[_Choice | CallChoice]) -> None:
    assert usage["prompt_tokens"] == sum(map(len, ask.prompts)), f"{ask.id}: {usage}"
    assert usage["completion_tokens"] == sum(len(choice.tokens) for choice in choices), f"{ask.id}: {usage}"


class _Choice:
    """The part of one choice of a completion that the client has received.

    Args:
        name: name for error texts.
        ask: the request.
        tokens: all expected tokens, including known tokens.
    """

    def __init__(self, name: str, ask: Ask, tokens: Sequence[int]) -> None:
        self.name = name
        self.tokens = tuple(tokens)
        self.stops = ask.stops
        is_stopped = is_whole(ask.form, tokens) or stopped_at(tokens, ask.stops) is not None
        self.end = "stop" if is_stopped else "length"
        self.known_count = min(ask.known_count, len(tokens)) if ask.streamed else 0
        self.has_ended_before = 0 < self.known_count == len(tokens)
        self.text = ""
        self.shown_tokens: list[int] | None = None
        self.finish_reason: str | None = None

    def take(self, choice: Any) -> None:
        assert self.finish_reason is None, f"{self.name}: {choice} after its end"
        assert not self.has_ended_before, f"{self.name}: {choice}, but its client already knew its end"
        self.text += choice["text"]
        self.finish_reason = choice["finish_reason"]
        if "token_ids" in choice:
            self.shown_tokens = [*(self.shown_tokens or ()), *choice["token_ids"]]

    def check_complete(self) -> None:
        if self.has_ended_before:
            return
        assert self.finish_reason == self.end, f"{self.name}: complete, and ended with {self.finish_reason}"
        tokens, text = list(self.tokens[self.known_count :]), self._text(len(self.tokens), is_whole=True)
        assert self.shown_tokens in (None, tokens), f"{self.name}: {self.shown_tokens} of {tokens}"
        assert self.text == text, f"{self.name}: {self.text!r} of {self.tokens}, and not {text!r}"

    def check_prefix(self) -> None:
        assert self.finish_reason in (None, self.end), f"{self.name} ended with {self.finish_reason}"
        if self.finish_reason is not None:
            self.check_complete()
            return
        counts: Sequence[int] = range(self.known_count, len(self.tokens) + 1)
        if self.shown_tokens is not None:
            counts = (self.known_count + len(self.shown_tokens),)
            tokens = self.tokens[self.known_count : counts[0]]
            assert tuple(self.shown_tokens) == tokens, f"{self.name}: {self.shown_tokens}"
        texts = {self._text(count, is_whole=is_whole) for count in counts for is_whole in (False, True)}
        assert self.text in texts, f"{self.name}: {self.text!r} is not a beginning of {self.tokens}"

    def _text(self, count: int, *, is_whole: bool) -> str:
        """Return the text that the client must receive after the first `count` tokens of the response.

        A resumed request already knows the first `known_count` tokens, so the server does not send their text.
        """
        text = shown(self.tokens[:count], self.stops, is_whole=is_whole)
        before = shown(self.tokens[: self.known_count], self.stops, is_whole=False) if self.known_count else ""
        assert text.startswith(before)
        return text[len(before) :]
