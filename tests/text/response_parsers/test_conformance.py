"""Tests parsers with the package canitoolcall: responses of models of nine families, and the expected parts."""

from __future__ import annotations

import random

import pytest

from trioserve.testing.byte_tokenizer import byte_tokenizer
from trioserve.text.reasoning_state import PromptReasoning
from trioserve.text.response_parsers.families import REASONING_FAMILIES
from trioserve.text.response_parsers.offered_tools import OfferedTool
from trioserve.text.response_parsers.registry import make_response_parser
from trioserve.text.response_parts import JoinedResponse

checks = pytest.importorskip("canitoolcall.checks", reason="canitoolcall is not installed: pip install trioserve[test]")
from canitoolcall.fixtures import Fixture  # noqa: E402
from canitoolcall.pytest_plugin import family_for  # noqa: E402
from canitoolcall.results import Observation, ParsedToolCall, ParseResult, Status  # noqa: E402

# Names of parsers by family and by a part of the model's name, as users would pass them to vLLM's flags.
FAMILIES: dict[str, list[tuple[str, str, str | None]]] = {
    "qwen3-hermes": [("", "hermes", "qwen3")],
    "qwen3-xml": [("Coder", "qwen3_coder", None), ("", "qwen3_coder", "qwen3")],
    "llama": [("Llama-4", "llama4_pythonic", None), ("", "llama3_json", None)],
    "mistral": [("", "mistral", "mistral")],
    "deepseek": [
        ("V4.1", "deepseek_v41", "deepseek_v41"),
        ("V4", "deepseek_v4", "deepseek_v4"),
        ("V3.2", "deepseek_v32", "deepseek_v3"),
        ("V3.1", "deepseek_v31", "deepseek_v3"),
        ("V3", "deepseek_v3", None),
    ],
    "glm": [("4.5", "glm45", "glm45"), ("", "glm47", "glm47")],
    "kimi": [("K3", "kimi_k3", "kimi_k3"), ("Instruct", "kimi_k2", None), ("", "kimi_k2", "kimi_k2")],
    "gpt-oss": [("", "openai", "openai_gptoss")],
    "gemma4": [("", "gemma4", "gemma4")],
}
# Two texts of this family have a sentence and a space before a call. One of them expects the space in the content, the
# other does not. So this white space is not compared.
WHITE_SPACE_DIFFERS = {"gemma4/vllm-text-before-call"}


def read(fixture: Fixture, pieces: list[str]) -> ParseResult:
    family = family_for(fixture)
    model = fixture.reference_model
    tool_family, reasoning_family = next(
        (tool, reasoning) for part, tool, reasoning in FAMILIES[fixture.family] if part in model
    )
    prompt = fixture.generation_prompt
    if prompt is None:
        prompts = (known.default_generation_prompt for known in family.reference_models if known.repo == model)
        prompt = next(prompts) or ""
    functions = [tool["function"] for tool in fixture.tools]
    parser = make_response_parser(
        tool_family,
        reasoning_family,
        tools=[OfferedTool(name=entry["name"], parameters=entry.get("parameters")) for entry in functions],
        begins_inside=None if reasoning_family is None else _begins_inside(prompt, reasoning_family),
    )
    joined = JoinedResponse()
    for piece in pieces:
        joined.take(parser.feed(piece))
    joined.take(parser.end())
    calls = tuple(ParsedToolCall(call.name, call.arguments) for call in joined.calls)
    return ParseResult(content=joined.content or None, reasoning_content=joined.reasoning or None, tool_calls=calls)


def _begins_inside(prompt: str, reasoning_family: str) -> bool | None:
    tokenizer, tags = byte_tokenizer(), REASONING_FAMILIES[reasoning_family].tags
    reasoning = PromptReasoning(tokenizer, opening=tags.opening, closing=tags.closing)
    return reasoning.begins_inside(tokenizer.encode(prompt))


def cut(text: str, seed: int) -> list[str]:
    """Split a text into single characters for seed 0, otherwise into random pieces of about one token."""
    drawn = random.Random(seed)
    pieces, at = [], 0
    while at < len(text):
        length = drawn.randint(1, 12) if seed else 1
        pieces.append(text[at : at + length])
        at += length
    return pieces


def test_parser_finds_the_expected_parts_for_any_pieces(canitoolcall_fixture):
    fixture = canitoolcall_fixture
    whole = read(fixture, [fixture.raw_output])
    for seed in range(4):
        assert read(fixture, cut(fixture.raw_output, seed)) == whole
    rows = checks.run_checks(fixture, family_for(fixture), Observation(nonstream=whole, streams={}))
    good = (Status.PASS, Status.SOFT_PASS) if fixture.id in WHITE_SPACE_DIFFERS else (Status.PASS,)
    assert [f"{row.check}: {row.detail}" for row in rows if row.status not in good] == []
