"""Tests structured output over HTTP: each field for structured output in both APIs, with streams, choices, logprobs and
stop strings.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from trioserve.testing.fake_engine import FakeEngine, open_fake_engine

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "age": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["ok", "age"],
    "additionalProperties": False,
}
PATTERN = r'\{"ok": (true|false), "age": [0-9]\}'
TAG = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f>"]}
FORMS: dict[str, tuple[dict[str, Any], str]] = {
    "json_schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
        PATTERN,
    ),
    "strict": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}},
        PATTERN,
    ),
    "structured_outputs.json": ({"structured_outputs": {"json": SCHEMA}}, PATTERN),
    "structured_outputs.json in a text": ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, PATTERN),
    "structured_outputs.regex": ({"structured_outputs": {"regex": "a+b"}}, "a+b"),
    "structured_outputs.choice": ({"structured_outputs": {"choice": ["x", "yz"]}}, "x|yz"),
    "structured_outputs.grammar": ({"structured_outputs": {"grammar": 'root ::= "q" [0-9]'}}, "q[0-9]"),
    "guided_json": ({"guided_json": SCHEMA}, PATTERN),
    "guided_regex": ({"guided_regex": "[a-c]{4}"}, "[a-c]{4}"),
    "guided_choice": ({"guided_choice": ["left", "right"]}, "left|right"),
    "guided_grammar": ({"guided_grammar": 'start: "q" /[0-9]/'}, "q[0-9]"),
}


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with open_fake_engine() as engine:
        yield engine


@pytest.fixture
def api(make_api: Any, engine: FakeEngine) -> Any:
    made = make_api()
    made.engine = engine
    return made


def text_of(choice: dict[str, Any]) -> str:
    return choice["text"] if "text" in choice else choice["message"]["content"]


def streamed(exchange: Any) -> dict[int, str]:
    texts: dict[int, str] = {}
    for event in exchange.events()[:-1]:
        for choice in event["choices"]:
            piece = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + piece
    return texts


@pytest.mark.parametrize(("fields", "pattern"), FORMS.values(), ids=FORMS.keys())
async def test_output_fits_every_structured_output_field_in_both_apis(
    api: Any, engine: FakeEngine, fields: dict[str, Any], pattern: str
) -> None:
    for ask in (api.chat, api.complete):
        whole = (await ask(**fields, max_tokens=60, temperature=0)).json()
        [choice] = whole["choices"]
        assert re.fullmatch(pattern, text_of(choice))
        assert choice["finish_reason"] == "stop"
        stream = await ask(**fields, max_tokens=60, temperature=0, stream=True)
        assert streamed(stream) == {0: text_of(choice)}
    engine.assert_all_free()


async def test_json_object_format_forces_the_output_to_begin_an_object(api: Any) -> None:
    response = (await api.chat(response_format={"type": "json_object"}, max_tokens=8)).json()
    assert response["choices"][0]["message"]["content"].startswith("{")


async def test_structural_tag_restricts_the_text_inside_the_tag(make_api: Any) -> None:
    async with open_fake_engine(response='so <f>{"ok": maybe') as engine:
        api = make_api()
        api.engine = engine
        fields = {"response_format": {"type": "structural_tag", **TAG}}
        response = (await api.complete(**fields, max_tokens=40)).json()
    assert re.fullmatch(f"so <f>{PATTERN}</f>.*", response["choices"][0]["text"])


async def test_structured_output_works_with_choices_logprobs_and_token_ids(api: Any) -> None:
    fields = FORMS["json_schema"][0]
    response = (await api.complete(**fields, n=3, logprobs=1, return_token_ids=True, max_tokens=60)).json()
    assert len(response["choices"]) == 3
    for choice in response["choices"]:
        assert re.fullmatch(PATTERN, choice["text"])
        assert len(choice["logprobs"]["tokens"]) == len(choice["token_ids"]) == len(choice["text"])


async def test_a_stop_string_ends_the_output_before_the_schema_does(api: Any, engine: FakeEngine) -> None:
    response = (await api.complete(**FORMS["json_schema"][0], stop="age", max_tokens=60)).json()
    [choice] = response["choices"]
    assert re.fullmatch(r'\{"ok": (true|false), "', choice["text"])
    assert choice["stop_reason"] == "age"
    assert response["usage"]["completion_tokens"] == len(choice["text"]) + 3
    engine.assert_all_free()


async def test_a_schema_that_is_not_strict_may_have_unsupported_keywords(api: Any) -> None:
    schema = {**SCHEMA, "unevaluatedItems": False}
    for strict, status in ((True, 400), (None, 200), (False, 200)):
        wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": strict}}
        exchange = await api.chat(response_format=wanted, max_tokens=60)
        assert exchange.status == status
        if status == 400:
            assert exchange.json()["error"]["param"] == "response_format.json_schema.schema"
            assert "at unevaluatedItems," in exchange.json()["error"]["message"]
        else:
            named = "response_format.json_schema.schema.unevaluatedItems"
            assert exchange.response_headers["x-trioserve-ignored"] == named


@pytest.mark.parametrize(
    ("place", "fields"),
    [
        ("guided_json", {"guided_json": "SCHEMA"}),
        ("structured_outputs.json", {"structured_outputs": {"json": "SCHEMA"}}),
        ("json_schema", {"json_schema": "SCHEMA"}),
        ("format", {"format": "SCHEMA"}),
        ("response_format.schema", {"response_format": {"type": "json_object", "schema": "SCHEMA"}}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_ignored_keywords_are_listed_for_fields_without_strict(
    api: Any, place: str, fields: dict[str, Any], stream: bool
) -> None:
    schema = {**SCHEMA, "unevaluatedItems": False}
    sent = json.loads(json.dumps(fields).replace('"SCHEMA"', json.dumps(schema)))
    for ask in (api.chat, api.complete):
        exchange = await ask(**sent, max_tokens=60, stream=stream)
        assert exchange.status == 200
        assert exchange.response_headers["x-trioserve-ignored"] == f"{place}.unevaluatedItems"


async def test_allowed_tokens_and_bad_words_restrict_the_output(api: Any) -> None:
    response = (await api.complete(allowed_token_ids=[97, 98], bad_words=["ba"], max_tokens=20)).json()
    assert re.fullmatch("a*b*", response["choices"][0]["text"])
    refused = await api.complete(allowed_token_ids=[97, 100_000])
    assert (refused.status, refused.json()["error"]["param"]) == (400, "allowed_token_ids")


@pytest.mark.parametrize("stream", [False, True])
async def test_allowed_tokens_that_contradict_a_schema_are_refused_with_400(api: Any, stream: bool) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    for ask in (api.chat, api.complete):
        refused = await ask(allowed_token_ids=[97, 98], response_format=form, stream=stream)
        assert (refused.status, refused.json()["error"]["param"]) == (400, "allowed_token_ids")
        assert "response_format" in refused.json()["error"]["message"]
