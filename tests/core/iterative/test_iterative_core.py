"""Tests of requests with a known number of steps: the order of computation, slots, and aborts."""

from __future__ import annotations

import pytest

from trioserve.contracts.errors import InvalidRequest, StartupError
from trioserve.contracts.events import AbortOutcome, FinishReason, IterativePhase, RequestFinished
from trioserve.contracts.ids import RequestId
from trioserve.contracts.image_generation import IterativeEvent, IterativePlan, IterativeRequest, OutputReady, StepDone
from trioserve.core.iterative_core import IterativeCore
from trioserve.core.settings import IterativeSettings
from trioserve.testing.fake_image_engine import FakeIterativeExecutor, latent_after
from trioserve.testing.invariants import check_iterative_core, check_iterative_idle

LETTERS = {IterativePhase.ENCODE: "e", IterativePhase.DENOISE: "", IterativePhase.DECODE: "d"}


def request_of(word: str, **fields) -> IterativeRequest:
    """Return a request. The text `a3` means three steps, `a3!` also has a better priority, and `a3+` uses guidance."""
    name, count = word[0], int(word[1:].rstrip("!+"))
    return IterativeRequest(
        id=RequestId(name), step_count=count, seed=7, priority=-1 if "!" in word else 0, is_guided="+" in word, **fields
    )


class Driven:
    """A core with a fake executor.

    `said` contains all events in order. `steps` contains each step as text, such as `ae be` or `a0 b3`.
    """

    def __init__(self, *, slots: int = 2, kept: int = 1, work: int = 8) -> None:
        self.core = IterativeCore(IterativeSettings(slot_count=slots, kept_slot_count=kept, step_work_max=work))
        self.executor = FakeIterativeExecutor(slots + kept)
        self.said: list[IterativeEvent] = []
        self.steps: list[str] = []
        self.living: set[RequestId] = set()  # The live requests when the last step was planned.

    def add(self, words: str, **fields) -> None:
        for word in words.split():
            self.core.add(request_of(word, **fields))
            check_iterative_core(self.core)

    def begin(self) -> IterativePlan | None:
        living = {live.request.id for live in self.core.live_requests()}
        plan = self.core.schedule(0.0)
        check_iterative_core(self.core)
        self.living = living
        if plan is not None:
            letter = LETTERS[plan.phase]
            works = [f"{work.request.id}{letter or work.step}" for work in plan.works]
            self.steps.append(" ".join([*(f"-{name}" for name in plan.preempted), *works]))
        return plan

    def end(self, plan: IterativePlan) -> list[IterativeEvent]:
        result = self.executor.execute(plan, self.core.flights.abandonment(plan))
        assert self.executor.held_ids <= self.living, "a slot holds garbage of a request that ended before this step"
        if result is None:
            events = self.core.drop_plan(plan, 0.0)
        else:
            events = self.core.update_from_output(plan, result, 0.0)
        check_iterative_core(self.core)
        self.said += events
        return events

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            plan = self.begin()
            assert plan is not None
            self.end(plan)

    def run(self) -> None:
        while (plan := self.begin()) is not None:
            self.end(plan)
        check_iterative_idle(self.core)

    def abort(self, name: str, reason: FinishReason = FinishReason.ABORT):
        (result,) = self.core.abort([RequestId(name)], reason, now=0.0).values()
        check_iterative_core(self.core)
        return result

    @property
    def outputs(self) -> dict[str, object]:
        return {event.request_id: event.output for event in self.said if isinstance(event, OutputReady)}

    @property
    def ends(self) -> dict[str, RequestFinished]:
        return {event.request_id: event for event in self.said if isinstance(event, RequestFinished)}


def check(arrivals: str, expect: str, **settings) -> Driven:
    """Run arrivals such as `a3 b2 | c1`, where `|` separates steps. Compare the steps with `expect`, which `|` also
    separates.
    """
    driven = Driven(**settings)
    first, *later = arrivals.split("|")
    driven.add(first)
    for words in later:
        driven.step()
        driven.add(words)
    driven.run()
    assert " | ".join(driven.steps) == expect
    words = arrivals.replace("|", " ").split()
    requests = [request_of(word) for word in words]
    assert driven.outputs == {request.id: latent_after(request, request.step_count) for request in requests}
    return driven


def test_image_request_is_encoded_denoised_and_decoded():
    check("a2", "ae | a0 | a1 | ad")


def test_requests_at_different_timesteps_are_computed_together():
    check("a3 | | b1", "ae | a0 | be | a1 b0 | bd | a2 | ad")


def test_encoding_denoising_and_decoding_of_different_requests_take_turns():
    check("a3 | | b3 | c3", "ae | a0 | be | a1 b0 | ce | a2 b1 c0 | ad | b2 c1 | bd | c2 | cd", slots=3)


def test_a_step_respects_its_work_and_the_longest_waiting_request_goes_first():
    check("a2 b2 c2", "ae be | a0 b0 | ce | a1 b1 | ad bd | c0 | c1 | cd", slots=3, work=2)


def test_guidance_is_computed_in_the_same_pass_and_doubles_the_work():
    check("a1+ b1 c1", "ae be ce | a0 b0 | ad bd | c0 | cd", slots=3, work=3)


def test_request_that_does_not_fit_into_a_step_is_first_in_the_next_step():
    check("a2 b1+", "ae be | a0 | b0 | bd | a1 | ad", work=2)


def test_request_waits_while_no_slot_is_free():
    check("a1 b1", "ae | a0 | ad | be | b0 | bd", slots=1)


def test_request_of_better_priority_gets_the_slot_and_the_preempted_latent_is_kept():
    driven = check("a3 | | b1!", "ae | a0 | -a be | b0 | bd | a1 | a2 | ad", slots=1)
    assert driven.core.stats().preemptions_total == 1
    assert driven.core.stats().denoised_total == 4


def test_no_request_is_preempted_without_a_free_kept_slot():
    check("a2 | | b1!", "ae | a0 | a1 | ad | be | b0 | bd", slots=1, kept=0)


def test_last_request_in_order_is_preempted():
    check("a2 b2 | | c1!", "ae be | a0 b0 | -b ce | a1 c0 | ad cd | b1 | bd", slots=2)


def test_a_request_that_only_needs_decoding_keeps_its_slot():
    check("a1 | | b1!", "ae | a0 | ad | be | b0 | bd", slots=1)


def test_a_resumed_request_is_computed_before_it_is_preempted_again():
    """Each time the large request has a slot again, a request of better priority arrives.

    The arriving request uses two units of the step's work, so the large request is left out once each time.
    """
    driven = Driven(slots=2, kept=1, work=2)
    driven.add("a4+ b12!")
    driven.step(3)
    for name in "cdefgh":
        while RequestId("a") not in driven.core.scheduler.running:
            driven.step()
        driven.add(f"{name}1!")
        driven.step()
    reported = [event.steps_done for event in driven.said if isinstance(event, StepDone) and event.request_id == "a"]
    assert reported == [1, 2, 3, 4]
    assert driven.core.stats().preemptions_total == 3
    driven.run()


def test_a_request_that_costs_a_whole_step_gets_its_turn():
    driven = Driven(slots=5, work=4)
    driven.add("a2 b2 c2")
    driven.add("z2", encode_work=4, denoise_work=4, decode_work=4)
    driven.add("d2 e2 f2 g2")
    driven.run()
    assert " | ".join(driven.steps) == (
        "ae be ce | a0 b0 c0 | ze | a1 b1 c1 | ad bd cd | de ee fe ge | z0 | d0 e0 f0 g0 | z1 | zd | "
        "d1 e1 f1 g1 | dd ed fd gd"
    )


def test_progress_is_reported_after_each_step_with_requested_partial_results():
    driven = Driven()
    driven.add("a4", partial_every=2)
    driven.run()
    request = request_of("a4")
    assert [event for event in driven.said if isinstance(event, StepDone)] == [
        StepDone(request.id, 1),
        StepDone(request.id, 2, latent_after(request, 2)),
        StepDone(request.id, 3),
        StepDone(request.id, 4),
    ]
    assert driven.ends["a"].reason is FinishReason.STOP


def test_a_partial_result_costs_as_much_as_decoding():
    driven = Driven(slots=3, work=4)
    driven.add("a3 b3 c3", partial_every=2)
    driven.run()
    assert " | ".join(driven.steps) == "ae be ce | a0 b0 c0 | a1 b1 | c1 a2 b2 | ad bd | c2 | cd"


def test_one_partial_result_alone_may_cost_more_than_a_step():
    driven = Driven(work=2)
    driven.add("a2 b2", partial_every=1, decode_work=2)
    driven.run()
    assert {name: end.reason for name, end in driven.ends.items()} == dict.fromkeys("ab", FinishReason.STOP)


@pytest.mark.parametrize(
    ("steps", "phase"),
    [(0, IterativePhase.QUEUED), (1, IterativePhase.DENOISE), (2, IterativePhase.DENOISE), (3, IterativePhase.DECODE)],
)
def test_abort_between_steps_releases_the_slot_at_once(steps, phase):
    driven = Driven()
    driven.add("a2")
    driven.step(steps)
    result = driven.abort("a")
    assert result.outcome is AbortOutcome.ABORTED
    assert result.finished == RequestFinished(request_id=RequestId("a"), reason=FinishReason.ABORT, phase=phase)
    check_iterative_idle(driven.core)


@pytest.mark.parametrize("steps", range(4))
def test_abort_during_a_step_waits_for_that_step_only(steps):
    driven = Driven()
    driven.add("a2")
    driven.step(steps)
    plan = driven.begin()
    assert driven.abort("a", FinishReason.DEADLINE).finished is None
    assert driven.abort("a").outcome is AbortOutcome.ABORTED  # The reason of the first abort is reported.
    assert driven.core.flights.is_abandoned(plan)
    assert driven.core.stats().slots_used == 1
    (event,) = driven.end(plan)
    assert isinstance(event, RequestFinished)
    assert event.reason is FinishReason.DEADLINE
    check_iterative_idle(driven.core)
    assert driven.abort("a").outcome is AbortOutcome.ALREADY_FINISHED


def test_an_aborted_request_does_not_affect_others_in_the_step():
    driven = Driven()
    driven.add("a2 b2")
    driven.step()
    plan = driven.begin()
    driven.abort("a")
    assert not driven.core.flights.is_abandoned(plan)
    events = driven.end(plan)
    assert [type(event) for event in events] == [RequestFinished, StepDone]
    driven.run()
    assert driven.outputs == {"b": latent_after(request_of("b2"), 2)}


def test_abort_of_a_denoising_request_does_not_wait_for_the_encoding_of_another():
    driven = Driven()
    driven.add("a2")
    driven.step(2)
    driven.add("b2")
    plan = driven.begin()
    assert plan.phase is IterativePhase.ENCODE
    assert driven.abort("a").finished is not None
    driven.end(plan)
    driven.run()


def test_abort_of_a_preempted_request_frees_its_kept_slot_while_its_latent_is_moved_there():
    driven = Driven(slots=1)
    driven.add("a2")
    driven.step(2)
    driven.add("b1!")
    plan = driven.begin()
    assert plan.preempted == ("a",)
    assert driven.abort("a").finished.phase is IterativePhase.DENOISE
    assert driven.core.stats().kept_used == 0
    driven.end(plan)
    driven.run()


def test_abort_of_an_unknown_id_raises_no_error():
    assert Driven().abort("x").outcome is AbortOutcome.UNKNOWN


def test_failed_request_ends_without_affecting_other_requests():
    driven = Driven()
    driven.add("a2 b2")
    driven.step()
    driven.executor.errors[RequestId("a")] = "not a number"
    driven.run()
    assert (driven.ends["a"].reason, driven.ends["a"].message) == (FinishReason.ERROR, "not a number")
    assert driven.outputs == {"b": latent_after(request_of("b2"), 2)}


def test_result_of_an_iterative_request_does_not_depend_on_other_requests():
    alone, together = Driven(), Driven(slots=3, work=3)
    alone.add("a4+")
    alone.run()
    together.add("b3 a4+")
    together.step(2)
    together.add("c2! d5!")
    together.run()
    assert together.outputs["a"] == alone.outputs["a"]


@pytest.mark.parametrize(
    ("word", "fields", "match"),
    [
        ("a0", {}, "at least 1"),
        ("a1", {"partial_every": 0}, "at least 1"),
        ("a1", {"priority": 101}, "-100 to 100"),
        ("a1", {"encode_work": 9}, "to encode it costs 9, but a step allows only 8"),
        ("a1+", {"denoise_work": 5}, "to denoise it costs 10"),
        ("a1", {"decode_work": 9}, "to decode it costs 9"),
    ],
)
def test_image_request_beyond_the_limits_of_the_core_is_refused(word, fields, match):
    driven = Driven()
    request = request_of(word)
    kept = {name: getattr(request, name) for name in request.__struct_fields__}
    with pytest.raises(InvalidRequest, match=match):
        driven.core.add(IterativeRequest(**{**kept, **fields}))
    check_iterative_idle(driven.core)


@pytest.mark.parametrize("fields", [{"slot_count": 0}, {"kept_slot_count": -1}, {"step_work_max": 0}])
def test_iterative_core_settings_out_of_range_are_refused(fields):
    with pytest.raises(StartupError, match="must be at least"):
        IterativeSettings(**{"slot_count": 1, "step_work_max": 1, **fields})


def test_schedule_is_refused_while_an_iterative_step_is_in_flight():
    driven = Driven()
    driven.add("a1 b1")
    driven.begin()
    with pytest.raises(AssertionError, match="in flight"):
        driven.core.schedule(0.0)
