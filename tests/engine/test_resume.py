"""Tests of `generate(..., resume=...)`. Another engine can resume a response after any delta."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trioserve import EngineFault, FinishReason, InvalidRequest, Resume, SamplingParams, StructuredOutput, Thinking
from trioserve.contracts.errors import ResumeMismatch
from trioserve.contracts.resume import digest_of
from trioserve.engine.resumed_output import RESUMED_TOKENS_MAX, checked_resume
from trioserve.testing import open_fake_engine
from trioserve.testing.byte_tokenizer import END_TOKEN_ID

PROMPT = "say it"
TEXT = "Grüße an 🦆 und STOP ganz am Schluss, aber nicht StoP vorher"
SMALL = {"block_count": 256, "max_model_len": 512, "max_num_batched_tokens": 512}


class Read:
    """Collects everything that a reader has received of a stream, by choice."""

    def __init__(self, known: Any = ()) -> None:
        self.texts: dict[int, str] = {}
        self.token_ids: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[Any]] = {}
        self.ends: dict[int, Any] = {}
        for delta in known:
            self.take(delta)

    def take(self, delta: Any) -> None:
        index = delta.index
        self.texts[index] = self.texts.get(index, "") + delta.text
        self.token_ids.setdefault(index, []).extend(delta.token_ids)
        self.logprobs.setdefault(index, []).extend(delta.logprobs or ())
        if delta.finish_reason is not None:
            assert index not in self.ends, "a choice ends once"
            self.ends[index] = (delta.finish_reason, delta.stop_reason)


async def read_all(stream: Any) -> tuple[Read, list[Resume], int]:
    """Return the whole response, and the resume state after each delta."""
    read, states = Read(stream.known), [stream.resume_state()]
    async for delta in stream:
        read.take(delta)
        states.append(stream.resume_state())
    return read, states, stream.completion_token_count


FORMS = (
    StructuredOutput.regex("(ab|ac){3}ü+x{4}end"),
    StructuredOutput.json({"type": "object", "properties": {"a": {"enum": ["one", "two"]}}, "required": ["a"]}),
)
sampling_params = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 40),
        "n": st.sampled_from([1, 1, 2, 3]),
        "seed": st.sampled_from([None, 7, 2**64 - 1]),
    },
    optional={
        "temperature": st.sampled_from([0.0, 1.0]),
        "min_tokens": st.just(1),
        "stop": st.sampled_from([("STOP",), ("St", "StoX", "ü"), ("e",)]),
        "include_stop_str_in_output": st.booleans(),
        "stop_token_ids": st.sampled_from([(ord("l"),), (ord("d"), ord("z"))]),
        "ignore_eos": st.booleans(),
        "logprobs": st.integers(0, 2),
        "prompt_logprobs": st.just(0),
        "structured": st.sampled_from(FORMS),
        "allowed_token_ids": st.just(tuple(range(97, 123))),
        "bad_words": st.just(("an", "und")),
        "thinking": st.just(Thinking(end="</t>", tokens_max=5)),
    },
)
engines = st.fixed_dictionaries(
    {
        "response": st.sampled_from([TEXT, None]),
        "speculative_ngram": st.sampled_from([0, 4]),
        "max_num_batched_tokens": st.sampled_from([8, 32]),
        "enable_prefix_caching": st.booleans(),
    }
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(fields=sampling_params, first=engines, second=engines)
async def test_another_engine_resumes_after_any_delta(
    fields: dict[str, Any], first: Mapping[str, Any], second: Mapping[str, Any]
) -> None:
    if fields.get("structured") is not None:
        fields.pop("allowed_token_ids", None)
        fields.pop("bad_words", None)
    sampling = SamplingParams(**fields)
    async with open_fake_engine(**{**SMALL, **first}) as fake, fake.generate(PROMPT, sampling) as stream:
        whole, states, token_count = await read_all(stream)
        prompt_logprobs = stream.prompt_logprobs
    async with open_fake_engine(**{**SMALL, **second, "response": first["response"]}) as fake:
        for state in states:
            async with fake.generate(PROMPT, sampling, resume=state) as stream:
                read, later, count = await read_all(stream)
                assert read.texts == whole.texts
                assert read.token_ids == whole.token_ids
                assert read.ends == whole.ends
                assert count == token_count
                assert later[0] == state
                assert later[-1] == states[-1]
                for index, logprobs in read.logprobs.items():
                    drawn = whole.logprobs[index][len(state.token_ids[index]) :]
                    assert logprobs == (drawn if not state.finished[index] else [])
                if stream.prompt_logprobs is not None:
                    assert stream.prompt_logprobs == prompt_logprobs
        fake.assert_all_free()


async def test_resumed_text_is_equal_after_any_token() -> None:
    sampling = SamplingParams(max_tokens=200, temperature=0.0, stop=("STOP", "Schl"))
    async with open_fake_engine(**SMALL, response=TEXT) as fake:
        async with fake.generate(PROMPT, sampling) as stream:
            whole, _, _ = await read_all(stream)
        token_ids = whole.token_ids[0]
        for count in range(len(token_ids)):
            resume = Resume(token_ids=(tuple(token_ids[:count]),), finished=(False,))
            async with fake.generate(PROMPT, sampling, resume=resume) as stream:
                assert [token_id for delta in stream.known for token_id in delta.token_ids] == token_ids[:count]
                read, _, _ = await read_all(stream)
                assert (read.texts, read.token_ids, read.ends) == (whole.texts, whole.token_ids, whole.ends)


async def test_response_resumes_after_a_fault_of_its_engine() -> None:
    sampling = SamplingParams(max_tokens=12, n=2, ignore_eos=True)
    read = Read()
    with pytest.raises(EngineFault):
        async with open_fake_engine(**SMALL, paused=True) as fake:
            stream = fake.generate(PROMPT, sampling)
            async with stream:
                await fake.step(4)
                for _ in range(2):
                    read.take(await anext(stream))
                fake.break_next_step()
                fake.resume()
                async for delta in stream:
                    read.take(delta)
    state = stream.resume_state()
    assert [len(token_ids) for token_ids in state.token_ids] == [len(read.token_ids[0]), len(read.token_ids[1])]
    async with open_fake_engine(**SMALL) as fake:
        async with fake.generate(PROMPT, sampling, resume=state) as stream:
            async for delta in stream:
                read.take(delta)
        async with fake.generate(PROMPT, msgspec.structs.replace(sampling, seed=state.seed)) as stream:
            whole, _, _ = await read_all(stream)
    assert (read.texts, read.token_ids) == (whole.texts, whole.token_ids)


@pytest.mark.parametrize("end", ["abort", "closed"])
async def test_resumable_request_ended_from_outside_repeats_no_text(end: str) -> None:
    sampling = SamplingParams(max_tokens=60, temperature=0.0, stop=("and SO",))
    read = Read()
    async with open_fake_engine(**SMALL, response="one and two", paused=True) as fake:
        async with fake.generate(PROMPT, sampling, request_id="r", resumable=True) as stream:
            await fake.step(len("one and "))  # The text "and " may be the beginning of the stop string.
            if end == "abort":
                fake.abort("r")
            else:
                fake.abort_all("the server leaves")
            deltas = [delta async for delta in stream]
            assert "".join(delta.text for delta in deltas) == "one "
            assert deltas[-1].finish_reason is FinishReason.ABORT
            assert deltas[-1].stop_reason == (None if end == "abort" else "server_stopping")
            read = Read(delta for delta in deltas if delta.finish_reason is None or delta.text)
            read.ends.clear()
            state = stream.resume_state()
            assert state.finished == (False,)
        fake.resume()
        async with fake.generate(PROMPT, sampling, resume=state) as stream:
            assert "".join(delta.text for delta in stream.known) == read.texts[0]
            async for delta in stream:
                read.take(delta)
    assert read.texts == {0: "one and two"}


async def test_complete_known_response_needs_no_computation() -> None:
    sampling = SamplingParams(max_tokens=5, n=2)
    async with open_fake_engine(**SMALL, paused=True) as fake:
        resume = Resume(token_ids=((65, 66), (67,)), finished=(True, True), prompt_digest=digest_of(list(b"say it")))
        async with fake.generate(PROMPT, sampling, resume=resume) as stream:
            assert await stream.wait_until_begun() is None
            assert [delta async for delta in stream] == []
            assert stream.completion_token_count == 3
            assert stream.prompt_token_count == len(PROMPT)
            assert not any(fake.dispatch.core.stats().leases.values())
        assert fake.stats().steps_total == 0
        fake.assert_all_free()


async def test_resumed_request_uses_a_slot_only_for_unfinished_choices() -> None:
    async with open_fake_engine(**SMALL, paused=True) as fake:
        resume = Resume(token_ids=((65,), (66,), ()), finished=(True, False, False))
        async with fake.generate(PROMPT, SamplingParams(n=3, max_tokens=5), resume=resume) as stream:
            await fake.step()
            assert len(list(fake.core.live_requests())) == 2
            assert {delta.index for delta in stream.known if delta.finish_reason is not None} == {0}


@pytest.mark.parametrize(
    ("token_ids", "fields", "message"),
    [
        ("abcd", {"max_tokens": 4}, "they are 4, and it may have 4"),
        ("abX", {"stop": ("bX",)}, "stop string 'bX' ends it"),
        ("ab", {"stop_token_ids": (ord("b"),)}, "token 98 ends it"),
        ([97, END_TOKEN_ID], {}, f"token {END_TOKEN_ID} ends it"),
        ("ab", {"structured": StructuredOutput.regex("ab")}, "its grammar is complete"),
        ("abc", {"structured": StructuredOutput.regex("ab")}, "its grammar is complete with token 2"),
        ("ax", {"structured": StructuredOutput.regex("ab")}, r"resume.token_ids\[0\]\[1\] is 120"),
        ("a", {"n": 2}, "1 lists and the request 2 choices"),
        ([9999], {}, "token id 9999"),
        (b"a" * 600, {}, "maximum context length"),
    ],
)
async def test_invalid_known_output_of_a_resumed_request_is_refused(
    token_ids: Any, fields: dict[str, Any], message: str
) -> None:
    known = tuple(token_ids.encode() if isinstance(token_ids, str) else token_ids)
    async with open_fake_engine(**SMALL) as fake:
        with pytest.raises(InvalidRequest, match=message) as refused:
            async with fake.generate(
                PROMPT, SamplingParams(**fields), resume=Resume(token_ids=(known,), finished=(False,))
            ):
                pass
        assert refused.value.param == "resume.token_ids"
        fake.assert_all_free()


def test_known_tokens_of_all_choices_are_limited() -> None:
    def check(token_count: int, context_tokens_max: int) -> None:
        half = (7,) * (token_count // 2)
        resume = Resume(token_ids=(half, half), finished=(True, True))
        checked_resume(resume, SamplingParams(n=2), vocab_size=100, context_tokens_max=context_tokens_max)

    check(RESUMED_TOKENS_MAX, RESUMED_TOKENS_MAX)
    check(RESUMED_TOKENS_MAX + 2, RESUMED_TOKENS_MAX + 2)
    with pytest.raises(InvalidRequest, match="has 524290 tokens in 2 lists, at most 524288 may be") as refused:
        check(RESUMED_TOKENS_MAX + 2, RESUMED_TOKENS_MAX)
    assert refused.value.param == "resume.token_ids"


async def test_resume_with_another_prompt_is_refused() -> None:
    async with open_fake_engine(**SMALL) as fake:
        resume = Resume(token_ids=((65,),), finished=(False,), prompt_digest=digest_of([1, 2]))
        with pytest.raises(ResumeMismatch) as refused:
            async with fake.generate(PROMPT, resume=resume):
                pass
        assert refused.value.param == "resume.prompt_digest"
        fake.assert_all_free()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"token_ids": 3}, "resume.token_ids"),
        ({"token_ids": (3,)}, "resume.token_ids"),
        ({"token_ids": ((0.5,),)}, "resume.token_ids"),
        ({"token_ids": (("a",),)}, "resume.token_ids"),
        ({"token_ids": ((-1,),)}, "resume.token_ids"),
        ({"finished": (1,)}, "resume.finished"),
        ({"finished": ()}, "resume.finished"),
        ({"seed": 2**64}, "resume.seed"),
        ({"seed": "1"}, "resume.seed"),
        ({"prompt_digest": 5}, "resume.prompt_digest"),
        ({"end_thinking": 1}, "resume.end_thinking"),
    ],
)
def test_error_of_a_resume_field_of_a_wrong_type_names_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Resume(**{"token_ids": ((1,),), "finished": (False,), **fields})
    assert refused.value.param == param


async def test_generate_accepts_only_a_resume_object() -> None:
    async with open_fake_engine(**SMALL) as fake:
        with pytest.raises(InvalidRequest, match="resume is"):
            fake.generate(PROMPT, resume={"token_ids": []})


def joined(parts: list[Any]) -> list[Any]:
    """Join consecutive parts of the same type."""
    whole: list[Any] = []
    for part in parts:
        if whole and hasattr(part, "text") and type(whole[-1]) is type(part):
            part = msgspec.structs.replace(part, text=whole.pop().text + part.text)
        whole.append(part)
    return whole


async def test_ended_reasoning_stays_ended_after_a_resume() -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=12, thinking=Thinking(end="</t>"))
    response = "abcdefghijklmnopqrstuvwxyz"
    async with open_fake_engine(**SMALL, response=response, paused=True) as fake:
        async with fake.generate(PROMPT, sampling, request_id="r") as stream:
            await fake.step(3)
            delta = await anext(stream)
            assert not stream.resume_state().end_thinking
            fake.end_reasoning("r")
            state = stream.resume_state()
        fake.resume()
        async with fake.generate(PROMPT, sampling, resume=state) as stream:
            text = delta.text + "".join([delta.text async for delta in stream])
            assert stream.resume_state().end_thinking
        assert text.index("</t>") <= len(delta.text) + 1
        fake.assert_all_free()


async def test_parts_of_a_resumed_response_follow_the_earlier_parts() -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    response = 'Well.\n<tool_call>\n{"name": "look", "arguments": {"at": "it"}}\n</tool_call>'
    sampling = SamplingParams(max_tokens=200, temperature=0.0)
    async with open_fake_engine(**SMALL, response=response) as fake:
        async with fake.generate(PROMPT, sampling) as stream:
            given: list[tuple[Resume, list[Any]]] = [(stream.resume_state(), [])]
            async for piece in fake.read_parts(stream, tools=tools):
                given.append((stream.resume_state(), given[-1][1] + piece.parts))
        whole = given[-1][1]
        for state, before in given[:-1]:
            async with fake.generate(PROMPT, sampling, resume=state) as stream:
                rest = [part async for piece in fake.read_parts(stream, tools=tools) for part in piece.parts]
            assert joined(before + rest) == joined(whole)


async def test_long_known_output_does_not_block_the_event_loop(autojump_clock: trio.testing.MockClock) -> None:
    async with open_fake_engine(
        block_count=4096, max_model_len=8192, max_num_batched_tokens=4096, max_num_seqs=2
    ) as fake:
        sizes: list[int] = []
        run = fake._texts.prompts.run

        async def watched(function: Any, *, size: int) -> Any:
            sizes.append(size)
            return await run(function, size=size)

        fake._texts.prompts.run = watched
        resume = Resume(token_ids=((65,) * 4000,), finished=(False,))
        async with fake.generate([1, 2], SamplingParams(max_tokens=4001, ignore_eos=True), resume=resume) as stream:
            assert (await anext(stream)).finish_reason is FinishReason.LENGTH
        assert max(sizes) > 10_000  # The known output is long enough to be replayed in a thread.
