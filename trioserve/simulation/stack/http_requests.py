"""The bytes of a simulated client's request, and its expected response."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from trioserve.contracts.ids import RequestId
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.engine.request_preparation import SEED_STRIDE
from trioserve.simulation.reference_engine import ReferenceEngine
from trioserve.simulation.stack.calls import TOOLS, message_of
from trioserve.simulation.stack.forms import guide_of
from trioserve.simulation.stack.http_plan import Ask
from trioserve.simulation.stack.seams import stopped_at
from trioserve.testing.byte_tokenizer import END_TOKEN_ID
from trioserve.testing.fake_executor import FakeModel
from trioserve.trio_tools.http_client import Fields

__all__ = ["KEY", "expected_tokens", "key_of", "path_of", "request_of", "seed_of"]

KEY = "x-simulated-client"  # header field that identifies the client for the simulation


def key_of(ask: Ask) -> str:
    return f"h{ask.number}"


def request_of(ask: Ask, expected: Sequence[Sequence[int]]) -> tuple[bytes, Fields]:
    """Return the body and the header fields of a request.

    Args:
        ask: the request.
        expected: result of expected_tokens, of which a part may be known.
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
            del body["seed"]  # The seed of the response that began counts.
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
    """Return the tokens of every choice of every prompt, in order of their indexes, up to the end by a stop string.

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
    """Return the engine's request for a choice, as far as the response depends on it."""
    return EngineRequest(
        id=RequestId(f"{ask.number}/{index}"),
        prompt_token_ids=prompt,
        sampling=SamplingParams(temperature=ask.temperature),
        output_tokens_max=ask.output,
        stop_token_ids=frozenset((END_TOKEN_ID,) if ask.has_tools else ()),
        seed=seed_of(ask, index),
        guide=guide_of(ask.form),
    )
