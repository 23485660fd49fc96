"""Tests that the server checks the ranges in /openapi.json: it accepts the limits, and refuses values beyond the
limits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from trioserve.contracts.sampling import SAMPLING_RANGES

BODIES = {
    "ChatBody": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
    "CompletionBody": ("/v1/completions", {"prompt": "ab"}),
}
# A valid body needs these other fields together with the field.
COMPANY = {"top_logprobs": {"logprobs": True}, "min_tokens": {"max_tokens": None}}
# In one of the two APIs, the lower limit is stricter than the range, because a response must have tokens.
LEAST = {"max_tokens": 1, "max_completion_tokens": 1}


async def described(api: Any, body: str) -> dict[str, Any]:
    document = (await api.context("GET", "/openapi.json")).json()
    return document["components"]["schemas"][body]["properties"]


def numbers(schema: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Any]]:
    """Return the schema of the numbers in a field, and a function that makes a value of the field from a number."""
    for option in schema.get("anyOf", [schema]):
        if option.get("type") in ("integer", "number"):
            yield option, lambda number: number
        elif option.get("type") == "array" and option["items"].get("type") == "integer":
            yield option["items"], lambda number: [number]
        elif option.get("additionalProperties", {}).get("type") == "number":
            yield option["additionalProperties"], lambda number: {"5": number}


@pytest.mark.parametrize("body", BODIES)
async def test_every_checked_number_range_is_in_the_openapi_document(api: Any, body: str) -> None:
    fields = await described(api, body)
    for name, allowed in SAMPLING_RANGES.items():
        if name == "logprobs" and body == "ChatBody":
            name = "top_logprobs"  # In this body, `logprobs` is a boolean.
        [(schema, _)] = numbers(fields[name])
        assert schema["exclusiveMinimum" if allowed.is_low_excluded else "minimum"] == allowed.low, name
        if allowed.high is not None:  # If the range has no upper limit, only the type limits the number.
            assert schema["maximum"] == allowed.high, name
    assert fields["temperature"]["anyOf"][0] == {"type": "number", "minimum": 0.0, "maximum": 100.0}


@pytest.mark.parametrize("body", BODIES)
async def test_limits_of_openapi_ranges_are_accepted_and_values_beyond_are_refused(api: Any, body: str) -> None:
    path, fields = BODIES[body]
    seen = 0
    for name, field in (await described(api, body)).items():
        if not (name in SAMPLING_RANGES or name in ("max_completion_tokens", "top_logprobs", "priority")):
            continue
        for schema, value_of in numbers(field):
            step = 1 if schema["type"] == "integer" else 0.001
            fitting, refused = [], []
            if "minimum" in schema:
                fitting.append(max(schema["minimum"], LEAST.get(name, schema["minimum"])))
                refused.append(schema["minimum"] - step)
            if "exclusiveMinimum" in schema:
                fitting.append(schema["exclusiveMinimum"] + step)
                refused.append(schema["exclusiveMinimum"])
            if "maximum" in schema:
                fitting.append(schema["maximum"])
                refused.append(schema["maximum"] + step)
            for number in fitting:
                asked = {**fields, **COMPANY.get(name, {}), name: value_of(number)}
                exchange = await api.context("POST", path, asked)
                assert exchange.status == 200, (name, number, exchange.data)
            for number in refused:
                asked = {**fields, **COMPANY.get(name, {}), name: value_of(number)}
                exchange = await api.context("POST", path, asked)
                error = exchange.json()["error"]
                assert exchange.status == 400
                assert name in error["message"] or name in (error["param"] or ""), (name, number, error)
            seen += 1
    assert seen >= 15


async def test_max_tokens_and_max_completion_tokens_are_checked(api: Any) -> None:
    exchange = await api.chat(max_tokens=-1, max_completion_tokens=5)
    assert exchange.json()["error"]["param"] == "max_tokens"
    assert (await api.chat(max_tokens=3, max_completion_tokens=5)).status == 200
    assert api.engine.streams[-1].sampling.max_tokens == 5
