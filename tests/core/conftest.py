"""Driver of a core with a fake model. One line of text (a script) controls it, so that test cases are data.

A script is a list of steps divided by "|". The events that the words describe happen before the step, unless noted
otherwise:

    a:12       request a arrives with a prompt of 12 tokens of its own
    a:b8+4     ... with the first 8 tokens of b's prompt and 4 tokens of its own
    a:12>3     ... with max_tokens 3 (otherwise 1)
    a:12@-1    ... with priority -1        a:12#x  ... with the salt x        a:12=p  ... with prompt logprobs
    a:12<8     ... and 8 of its prompt tokens can be loaded from another engine
    !a         a is aborted                ~a      a is aborted while the step runs
    ?a         a fails in this step
    +a  +a4    the load of a arrives, all of it or 4 tokens          -a      the load of a fails
    _9         9 seconds pass
    ^          all requests are preempted                            %       all cached blocks become unfindable

The expectation uses the same notation: "-b" for a request that lost its blocks, then the chunks in the order of the
plan: "a0-7" for the tokens at positions 0 to 7, "a8*" for a chunk that samples, and "." for a step without chunks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

import pytest

from trioserve.contracts.events import (
    AbortOutcome,
    AbortResult,
    EngineEvent,
    FinishReason,
    PromptLogprobs,
    RequestFinished,
    TokenLogprob,
    TokensReady,
)
from trioserve.contracts.ids import RequestId
from trioserve.contracts.kv_transfer import TransferEvent, TransferFault
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.step import StepPlan, StepResult
from trioserve.core.engine import EngineCore
from trioserve.core.settings import CoreSettings
from trioserve.engine.structured_output import MasksAtOnce
from trioserve.simulation.reference_engine import ReferenceEngine
from trioserve.testing.fake_executor import FakeExecutor, FakeModel
from trioserve.testing.invariants import check_core, check_idle
from trioserve.testing.scripted_connector import FakeConnector

ARRIVAL = re.compile(
    r"(?P<name>\w):(?:(?P<other>\w)(?P<shared>\d+)\+)?(?P<own>\d+)(?:<(?P<remote>\d+))?"
    r"(?:>(?P<output>\d+))?(?:@(?P<priority>-?\d+))?(?:#(?P<salt>\w+))?(?P<logprobs>=p)?"
)
ARRIVED = re.compile(r"\+(?P<name>\w)(?P<count>\d+)?")


def own_tokens(name: str, count: int) -> tuple[int, ...]:
    """Return `count` tokens that differ from the tokens of every other name (one letter)."""
    return tuple(ord(name) * 1000 + position for position in range(count))


class Driver:
    """Drives a core, checks the core after every event, and records its events. Compares responses with the reference.

    Args:
        core: the core.
        executor: computes the plans.
        connector: matches the tokens in `remote`, and holds the requests in `holds`. None: the core has no connector.
    """

    def __init__(self, core: EngineCore, executor: FakeExecutor, connector: FakeConnector | None = None) -> None:
        self.core = core
        self.executor = executor
        self.connector = connector
        self.remote: dict[str, int] = {}
        self.holds: set[str] = set()
        if connector is not None:
            connector.matched_count = lambda request, computed: max(0, self.remote.get(request.id, 0) - computed)
            connector.holds = lambda request, reason: request.id in self.holds
        self.now = 0.0
        self.requests: dict[str, EngineRequest] = {}
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[TokenLogprob]] = {}
        self.prompt_logprobs: dict[str, list[TokenLogprob | None]] = {}
        self.finished: dict[str, RequestFinished] = {}

    def add(self, name: str, prompt: Sequence[int], output_tokens_max: int = 1, **more: object) -> None:
        # The names seed and stop_token_ids exist in both structs. In this test they are set in the engine request.
        of_sampling = more.keys() & set(SamplingParams.__struct_fields__) - set(EngineRequest.__struct_fields__)
        sampling = SamplingParams(temperature=0.0, **{key: more.pop(key) for key in of_sampling})
        request = EngineRequest(
            id=RequestId(name),
            prompt_token_ids=tuple(prompt),
            output_tokens_max=output_tokens_max,
            sampling=sampling,
            **{"stop_token_ids": frozenset(), "seed": 0, **more},
        )
        self.core.add(request)
        self.requests[name] = request
        self.tokens[name], self.logprobs[name], self.prompt_logprobs[name] = [*request.resumed_output], [], []
        self.check()

    def check(self) -> None:
        check_core(self.core)
        if self.connector is not None:
            self.connector.check()
            assert self.connector.finished == {name: event.reason for name, event in self.finished.items()}

    def report(self, event: TransferEvent) -> None:
        """Pass a report of the connector to the core."""
        for ended in self.core.on_transfer(event, self.now):
            self._take(ended)
        self.check()

    def wait(self, seconds: float) -> None:
        self.now += seconds
        for ended in self.core.expire(self.now):
            self._take(ended)
        self.check()

    @property
    def faults(self) -> dict[str, int]:
        """Return the counts of faults so far, without counts of 0."""
        totals: dict[TransferFault, int] = self.core.stats().transfer_faults_total
        return {fault.value: total for fault, total in totals.items() if total}

    def abort(self, *names: str, reason: FinishReason = FinishReason.ABORT) -> dict[RequestId, AbortResult]:
        results = self.core.abort([RequestId(name) for name in names], reason, now=self.now)
        for result in results.values():
            if result.finished is not None:
                self._take(result.finished)
        self.check()
        return results

    def preempt_all(self) -> list[RequestId]:
        """Preempt all requests, and check that no live request has a block."""
        preempted = self.core.preempt_all(self.now)
        self.check()
        assert self.core.stats().blocks_used == 0
        return preempted

    def step(self, *, abort: Iterable[str] = (), fail: Iterable[str] = ()) -> StepPlan | None:
        """Do one whole step. Requests in `abort` are aborted during the step, and requests in `fail` fail in the
        step.
        """
        plan = self.core.schedule(self.now)
        self.check()
        if plan is None:
            return None
        self.executor.errors.update({RequestId(name): f"{name} is broken" for name in fail})
        result = self.executor.execute(plan)
        for name in abort:
            assert self.abort(name)[RequestId(name)].outcome is AbortOutcome.ABORTED
        self.take_result(plan, result)
        return plan

    def take_result(self, plan: StepPlan, result: StepResult | None) -> list[EngineEvent]:
        """Pass the result of a plan to the core. None means that the plan was abandoned."""
        if result is None:
            events = self.core.drop_plan(plan, self.now)
        else:
            events = self.core.update_from_output(plan, result, self.now)
        for event in events:
            self._take(event)
        self.check()
        return events

    def run(self, steps_max: int = 10_000) -> None:
        """Run all requests to their end. Check that no request or block remains, and that each complete response equals
        the reference.
        """
        for _ in range(steps_max):
            if self.step() is None:
                deadline = self.core.next_deadline()
                if deadline is None:
                    break
                self.wait(deadline - self.now)
        check_idle(self.core)
        self.compare()

    def compare(self) -> None:
        reference = ReferenceEngine(self.executor.model)
        assert set(self.finished) == set(self.requests)
        for name, request in self.requests.items():
            finished, response = self.finished[name], reference.response(request)
            tokens = tuple(self.tokens[name])
            assert tokens == response.token_ids[: len(tokens)], name
            drawn = (response.logprobs or ())[len(request.resumed_output) :]
            assert tuple(self.logprobs[name]) == drawn[: len(self.logprobs[name])], name
            prompt_logprobs = tuple(self.prompt_logprobs[name])
            assert prompt_logprobs == (response.prompt_logprobs or ())[: len(prompt_logprobs)], name
            if finished.reason in (FinishReason.STOP, FinishReason.LENGTH):
                assert tokens == response.token_ids, name
                assert (finished.reason, finished.stop_token_id) == (response.reason, response.stop_token_id), name
                assert prompt_logprobs == (response.prompt_logprobs or ()), name

    def _take(self, event: EngineEvent) -> None:
        name = str(event.request_id)
        assert name not in self.finished, f"{name} has finished, but then came {event}"
        if isinstance(event, TokensReady):
            assert len(event.token_ids) >= 1
            self.tokens[name] += event.token_ids
            self.logprobs[name] += event.logprobs or ()
        elif isinstance(event, PromptLogprobs):
            known = self.requests[name].resumed_output
            assert len(self.tokens[name]) == len(known), "prompt logprobs come before the first token"
            self.prompt_logprobs[name] += event.logprobs
        else:
            self.finished[name] = event


def make_driver(*, model: FakeModel | None = None, connected: bool = False, **settings: object) -> Driver:
    defaults = {"block_count": 64, "block_size": 4, "max_num_seqs": 4, "step_tokens_max": 8}
    merged = {**defaults, **settings}
    merged.setdefault("context_tokens_max", merged["block_count"] * merged["block_size"])
    executor = FakeExecutor(
        block_count=merged["block_count"],
        block_size=merged["block_size"],
        model=model,
        state_slot_count=merged.get("state_slot_count", 0) + merged.get("snapshot_slot_count", 0),
    )
    connector = FakeConnector(executor) if connected else None
    core = EngineCore(CoreSettings(**merged), connector=connector, mask_maker=MasksAtOnce(executor.model.vocab_size))
    return Driver(core, executor, connector)


def shown(plan: StepPlan | None) -> str:
    if plan is None:
        return "."
    parts = [f"-{request_id}" for request_id in plan.preempted]
    for chunk in plan.chunks:
        last = chunk.start + chunk.count - 1
        span = f"{chunk.start}" if chunk.count == 1 else f"{chunk.start}-{last}"
        parts.append(f"{chunk.request.id}{span}{'*' if chunk.samples else ''}")
    return " ".join(parts)


def run_script(script: str, expect: str, **settings: object) -> Driver:
    """Run a script, and compare its steps with the expectation."""
    driver = make_driver(**settings)
    expected = [" ".join(step.split()) for step in expect.split("|")]
    moments = [step.split() for step in script.split("|")]
    steps: list[str] = []
    while len(steps) < max(len(moments), len(expected)) or list(driver.core.live_requests()):
        assert len(steps) < 200, f"the script does not end: {' | '.join(steps)}"
        during: dict[str, list[str]] = {"~": [], "?": []}
        for word in moments[len(steps)] if len(steps) < len(moments) else []:
            if word[0] in during:
                during[word[0]].append(word[1:])
            elif word[0] == "!":
                driver.abort(word[1:])
            elif word[0] == "-":
                driver.report(driver.connector.load_failed(RequestId(word[1:])))
            elif word[0] == "_":
                driver.wait(float(word[1:]))
            elif word == "^":
                driver.preempt_all()
            elif word == "%":
                driver.core.forget_prefixes()
                driver.check()
            elif (arrived := ARRIVED.fullmatch(word)) is not None:
                count = None if arrived["count"] is None else int(arrived["count"])
                driver.report(driver.connector.loaded(RequestId(arrived["name"]), count))
            else:
                _arrive(driver, word)
        steps.append(shown(driver.step(abort=during["~"], fail=during["?"])))
    assert steps == expected, f"got {' | '.join(steps)}"
    driver.run()
    return driver


def _arrive(driver: Driver, word: str) -> None:
    match = ARRIVAL.fullmatch(word)
    assert match is not None, f"{word} is not an arrival"
    name, other = match["name"], match["other"]
    if match["remote"] is not None:
        driver.remote[name] = int(match["remote"])
    shared = driver.requests[other].prompt_token_ids[: int(match["shared"])] if other else ()
    driver.add(
        name,
        shared + own_tokens(name, int(match["own"])),
        int(match["output"] or 1),
        priority=int(match["priority"] or 0),
        cache_salt=match["salt"],
        prompt_logprobs=0 if match["logprobs"] else None,
    )


@pytest.fixture
def check() -> Callable[..., Driver]:
    """Run a script to its end, compare steps and responses, and return the driver: check(script, expect,
    **settings).
    """
    return run_script


@pytest.fixture
def drive() -> Callable[..., Driver]:
    """Return a function that makes a driver of the core: drive(**settings).

    It is for cases that the one-line notation of tests cannot express.
    """
    return make_driver
