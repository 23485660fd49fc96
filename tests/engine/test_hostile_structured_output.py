"""Tests of hostile grammars beside normal requests. Each hostile request is refused or ends, the normal requests get
their tokens, and all memory is freed.
"""

from __future__ import annotations

import json

import pytest
import trio

from trioserve import FinishReason, InvalidRequest, SamplingParams, StructuredOutput
from trioserve.admission.text_threads import TextThreads
from trioserve.testing import open_fake_engine

ENDLESS = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/a"}},
    "required": ["a"],
    "additionalProperties": False,
}
LATE = {
    "$defs": {"a": ENDLESS},
    "type": "object",
    "properties": {"x": {"enum": ["1", "2"]}, "b": {"$ref": "#/$defs/a"}},
    "required": ["x", "b"],
    "additionalProperties": False,
}
PATTERNS = {"allOf": [{"type": "string", "pattern": f".*{index}.*"} for index in range(500)]}
HOSTILE = {
    "never ends": StructuredOutput.grammar('start: "a" start'),
    "forces without an end, from its first token": StructuredOutput.json(
        {"$defs": {"a": ENDLESS}, "$ref": "#/$defs/a"}
    ),
    "forces without an end, later": StructuredOutput.json(LATE),
    "patterns by the hundred": StructuredOutput.json(PATTERNS),
    "states without number": StructuredOutput.regex("(a|b)*a(a|b){200}"),
    "any text, again and again": StructuredOutput.regex("(.*a){100}"),
    "a deep stack": StructuredOutput.json('{"type": "array", "items": ' * 6000 + "{}" + "}" * 6000),
    "repeats": StructuredOutput.regex("(a{1,9000}){1,9000}"),
    "half a character": StructuredOutput.json(r'{"const": "\ud800"}'),
    "ambiguous": StructuredOutput.grammar('start: e\ne: e e | "a"'),
    "many choices": StructuredOutput.choice([f"value-{index}" for index in range(10_000)]),
}
REFUSED = {
    "never ends",
    "forces without an end, from its first token",
    "patterns by the hundred",
    "a deep stack",
    "repeats",
    "half a character",
}


@pytest.mark.slow
async def test_hostile_grammars_do_not_affect_other_requests() -> None:
    ended: dict[str, FinishReason | None] = {}
    texts: dict[str, str] = {}

    async def ask(name: str, form: StructuredOutput | None) -> None:
        params = SamplingParams(structured=form, max_tokens=40, ignore_eos=True, temperature=1.0, seed=5)
        try:
            async with engine.generate(f"say {name}", params) as stream:
                async for delta in stream:
                    texts[name] = texts.get(name, "") + delta.text
                    ended[name] = delta.finish_reason or ended.get(name)
        except InvalidRequest:
            ended[name] = None

    async with open_fake_engine(max_queued_requests=64, new_text_threads=TextThreads) as engine:
        async with trio.open_nursery() as nursery:
            for name, form in HOSTILE.items():
                nursery.start_soon(ask, name, form)
                nursery.start_soon(ask, f"beside {name}", None)
                nursery.start_soon(ask, f"json beside {name}", StructuredOutput.json({"enum": ["yes", "no"]}))
        engine.assert_all_free()
        assert (await engine.encode("still here")) is not None
    assert {name for name, reason in ended.items() if reason is None} == REFUSED
    for name in HOSTILE:
        assert ended[f"beside {name}"] is FinishReason.LENGTH
        assert ended[f"json beside {name}"] is FinishReason.STOP
        assert json.loads(texts[f"json beside {name}"]) in ("yes", "no")


@pytest.mark.slow
async def test_client_that_leaves_while_a_hostile_grammar_compiles_frees_everything() -> None:
    grammar = StructuredOutput.grammar(
        "start: T0\n" + "\n".join(f"T{i}: T{i + 1} T{i + 1}" for i in range(40)) + '\nT40: "a"'
    )
    async with open_fake_engine(new_text_threads=TextThreads) as engine:
        with trio.move_on_after(0.02) as scope:
            async with engine.generate("say", SamplingParams(structured=grammar)):
                raise AssertionError("it cannot be compiled")
        assert scope.cancelled_caught
        engine.assert_all_free()
        async with engine.generate("say", SamplingParams(max_tokens=3)) as stream:
            assert [delta async for delta in stream]
        engine.assert_all_free()
