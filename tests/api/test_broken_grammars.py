"""Tests that a request with an invalid grammar or schema is refused, and that the engine keeps running."""

from __future__ import annotations

import re
from typing import Any

import pytest
import trio.testing

from trioserve.contracts.sampling import SamplingParams
from trioserve.testing.fake_engine import open_fake_engine
from trioserve.testing.invariants import check_idle

DEEP: dict[str, Any] = {}
for _ in range(200):
    DEEP = {"type": "object", "properties": {"deeper": DEEP}}

BROKEN = {
    "a schema of no type": {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}},
    "a schema that is no schema": {"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}},
    "a schema that is missing": {"response_format": {"type": "json_schema"}},
    "a schema that leads nowhere": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#/nowhere"}}}
    },
    "a format that nobody knows": {"response_format": {"type": "haiku"}},
    "a format that is no object": {"response_format": "json_object"},
    "a schema in text": {"guided_json": "{"},
    "a schema nested deeply": {"guided_json": DEEP},
    "a regex that is open": {"guided_regex": "(((("},
    "a regex that looks back": {"guided_regex": r"(a)\1"},
    "no choice": {"guided_choice": [1, None]},
    "a grammar without an end": {"guided_grammar": 'root ::= "a" ('},
    "a grammar without a root": {"guided_grammar": "other ::= nowhere"},
    "a structure of all kinds": {"structured_outputs": {"regex": "((", "json": 1, "grammar": "::="}},
}


@pytest.mark.parametrize("fields", BROKEN.values(), ids=BROKEN.keys())
async def test_an_unusable_grammar_is_400_and_the_engine_keeps_running(
    make_api: Any, fields: dict[str, Any], autojump_clock: trio.testing.MockClock
) -> None:
    """Scenario S17 of tests/README.md: another request runs at the same time. The test uses both APIs, streamed and
    whole.
    """
    async with open_fake_engine(step_seconds=0.01) as fake:
        api = make_api()
        api.engine = fake
        async with fake.generate("beside", SamplingParams(max_tokens=20, ignore_eos=True)) as beside:
            fake.pause()  # The clock keeps running while a grammar is compiled.
            for ask in (api.chat, api.complete):
                for stream in (False, True):
                    response = await ask(**fields, stream=stream)
                    assert response.status == 400, response.data
                    error = response.json()["error"]
                    assert error["type"] == "invalid_request_error"
                    assert re.split(r"[.[]", error["param"])[0] == next(iter(fields))
            assert fake.core.stats().running_count + fake.core.stats().waiting_count == 1
            fake.resume()
            assert sum([len(delta.token_ids) async for delta in beside]) == 20
        assert (await api.chat(max_tokens=3)).status == 200
        assert fake.ready
        check_idle(fake.core)
