"""Tests of grammars, reasoning, allowed tokens and bad words, from the caller's options to the generated text."""

from __future__ import annotations

import json
import re
import threading

import pytest
import trio
import trio.testing

from trioserve import AbortOutcome, Deadlines, FinishReason, InvalidRequest, SamplingParams, StructuredOutput, Thinking
from trioserve.admission.text_threads import TextThreads
from trioserve.contracts.resume import Resume
from trioserve.contracts.sampling import ReasoningOutcome
from trioserve.testing import open_fake_engine
from trioserve.testing.inline_work import InlineTexts
from trioserve.text.grammar_compiler import GrammarCompiler

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


async def said(engine, structured=None, *, prompt="say", **sampling):
    params = SamplingParams(structured=structured, **{"temperature": 0.0, "max_tokens": 60, **sampling})
    texts, reasons, tokens = {}, {}, {}
    async with engine.generate(prompt, params) as stream:
        async for delta in stream:
            texts[delta.index] = texts.get(delta.index, "") + delta.text
            tokens[delta.index] = tokens.get(delta.index, 0) + len(delta.token_ids)
            if delta.logprobs is not None:
                assert len(delta.logprobs) == len(delta.token_ids)
            if delta.finish_reason:
                reasons[delta.index] = delta.finish_reason
                assert delta.finish_reason is not FinishReason.ERROR, delta.message
    engine.assert_all_free()
    return texts[0] if len(texts) == 1 else texts, reasons[0]


async def test_response_satisfies_its_schema():
    async with open_fake_engine() as engine:
        text, reason = await said(engine, StructuredOutput.json(PERSON))
    person = json.loads(text)
    assert set(person) == {"name", "age"}
    assert len(person["name"]) <= 4
    assert 0 <= person["age"] <= 99
    assert reason is FinishReason.STOP


async def test_tokens_forced_by_the_grammar_are_not_sampled():
    async with open_fake_engine() as engine:
        text, _ = await said(engine, StructuredOutput.json(PERSON))
        stats = engine.stats()
    assert stats.forced_tokens_total >= len('"name": "", "age": }')
    assert stats.steps_total == len(text.encode()) - stats.forced_tokens_total


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        (StructuredOutput.regex("[a-c]{3,5}-[0-9]"), "[a-c]{3,5}-[0-9]"),
        (StructuredOutput.choice(["yes", "no", "perhaps"]), "yes|no|perhaps"),
        (StructuredOutput.choice(['é/"\\', "\n\t"]), 'é/"\\\\|\n\t'),
        (StructuredOutput.grammar('root ::= "a" [0-9]{2} | "bc"'), "a[0-9]{2}|bc"),
        (StructuredOutput.grammar('start: "a" /[0-9]{2}/ | "bc"'), "a[0-9]{2}|bc"),
        (StructuredOutput.json({"enum": ["x", 1, None]}), '"x"|1|null'),
        (StructuredOutput.json(True), None),
    ],
)
async def test_response_matches_every_kind_of_grammar(form, pattern):
    async with open_fake_engine() as engine:
        text, reason = await said(engine, form)
    if pattern is not None:
        assert re.fullmatch(pattern, text)
        assert reason is FinishReason.STOP


async def test_json_object_mode_gives_the_beginning_of_an_object():
    async with open_fake_engine() as engine:
        text, _ = await said(engine, StructuredOutput.json_object())
    assert text.startswith("{")


async def test_each_choice_has_its_own_grammar_state():
    async with open_fake_engine() as engine:
        texts, _ = await said(engine, StructuredOutput.json(PERSON), n=3, temperature=1.0, seed=3)
    for text in texts.values():
        json.loads(text)
    assert len(set(texts.values())) == 3


@pytest.mark.parametrize("more", [{"logprobs": 1}, {"stop": ("name",)}, {"min_tokens": 9}, {"repetition_penalty": 1.2}])
async def test_grammar_works_with_logprobs_stop_strings_and_penalties(more):
    async with open_fake_engine() as engine:
        text, reason = await said(engine, StructuredOutput.json(PERSON), **more)
    if "stop" in more:
        assert (text, reason) == ('{"', FinishReason.STOP)
    else:
        assert set(json.loads(text)) == {"name", "age"}


@pytest.mark.parametrize("max_tokens", [0, 1, 2, 5, 12])
async def test_max_tokens_can_end_structured_output_early(max_tokens):
    async with open_fake_engine() as engine:
        whole, _ = await said(engine, StructuredOutput.json(PERSON))
        text, reason = await said(engine, StructuredOutput.json(PERSON), max_tokens=max_tokens)
    assert (text, reason) == (whole.encode()[:max_tokens].decode(errors="replace"), FinishReason.LENGTH)


@pytest.mark.parametrize(
    "settings",
    [
        {"speculative_ngram": 4},
        {"draft_model_tokens": 4},
        {"overlap_steps": True},
        {"block_count": 20, "max_model_len": 80},
    ],
)
async def test_structured_output_is_equal_with_drafts_overlap_and_preemption(settings):
    structured = StructuredOutput.json(
        {"type": "array", "items": {"enum": ["ab", "abc"]}, "minItems": 5, "maxItems": 5}
    )
    async with open_fake_engine() as engine:
        expected, _ = await said(engine, structured)
    async with open_fake_engine(**settings) as engine:
        texts = []

        async def one():
            async with engine.generate(
                "say", SamplingParams(temperature=0.0, max_tokens=60, structured=structured)
            ) as stream:
                texts.append("".join([delta.text async for delta in stream]))

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(one)
        engine.assert_all_free()
    assert texts == [expected] * 3


FREE_KEYS = {
    "type": "object",
    "additionalProperties": {"enum": [1, 2]},
    "propertyNames": {"pattern": "^[ab]+$"},
    "minProperties": 4,
    "maxProperties": 4,
}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"speculative_ngram": 4},
        {"draft_model_tokens": 4},
        {"overlap_steps": True},
        {"block_count": 20, "max_model_len": 80},
    ],
)
async def test_object_has_each_key_once_with_drafts_overlap_and_preemption(settings):
    structured = StructuredOutput.json(FREE_KEYS)
    params = SamplingParams(structured=structured, temperature=0.0, max_tokens=60)
    async with open_fake_engine() as engine:
        expected, _ = await said(engine, structured)
    pairs: list[tuple[str, int]] = json.loads(expected, object_pairs_hook=list)
    assert len(pairs) == len(dict(pairs)) == 4
    async with open_fake_engine(**settings) as engine:
        texts = []

        async def one():
            async with engine.generate("say", params) as stream:
                texts.append("".join([delta.text async for delta in stream]))

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(one)
        engine.assert_all_free()
    assert texts == [expected] * 3


async def test_resumed_object_repeats_no_key():
    structured = StructuredOutput.json(FREE_KEYS)
    params = SamplingParams(structured=structured, temperature=0.0, max_tokens=60, seed=0)
    async with open_fake_engine() as engine:
        async with engine.generate("say", params) as stream:
            expected = [token_id async for delta in stream for token_id in delta.token_ids]
        for place in range(1, len(expected)):
            resume = Resume(token_ids=(tuple(expected[:place]),), finished=(False,))
            async with engine.generate("say", params, resume=resume) as stream:
                more = [token_id async for delta in stream for token_id in delta.token_ids]
            assert expected[:place] + more == expected
        engine.assert_all_free()


async def test_response_with_ignore_eos_ends_with_its_grammar():
    async with open_fake_engine() as engine:
        text, reason = await said(engine, StructuredOutput.choice(["yes"]), ignore_eos=True)
    assert (text, reason) == ("yes", FinishReason.STOP)


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (StructuredOutput.regex("("), "the regex cannot be compiled"),
        (StructuredOutput.json("{"), "is not JSON"),
        (StructuredOutput.json({"type": "string", "pattern": "(?=a)"}), "look-around"),
        (StructuredOutput.json({"type": "object", "not": {}}), "schema is false"),
        (StructuredOutput.json({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}), "nothing can satisfy it"),
        (StructuredOutput.grammar("start: missing"), "unknown name"),
        (StructuredOutput.structural_tag({"format": {"type": "odd"}}), "there are const_string"),
    ],
)
async def test_invalid_grammar_is_refused_and_keeps_no_resource(form, words):
    async with open_fake_engine() as engine:
        with pytest.raises(InvalidRequest, match=re.escape(words)) as raised:
            await said(engine, form)
        assert raised.value.param.startswith("structured")
        engine.assert_all_free()


async def test_grammar_is_compiled_once_and_cached():
    compiler = None
    async with open_fake_engine() as engine:
        compiler = engine._texts.guides._factory.compiler
        form = StructuredOutput.regex("once[0-9]")
        compiles, hits = compiler.compiles_total, compiler.hits_total
        for _ in range(3):
            await said(engine, form)
        assert (compiler.compiles_total - compiles, compiler.hits_total - hits) == (1, 2)


@pytest.fixture
def held_compiles(monkeypatch):
    """Block every compilation until the test allows it. Yields the events "begun" and "let"."""
    begun, let = threading.Event(), threading.Event()
    compile_form = GrammarCompiler.compile

    def held(self, form, *arguments, **options):
        begun.set()
        assert let.wait(10)
        return compile_form(self, form, *arguments, **options)

    monkeypatch.setattr(GrammarCompiler, "compile", held)
    yield begun, let
    let.set()


async def until(event):
    while not event.is_set():
        await trio.to_thread.run_sync(event.wait, 10)


class CompilesNothing(InlineTexts):
    """Text threads in which every grammar compilation waits until its request leaves."""

    async def run_compile(self, function, *, tenant):
        await trio.sleep_forever()


async def test_client_that_leaves_during_compilation_frees_everything_at_once(held_compiles):
    begun, let = held_compiles
    sampling = SamplingParams(structured=StructuredOutput.regex("left[0-9]"))
    async with (
        open_fake_engine(max_num_seqs=1, new_text_threads=TextThreads) as engine,
        trio.open_nursery() as nursery,
    ):

        async def ask():
            async with engine.generate("say", sampling):
                raise AssertionError("entered")

        nursery.start_soon(ask)
        await until(begun)
        assert engine.load().waiting == 1
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            await trio.testing.wait_all_tasks_blocked()
            engine.assert_all_free()
            # Another request gets the slot, although the thread is still busy with the compilation.
            text, _ = await said(engine, prompt="other", max_tokens=3)
            assert text
            let.set()
    assert engine.core.stats().blocks_used == 0


async def test_abort_and_deadline_end_the_wait_for_compilation(autojump_clock):
    sampling = SamplingParams(structured=StructuredOutput.regex("aborted[0-9]"))
    async with open_fake_engine(new_text_threads=CompilesNothing) as engine:
        reasons = []

        async def ask(request_id, deadlines):
            async with engine.generate("say", sampling, request_id=request_id, deadlines=deadlines) as stream:
                reasons.extend([delta.finish_reason async for delta in stream])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, "mine", None)
            nursery.start_soon(ask, "late", Deadlines(queue_timeout=0.05))
            await trio.testing.wait_all_tasks_blocked()
            assert reasons == []
            assert engine.abort("mine")["mine"] is AbortOutcome.ABORTED
        assert sorted(reason.value for reason in reasons) == ["abort", "deadline"]
        engine.assert_all_free()


async def test_requests_without_a_grammar_do_not_wait_for_compilation(held_compiles):
    begun, let = held_compiles
    async with open_fake_engine(new_text_threads=TextThreads) as engine, trio.open_nursery() as nursery:
        nursery.start_soon(said, engine, StructuredOutput.regex("slow[0-9]"))
        await until(begun)
        params = SamplingParams(max_tokens=4, temperature=0.0)
        async with engine.generate("other", params) as stream:
            assert sum([len(delta.token_ids) async for delta in stream]) == 4
        let.set()


async def test_only_allowed_tokens_are_sampled():
    async with open_fake_engine() as engine:
        text, reason = await said(engine, allowed_token_ids=(97, 98, 99), max_tokens=20)
    assert set(text) <= set("abc")
    assert (len(text), reason) == (20, FinishReason.LENGTH)


async def test_allowed_tokens_that_the_grammar_excludes_are_refused():
    async with open_fake_engine() as engine:
        params = SamplingParams(structured=StructuredOutput.json(PERSON), allowed_token_ids=tuple(b"0123456789"))
        with pytest.raises(InvalidRequest, match="it requires"):
            async with engine.generate("say", params):
                pass
        engine.assert_all_free()
        assert engine.stats().steps_total == 0


@pytest.mark.parametrize("settings", [{}, {"speculative_ngram": 4}, {"overlap_steps": True}])
async def test_dead_end_of_grammar_and_bad_words_ends_only_its_request(settings):
    async with open_fake_engine(**settings) as engine:
        dead = SamplingParams(structured=StructuredOutput.regex("a{40}b"), bad_words=("b",), logprobs=0)
        free = SamplingParams(temperature=0.0, max_tokens=60)
        async with engine.generate("say", dead) as stream, engine.generate("other", free) as other:
            *_, last = [delta async for delta in stream]
            count = sum([len(delta.token_ids) async for delta in other])
        engine.assert_all_free()
    assert last.finish_reason is FinishReason.ERROR
    assert "under bad_words" in last.message
    assert count == 60


async def test_output_contains_no_bad_words():
    async with open_fake_engine(next_token=lambda tokens: 97 + len(tokens) % 3) as engine:
        free, _ = await said(engine)
        text, _ = await said(engine, bad_words=("ab", "c"))
    assert "ab" in free
    assert "ab" not in text
    assert "c" not in text


async def test_grammar_begins_after_the_unrestricted_part():
    async with open_fake_engine(response="well</t>and so on and on") as engine:
        text, _ = await said(engine, StructuredOutput.choice(["yes", "no"], free_until="</t>"))
    assert text in ("well</t>yes", "well</t>no")


async def test_thinking_budget_forces_the_end_of_reasoning():
    async with open_fake_engine() as engine:
        text, _ = await said(
            engine,
            StructuredOutput.choice(["yes", "no"], free_until="</t>"),
            thinking=Thinking(end="</t>", tokens_max=7),
            allowed_token_ids=tuple(range(97, 123)),
        )
    assert re.fullmatch("[a-z]{7}</t>.*", text)


@pytest.mark.parametrize("more", [{}, {"logprobs": 0}])
@pytest.mark.parametrize("tokens_max", [0, 1, 5])
async def test_forced_end_of_reasoning_starts_the_grammar(tokens_max, more):
    async with open_fake_engine() as engine:
        text, reason = await said(
            engine,
            StructuredOutput.choice(["yes", "no"], free_until="</t>"),
            thinking=Thinking(end="</t>", tokens_max=tokens_max),
            **more,
        )
    head, end, tail = text.partition("</t>")
    assert (end, reason) == ("</t>", FinishReason.STOP)
    assert tail in ("yes", "no")
    assert len(head.encode()) >= tokens_max


async def test_end_of_reasoning_is_not_forced_if_the_model_has_written_it():
    async with open_fake_engine(response="a</t>bcdefghij") as engine:
        text, _ = await said(engine, thinking=Thinking(end="</t>", tokens_max=6))
    assert text == "a</t>bcdefghij"


async def test_response_without_reasoning_has_no_budget():
    async with open_fake_engine(response="abcdefghij") as engine:
        text, _ = await said(engine, thinking=Thinking(begin="<t>", end="</t>", tokens_max=2))
    assert text == "abcdefghij"


async def test_thinking_budget_counts_from_the_beginning_of_reasoning():
    async with open_fake_engine(response=" <t>abcdefghij") as engine:
        text, _ = await said(engine, thinking=Thinking(begin="<t>", end="</t>", tokens_max=2))
    assert text.startswith(" <t>ab</t>")


async def test_stop_tokens_are_allowed_where_the_grammar_may_end():
    async with open_fake_engine(next_token=lambda tokens: 122 if len(tokens) > 6 else 97) as engine:
        text, reason = await said(engine, StructuredOutput.regex("a+"), stop_token_ids=(122,))
    assert (set(text), reason) == ({"a"}, FinishReason.STOP)


YES_AFTER_REASONING = {
    "structured": StructuredOutput.choice(["yes", "no"], free_until="</t>"),
    "thinking": Thinking(begin="<t>", end="</t>", tokens_max=4),
}


@pytest.mark.parametrize(
    ("prompt", "says", "expected"),
    [
        ("say", "<t>ab</t>oh", "<t>ab</t>(yes|no)"),  # The model reasons.
        ("say", "<t>abcdefgh", "<t>abcd</t>(yes|no)"),  # The model reasons for too long.
        ("say", "oh", "(yes|no)"),  # The model does not reason.
        ("say<t>", "ab</t>oh", "ab</t>(yes|no)"),  # The prompt has begun the reasoning.
        ("say<t>\n", "abcdefgh", "abcd</t>(yes|no)"),
        ("say<t></t>\n", "oh", "(yes|no)"),  # The prompt has ended the reasoning.
    ],
)
@pytest.mark.parametrize("more", [{}, {"logprobs": 0}])
async def test_grammar_follows_reasoning_or_begins_without_it(prompt, says, expected, more):
    async with open_fake_engine(response=says) as engine:
        text, reason = await said(engine, prompt=prompt, **YES_AFTER_REASONING, **more)
    assert re.fullmatch(expected, text), text
    assert reason is FinishReason.STOP


async def test_ending_the_reasoning_takes_effect_with_the_next_token():
    async with open_fake_engine(response="abcdefghijklmnopqrstuvwxyz", paused=True) as engine:
        text = ""
        sampling = SamplingParams(temperature=0.0, max_tokens=12, thinking=Thinking(end="</t>"))
        async with engine.generate("say", sampling, request_id="mine", owner="me") as stream:
            await engine.step(3)
            assert engine.end_reasoning("mine", owner="other") == {"mine": ReasoningOutcome.UNKNOWN}
            assert engine.end_reasoning(["mine", "nobody"], owner="me") == {
                "mine": ReasoningOutcome.ENDING,
                "nobody": ReasoningOutcome.UNKNOWN,
            }
            engine.resume()
            text = "".join([delta.text async for delta in stream])
            assert engine.end_reasoning("mine") == {"mine": ReasoningOutcome.NO_REASONING}
        assert text == "abcd</t>ijkl"
        assert engine.end_reasoning("mine") == {"mine": ReasoningOutcome.UNKNOWN}
        engine.assert_all_free()


async def test_reasoning_can_be_ended_while_steps_are_in_flight():
    async with open_fake_engine(response="abcdefghijklmnopqrstuvwxyz", overlap_steps=True, step_seconds=0.01) as engine:
        sampling = SamplingParams(temperature=0.0, max_tokens=20, thinking=Thinking(end="</t>"))
        text = ""
        async with engine.generate("say", sampling, request_id="mine") as stream:
            async for delta in stream:
                text += delta.text
                if len(text) == 3:
                    engine.end_reasoning("mine")
        head, end, _ = text.partition("</t>")
        assert end
        assert head in "abcdefghijklmnopqrstuvwxyz"
        assert 4 <= len(head) <= 6
        engine.assert_all_free()


async def test_reasoning_of_a_queued_request_can_be_ended_before_it_begins():
    async with open_fake_engine(response="<t>abcdefgh", max_num_seqs=1, paused=True) as engine:
        sampling = SamplingParams(temperature=0.0, max_tokens=12, thinking=Thinking(begin="<t>", end="</t>"))
        texts = []

        async def ask():
            async with engine.generate("say", sampling, request_id="second") as stream:
                texts.append("".join([delta.text async for delta in stream]))

        first = engine.generate("say", SamplingParams(max_tokens=3))
        async with trio.open_nursery() as nursery, first:
            await engine.step()
            nursery.start_soon(ask)
            await trio.testing.wait_all_tasks_blocked()
            assert engine.end_reasoning("second") == {"second": ReasoningOutcome.ENDING}
            engine.resume()
            assert [delta async for delta in first]
        assert texts[0].startswith("<t></t>")
        engine.assert_all_free()


async def test_ending_the_reasoning_reports_a_request_without_reasoning():
    params = SamplingParams(max_tokens=3)
    async with open_fake_engine(paused=True) as engine, engine.generate("say", params, request_id="mine"):
        assert engine.end_reasoning("mine") == {"mine": ReasoningOutcome.NO_REASONING}


async def test_reasoning_alone_does_not_prevent_overlapping_steps():
    async with open_fake_engine(response="abcdefghijklmnop", overlap_steps=True) as engine:
        sampling = SamplingParams(temperature=0.0, max_tokens=12, thinking=Thinking(end="</t>", tokens_max=8))
        async with engine.generate("say", sampling) as stream:
            text = "".join([delta.text async for delta in stream])
        assert text == "abcdefgh</t>"
        engine.assert_all_free()
