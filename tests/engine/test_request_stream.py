"""Tests of engine.generate(): what its stream guarantees, in every way in which the stream can be left."""

from __future__ import annotations

import pytest
import trio
import trio.lowlevel

from trioserve.admission.text_threads import TextThreads
from trioserve.contracts.errors import AlreadyEnded, ContextTooLong, InvalidRequest, Overloaded
from trioserve.contracts.events import AbortOutcome, FinishReason
from trioserve.contracts.output import Delta
from trioserve.contracts.prompt import ChatPrompt
from trioserve.contracts.sampling import SamplingParams
from trioserve.engine.request_stream import RequestStream
from trioserve.testing.fake_engine import FakeEngine, open_fake_engine
from trioserve.testing.fake_executor import FakeModel
from trioserve.testing.invariants import check_core, check_idle

PROMPT = "a prompt of some length"


def check_all_free(fake: FakeEngine) -> None:
    check_idle(fake.core)
    assert len(fake._delivery) == 0


async def response_of(fake: FakeEngine, prompt: str = PROMPT, **sampling: object) -> list[int]:
    token_ids: list[int] = []
    async with fake.generate(prompt, SamplingParams(**sampling)) as stream:
        async for delta in stream:
            token_ids += delta.token_ids
    return token_ids


async def test_engine_returns_the_tokens_that_the_model_chooses_without_an_engine(autojump_clock):
    model = FakeModel(vocab_size=256)
    known = list(PROMPT.encode())
    async with open_fake_engine(model=model) as fake:
        token_ids = await response_of(fake, max_tokens=20, temperature=0)
        for token_id in token_ids:
            digest = model.digest(known)
            expected = digest_token(model, digest)
            assert token_id == expected
            known.append(token_id)
        assert len(token_ids) == 20
        check_all_free(fake)


def digest_token(model: FakeModel, digest: int) -> int:
    class Request:
        sampling = SamplingParams(temperature=0)
        prompt_token_ids = ()
        stop_token_ids = frozenset()

    return model.next_token_id(Request(), (), digest)


async def test_only_the_last_delta_of_each_choice_has_a_finish_reason(autojump_clock):
    async with (
        open_fake_engine(step_seconds=0.01) as fake,
        fake.generate(PROMPT, SamplingParams(n=3, max_tokens=5)) as stream,
    ):
        reasons: dict[int, list[object]] = {0: [], 1: [], 2: []}
        async for delta in stream:
            reasons[delta.index].append(delta.finish_reason)
    for of_choice in reasons.values():
        assert of_choice[-1] is FinishReason.LENGTH
        assert set(of_choice[:-1]) <= {None}


async def test_slow_reader_gets_merged_deltas(autojump_clock):
    async with open_fake_engine(step_seconds=0.01) as fake:
        expected = await response_of(fake, max_tokens=30, temperature=0)
        async with fake.generate(PROMPT, SamplingParams(max_tokens=30, temperature=0)) as stream:
            await trio.sleep(10)
            deltas = [delta async for delta in stream]
        assert len(deltas) == 1
        assert list(deltas[0].token_ids) == expected
        assert deltas[0].finish_reason is FinishReason.LENGTH


async def test_request_that_leaves_between_two_tokens_frees_its_blocks_before_the_next_schedule(autojump_clock):
    """Scenario S22 of tests/README.md: an abort takes effect with the step in flight."""
    async with open_fake_engine(step_seconds=0.01) as fake:
        async with fake.generate(PROMPT, SamplingParams(max_tokens=100)) as stream:
            async for _ in stream:
                break
            assert fake.core.stats().blocks_used > 0
            steps_before = fake.steps.step_count
        await trio.sleep(0.05)
        assert fake.steps.step_count <= steps_before + 1
        check_all_free(fake)


async def test_request_that_leaves_during_a_forward_pass_frees_its_blocks_after_the_pass(autojump_clock):
    async with open_fake_engine() as fake:
        fake.steps.hold()
        async with fake.generate(PROMPT, SamplingParams(max_tokens=100)):
            await fake.steps.entered()
            used = fake.core.stats().blocks_used
            assert used > 0
        # The forward pass still reads the blocks.
        assert fake.core.stats().blocks_used == used
        check_core(fake.core)
        fake.steps.release()
        await trio.testing.wait_all_tasks_blocked()
        assert fake.steps.step_count == 1
        check_all_free(fake)
        metrics = fake.metrics.expose().decode()
        assert 'trioserve:aborts_total{engine="0",model_name="fake",phase="prefill"} 1.0' in metrics
        assert 'trioserve:cancel_to_free_seconds_count{engine="0",model_name="fake",phase="prefill"} 1.0' in metrics


async def test_request_that_leaves_the_queue_frees_its_queue_slot_and_never_runs(autojump_clock):
    """Scenario S32 of tests/README.md: no step contains a request whose client has left."""
    async with open_fake_engine(max_num_seqs=1) as fake:
        fake.steps.hold()
        async with fake.generate(PROMPT, SamplingParams(max_tokens=5)) as first:
            await fake.steps.entered()
            async with fake.generate("another", SamplingParams(max_tokens=5)):
                await trio.testing.wait_all_tasks_blocked()
                assert fake.core.stats().waiting_count == 1
            assert fake.core.stats().waiting_count == 0
            fake.steps.release()
            assert [delta.finish_reason async for delta in first][-1] is FinishReason.LENGTH
        assert fake.core.stats().prefix_query_tokens_total == len(PROMPT)
        check_all_free(fake)


@pytest.mark.parametrize("seconds", [0.0, 0.005, 0.015, 0.025, 0.035])
async def test_outer_deadline_ends_a_request_in_any_phase(seconds, autojump_clock):
    async with open_fake_engine(step_seconds=0.01, max_num_batched_tokens=8) as fake:
        with trio.move_on_after(seconds) as scope:
            await response_of(fake, max_tokens=100)
        assert scope.cancelled_caught
        await trio.sleep(0.02)
        check_all_free(fake)


async def test_error_in_the_body_ends_the_request_and_is_raised_unchanged(autojump_clock):
    async with open_fake_engine(step_seconds=0.01) as fake:
        with pytest.raises(ZeroDivisionError):
            async with fake.generate(PROMPT) as stream:
                async for _ in stream:
                    1 / 0  # noqa: B018
        await trio.sleep(0.02)
        check_all_free(fake)


async def test_request_that_leaves_does_not_affect_other_requests(autojump_clock):
    async with open_fake_engine(step_seconds=0.01) as fake:
        expected = await response_of(fake, max_tokens=40, temperature=0)

        async def leave_early(index: int) -> None:
            async with fake.generate(f"{index} {PROMPT}", SamplingParams(max_tokens=40)) as stream:
                count = 0
                async for _ in stream:
                    count += 1
                    if count == index:
                        break

        results = []
        async with trio.open_nursery() as nursery:
            for index in range(1, 8):
                nursery.start_soon(leave_early, index)
            results.append(await response_of(fake, max_tokens=40, temperature=0))
        assert results == [expected]
        await trio.sleep(0.02)
        check_all_free(fake)


async def test_abort_by_id_gives_a_last_delta_and_returns_the_outcome(autojump_clock):
    async with open_fake_engine(step_seconds=0.01) as fake:
        assert fake.abort(["mine"]) == {"mine": AbortOutcome.UNKNOWN}
        async with fake.generate(PROMPT, SamplingParams(max_tokens=100), request_id="mine") as stream:
            async for delta in stream:
                if delta.finish_reason is None:
                    assert fake.abort(["mine", "min", "mine2"]) == {
                        "mine": AbortOutcome.ABORTED,
                        "min": AbortOutcome.UNKNOWN,
                        "mine2": AbortOutcome.UNKNOWN,
                    }
                    assert fake.abort(["mine"]) == {"mine": AbortOutcome.ALREADY_FINISHED}
            assert delta.finish_reason is FinishReason.ABORT
            assert delta.token_ids == ()
        assert fake.abort(["mine"]) == {"mine": AbortOutcome.ALREADY_FINISHED}
        await trio.sleep(0.02)
        check_all_free(fake)


async def test_abort_after_the_end_does_not_affect_a_late_reader(autojump_clock):
    async with (
        open_fake_engine(step_seconds=0.01) as fake,
        fake.generate(PROMPT, SamplingParams(max_tokens=3), request_id="mine") as stream,
    ):
        await trio.sleep(1)
        assert fake.abort(["mine"]) == {"mine": AbortOutcome.ALREADY_FINISHED}
        fake.abort_all("too late")
        fake.drain()
        assert [(len(delta.token_ids), delta.finish_reason) async for delta in stream] == [(3, FinishReason.LENGTH)]


async def test_two_requests_may_have_equal_ids(autojump_clock):
    async with open_fake_engine(step_seconds=0.01) as fake:
        async with (
            fake.generate(PROMPT, SamplingParams(max_tokens=100), request_id="same") as first,
            fake.generate("other", SamplingParams(max_tokens=100), request_id="same") as second,
        ):
            await trio.sleep(0.05)
            assert fake.abort(["same"]) == {"same": AbortOutcome.ABORTED}
            for stream in (first, second):
                assert [delta.finish_reason async for delta in stream][-1] is FinishReason.ABORT
        await trio.sleep(0.02)
        check_all_free(fake)


async def test_request_id_that_one_abort_names_twice_is_aborted_once(autojump_clock):
    async with (
        open_fake_engine(step_seconds=0.01) as fake,
        fake.generate(PROMPT, request_id="mine"),
    ):
        assert fake.abort(iter(["mine", "mine"])) == {"mine": AbortOutcome.ABORTED}


async def test_late_abort_knows_a_limited_number_of_ended_requests(autojump_clock, monkeypatch):
    monkeypatch.setattr("trioserve.admission.dispatch.ENDED_IDS_MAX", 2)
    async with open_fake_engine() as fake:
        for request_id in ("one", "two", "one", "three"):
            async with fake.generate(PROMPT, request_id=request_id):
                pass
        assert fake.abort(["one", "two", "three"]) == {
            "one": AbortOutcome.ALREADY_FINISHED,
            "two": AbortOutcome.UNKNOWN,
            "three": AbortOutcome.ALREADY_FINISHED,
        }


async def test_request_that_leaves_after_some_choices_ended_ends_its_other_choices(autojump_clock):
    async with open_fake_engine(step_seconds=0.01) as fake:
        async with fake.generate(PROMPT, SamplingParams(n=3, max_tokens=50)) as stream:
            fake.executor.errors[stream._request.choices[0].sequence_id] = "bad luck"
            async for delta in stream:
                if delta.finish_reason is FinishReason.ERROR:
                    break
            assert fake.core.stats().running_count + fake.core.stats().waiting_count == 2
        await trio.sleep(0.02)
        check_all_free(fake)


async def test_choices_of_one_seed_differ_and_an_equal_seed_gives_equal_choices(autojump_clock):
    async with open_fake_engine(step_seconds=0.01) as fake:
        responses = []
        for seed in (-1, -1, 2):
            texts = {0: "", 1: ""}
            async with fake.generate(PROMPT, SamplingParams(n=2, max_tokens=20, seed=seed)) as stream:
                async for delta in stream:
                    texts[delta.index] += delta.text
            assert texts[0] != texts[1]
            responses.append(texts)
        assert responses[0] == responses[1] != responses[2]


async def test_token_counts_of_a_stream_are_available_at_its_end(autojump_clock):
    async with open_fake_engine() as fake:
        for cached in (0, len(PROMPT) // 4 * 4 - (len(PROMPT) % 4 == 0) * 4):
            async with fake.generate(PROMPT, SamplingParams(n=2, max_tokens=7, ignore_eos=True)) as stream:
                assert stream.prompt_token_ids == tuple(PROMPT.encode())
                async for _ in stream:
                    pass
                assert stream.completion_token_count == 14
                assert stream.cached_token_count == cached


async def test_response_without_max_tokens_ends_at_the_context_limit(autojump_clock):
    async with open_fake_engine(max_model_len=64) as fake:
        assert len(await response_of(fake, ignore_eos=True)) == 64 - len(PROMPT)


async def test_request_with_the_lower_priority_number_runs_first(autojump_clock):
    order = []
    async with (
        open_fake_engine(step_seconds=0.01, max_num_seqs=1) as fake,
        fake.generate(PROMPT, SamplingParams(max_tokens=3)),
        trio.open_nursery() as nursery,
    ):
        await trio.sleep(0.005)

        async def ask(priority: int) -> None:
            async with fake.generate("x", SamplingParams(max_tokens=2), priority=priority) as stream:
                async for _ in stream:
                    pass
            order.append(priority)

        for priority in (1, -1, 0):
            nursery.start_soon(ask, priority)
            await trio.testing.wait_all_tasks_blocked()
    assert order == [-1, 0, 1]


async def test_prefixes_are_shared_only_between_equal_salts(autojump_clock):
    async with open_fake_engine() as fake:
        hits = []
        for salt in (None, None, "a", "b", "a"):
            async with fake.generate(PROMPT, SamplingParams(max_tokens=1), cache_salt=salt) as stream:
                async for _ in stream:
                    pass
            hits.append(stream.cached_token_count > 0)
        assert hits == [False, True, False, False, True]


async def test_end_tokens_end_the_response_unless_ignored(autojump_clock):
    async with open_fake_engine(model=FakeModel(vocab_size=257, stop_token_id=256, stop_period=8)) as fake:
        ended = await response_of(fake, max_tokens=100, temperature=0)
        assert ended[-1] == 256
        assert 256 not in ended[:-1]
        assert len(ended) < 100
        assert len(await response_of(fake, max_tokens=100, temperature=0, ignore_eos=True)) == 100
        stopped = await response_of(fake, max_tokens=100, temperature=0, stop_token_ids=(ended[0],))
        assert stopped == ended[:1]


async def test_full_queue_refuses_a_request_before_its_prompt_is_tokenized(autojump_clock, monkeypatch):
    """Scenario S14 of tests/README.md: a request counts before its prompt is tokenized."""
    async with open_fake_engine(max_num_seqs=1, max_queued_requests=2) as fake:
        fake.steps.hold()
        async with fake.generate(PROMPT), fake.generate(PROMPT), trio.open_nursery() as nursery:
            nursery.start_soon(response_of, fake)
            await trio.testing.wait_all_tasks_blocked()
            monkeypatch.setattr(fake.tokenizer, "encode", lambda *_args, **_kwargs: pytest.fail("tokenized"))
            with pytest.raises(Overloaded, match="1 requests wait for the model, the limit is 1") as caught:
                async with fake.generate(PROMPT):
                    pass
            assert caught.value.reason == "queue_full"
            assert caught.value.retry_after_seconds >= 1
            monkeypatch.undo()
            nursery.cancel_scope.cancel()
        fake.steps.release()
        await trio.lowlevel.checkpoint()
        await response_of(fake, max_tokens=3)
        check_all_free(fake)
        assert (
            'requests_rejected_total{engine="0",model_name="fake",reason="queue_full"} 1.0'
            in fake.metrics.expose().decode()
        )


@pytest.mark.parametrize(
    ("prompt", "sampling", "error", "words"),
    [
        ("x" * 128, {}, ContextTooLong, "128 tokens"),
        ("x" * 100, {"max_tokens": 29}, ContextTooLong, "max_tokens asks for 29"),
        ("", {}, InvalidRequest, "no tokens"),
        ([], {}, InvalidRequest, "no tokens"),
        ([1, 257], {}, InvalidRequest, "token id 257, this model's are 0 to 256"),
        ([-1], {}, InvalidRequest, "token id -1"),
        ([10**5000], {}, InvalidRequest, "token id \\.\\.\\.,"),
        ("half a pair \ud800", {}, InvalidRequest, "U\\+D800"),
        (ChatPrompt(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), {}, InvalidRequest, "image_url"),
    ],
)
async def test_invalid_request_is_refused_and_uses_no_slot(prompt, sampling, error, words, autojump_clock):
    async with open_fake_engine(max_model_len=128) as fake:
        with pytest.raises(error, match=words):
            async with (stream := fake.generate(prompt, SamplingParams(**sampling))):
                pass
        with pytest.raises(AlreadyEnded):
            await anext(stream)
        check_all_free(fake)
        assert fake.live_requests() == []
        assert fake.preparing_count == 0


async def test_client_can_leave_while_its_long_prompt_is_tokenized_in_a_thread():
    # This test uses a real thread, and so the real clock. It does not wait for time to pass.
    import threading

    async with open_fake_engine(block_count=2048, max_model_len=4096, new_text_threads=TextThreads) as fake:
        tokenizer = fake.tokenizer
        begun, proceed = trio.Event(), threading.Event()
        token = trio.lowlevel.current_trio_token()
        encode = tokenizer.encode

        def slow_encode(*arguments: object, **keywords: object) -> list[int]:
            assert threading.current_thread().name == "trioserve-text"
            token.run_sync_soon(begun.set)
            proceed.wait(10)
            return encode(*arguments, **keywords)

        tokenizer.encode = slow_encode  # type: ignore[method-assign]
        async with trio.open_nursery() as nursery:

            async def ask() -> None:
                async with fake.generate("long " * 500):
                    pytest.fail("was entered")

            nursery.start_soon(ask)
            await begun.wait()
            assert fake.preparing_count == 1
            nursery.cancel_scope.cancel()
        assert fake.preparing_count == 0
        assert fake.live_requests() == []
        proceed.set()


async def test_an_abort_by_id_reaches_a_request_that_is_being_tokenized():
    import threading

    async with open_fake_engine(block_count=2048, max_model_len=4096, new_text_threads=TextThreads) as fake:
        tokenizer = fake.tokenizer
        begun, proceed = trio.Event(), threading.Event()
        token = trio.lowlevel.current_trio_token()

        def slow_encode(*_arguments: object, **_keywords: object) -> list[int]:
            token.run_sync_soon(begun.set)
            proceed.wait(10)
            return [1]

        tokenizer.encode = slow_encode  # type: ignore[method-assign]
        reasons = []

        async def ask() -> None:
            async with fake.generate("long " * 500, request_id="slow") as stream:
                reasons.extend([delta.finish_reason async for delta in stream])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await begun.wait()
            assert fake.abort(["slow"]) == {"slow": AbortOutcome.ABORTED}
        assert reasons == [FinishReason.ABORT]
        proceed.set()
        check_all_free(fake)


async def test_stream_can_be_used_only_once_and_only_inside_its_scope(autojump_clock):
    async with open_fake_engine() as fake:
        stream = fake.generate(PROMPT, SamplingParams(max_tokens=2))
        with pytest.raises(AlreadyEnded, match="async with"):
            await anext(stream)
        async with stream:
            pass
        with pytest.raises(AlreadyEnded, match="async with"):
            await anext(stream)
        with pytest.raises(AlreadyEnded, match="entered before"):
            async with stream:
                pass


async def read_all(stream: RequestStream) -> list[Delta]:
    return [delta async for delta in stream]


WAYS_TO_WAIT = {
    "reading": read_all,
    "begun": RequestStream.wait_until_begun,
}


@pytest.mark.parametrize("wait", WAYS_TO_WAIT.values(), ids=WAYS_TO_WAIT)
async def test_waiting_task_gets_already_ended_when_the_stream_is_left(wait, autojump_clock):
    async with open_fake_engine(paused=True) as fake, trio.open_nursery() as nursery:
        told = trio.Event()

        async def wait_outside(stream: RequestStream) -> None:
            with pytest.raises(AlreadyEnded, match="inside its `async with`"):
                await wait(stream)
            told.set()

        async with fake.generate(PROMPT) as stream:
            nursery.start_soon(wait_outside, stream)
            nursery.start_soon(wait_outside, stream)
            await trio.testing.wait_all_tasks_blocked()
        with trio.fail_after(1):
            await told.wait()
        with pytest.raises(AlreadyEnded):
            await wait(stream)
        check_all_free(fake)


async def test_waiting_on_a_stream_that_is_not_entered_is_refused(autojump_clock):
    async with open_fake_engine() as fake:
        with pytest.raises(AlreadyEnded):
            await fake.generate(PROMPT).wait_until_begun()


async def test_each_delta_goes_to_one_of_several_readers_and_all_see_the_end(autojump_clock):
    async with open_fake_engine(step_seconds=0.01) as fake:
        alone = await response_of(fake, max_tokens=30, temperature=0)
        read: list[list[Delta]] = []

        async def read_some(stream: RequestStream) -> None:
            read.append(await read_all(stream))

        async with fake.generate(PROMPT, SamplingParams(max_tokens=30, temperature=0)) as stream:
            with trio.fail_after(10):
                async with trio.open_nursery() as nursery:
                    for _ in range(3):
                        nursery.start_soon(read_some, stream)
        token_ids = [token_id for deltas in read for delta in deltas for token_id in delta.token_ids]
        assert len(read) == 3
        assert sorted(token_ids) == sorted(alone)
        reasons = [delta.finish_reason for deltas in read for delta in deltas]
        assert [reason for reason in reasons if reason is not None] == [FinishReason.LENGTH]
        check_all_free(fake)


async def test_wait_until_begun_returns_the_end_even_if_another_task_has_read_it(autojump_clock):
    async with open_fake_engine(paused=True) as fake, fake.generate(PROMPT) as stream:
        fake.abort([stream.id])
        assert [delta.finish_reason for delta in await read_all(stream)] == [FinishReason.ABORT]
        for _ in range(2):
            end = await stream.wait_until_begun()
            assert end is not None
            assert end.finish_reason is FinishReason.ABORT


async def test_a_stop_string_ends_the_sequence_before_another_step(autojump_clock):
    """Scenario S18 of tests/README.md: the core samples no token after the end of the sequence."""
    async with open_fake_engine(step_seconds=0.01) as fake:
        text = ""
        async with fake.generate(PROMPT, SamplingParams(max_tokens=60, temperature=0)) as stream:
            async for delta in stream:
                text += delta.text
        stop = next(text[i : i + 2] for i in range(20, len(text)) if text[i : i + 2].isascii())
        steps_before = fake.steps.step_count
        shown = ""
        async with fake.generate(PROMPT, SamplingParams(max_tokens=60, temperature=0, stop=(stop,))) as stream:
            async for delta in stream:
                shown += delta.text
            assert delta.finish_reason is FinishReason.STOP
            assert delta.stop_reason == stop
            # The blocks are free while the reader still has the stream.
            check_idle(fake.core)
            assert stream.completion_token_count < 60
            assert fake.steps.step_count - steps_before == stream.completion_token_count
        assert shown == text[: text.index(stop)]


async def test_max_tokens_zero_computes_the_prompt_and_delivers_no_token(autojump_clock):
    async with (
        open_fake_engine() as fake,
        fake.generate(PROMPT, SamplingParams(max_tokens=0, prompt_logprobs=1)) as stream,
    ):
        deltas = [delta async for delta in stream]
        assert [(delta.text, delta.token_ids, delta.finish_reason) for delta in deltas] == [
            ("", (), FinishReason.LENGTH)
        ]
        assert stream.prompt_logprobs is not None
        assert len(stream.prompt_logprobs) == len(PROMPT)
        assert stream.completion_token_count == 0


async def test_error_of_one_request_does_not_affect_others(autojump_clock):
    async with open_fake_engine(step_seconds=0.01) as fake:
        async with (
            fake.generate("unlucky", SamplingParams(max_tokens=20)) as unlucky,
            fake.generate("lucky", SamplingParams(max_tokens=20)) as lucky,
        ):
            fake.executor.errors[unlucky._request.choices[0].sequence_id] = "the logits are not numbers"
            unlucky_deltas = [delta async for delta in unlucky]
            lucky_deltas = [delta async for delta in lucky]
        assert unlucky_deltas[-1].finish_reason is FinishReason.ERROR
        assert unlucky_deltas[-1].message == "the logits are not numbers"
        assert lucky_deltas[-1].finish_reason is FinishReason.LENGTH
        check_all_free(fake)


async def test_text_error_fails_only_its_request(autojump_clock, caplog):
    async with open_fake_engine(step_seconds=0.01) as fake:
        async with (
            fake.generate("unlucky", SamplingParams(max_tokens=20)) as unlucky,
            fake.generate("lucky", SamplingParams(max_tokens=20)) as lucky,
        ):

            def broken(*_arguments: object) -> None:
                raise ValueError("no such token")

            unlucky._request.choices[0].output.feed = broken  # type: ignore[assignment,method-assign]
            deltas = [delta async for delta in unlucky]
            assert deltas[-1].finish_reason is FinishReason.ERROR
            assert "no such token" in (deltas[-1].message or "")
            assert len(deltas[-1].token_ids) == 1
            assert [delta async for delta in lucky][-1].finish_reason is FinishReason.LENGTH
        check_all_free(fake)
    assert "text of a request failed" in caplog.text
