"""Tests of partial results. The partial result of a stopped request equals the output that its reader received, and can
be resumed.
"""

from __future__ import annotations

import functools
from random import Random
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.contracts.deadlines import Deadlines
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.events import AbortOutcome, FinishReason, TokenLogprob
from trioserve.contracts.output import Delta
from trioserve.contracts.resume import Partial, Resume
from trioserve.contracts.sampling import SamplingParams
from trioserve.testing.fake_engine import FakeEngine, open_fake_engine
from trioserve.text.output import merge

SAMPLING = SamplingParams(max_tokens=12, temperature=1.0, seed=3, n=2, logprobs=1, ignore_eos=True)
KINDS: list[dict[str, Any]] = [
    {},
    {"overlap_steps": True},
    {"speculative_ngram": 3},
    {"block_count": 33, "max_num_seqs": 3},
]


class Rollout:
    """A client that reads a request, fast or slowly, and joins the deltas of each choice."""

    def __init__(self) -> None:
        self.given: dict[int, Delta] = {}
        self.error: Exception | None = None
        # The engine does not deliver these tokens again, even if the request is stopped in the queue.
        self.resume: Resume | None = None

    async def read(
        self,
        fake: FakeEngine,
        prompt: str = "one",
        sampling: SamplingParams = SAMPLING,
        *,
        pause: float = 0.0,
        **more: Any,
    ) -> None:
        options = {"request_id": "r", "keep_logprobs": True, **more}
        self.resume = more.get("resume")
        try:
            async with fake.generate(prompt, sampling, **options) as stream:
                self.take(*stream.known)
                if stream.known:
                    self.resume = None
                async for delta in stream:
                    self.take(delta)
                    await trio.sleep(pause)
        except Exception as error:
            self.error = error

    def take(self, *deltas: Delta) -> None:
        for delta in deltas:
            before = self.given.get(delta.index)
            self.given[delta.index] = delta if before is None else merge(before, delta)

    def tokens(self, index: int) -> tuple[int, ...]:
        known = () if self.resume is None else self.resume.token_ids[index]
        return known + (self.given[index].token_ids if index in self.given else ())

    def is_finished(self, index: int) -> bool:
        """Return whether a choice is whole. A request that ends while its prompt is tokenized gives nothing."""
        if index in self.given:
            return self.given[index].finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        return self.resume is not None and self.resume.finished[index]

    def logprobs(self, index: int) -> tuple[TokenLogprob, ...]:
        known = () if self.resume is None or self.resume.logprobs is None else self.resume.logprobs[index]
        return known + ((self.given[index].logprobs or ()) if index in self.given else ())


async def undisturbed(prompt: str = "one", sampling: SamplingParams = SAMPLING, **options: Any) -> Rollout:
    rollout = Rollout()
    async with open_fake_engine(step_seconds=0.01, **options) as fake:
        await rollout.read(fake, prompt, sampling)
    return rollout


def check_given(partial: Partial, rollout: Rollout) -> None:
    """Check that the partial result equals the whole output that its reader has received."""
    for index, choice in enumerate(partial.choices):
        assert choice.token_ids == rollout.tokens(index)
        if choice.logprobs is not None:
            assert choice.logprobs == rollout.logprobs(index)
            assert len(choice.logprobs) == len(choice.token_ids)
        if index in rollout.given:
            assert choice.finish_reason is rollout.given[index].finish_reason
            assert choice.weight_versions == rollout.given[index].weight_versions
    assert partial.resume.token_ids == tuple(choice.token_ids for choice in partial.choices)


@pytest.mark.parametrize("pause", [0.0, 0.04], ids=["fast reader", "slow reader"])
@pytest.mark.parametrize("options", KINDS, ids=str)
async def test_partial_result_equals_the_delivered_output_and_can_be_resumed(autojump_clock, options, pause):
    expected = await undisturbed(**options)
    first, second = Rollout(), Rollout()
    async with open_fake_engine(step_seconds=0.01, **options) as fake, trio.open_nursery() as nursery:
        async with trio.open_nursery() as reading:
            reading.start_soon(lambda: first.read(fake, pause=pause))
            await trio.sleep(0.055)
            cut = fake.abort_with_partial("r")["r"]
            assert cut.outcome is AbortOutcome.ABORTED
        [partial] = cut.partials
        assert 0 < len(partial.choices[0].token_ids) < 12
        check_given(partial, first)
        await trio.sleep(0.02)
        fake.assert_all_free()
        nursery.start_soon(lambda: second.read(fake, resume=partial.resume))
    for index in range(2):
        assert second.tokens(index) == expected.tokens(index)
        assert second.logprobs(index) == expected.logprobs(index)
    assert all(delta.finish_reason is FinishReason.LENGTH for delta in second.given.values())


async def test_choice_with_a_text_error_keeps_log_probabilities_of_its_tokens(autojump_clock, monkeypatch):
    """If the choice dropped its log probabilities, those of the other choices could not be returned either."""
    rollout = Rollout()
    async with open_fake_engine(step_seconds=0.01) as fake, trio.open_nursery() as nursery:
        nursery.start_soon(rollout.read, fake)
        await trio.sleep(0.035)

        def broken(*_arguments: object) -> None:
            raise ValueError("no such token")

        [request] = fake.requests
        monkeypatch.setattr(request.choices[0].output, "feed", broken)
        await trio.sleep(0.02)
        [partial] = fake.abort_with_partial("r")["r"].partials
        assert [choice.finish_reason for choice in partial.choices] == [FinishReason.ERROR, FinishReason.ABORT]
        await trio.sleep(0.02)
        check_given(partial, rollout)
    fake.assert_all_free()


async def test_tokens_of_the_step_in_flight_are_not_in_the_partial_result(autojump_clock):
    rollout = Rollout()
    async with open_fake_engine(paused=True) as fake, trio.open_nursery() as nursery:
        nursery.start_soon(rollout.read, fake)
        await wait_all_tasks_blocked()
        await fake.step(3)
        async with fake.held_step():
            await wait_all_tasks_blocked()
            before = [rollout.tokens(index) for index in range(2)]
            [partial] = fake.abort_with_partial("r")["r"].partials
            await wait_all_tasks_blocked()
        # There were three steps, and some text was held back.
        assert [len(choice.token_ids) for choice in partial.choices] == [3, 3]
        assert [
            choice.token_ids[: len(tokens)] for choice, tokens in zip(partial.choices, before, strict=True)
        ] == before
        await wait_all_tasks_blocked()
        check_given(partial, rollout)


async def test_queued_request_has_an_empty_partial_result_that_can_be_resumed(autojump_clock):
    expected = await undisturbed()
    first, second = Rollout(), Rollout()
    async with open_fake_engine(max_num_seqs=2, step_seconds=0.01) as fake, trio.open_nursery() as nursery:
        nursery.start_soon(lambda: Rollout().read(fake, "other", request_id="other"))
        await trio.sleep(0.02)
        nursery.start_soon(first.read, fake)
        await trio.sleep(0.02)
        [partial] = fake.abort_with_partial("r")["r"].partials
        assert [choice.token_ids for choice in partial.choices] == [(), ()]
        assert [choice.finish_reason for choice in partial.choices] == [FinishReason.ABORT] * 2
        nursery.start_soon(lambda: second.read(fake, resume=partial.resume))
    check_given(partial, first)
    assert [second.tokens(index) for index in range(2)] == [expected.tokens(index) for index in range(2)]
    assert second.logprobs(1) == expected.logprobs(1)


async def test_complete_choice_stays_complete_in_a_partial_result(autojump_clock):
    """If a response has ended but its reader has not left, its partial result is the complete response."""
    first, second = Rollout(), Rollout()
    async with open_fake_engine(step_seconds=0.01) as fake, trio.open_nursery() as nursery:
        nursery.start_soon(lambda: first.read(fake, pause=1.0))
        await trio.sleep(0.9)
        cut = fake.abort_with_partial("r")["r"]
        assert cut.outcome is AbortOutcome.ALREADY_FINISHED
        [partial] = cut.partials
        assert partial.resume.finished == (True, True)
        nursery.start_soon(lambda: second.read(fake, resume=partial.resume))
    check_given(partial, first)
    assert {index: delta.token_ids for index, delta in second.given.items()} == {
        index: delta.token_ids for index, delta in first.given.items()
    }


@pytest.mark.parametrize("finished", [(True, False), (True, True)], ids=str)
async def test_known_complete_choice_is_complete_while_the_request_is_queued(autojump_clock, finished):
    expected = await undisturbed()
    resume = Resume(token_ids=(expected.tokens(0), expected.tokens(1)[:4]), finished=(True, False), seed=3)
    if all(finished):
        resume = Resume(token_ids=(expected.tokens(0), expected.tokens(1)), finished=finished, seed=3)
    rollout = Rollout()
    async with open_fake_engine(max_num_seqs=2, step_seconds=0.01) as fake, trio.open_nursery() as nursery:
        for _ in range(12):  # The request gets no lease, so its known tokens are not replayed.
            nursery.start_soon(lambda: Rollout().read(fake, "other", request_id="other"))
        await trio.sleep(0.02)
        with trio.fail_after(1):
            async with trio.open_nursery() as reading:
                reading.start_soon(lambda: rollout.read(fake, resume=resume))
                await trio.sleep(0.02)
                [partial] = fake.abort_with_partial("r")["r"].partials
        assert partial.resume.finished == resume.finished
        assert partial.resume.token_ids == resume.token_ids
        assert list(rollout.given) == ([0] if all(finished) else [1]), (
            "one end, which nobody else says where all had one"
        )
        fake.abort_with_partial("other")
    fake.assert_all_free()


async def test_abort_of_an_ended_unknown_or_foreign_request_returns_no_partial_result(autojump_clock):
    async with open_fake_engine(step_seconds=0.01) as fake, trio.open_nursery() as nursery:
        await Rollout().read(fake)
        assert fake.abort_with_partial("r")["r"].partials == ()
        assert fake.abort_with_partial(["nobody"])["nobody"].outcome is AbortOutcome.UNKNOWN
        nursery.start_soon(lambda: Rollout().read(fake, owner="ann"))
        await trio.sleep(0.03)
        assert fake.abort_with_partial("r", owner="bob")["r"].partials == ()
        [partial] = fake.abort_with_partial("r", owner="ann")["r"].partials
        assert partial.choices[0].token_ids


async def test_each_request_with_the_same_id_has_a_partial_result(autojump_clock):
    rollouts = [Rollout(), Rollout()]
    async with open_fake_engine(step_seconds=0.01) as fake, trio.open_nursery() as nursery:
        for rollout, prompt in zip(rollouts, ("one", "two"), strict=True):
            nursery.start_soon(rollout.read, fake, prompt)
            await wait_all_tasks_blocked()
        await trio.sleep(0.04)
        partials = fake.abort_with_partial("r")["r"].partials
    assert len(partials) == 2
    for partial, rollout in zip(partials, rollouts, strict=True):
        check_given(partial, rollout)


async def test_log_probabilities_are_kept_only_if_requested(autojump_clock):
    async with open_fake_engine(step_seconds=0.01) as fake, trio.open_nursery() as nursery:
        nursery.start_soon(lambda: Rollout().read(fake, keep_logprobs=False))
        await trio.sleep(0.04)
        [partial] = fake.abort_with_partial("r")["r"].partials
        assert partial.choices[0].token_ids
        assert partial.choices[0].logprobs is None
        assert partial.resume.logprobs is None


async def test_weight_versions_of_known_tokens_come_before_those_of_new_tokens(autojump_clock):
    expected = await undisturbed()
    tokens = tuple(expected.tokens(index)[:5] for index in range(2))
    runs = ((("a", 2), ("b", 3)), (("b", 5),))
    resume = Resume(token_ids=tokens, finished=(False, False), seed=3, weight_versions=runs)
    rollout = Rollout()
    async with open_fake_engine(step_seconds=0.01) as fake, trio.open_nursery() as nursery:
        nursery.start_soon(lambda: rollout.read(fake, resume=resume))
        await trio.sleep(0.04)
        [partial] = fake.abort_with_partial("r")["r"].partials
    more = len(partial.choices[0].token_ids) - 5
    assert more > 0
    assert partial.choices[0].weight_versions == (("a", 2), ("b", 3), ("default", more))
    assert partial.choices[1].weight_versions == (("b", 5), ("default", more))
    assert [choice.token_ids for choice in partial.choices] == [
        expected.tokens(index)[: 5 + more] for index in range(2)
    ]
    # The reader gets log probabilities only of new tokens, because the engine does not know those of the known tokens.
    assert partial.choices[0].logprobs is None
    assert len(rollout.logprobs(0)) == more


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": [[]]}, "resume.logprobs"),
        ({"logprobs": [[TokenLogprob(1, -1.0)], [], []]}, "resume.logprobs"),
        ({"logprobs": [[1, 2], []]}, "resume.logprobs"),
        ({"logprobs": 3}, "resume.logprobs"),
        ({"weight_versions": [[("a", 1)], []]}, "resume.weight_versions"),
        ({"weight_versions": [[("a", 1), ("b", 0), ("c", 1)], []]}, "resume.weight_versions"),
        ({"weight_versions": [["a", 2], []]}, "resume.weight_versions"),
        ({"weight_versions": [[]]}, "resume.weight_versions"),
    ],
    ids=str,
)
def test_invalid_known_output_of_a_partial_result_is_refused(fields, param):
    with pytest.raises(InvalidRequest) as caught:
        Resume(token_ids=((1, 2), ()), finished=(False, False), **fields)
    assert caught.value.param == param


def test_resume_state_can_be_shortened_to_fewer_tokens():
    resume = Resume(
        token_ids=((1, 2, 3), (4,)),
        finished=(True, False),
        logprobs=(tuple(TokenLogprob(token, -1.0) for token in (1, 2, 3)), (TokenLogprob(4, -1.0),)),
        weight_versions=((("a", 1), ("b", 2)), ()),
    )
    shorter = resume.without_last(0, 1, has_end=True)
    assert shorter.token_ids == ((1, 2), (4,))
    assert shorter.finished == (False, False)
    assert shorter.logprobs is not None
    assert [len(entries) for entries in shorter.logprobs] == [2, 1]
    assert shorter.weight_versions == ((("a", 1), ("b", 1)), ())
    assert resume.without_last(1, 0, has_end=False) == resume


SEEDS = range(40)
SAMPLINGS = (
    SamplingParams(max_tokens=20, temperature=1.0, seed=3, logprobs=0, ignore_eos=True),
    SamplingParams(max_tokens=15, temperature=1.0, seed=5, n=3),
    SamplingParams(max_tokens=20, temperature=1.0, seed=7, stop=("ab", "xyz"), logprobs=2),
    SamplingParams(max_tokens=12, temperature=0.0, seed=1, n=2, logprobs=0),
)


async def roll_out(
    fake: FakeEngine, rng: Random, name: str, prompt: str, sampling: SamplingParams, *, resumable: bool
) -> Rollout:
    """Run a rollout that is stopped and resumed repeatedly: by the trainer, by a pause, or by its deadline.

    Returns:
        The whole response, with each token exactly once.
    """
    resume: Resume | None = None
    for _ in range(30):
        rollout, partials = Rollout(), list[Partial]()
        limits = Deadlines(timeout=rng.uniform(0.02, 0.3)) if rng.random() < 0.3 else None
        options: dict[str, Any] = {
            "request_id": name,
            "resume": resume,
            "resumable": resumable,
            "deadlines": limits,
            "pause": rng.choice((0.0, 0.0, 0.05)),
        }
        async with trio.open_nursery() as nursery:

            async def read(rollout: Rollout = rollout, options: dict[str, Any] = options) -> None:
                await rollout.read(fake, prompt, sampling, **options)
                nursery.cancel_scope.cancel()

            nursery.start_soon(read)
            await trio.sleep(rng.uniform(0, 0.25))
            partials += fake.abort_with_partial(name)[name].partials
            await trio.sleep_forever()
        assert rollout.error is None
        if len(rollout.given) == sampling.n and all(map(rollout.is_finished, rollout.given)):
            return rollout
        for partial in partials:
            check_given(partial, rollout)
            resume = partial.resume
        if not partials:  # A deadline or a pause came first, and the reader uses the output that it has received.
            state = Resume(
                token_ids=tuple(rollout.tokens(index) for index in range(sampling.n)),
                finished=tuple(map(rollout.is_finished, range(sampling.n))),
                seed=sampling.seed,
                logprobs=None if sampling.logprobs is None else tuple(map(rollout.logprobs, range(sampling.n))),
            )
            resume = state
    raise AssertionError("it never comes to an end")


@pytest.mark.parametrize("seed", SEEDS)
async def test_every_token_is_delivered_once_over_repeated_aborts_and_resumes(
    autojump_clock: object, seed: int
) -> None:
    rng = Random(seed)
    options = KINDS[seed % len(KINDS)]
    prompts = ("a", "two blocks of it", "two blocks of it, and more", "another")
    cases = [(f"r{index}", rng.choice(prompts), rng.choice(SAMPLINGS)) for index in range(6)]
    expected = [await undisturbed(prompt, sampling, **options) for _, prompt, sampling in cases]
    whole: dict[str, Rollout] = {}
    async with open_fake_engine(step_seconds=0.01, **options) as fake:

        async def one(name: str, prompt: str, sampling: SamplingParams) -> None:
            await trio.sleep(rng.uniform(0, 0.3))
            whole[name] = await roll_out(fake, rng, name, prompt, sampling, resumable=rng.random() < 0.3)

        async def trainer() -> None:
            while True:
                await trio.sleep(rng.uniform(0.05, 0.3))
                await fake.pause_generation(rng.choice(("abort", "keep")))
                await trio.sleep(rng.uniform(0, 0.05))
                fake.resume_generation()

        with trio.fail_after(1000):
            async with trio.open_nursery() as training:
                training.start_soon(trainer)
                async with trio.open_nursery() as nursery:
                    for case in cases:
                        nursery.start_soon(one, *case)
                training.cancel_scope.cancel()
        fake.resume_generation()
        await trio.sleep(1)
        fake.assert_all_free()
    for (name, _, sampling), undisturbed_one in zip(cases, expected, strict=True):
        for index in range(sampling.n):
            ours, theirs = whole[name].given[index], undisturbed_one.given[index]
            assert (ours.token_ids, ours.logprobs, ours.text) == (theirs.token_ids, theirs.logprobs, theirs.text)
            assert (ours.finish_reason, ours.stop_reason) == (theirs.finish_reason, theirs.stop_reason)


@pytest.mark.parametrize("options", KINDS, ids=str)
async def test_partial_results_resume_with_new_weights_repeatedly(autojump_clock, options):
    """Known tokens keep the version and the log probabilities of the weights that sampled them. The new weights compute
    their KV.
    """
    sampling = SamplingParams(max_tokens=30, temperature=1.0, seed=3, n=2, logprobs=1, ignore_eos=True)
    expected = await undisturbed("one and a block", sampling, **options)
    resume: Resume | None = None
    counts: list[int] = []
    async with open_fake_engine(step_seconds=0.01, **options) as fake:
        for number in range(4):
            rollout = Rollout()
            async with trio.open_nursery() as nursery:
                read = functools.partial(rollout.read, resume=resume)
                nursery.start_soon(read, fake, "one and a block", sampling)
                if number < 3:
                    await trio.sleep(0.055)
                    [partial] = fake.abort_with_partial("r")["r"].partials
            if number < 3:
                check_given(partial, rollout)
                counts.append(len(partial.choices[0].token_ids))
                before, resume = resume, partial.resume
                if before is not None:
                    assert before.logprobs is not None
                    assert rollout.logprobs(0)[: counts[-2]] == before.logprobs[0]
                await fake.update_weights(f"weights {number}", version=f"step {number + 1}")
        fake.assert_all_free()
    assert 0 < counts[0] < counts[1] < counts[2] < 30
    first, second, third = counts
    runs = (("default", first), ("step 1", second - first), ("step 2", third - second), ("step 3", 30 - third))
    assert rollout.given[0].weight_versions == runs
    assert rollout.tokens(0)[:first] == expected.tokens(0)[:first]
    assert rollout.logprobs(0)[:first] == expected.logprobs(0)[:first]
    assert rollout.tokens(0) != expected.tokens(0), "the same tokens, whatever weights there are"
    assert len(rollout.logprobs(0)) == 30
    # An engine that has only the last weights generates equal tokens after the same known tokens.
    assert resume is not None
    alone, told = Rollout(), Resume(token_ids=resume.token_ids, finished=(False, False), seed=3)
    async with open_fake_engine(step_seconds=0.01, **options) as fake:
        await fake.update_weights("weights 2", version="step 3")
        await alone.read(fake, "one and a block", sampling, resume=told)
    for index in range(2):
        assert alone.tokens(index) == rollout.tokens(index)
        assert alone.logprobs(index) == rollout.logprobs(index)[len(resume.token_ids[index]) :]
