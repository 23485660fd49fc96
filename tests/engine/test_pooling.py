"""Tests of engine.embed(): one scope covers any number of inputs, and leaving the scope frees all resources."""

from __future__ import annotations

import pytest
import trio
from msgspec import structs
from trio.testing import wait_all_tasks_blocked

from trioserve.contracts.deadlines import Deadlines
from trioserve.contracts.errors import (
    ContextTooLong,
    DeadlinePassed,
    Draining,
    EngineFault,
    InvalidRequest,
    RequestAborted,
    RequestFailed,
)
from trioserve.contracts.events import AbortOutcome
from trioserve.contracts.pooling import LabelledPrompt, Pooling, PoolingParams, PoolingResult, TextPair
from trioserve.contracts.prompt import ChatPrompt
from trioserve.contracts.sampling import SamplingParams
from trioserve.engine.pooling_request import check_can_be_pooled, check_can_generate
from trioserve.testing.fake_engine import FakeEngine, open_fake_engine
from trioserve.testing.fake_executor import EMBEDDING_SIZE, FakeModel

TEXTS = ("one", "and another", "a third one that is longer than the others by far", "4")
WHOLE = {"encoder": "embed", "max_num_batched_tokens": 64}


def expected(text: str, **asked: object) -> PoolingResult:
    """Return the result that the fake model gives for this text in a request of its own."""
    model = FakeModel(vocab_size=256)
    pooling = {"task": "embed", "method": "last", "normalize": True} | asked
    return model.pooled(Pooling(**pooling), model.digest(list(text.encode())))


async def test_decoder_without_a_head_computes_only_vectors(autojump_clock):
    async with open_fake_engine() as fake:
        model = fake.model
        headless = structs.replace(model, pooled=structs.replace(model.pooled, continues_texts=False))
    with pytest.raises(
        InvalidRequest, match="was saved without a head and does not generate text: ask it for embeddings"
    ):
        check_can_generate(headless)
    with pytest.raises(InvalidRequest, match="was saved without a head: it has no probabilities"):
        check_can_be_pooled(headless, PoolingParams(task="labels"), [LabelledPrompt("a", ("b",))])
    assert check_can_be_pooled(headless, PoolingParams(), ["a"]) is headless.pooled


async def test_every_input_has_its_own_vector_in_the_order_of_the_inputs(autojump_clock):
    async with open_fake_engine() as fake:
        vectors = await fake.embed(TEXTS)
        assert vectors == tuple(map(expected, TEXTS))
        assert len(vectors[0]) == EMBEDDING_SIZE
        assert sum(value * value for value in vectors[0].values()) == pytest.approx(1, abs=1e-6)
        assert 'trioserve:pooled_inputs_total{engine="0",model_name="fake"} 4.0' in fake.metrics.expose().decode()
        fake.assert_all_free()


async def test_single_input_may_be_text_tokens_or_chat(autojump_clock):
    chat = ChatPrompt(messages=[{"role": "user", "content": "hi"}], add_generation_prompt=False)
    async with open_fake_engine() as fake:
        assert await fake.embed("one") == (expected("one"),)
        assert await fake.embed(list(b"one")) == (expected("one"),)
        assert await fake.embed([list(b"one"), "4"]) == (expected("one"), expected("4"))
        assert await fake.embed(chat) == (expected("user: hi\n"),)


@pytest.mark.parametrize("encoder", [None, "embed"])
async def test_pooling_options_reach_the_model(encoder, autojump_clock):
    async with open_fake_engine(encoder=encoder) as fake:
        asked = {"method": "mean", "normalize": False, "dimensions": 3}
        assert await fake.embed("one", PoolingParams(**asked)) == (expected("one", **asked),)


@pytest.mark.parametrize("encoder", [None, "embed"])
async def test_request_may_have_more_inputs_than_run_at_a_time(encoder, autojump_clock):
    texts = [f"text {index}" for index in range(50)]
    async with open_fake_engine(encoder=encoder, max_num_seqs=4, max_queued_requests=4, paused=True) as fake:
        async with fake.embed(texts) as stream:
            sequence_count_max = 0
            while (await fake.step()) is not None:
                stats = fake.stats()
                sequence_count_max = max(sequence_count_max, stats.running_count + stats.waiting_count)
                assert fake.dispatch.core.stats().leases
            assert sequence_count_max == 2, "half of what may run is its own"
            assert not fake.dispatch.core.stats().waiting
            method = "last" if encoder is None else "mean"
            assert await stream.results() == tuple(expected(text, method=method) for text in texts)
            assert stream.prompt_token_count == sum(map(len, texts))
        fake.resume()
        fake.assert_all_free()


async def test_request_with_many_inputs_does_not_block_others(autojump_clock):
    async with open_fake_engine(max_num_seqs=4, step_seconds=0.01) as fake, trio.open_nursery() as nursery:
        done: list[str] = []

        async def embed() -> None:
            # The inputs are tokenized in this thread, so no time passes.
            await fake.embed(["a text of some length"] * 18)
            done.append("embedded")

        nursery.start_soon(embed)
        await trio.sleep(0.03)
        async with fake.generate("hello", SamplingParams(max_tokens=2)) as stream:
            async for _ in stream:
                pass
        done.append("generated")
        await trio.sleep(10)
        assert done == ["generated", "embedded"]


@pytest.mark.parametrize("encoder", [None, "embed"])
@pytest.mark.parametrize("steps_before", [0, 1, 3])
async def test_pooled_request_that_leaves_between_steps_frees_all_blocks_at_once(encoder, steps_before, autojump_clock):
    async with open_fake_engine(encoder=encoder, max_num_seqs=4, max_num_batched_tokens=16, paused=True) as fake:
        async with fake.embed(["fourteen bytes"] * 20):
            await fake.step(steps_before)
        fake.assert_all_free()


@pytest.mark.parametrize("encoder", [None, "embed"])
async def test_pooled_request_that_leaves_during_a_step_frees_all_blocks_after_the_step(encoder, autojump_clock):
    async with open_fake_engine(encoder=encoder, max_num_seqs=4, paused=True) as fake:
        stream = fake.embed(["text"] * 20)
        await stream.__aenter__()
        async with fake.held_step() as plan:
            assert len(plan.chunks) == 2
            await stream.__aexit__(None, None, None)
            assert fake.core.flights.is_abandoned(plan)
        fake.assert_all_free()


async def test_pooled_request_that_leaves_the_queue_frees_its_queue_slot(autojump_clock):
    async with open_fake_engine(max_num_seqs=1, paused=True) as fake:
        async with fake.generate("hello", SamplingParams(max_tokens=4)):
            with trio.move_on_after(1) as scope:
                async with fake.generate("more", SamplingParams(n=4)), fake.embed(TEXTS):
                    raise AssertionError("it has no lease yet")
            assert scope.cancelled_caught
        fake.assert_all_free()


async def test_pooled_request_that_leaves_during_tokenization_frees_all_resources(autojump_clock):
    async with open_fake_engine() as fake:
        with trio.move_on_after(0):
            await fake.embed(["x" * 40_000] * 3)
        fake.assert_all_free()


async def test_too_long_input_is_named_and_nothing_is_computed(autojump_clock):
    async with open_fake_engine(max_model_len=20) as fake:
        with pytest.raises(ContextTooLong, match=r"input\[2\] has 49: shorten it") as caught:
            await fake.embed(TEXTS)
        assert caught.value.param == "input[2]"
        with pytest.raises(ContextTooLong, match=r"^This model's maximum context length is 20 tokens, and input has"):
            await fake.embed(TEXTS[2])
        with pytest.raises(InvalidRequest, match=r"input\[1\] has no tokens"):
            await fake.embed(["a", ""])
        with pytest.raises(InvalidRequest, match=r"query: the prompt has token id 257") as caught:
            await fake.embed([[1], [257]], name_of=lambda index: "query")
        assert caught.value.param == "query"
        assert fake.stats().steps_total == 0
        fake.assert_all_free()


async def test_pooled_prompt_may_be_as_long_as_the_context(autojump_clock):
    async with open_fake_engine(max_model_len=20) as fake:
        assert await fake.embed("x" * 20) == (expected("x" * 20),)


async def test_input_computed_in_one_step_is_limited_by_the_step(autojump_clock):
    mean = PoolingParams(method="mean")
    async with open_fake_engine(max_num_batched_tokens=32, max_num_seqs=8) as fake:
        assert await fake.embed("x" * 25, mean) == (expected("x" * 25, method="mean"),)
        with pytest.raises(
            ContextTooLong, match="25 tokens for inputs that are computed in one step, as here, and input has"
        ):
            await fake.embed("x" * 26, mean)
        assert await fake.embed("x" * 26) == (expected("x" * 26),)
    async with open_fake_engine(**WHOLE) as fake:
        assert len(await fake.embed("x" * 64)) == 1
        with pytest.raises(ContextTooLong):
            await fake.embed("x" * 65)


async def test_failed_input_fails_only_its_request(autojump_clock):
    async with open_fake_engine(paused=True) as fake:
        async with fake.embed(["one"]) as other, fake.embed(TEXTS, request_id="r") as stream:
            fake.fail_request("r", "broken")
            await fake.step(3)
            with pytest.raises(RequestFailed, match="broken"):
                await stream.results()
            assert await other.results() == (expected("one"),)
        fake.assert_all_free()


async def test_abort_by_id_ends_all_inputs(autojump_clock):
    async with open_fake_engine(paused=True, max_num_seqs=2) as fake:
        async with fake.embed(TEXTS, request_id="r") as stream:
            await fake.step()
            assert fake.abort("r") == {"r": AbortOutcome.ABORTED}
            with pytest.raises(RequestAborted):
                await stream.results()
            assert fake.stats().running_count == fake.stats().waiting_count == 0
        fake.assert_all_free()


async def test_pooled_request_ends_at_its_deadline(autojump_clock):
    async with open_fake_engine(step_seconds=1, max_num_seqs=2) as fake:
        with pytest.raises(DeadlinePassed, match=r"timeout of 2\.5 s"):
            await fake.embed(TEXTS, deadlines=Deadlines(timeout=2.5))
        await trio.sleep(1)  # Wait until the step in flight has ended.
        fake.assert_all_free()
        assert len(await fake.embed(TEXTS, deadlines=Deadlines(queue_timeout=0.5, ttft_timeout=1.5))) == 4
        with pytest.raises(DeadlinePassed, match="ttft_timeout"):
            await fake.embed(TEXTS, deadlines=Deadlines(ttft_timeout=0.5))
        await trio.sleep(1)
        fake.assert_all_free()


async def test_drain_refuses_queued_pooled_requests_and_finishes_begun_ones(autojump_clock):
    async with open_fake_engine(paused=True, max_num_seqs=1) as fake:
        async with fake.embed(TEXTS) as running, fake.embed(TEXTS) as queued:
            await fake.step()
            fake.drain()
            with pytest.raises(Draining):
                await fake.embed("late")
            with pytest.raises(Draining):
                await queued.results()
            fake.resume()
            assert await running.results() == tuple(map(expected, TEXTS))
        await wait_all_tasks_blocked()
        fake.assert_all_free()


async def test_engine_fault_ends_a_pooled_request(autojump_clock):
    with pytest.raises(EngineFault):
        async with open_fake_engine(max_num_seqs=2) as fake:
            fake.break_next_step()
            await fake.embed(TEXTS)


async def test_pooled_request_with_the_lower_priority_number_runs_first(autojump_clock):
    order: list[int] = []

    async def embed(fake: FakeEngine, priority: int) -> None:
        await fake.embed(["some text"] * 3, priority=priority)
        order.append(priority)

    async with open_fake_engine(max_num_seqs=1, step_seconds=0.1) as fake, trio.open_nursery() as nursery:
        nursery.start_soon(embed, fake, 5)
        await trio.sleep(0.05)
        nursery.start_soon(embed, fake, 9)
        nursery.start_soon(embed, fake, -5)
    assert order[-1] == 9
    assert sorted(order) == [-5, 5, 9]


async def test_the_prefix_cache_serves_vectors_of_the_last_token(autojump_clock):
    async with open_fake_engine(block_size=4) as fake:
        first = await fake.embed("a text of some length")
        async with fake.embed("a text of some length") as stream:
            assert await stream.results() == first
            assert stream.cached_token_count == 20
        async with fake.embed("a text of some length", PoolingParams(method="mean")) as stream:
            await stream.results()
            assert stream.cached_token_count == 0


async def test_encoder_does_not_generate_and_scores_need_a_scoring_model(autojump_clock):
    pair = TextPair("query", "document")
    async with open_fake_engine(encoder="embed") as fake:
        with pytest.raises(InvalidRequest, match="encoder and does not generate text: ask it for embeddings"):
            async with fake.generate("hello"):
                pass
        with pytest.raises(InvalidRequest, match="has no head that scores"):
            await fake.embed(pair, PoolingParams(task="score"))
        with pytest.raises(InvalidRequest, match="a vector is computed from one text"):
            await fake.embed(pair)
        with pytest.raises(InvalidRequest, match="dimensions is 9, but vectors of fake have 8") as caught:
            await fake.embed("x", PoolingParams(dimensions=9))
        assert caught.value.param == "dimensions"
    async with open_fake_engine(encoder="score") as fake:
        (score,) = await fake.embed(pair, PoolingParams(task="score"))
        assert 0 <= score.values()[0] <= 1
        with pytest.raises(InvalidRequest, match="computes no embeddings"):
            await fake.embed("text")
    async with open_fake_engine() as fake:
        with pytest.raises(InvalidRequest, match='method is "cls", but fake is a decoder'):
            await fake.embed("text", PoolingParams(method="cls"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"inputs": []}, "input is an empty list"),
        ({"inputs": 5}, r"input is 5 \(int\)"),
        ({"inputs": {"a": 1}}, r"\(dict\)"),
        ({"inputs": ["a", 5]}, r"prompt is 5 \(int\)"),
        ({"inputs": ["a"] * 2049}, "input has 2049 entries, at most 2048 are allowed"),
        ({"inputs": "a", "pooling": {}}, "PoolingParams, or None"),
        ({"inputs": TextPair("a", 5)}, r"second is 5 \(int\)"),
        ({"inputs": [LabelledPrompt("a", ())]}, "labels is empty"),
        ({"inputs": [LabelledPrompt("a", ("b", 5))]}, r"labels holds 5 \(int\)"),
        ({"inputs": LabelledPrompt("a", "bc")}, r"labels is 'bc' \(str\)"),
        ({"inputs": LabelledPrompt([1], ("b",))}, r"prompt is \[1\] \(list\)"),
        ({"inputs": "a", "priority": "high"}, "priority is 'high'"),
    ],
)
async def test_error_names_the_embed_argument_of_a_wrong_type(arguments, words, autojump_clock):
    async with open_fake_engine() as fake:
        with pytest.raises(InvalidRequest, match=words):
            await fake.embed(**arguments)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"task": "rank"}, "task is 'rank'"),
        ({"method": "max"}, "method is 'max'"),
        ({"normalize": 1}, "normalize is 1"),
        ({"dimensions": 0}, "dimensions is 0, allowed is 1 to"),
        ({"dimensions": 1.5}, "dimensions is 1.5"),
    ],
)
def test_impossible_pooling_options_are_refused_when_created(fields, words):
    with pytest.raises(InvalidRequest, match=words):
        PoolingParams(**fields)


@pytest.mark.parametrize("encoder", [None, "embed"])
async def test_pooled_requests_give_equal_vectors_with_overlapping_steps(encoder, autojump_clock):
    texts = [f"text {index}" * (1 + index % 4) for index in range(18)]
    async with open_fake_engine(encoder=encoder, overlap_steps=True, step_seconds=0.01, max_num_seqs=4) as fake:
        async with fake.generate("beside them", SamplingParams(max_tokens=30)) if encoder is None else fake.embed("x"):
            method = "last" if encoder is None else "mean"
            assert await fake.embed(texts) == tuple(expected(text, method=method) for text in texts)
        await trio.sleep(1)
        fake.assert_all_free()
