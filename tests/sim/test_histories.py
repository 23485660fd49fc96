"""Tests that scripts of histories are parsed as they were written, and that seeds pass and reach every phase."""

from __future__ import annotations

from collections import Counter

import pytest

from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.events import FinishReason
from trioserve.simulation import models
from trioserve.simulation.core.history import (
    Abort,
    Arrive,
    Begin,
    Break,
    Drain,
    Fail,
    Forget,
    Forward,
    History,
    Inquire,
    Report,
    Retract,
    Update,
    Wait,
    World,
)
from trioserve.simulation.images import core_simulator as iterative
from trioserve.simulation.router.history import (
    Add,
    Ask,
    Check,
    Crowd,
    Leave,
    Models,
    Note,
    Remove,
    Response,
    RouterHistory,
    RouterWorld,
    Send,
    Store,
    Token,
)
from trioserve.simulation.router.history import Arrive as ArriveAtRouter
from trioserve.simulation.router.history import Drain as DrainRouter
from trioserve.simulation.router.history import Fail as FailAtEndpoint
from trioserve.simulation.router.history import Wait as WaitAtRouter
from trioserve.simulation.router.routers_books import Back, Come, Die, Meet, Part, RoutersHistory, RoutersWorld
from trioserve.simulation.runs import case_of, runs_of, script_of
from trioserve.simulation.stack.http_connection import Ask as AskOverHttp
from trioserve.simulation.stack.http_connection import Connection, Delete, Front
from trioserve.simulation.stack.pause_plan import Order, Pause, Resume, Sleep, Swap, Wake
from trioserve.simulation.stack.plan import Client, Load, StackPlan, Stage, Unload

EVERYTHING = History(
    World(block_count=8, block_size=2, max_num_seqs=2, step_tokens_max=4, has_connector=True),
    (
        Arrive(id="a", prompt=(1, 2), output=3, choices=2, salt="", stops=(0,), temperature=1.0, timeout=0.5, remote=1),
        Abort(ids=("a.0", "nobody"), reason=FinishReason.DEADLINE),
        Begin(),
        Fail(ids=("a.1",)),
        Forward(),
        Update(),
        Wait(seconds=0.25),
        Report(id="a.0", what="loaded", tokens=1),
        Report(id="a.1", what="read", waits=True),
        Inquire(),
        Break(calls=("start_load",)),
        Retract(),
        Forget(),
        Drain(seconds=1.0),
    ),
)

CORE_MOMENTS = [
    *(f"aborts: {when}, {phase}" for when in ("between steps", "in a step") for phase in ("prefill", "decode")),
    "aborts: between steps, queued",
    "aborts: repeated",
    "aborts: too late",
    "aborts: unknown id",
    *(f"ended: {reason.value}" for reason in FinishReason),
    "failed",
    "preempted",
    "prefixes forgotten",
    "refused: draining",
    "refused: invalid",
    *(f"reports: {what}" for what in ("loaded", "failed", "released")),
    "retractions",
    "steps abandoned",
]
STACK_MOMENTS = [
    *(f"aborts: {outcome}" for outcome in ("aborted", "already_finished", "unknown")),
    *(f"answers: 200 {reason}" for reason in ("engine_fault", "request_aborted", "timeout")),
    *(f"answers: 503 {reason}" for reason in ("draining", "request_aborted")),
    *(f"answers: 504 {reason}" for reason in ("queue_timeout", "timeout")),
    *(
        f"answers: {what}"
        for what in ("408 body_timeout", "429 queue_full", "500 engine_fault", "broken off", "complete")
    ),
    "answers with tools: broken off",
    "answers with tools: complete",
    *(f"clients: {what}" for what in ("left early", "client timeout", "read to the end", "got the engine's fault")),
    *(f"clients: refused: {what}" for what in ("draining", "full", "no such adapter")),
    *(f"loads: {outcome}" for outcome in ("already_loaded", "loading", "ready", "too_many")),
    *(f"unloads: {outcome}" for outcome in ("done", "unknown")),
    "steps with images",
    *(f"pauses: {outcome}" for outcome in ("abort", "keep", "wait")),
    *(f"sleeps: level {level}" for level in (1, 2)),
    *(f"swaps: {outcome}" for outcome in ("abort", "keep", "recompute")),
    "answers: 503 paused",
    "resumes",
    *(f"ends: {reason}" for reason in ("abort", "deadline", "length")),
    *(f"deletes: {outcome}" for outcome in ("aborted", "already_finished", "unknown")),
    "connections stalled",
    "requests that resume a response",
    "requests with stop strings",
    "engines broken",
    "server: exchanges_stalled_total",
    "stalls",
    *(f"ways to leave: {way}, HTTP/{http}" for way in ("abort", "close", "half-close") for http in (1, 2)),
    *(f"ways to leave: {way}, HTTP/2" for way in ("goaway", "reset")),
]
STACK = StackPlan(
    Stage(
        block_count=8,
        max_num_seqs=2,
        step_tokens_max=4,
        waiting_requests_max=4,
        step_seconds=(0.01,),
        schedule_seed=3,
        front=Front(buffer_bytes=1024),
        family="mistral",
    ),
    (
        Client(number=0, id="r0", at=0.0, prompt=(1, 2), output=3, form=("yes, indeed",)),
        Connection(number=0, http=1, pieces=(3, 20), is_pipelined=True),
        AskOverHttp(number=0, connection=0, prompts=((1, 2), (3,)), output=2, streamed=True, leaves_after=100),
        AskOverHttp(number=1, connection=0, prompts=((4,),), output=2, id="h1"),
        AskOverHttp(number=2, connection=1, prompts=((5,),), output=2, id="h2", way="goaway", patience=0.02),
        AskOverHttp(number=3, connection=1, prompts=(tuple(b"f g text 0"),), output=20, has_tools=True),
        AskOverHttp(
            number=4, connection=3, prompts=((6,),), output=8, form=("yes, indeed",), stops=("in",), known_count=6
        ),
        Delete(at=0.01, id="h1"),
        Order(at=0.02, ids=("r0",)),
        Order(at=0.03, drains=True),
        Order(at=0.04, ends_all=True),
    ),
)
LENDING = StackPlan(
    Stage(
        block_count=30,
        max_num_seqs=2,
        step_tokens_max=4,
        waiting_requests_max=8,
        step_seconds=(0.005,),
        schedule_seed=3,
        adapters_max=2,
        load_seconds=0.001,
        room_tiles=10,
        tile_seconds=0.002,
    ),
    (
        Load(at=0.0, name="a", content="x"),
        Load(at=0.005, name="a", content="y", replaces=True),
        Client(number=0, id="r0", at=0.001, prompt=(3,), output=4, adapter="a"),
        Client(number=1, id="r1", at=0.001, prompt=(3,), output=4, images=(0, 2), patience=0.02),
        Client(number=2, id="r2", at=0.006, prompt=(3,), output=4, adapter="a", images=(1,)),
        Unload(at=0.01, name="a", seconds=0.05),
    ),
)
HALTS = StackPlan(
    Stage(
        block_count=20,
        max_num_seqs=2,
        step_tokens_max=6,
        waiting_requests_max=8,
        step_seconds=(0.01,),
        schedule_seed=3,
        opening_seconds=0.05,
    ),
    (
        Client(number=0, id="r0", at=0.0, prompt=(1, 2), output=8),
        Client(number=1, id="r1", at=0.04, prompt=(3,), output=8, patience=0.03),
        Connection(number=0),
        AskOverHttp(number=0, connection=0, prompts=((4, 5),), output=12, id="h0", streamed=True),
        Pause(at=0.01, mode="wait", patience=0.005),
        Resume(at=0.02),
        Sleep(at=0.03, level=2, mode="keep", patience=0.015),
        Wake(at=0.06),
        Pause(at=0.06),
        Sleep(at=0.12),
        Pause(at=0.15, mode="abort"),
        Wake(at=0.2, patience=0.01),
    ),
)
SWAPS = StackPlan(
    Stage(
        block_count=20,
        max_num_seqs=3,
        step_tokens_max=8,
        waiting_requests_max=8,
        step_seconds=(0.01,),
        schedule_seed=3,
        overlaps=True,
    ),
    (
        Client(number=0, id="r0", at=0.0, prompt=(1, 2, 3, 4, 5), output=8, choices=2),
        Client(number=1, id="r1", at=0.03, prompt=(1, 2, 3, 4, 6), output=6),
        Client(number=2, id="r2", at=0.06, prompt=(1, 2, 3, 4, 6), output=3),
        Swap(at=0.025, number=1, seconds=0.01),
        Swap(at=0.04, number=2, in_flight="recompute", patience=0.02),
        Pause(at=0.05),
        Swap(at=0.055, number=3, breaks=True),
        Swap(at=0.07, number=1, in_flight="abort"),
        Resume(at=0.1),
    ),
)
ROUTER_MOMENTS = [
    "endpoints that return",
    *(f"faults: {fault}" for fault in ("broke", "busy", "unreachable")),
    "given up",
    "grants: fewer slots than sequences",
    "retries",
    *(
        f"leaves: {moment}"
        for moment in (
            "in the queue",
            "in the queue again",
            "leased, not sent",
            "before the first token",
            "after the first token",
            "ended",
        )
    ),
    *(
        f"refused: {reason}"
        for reason in (
            "draining",
            "no_endpoint",
            "pinned_endpoint_overloaded",
            "queue_full",
            "queue_timeout",
            "queue_wait_over",
            "too many sequences",
        )
    ),
    "reports: false",
    "reports: true",
]
ROUTER = RouterHistory(
    RouterWorld(policy="kv_aware", seed=3, leases_max=2, waiting_depth_max=1, failures_max=1, slow_start_seconds=1.5),
    (
        Add(id="e0", models=("m", "n"), leases_max=3, seats=2, strangers=1, tells_seats=False),
        Add(id="e1"),
        Check(id="e0"),
        Check(id="e1", is_well=True),
        Store(id="e0", blocks=("a", "b")),
        Store(id="e0", blocks=("b",), is_removed=True),
        ArriveAtRouter(
            name="a", tenant="t", priority=1, sequences=2, prompt_tokens=10, session="s", blocks=("a",), patience=0.5
        ),
        ArriveAtRouter(name="b", model="n", pinned=None),
        ArriveAtRouter(name="c", pinned="e1"),
        *(ArriveAtRouter(name=f"d{index}") for index in range(4)),
        Send(name="a"),
        Ask(id="e0"),
        Response(id="e0", lie=(1, 2)),
        Note(id="e0"),
        FailAtEndpoint(name="a", fault="busy", busy_seconds=0.2),
        Crowd(count=3, tenant="u", patience=1.0),
        Send(name="b"),
        Token(name="b"),
        WaitAtRouter(seconds=0.25, is_late=True),
        Models(id="e0", models=("m",)),
        Remove(id="e1"),
        Leave(name="c"),
        Leave(name="b"),
        WaitAtRouter(seconds=1.0),
        Add(id="e1", leases_max=1),
        DrainRouter(),
    ),
)
ROUTERS = RoutersHistory(
    RoutersWorld(routers=3, endpoints=2, seats=2, leases_max=3, waiting_depth_max=1, shares=True, seed=3),
    (
        *(Come(number=number, at=3.0, router=number, seconds=2.5) for number in range(3)),
        Come(number=3, at=3.1, tenant="little", patience=0.2),
        Part(at=3.2, router=0, peer=1),
        Die(at=3.5, router=2),
        *(Come(number=number, at=4.0, router=number, patience=1.0) for number in range(4, 12)),
        Meet(at=5.0, router=0, peer=1),
        Back(at=12.0, router=2),
        Die(at=12.5, router=0),
        Come(number=12, at=13.0, router=0),
    ),
)
ROUTERS_MOMENTS = [
    "clients that left",
    "grants",
    "routers that came back",
    "routers that died",
    "routers that lost sight of each other",
    "routers that met",
]

ITERATIVE = iterative.IterativeHistory(
    iterative.IterativeWorld(slots=1, kept=1, work=4),
    (
        iterative.Arrive(id="a", steps=3, seed=5, guided=True, encode=2, denoise=2, decode=4, partial_every=2),
        *(iterative.Begin(), iterative.Forward(), iterative.Update()) * 2,
        iterative.Arrive(id="b", priority=-1),
        iterative.Arrive(id="c", steps=0),
        iterative.Begin(),
        iterative.Abort(ids=("a", "nobody"), reason=FinishReason.DEADLINE),
        iterative.Fail(ids=("b",)),
        iterative.Forward(),
        iterative.Update(),
    ),
)
ITERATIVE_MOMENTS = [
    *(f"aborts: between steps, {phase}" for phase in ("queued", "denoise", "decode")),
    *(f"aborts: in a step, {phase}" for phase in ("encode", "denoise", "decode")),
    *(f"aborts: {moment}" for moment in ("preempted", "repeated", "too late", "unknown id")),
    *(f"ended: {reason}" for reason in ("abort", "deadline", "error", "stop")),
    "latents moved back into a slot",
    "partial results",
    "preempted",
    "refused: invalid",
    "steps abandoned",
    "steps at different timesteps",
]

MODELS = models.ModelsHistory(
    models.ModelsWorld(memory=3, bytes=(2, 2, 1), pinned=(2,), turn=2.0, keep_alive=5.0),
    (
        models.Loaded(model=2),
        models.Arrive(id="a", model=0),
        models.LoadFails(model=0),
        models.LoadNow(model=0),
        models.Arrive(id="b", model=1),
        models.Loaded(model=0),
        models.Arrive(id="c", model=0),
        models.Advance(seconds=4.0),
        models.Leave(id="c"),
        models.Unloaded(model=0),
        models.Loaded(model=1),
        models.Crash(model=1),
        models.UnloadNow(model=0),
        models.Leave(id="nobody"),
    ),
)
MODELS_MOMENTS = [
    *(f"orders: {state}" for state in ("draining", "loaded", "loading", "unloading")),
    *(f"refused: {reason}" for reason in ("load failed", "too large")),
    *("crashes", "left while waiting", "load requests", "loads failed", "served", "unload requests"),
]


def test_parsing_a_script_of_a_core_history_restores_the_history():
    assert case_of(script_of(EVERYTHING), History) == EVERYTHING


def test_comments_and_empty_lines_of_a_script_are_skipped():
    assert case_of("# once\n\n" + script_of(EVERYTHING), History) == EVERYTHING


@pytest.mark.parametrize(
    ("script", "match"),
    [
        ("", "begins with 'world"),
        ("begin", "begins with 'world"),
        (script_of(EVERYTHING) * 2, "has only one"),
        ("world block_count=8", "line 1"),
        (script_of(EVERYTHING) + "abort ids=[1]", "line 16"),
        (script_of(EVERYTHING) + "abort ids=", "line 16"),
        (script_of(EVERYTHING) + "explode", "line 16"),
    ],
)
def test_error_of_an_invalid_script_names_the_line(script, match):
    with pytest.raises(InvalidRequest, match=match):
        case_of(script, History)


@pytest.mark.parametrize("missing", range(len(EVERYTHING.events)))
def test_core_history_still_runs_without_some_of_its_events(missing):
    events = EVERYTHING.events[:missing] + EVERYTHING.events[missing + 1 :]
    for kept in (events, events[::-1]):
        assert runs_of("core").run_script(script_of(History(EVERYTHING.world, kept))).failure is None


@pytest.mark.parametrize("plan", [STACK, LENDING, HALTS, SWAPS], ids=["connections", "lending", "halts", "swaps"])
def test_parsing_a_script_of_a_stack_plan_restores_the_plan(plan):
    assert case_of(script_of(plan), StackPlan) == plan


@pytest.mark.parametrize(
    ("plan", "missing"),
    [(plan, missing) for plan in (STACK, LENDING, HALTS, SWAPS) for missing in range(len(plan.parts))],
)
def test_stack_plan_still_runs_without_some_of_its_parts(plan, missing):
    parts = plan.parts[:missing] + plan.parts[missing + 1 :]
    for kept in (parts, parts[::-1]):
        assert runs_of("stack").run_script(script_of(StackPlan(plan.stage, kept))).failure is None


def test_parsing_a_script_of_a_router_history_restores_the_history():
    assert case_of(script_of(ROUTER), RouterHistory) == ROUTER


@pytest.mark.parametrize("script", ["", 'send name="a"', "router\nrouter"])
def test_router_script_without_settings_first_is_refused(script):
    with pytest.raises(InvalidRequest, match="begins with 'router "):
        case_of(script, RouterHistory)


@pytest.mark.parametrize("missing", range(len(ROUTER.events)))
def test_router_history_still_runs_without_some_of_its_events(missing):
    events = ROUTER.events[:missing] + ROUTER.events[missing + 1 :]
    for kept in (events, events[::-1]):
        assert runs_of("router").run_script(script_of(RouterHistory(ROUTER.world, kept))).failure is None


def test_parsing_a_script_of_several_routers_restores_the_history():
    assert case_of(script_of(ROUTERS), RoutersHistory) == ROUTERS


@pytest.mark.parametrize("script", ["", "come number=1", "routers\nrouters"])
def test_routers_script_without_settings_first_is_refused(script):
    with pytest.raises(InvalidRequest, match="begins with 'routers"):
        case_of(script, RoutersHistory)


@pytest.mark.parametrize("missing", range(len(ROUTERS.events)))
def test_history_of_several_routers_still_runs_without_some_of_its_events(missing):
    events = ROUTERS.events[:missing] + ROUTERS.events[missing + 1 :]
    for kept in (events, events[::-1]):
        assert runs_of("routers").run_script(script_of(RoutersHistory(ROUTERS.world, kept))).failure is None


def test_parsing_a_script_of_an_iterative_history_restores_the_history():
    assert case_of(script_of(ITERATIVE), iterative.IterativeHistory) == ITERATIVE


@pytest.mark.parametrize("script", ["", "begin", "iterative\niterative"])
def test_iterative_script_without_settings_first_is_refused(script):
    with pytest.raises(InvalidRequest, match="begins with 'iterative"):
        case_of(script, iterative.IterativeHistory)


@pytest.mark.parametrize("missing", range(len(ITERATIVE.events)))
def test_iterative_history_still_runs_without_some_of_its_events(missing):
    events = ITERATIVE.events[:missing] + ITERATIVE.events[missing + 1 :]
    for kept in (events, events[::-1]):
        script = script_of(iterative.IterativeHistory(ITERATIVE.world, kept))
        assert runs_of("iterative").run_script(script).failure is None


def test_parsing_a_script_of_a_models_history_restores_the_history():
    assert case_of(script_of(MODELS), models.ModelsHistory) == MODELS


@pytest.mark.parametrize("missing", range(len(MODELS.events)))
def test_models_history_still_runs_without_some_of_its_events(missing):
    events = MODELS.events[:missing] + MODELS.events[missing + 1 :]
    for kept in (events, events[::-1]):
        assert runs_of("models").run_script(script_of(models.ModelsHistory(MODELS.world, kept))).failure is None


@pytest.mark.parametrize(("mode", "moments"), [("iterative", ITERATIVE_MOMENTS), ("models", MODELS_MOMENTS)])
def test_seeds_pass_and_reach_every_moment(mode, moments):
    totals: Counter[str] = Counter()
    for seed in range(120):
        verdict = runs_of(mode).run_seed(seed, 150)
        assert verdict.failure is None, (seed, verdict.failure)
        totals.update(verdict.counts)
    assert [moment for moment in moments if not totals[moment]] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "step_count", "seed_count", "moments"),
    [
        (runs_of("core").run_seed, 100, 1000, CORE_MOMENTS),
        (runs_of("stack").run_seed, 12, 200, STACK_MOMENTS),
        (runs_of("router").run_seed, 150, 300, ROUTER_MOMENTS),
        (runs_of("routers").run_seed, 100, 300, ROUTERS_MOMENTS),
        (runs_of("iterative").run_seed, 150, 300, ITERATIVE_MOMENTS),
        (runs_of("models").run_seed, 150, 3000, MODELS_MOMENTS),
    ],
    ids=["core", "stack", "router", "routers", "iterative", "models"],
)
def test_seeds_of_each_simulation_pass_and_reach_every_phase(run, step_count, seed_count, moments):
    totals: Counter[str] = Counter()
    for seed in range(seed_count):
        verdict = run(seed, step_count)
        assert verdict.failure is None, (seed, verdict.failure)
        totals.update(verdict.counts)
    assert {moment: totals[moment] for moment in moments if totals[moment] < 3} == {}
