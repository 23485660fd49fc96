"""Tests streams whose endpoints fail: where they resume, in which order, how often, and what ends them."""

from __future__ import annotations

import math

import pytest

from trioserve.contracts.endpoint import EndpointId, EndpointLoad
from trioserve.contracts.errors import EndpointLost, Overloaded, RequestPoisoned
from trioserve.contracts.kv_transfer import EngineRole
from trioserve.router.endpoint_state import Fault
from trioserve.router.ticket import TicketFollower, TicketState


def leases(router):
    return dict(router.core.stats().leases)


def streaming(router, **fields):
    """Return a ticket whose client has received output."""
    ticket = router.sent(**fields)
    router.core.first_token(ticket, router.now)
    return ticket


def break_off(router, ticket, *, fault=Fault.BROKE, tokens=100):
    return router.core.failed(ticket, fault, router.now, token_count=tokens)


def test_stream_resumes_at_another_endpoint_after_its_lease_is_released(make_router):
    router = make_router()
    router.endpoint("a", leases_max=1)
    router.endpoint("b", leases_max=1)
    ticket = streaming(router)
    assert break_off(router, ticket)
    assert (ticket.state, ticket.endpoint) == (TicketState.LEASED, "b")
    assert leases(router) == {"a": 0, "b": 1}
    assert router.changed == [ticket]
    router.core.sent(ticket)
    router.core.first_token(ticket, router.now)
    router.leave(ticket)
    assert leases(router) == {"a": 0, "b": 0}
    assert router.core.stats().continuations_total == 1


def test_stream_resumes_if_its_lease_ended_at_its_first_token(make_router):
    router = make_router(lease_until="first_token")
    router.endpoint("a", leases_max=1)
    b = router.endpoint("b", leases_max=1)
    ticket = streaming(router)
    assert ticket.state is TicketState.RUNNING_FREE
    assert break_off(router, ticket)
    router.core.sent(ticket)
    router.core.first_token(ticket, router.now)
    assert (ticket.state, ticket.endpoint) == (TicketState.RUNNING_FREE, "b")
    assert router.core.endpoints[b].in_flight == 1
    assert leases(router) == {"a": 0, "b": 0}


def test_stream_that_leaves_while_it_waits_to_resume_is_not_served(make_router):
    router = make_router()
    router.endpoint("a", leases_max=1)
    router.endpoint("b", leases_max=1)
    first, second = streaming(router), streaming(router)
    assert break_off(router, first)
    assert first.state is TicketState.WAITING
    assert router.core.stats().continuing == 1
    router.leave(first)
    router.leave(second)
    assert router.core.stats().continuing == router.core.stats().waiting == 0
    assert leases(router) == {"a": 0, "b": 0}
    assert router.core.next_tick(router.now) == math.inf


def test_stream_waits_at_most_continuation_seconds_max(make_router):
    router = make_router(continuation_seconds_max=5, queue_seconds_max=1)
    router.endpoint("a", leases_max=1)
    router.endpoint("b", leases_max=1)
    first = streaming(router, queue_deadline=router.now + 0.5)
    streaming(router)
    assert break_off(router, first)
    router.after(4.9)
    assert first.state is TicketState.WAITING, "its queue deadline was for the wait before its first token"
    router.after(0.2)
    assert isinstance(first.refusal, Overloaded)
    assert first.refusal.reason == "continuation_wait_over"


def test_stream_returns_to_the_endpoint_that_failed_it_once_that_endpoint_is_healthy(make_router):
    router = make_router()
    a = router.endpoint("a")
    ticket = streaming(router)
    assert break_off(router, ticket)
    router.after(2)
    assert ticket.state is TicketState.WAITING
    router.core.note_health(a, True, router.now)
    assert (ticket.state, ticket.endpoint) == (TicketState.LEASED, "a")


def test_stream_ends_if_no_endpoint_serves_its_model(make_router):
    router = make_router()
    a = router.endpoint("a")
    ticket = streaming(router)
    router.core.drain_endpoint(a, router.now)
    assert not break_off(router, ticket)
    assert isinstance(ticket.refusal, EndpointLost)
    assert router.core.stats().continuations_refused_total == {"no_endpoint": 1}
    assert router.gone == ["a"]


def test_stream_ends_with_an_error_if_its_endpoints_fail_in_a_row(make_router):
    router = make_router(breaks_max=2)
    for id in "abc":
        router.endpoint(id)
    ticket = streaming(router)
    assert break_off(router, ticket, tokens=100)
    router.core.sent(ticket)
    assert not break_off(router, ticket, tokens=101)
    assert isinstance(ticket.refusal, RequestPoisoned)
    assert "2 endpoints in a row" in str(ticket.refusal)
    assert router.core.stats().continuations_refused_total == {"poisoned": 1}


def test_stream_with_progress_resumes_each_time(make_router):
    router = make_router(breaks_max=2, progress_tokens_min=16)
    for id in "abcd":
        router.endpoint(id)
    ticket = streaming(router)
    for tokens in (3, 19, 35):
        assert break_off(router, ticket, tokens=tokens)
        router.core.sent(ticket)
        router.core.first_token(ticket, router.now)


@pytest.mark.parametrize("fault", [Fault.UNREACHABLE, Fault.BUSY, Fault.LEAVING])
def test_faults_that_a_request_cannot_cause_do_not_count_against_the_request(make_router, fault):
    router = make_router(breaks_max=1)
    router.endpoint("a")
    router.endpoint("b")
    ticket = streaming(router)
    assert break_off(router, ticket, fault=fault)


def test_stream_resumes_at_most_continuations_max_times(make_router):
    router = make_router(continuations_max=1)
    for id in "abc":
        router.endpoint(id)
    ticket = streaming(router)
    assert break_off(router, ticket)
    router.core.sent(ticket)
    router.core.first_token(ticket, router.now)
    assert not break_off(router, ticket, tokens=200)
    assert router.core.stats().continuations_refused_total == {"too_many": 1}


def test_resumed_streams_per_second_are_limited(make_router):
    router = make_router(continuations_per_second_max=4, failures_max=1)
    router.endpoint("a", leases_max=20)
    tickets = [streaming(router) for _ in range(10)]
    router.endpoint("b", leases_max=20)
    for ticket in tickets:
        break_off(router, ticket)
    assert leases(router)["b"] == 4
    newcomer = router.enter()
    assert newcomer.state is TicketState.LEASED, "a newcomer does not wait for streams that the rate limit holds back"
    router.after(0.5)
    assert leases(router)["b"] == 4 + 1 + 2
    router.after(1.0)
    assert leases(router)["b"] == 10 + 1


def test_streams_are_served_before_newcomers_but_do_not_starve_newcomers(make_router):
    router = make_router(continuations_in_a_row_max=2, failures_max=100)
    router.endpoint("a", leases_max=4)
    streams = [streaming(router) for _ in range(4)]
    router.endpoint("b", leases_max=1)
    running = router.sent()
    for stream in streams:
        break_off(router, stream)
    # Other requests use the slots of the endpoint that failed the streams.
    others = [router.enter() for _ in range(4)]
    newcomers = [router.enter() for _ in range(2)]
    assert {ticket.state for ticket in others} == {TicketState.LEASED}
    order = []
    router.changed.clear()
    for _ in range(6):
        router.leave(running)
        running = router.changed[-1]
        order.append("stream" if running in streams else "newcomer")
    assert order == ["stream", "stream", "newcomer", "stream", "stream", "newcomer"]
    assert [ticket.state for ticket in newcomers] == [TicketState.ENDED, TicketState.LEASED]


def test_newcomer_with_better_priority_is_served_before_streams(make_router):
    router = make_router()
    router.endpoint("a", leases_max=1)
    stream = streaming(router, priority=1)
    router.endpoint("b", leases_max=1)
    running = router.sent()
    break_off(router, stream)
    router.sent(priority=1)
    better = router.enter(priority=0)
    router.leave(running)
    assert (better.endpoint, stream.state) == ("b", TicketState.WAITING)


def test_streams_that_wait_to_resume_do_not_count_against_the_queue_limit(make_router):
    router = make_router(queue_requests_max=1, failures_max=100)
    router.endpoint("a", leases_max=2)
    streams = [streaming(router) for _ in range(2)]
    router.endpoint("b", leases_max=1)
    router.sent()
    for stream in streams:
        break_off(router, stream)
    for _ in range(2):
        router.sent()
    assert router.enter().state is TicketState.WAITING
    assert router.core.stats().waiting == 3


def test_stream_resumes_at_an_endpoint_with_the_same_fingerprint(make_router):
    router = make_router()
    for id, fingerprint in (("a", "x"), ("b", "y"), ("c", "x")):
        router.core.note_fingerprint(router.endpoint(id), fingerprint)
    ticket = streaming(router)
    router.sent()
    router.sent()
    router.sent()
    assert ticket.endpoint == "a"
    assert break_off(router, ticket)
    assert ticket.endpoint == "c"
    router.core.sent(ticket)
    assert break_off(router, ticket, fault=Fault.BUSY)
    assert ticket.endpoint == "b", "other text is better than no text"


def test_streams_resume_while_the_router_drains(make_router):
    router = make_router()
    router.endpoint("a", leases_max=1)
    router.endpoint("b", leases_max=1)
    first, second = streaming(router), streaming(router)
    assert break_off(router, first)
    router.core.drain(router.now)
    assert first.state is TicketState.WAITING
    router.leave(second)
    assert (first.state, first.endpoint) == (TicketState.LEASED, "b")


def test_stream_of_a_disaggregated_request_resumes_at_one_endpoint(make_router):
    router = make_router()
    both: EngineRole = "both"
    for id in "abc":
        router.endpoint(id, role=both)
    ticket = router.sent(can_be_disaggregated=True)
    router.core.prefilled(ticket, router.now)
    router.core.sent(ticket)
    router.core.first_token(ticket, router.now)
    prefilled_by = ticket.prefilled_by
    assert break_off(router, ticket)
    assert ticket.stage is None
    assert ticket.endpoint == prefilled_by, "this endpoint has the prompt"


def test_failure_of_an_endpoint_with_hundreds_of_streams_causes_few_lease_searches(make_router, monkeypatch):
    router = make_router(failures_max=10_000, continuations_per_second_max=1e6)
    router.endpoint("a", leases_max=200)
    tickets = [streaming(router) for _ in range(200)]
    router.endpoint("b", leases_max=1)
    router.sent()
    asked = 0
    grant = router.core._fleet.grant

    def counted(ticket, now):
        nonlocal asked
        asked += 1
        return grant(ticket, now)

    monkeypatch.setattr(router.core._fleet, "grant", counted)
    for ticket in tickets:
        break_off(router, ticket)
    assert asked <= 2 * len(tickets)


def test_resumed_streams_do_not_use_the_retry_budget(make_router):
    router = make_router(retry_share_max=0.0, retries_per_second_min=0.1, failures_max=100)
    for id in "ab":
        router.endpoint(id)
    assert break_off(router, streaming(router))
    assert router.core.failed(router.sent(), Fault.FAILED, router.now)
    assert not router.core.failed(router.sent(), Fault.FAILED, router.now), "the retry budget is empty"
    assert break_off(router, streaming(router)), "a stream does not use the retry budget"


def test_fingerprint_of_a_removed_endpoint_is_ignored(make_router):
    router = make_router()
    router.core.note_fingerprint(EndpointId("gone"), "x")


def test_streams_that_shared_two_failed_endpoints_get_one_more_attempt(make_router):
    router = make_router(breaks_max=2, failures_max=1)
    a = router.endpoint("a")
    streams = [streaming(router) for _ in range(3)]
    for id in "bc":
        router.endpoint(id, leases_max=8)
    for stream in streams:
        assert break_off(router, stream, tokens=5)
        router.core.sent(stream)
    there = [stream for stream in streams if stream.endpoint == "b"]
    assert len(there) > 1
    router.core.note_health(a, True, router.now)
    for stream in there:
        assert break_off(router, stream, tokens=6), "another stream may be the cause"
        router.core.sent(stream)
    for stream in there:
        assert not break_off(router, stream, tokens=7)


def test_passed_health_check_resets_the_number_of_suspected_requests(make_router):
    router = make_router(breaks_max=2, failures_max=1)
    router.endpoint("a")
    first, second = streaming(router), streaming(router)
    b = router.endpoint("b")
    for stream in (first, second):
        assert break_off(router, stream, tokens=5)
        router.core.sent(stream)
    router.leave(second)
    router.core.note_health(b, True, router.now)
    assert not break_off(router, first, tokens=6)


# --- requests on trial ---


def report_well(router, id, clock):
    """Record a passed health check of the endpoint, and then a load report with this clock name."""
    router.core.note_health(EndpointId(id), True, router.now)
    report_load(router, id, clock)


def report_load(router, id, clock):
    load = EndpointLoad(running=0, waiting=0, **({} if clock is None else {"clock": clock}))
    router.core.note_load(EndpointId(id), load, router.now, sent_when_asked=0)


def on_trial(make_router, *, clocks="abc", fault=Fault.BROKE, is_certain=False, **settings):
    """Return a router, and a stream that was at two endpoints when they failed. A third endpoint is healthy."""
    router = make_router(breaks_max=2, failures_max=100, **settings)
    for id, clock in zip("abc", clocks, strict=True):
        router.endpoint(id)
        report_load(router, id, None if clock == "-" else clock)
    ticket = streaming(router)
    assert break_off(router, ticket, fault=fault, tokens=10)
    router.core.sent(ticket)
    router.core.failed(ticket, fault, router.now, token_count=11, is_certain=is_certain)
    assert [broken.endpoint for broken in ticket.broken] == ["a", "b"]
    return router, ticket


@pytest.mark.parametrize("fault", [Fault.BROKE, Fault.HUNG])
def test_stream_resumes_if_the_process_of_its_failed_endpoint_still_runs(make_router, fault):
    router, ticket = on_trial(make_router, fault=fault)
    assert ticket.state is TicketState.WAITING
    report_load(router, "b", "b")
    assert ticket.state is TicketState.WAITING, "this report may have been made before the break"
    report_well(router, "b", "b")
    assert ticket.state is TicketState.LEASED
    assert sum(leases(router).values()) == 1


def test_stream_ends_if_the_processes_of_all_its_endpoints_were_replaced(make_router):
    router, ticket = on_trial(make_router)
    report_well(router, "a", "new")
    assert ticket.state is TicketState.WAITING
    router.changed.clear()
    report_well(router, "b", "new")
    assert router.changed == [ticket]
    assert isinstance(ticket.refusal, RequestPoisoned)
    assert '"a", "b"' in str(ticket.refusal)
    assert router.core.stats().continuations_refused_total == {"poisoned": 1}
    assert router.core.next_tick(router.now) == math.inf or router.core.stats().continuing == 0


def test_stream_does_not_wait_for_checks_of_endpoints_that_reported_their_failure(make_router):
    router = make_router(breaks_max=1)
    for id in "ab":
        router.endpoint(id)
        report_load(router, id, id)
    ticket = streaming(router)
    assert not router.core.failed(ticket, Fault.BROKE, router.now, token_count=5, is_certain=True)
    assert isinstance(ticket.refusal, RequestPoisoned)


def test_stream_waits_for_the_check_of_an_endpoint_that_did_not_report_its_failure(make_router):
    router, ticket = on_trial(make_router, is_certain=True)
    report_well(router, "b", "b")
    assert ticket.state is TicketState.WAITING
    report_well(router, "a", "a")
    assert ticket.state is TicketState.LEASED


def test_stream_does_not_wait_for_checks_of_endpoints_that_report_no_clock(make_router):
    _router, ticket = on_trial(make_router, clocks="--c")
    assert isinstance(ticket.refusal, RequestPoisoned)


def test_stream_that_waits_for_checks_of_endpoints_does_not_block_other_requests_and_may_leave(make_router):
    router, ticket = on_trial(make_router, leases_max=1)
    other = streaming(router)
    assert other.state is TicketState.LEASED
    assert break_off(router, other, tokens=50)
    assert other.state is TicketState.LEASED, "it resumes before the stream that waited earlier"
    newcomer = router.enter()
    assert newcomer.state is TicketState.LEASED
    router.leave(ticket)
    assert router.core.stats().continuing == 0
    report_well(router, "b", "b")
    assert ticket.refusal is None
    router.leave(other, newcomer)
    assert set(leases(router).values()) == {0}


def test_stream_that_waits_for_checks_of_endpoints_ends_at_its_queue_deadline(make_router):
    router, ticket = on_trial(make_router, continuation_seconds_max=5)
    router.after(4.9)
    assert ticket.state is TicketState.WAITING
    router.after(0.2)
    assert isinstance(ticket.refusal, RequestPoisoned)
    assert router.core.stats().continuations_refused_total == {"poisoned": 1}


def test_stream_that_waits_for_the_check_of_an_endpoint_ends_if_the_endpoint_is_removed(make_router):
    router, ticket = on_trial(make_router)
    report_well(router, "a", "new")
    router.core.drain_endpoint(EndpointId("b"), router.now)
    assert isinstance(ticket.refusal, RequestPoisoned)


def test_stream_that_waits_for_checks_of_endpoints_releases_the_lease_at_its_next_endpoint(make_router):
    router = make_router(breaks_max=1)
    for id in "ab":
        router.endpoint(id)
        report_load(router, id, id)
    ticket = router.sent()
    router.core.first_token(ticket, router.now, can_resume=True)
    router.core.note_leaving(EndpointId("a"), router.now, move_seconds=30)
    assert ticket.next_lease is not None
    assert break_off(router, ticket)
    assert (ticket.state, leases(router)) == (TicketState.WAITING, {"a": 0, "b": 0})
    report_well(router, "a", "a")
    assert ticket.state is TicketState.LEASED


def test_stream_waits_for_the_next_load_of_its_model_if_its_draining_endpoint_fails(make_router):
    router = make_router()
    router.core.host(["m"], TicketFollower())
    waiting = router.enter()
    assert waiting.state is TicketState.WAITING
    a = router.endpoint("a")
    router.core.sent(waiting)
    router.core.first_token(waiting, router.now)
    router.core.drain_endpoint(a, router.now)
    assert break_off(router, waiting)
    assert (waiting.state, waiting.refusal) == (TicketState.WAITING, None)
    router.endpoint("b")
    assert (waiting.state, waiting.endpoint) == (TicketState.LEASED, "b")
    router.leave(waiting)
    assert router.gone == ["a"]
