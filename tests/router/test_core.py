"""Tests leases, queues and refusals of the router core. Each lease and queue position must be released exactly once."""

from __future__ import annotations

import math

import pytest

from trioserve.contracts.endpoint import EndpointId, EndpointLoad, RoutedRequest
from trioserve.contracts.errors import (
    Draining,
    NoEndpoint,
    Overloaded,
    QueueWaitOver,
    RequestPoisoned,
    StartupError,
)
from trioserve.router.core import Fault
from trioserve.router.endpoint_state import LOST, EndpointHealth
from trioserve.router.ticket import TicketState


def leases(router) -> dict[str, int]:
    return dict(router.core.stats().leases)


# --- leases ---


def test_request_gets_a_lease_at_once_while_an_endpoint_has_a_free_slot(make_router):
    router = make_router()
    router.endpoint("a", leases_max=2)
    first, second, third = router.enter(), router.enter(), router.enter()
    assert [ticket.state for ticket in (first, second, third)] == [
        TicketState.LEASED,
        TicketState.LEASED,
        TicketState.WAITING,
    ]
    assert leases(router) == {"a": 2}


def test_preferred_endpoint_gets_the_request_only_while_it_has_a_free_slot(make_router):
    router = make_router()
    for id in "ab":
        router.endpoint(id, leases_max=2)
    router.enter(pinned="b")
    assert router.enter(preferred=EndpointId("b")).endpoint == "b"
    assert router.enter(preferred=EndpointId("b")).endpoint == "a"
    assert router.enter(preferred=EndpointId("unknown")).endpoint == "a"


def test_draining_endpoint_gets_no_request_that_prefers_it(make_router):
    router = make_router()
    for id in "ab":
        router.endpoint(id, leases_max=2)
    router.core.drain_endpoint(EndpointId("b"), router.now)
    assert router.enter(preferred=EndpointId("b")).endpoint == "a"


def test_released_lease_goes_to_the_oldest_waiting_request_in_the_same_call(make_router):
    router = make_router()
    router.endpoint("a", leases_max=1)
    holder, oldest, youngest = router.enter(), router.enter(), router.enter()
    router.leave(holder)
    assert router.changed == [oldest]
    assert (oldest.state, youngest.state) == (TicketState.LEASED, TicketState.WAITING)
    assert leases(router) == {"a": 1}


def test_request_that_leaves_twice_releases_its_lease_once(make_router):
    router = make_router()
    router.endpoint("a", leases_max=2)
    first, second = router.enter(), router.enter()
    router.leave(first, first)
    assert leases(router) == {"a": 1}
    router.leave(second)
    assert leases(router) == {"a": 0}


def test_request_that_left_the_queue_never_gets_a_lease(make_router):
    """Scenario S32 of tests/README.md: a request whose client left is never executed."""
    router = make_router()
    router.endpoint("a", leases_max=1)
    holder, leaver, stayer = router.enter(), router.enter(), router.enter()
    router.leave(leaver)
    router.leave(holder)
    assert router.changed == [stayer]
    assert leaver.state is TicketState.ENDED


def test_lease_ends_at_the_first_token_if_configured_and_only_once(make_router):
    """Scenario S26 of tests/README.md: the end of a lease is configurable. Waiting requests are counted separately."""
    router = make_router(lease_until="first_token")
    router.endpoint("a", leases_max=1)
    first = router.sent()
    second = router.enter()
    router.core.first_token(first, router.now)
    router.core.first_token(first, router.now)
    assert second.state is TicketState.LEASED
    router.leave(first)
    assert leases(router) == {"a": 1}


# --- the queue ---


def test_request_with_better_priority_is_served_before_earlier_requests(make_router):
    router = make_router()
    router.endpoint("a", leases_max=1)
    holder = router.enter()
    later, sooner = router.enter(priority=5), router.enter(priority=-5)
    router.leave(holder)
    assert router.changed == [sooner]
    router.leave(sooner)
    assert router.changed == [sooner, later]


def test_tenants_take_turns_even_in_a_burst(make_router):
    router = make_router()
    router.endpoint("a", leases_max=1)
    holder = router.enter(tenant="x")
    burst = [router.enter(tenant="burst", prompt_tokens=100) for _ in range(5)]
    single = router.enter(tenant="single", prompt_tokens=100)
    router.leave(holder)
    router.leave(burst[0])
    assert router.changed == [burst[0], single]


def test_tenants_share_the_queue_by_prompt_tokens(make_router):
    router = make_router()
    router.endpoint("a", leases_max=1)
    holder = router.enter()
    long = [router.enter(tenant="long", prompt_tokens=936) for _ in range(3)]
    short = [router.enter(tenant="short", prompt_tokens=36) for _ in range(12)]
    router.leave(holder)
    for _ in range(12):
        router.leave(router.changed[-1])
    served = router.changed[:12]
    # The cost of a request is 1000 tokens for one tenant, and 100 tokens for the other tenant.
    assert sum(ticket in long for ticket in served) == 2
    assert sum(ticket in short for ticket in served) == 10


def test_tenants_share_the_queue_by_sequences_of_their_requests(make_router):
    """Each choice uses a slot, so a tenant whose requests have several choices gets fewer turns."""
    router = make_router()
    router.endpoint("a", leases_max=4)
    holder = router.enter(tenant="x", sequences=4)
    several = [router.enter(tenant="several", sequences=4) for _ in range(3)]
    single = [router.enter(tenant="single") for _ in range(8)]
    router.leave(holder)
    for index in range(6):
        router.leave(router.changed[index])
    served = router.changed[:6]
    # The cost of a request is 256 tokens for one tenant, and 64 tokens for the other tenant.
    assert sum(ticket in several for ticket in served) == 2
    assert sum(ticket in single for ticket in served) == 4


def test_returning_tenant_gets_no_credit_for_its_absence(make_router):
    router = make_router()
    router.endpoint("a", leases_max=1)
    holder = router.enter()
    busy = [router.enter(tenant="busy", prompt_tokens=100) for _ in range(10)]
    router.leave(holder)
    for ticket in busy[:4]:
        router.leave(ticket)
    back = [router.enter(tenant="back", prompt_tokens=100) for _ in range(5)]
    for _ in range(4):
        router.leave(router.changed[-1])
    assert sum(ticket in back for ticket in router.changed[5:]) == 2


@pytest.mark.parametrize("count", [0, 1, 3])
def test_full_queue_refuses_with_a_reason_and_a_retry_time(make_router, count):
    """Scenarios S13 and S42 of tests/README.md: the queue is bounded by default, and each refusal has a time for the
    retry.
    """
    router = make_router(queue_requests_max=count)
    router.endpoint("a", leases_max=1)
    router.enter()
    for _ in range(count):
        assert router.enter().state is TicketState.WAITING
    with pytest.raises(Overloaded, match=f"{count} requests wait") as refusal:
        router.enter()
    assert refusal.value.reason == "queue_full"
    assert refusal.value.retry_after_seconds >= 1
    assert router.core.stats().waiting == count
    assert router.core.stats().rejections_total == {"queue_full": 1}


def test_waiting_retry_does_not_block_a_free_endpoint_if_queue_limit_is_zero(make_router):
    router = make_router(queue_requests_max=0)
    router.endpoint("a", leases_max=1)
    failing = router.sent()
    router.endpoint("b", leases_max=1)
    router.enter()
    assert router.core.failed(failing, Fault.BROKE, router.now)
    assert router.enter().endpoint == "a"
    with pytest.raises(Overloaded):
        router.enter()


def test_router_queue_is_bounded_in_prompt_tokens(make_router):
    router = make_router(queue_prompt_tokens_max=100)
    router.endpoint("a", leases_max=1)
    router.enter()
    waiting = router.enter(prompt_tokens=90)
    with pytest.raises(Overloaded, match="90 prompt tokens wait"):
        router.enter(prompt_tokens=11)
    router.enter(prompt_tokens=10)
    router.leave(waiting)
    assert router.core.stats().waiting_prompt_tokens == 10


def test_retry_after_follows_the_rate_at_which_requests_end(make_router):
    router = make_router(queue_requests_max=4)
    router.endpoint("a", leases_max=1)
    for _ in range(10):
        ticket = router.enter()
        router.after(3.0)
        router.leave(ticket)
    for _ in range(5):
        router.enter()
    with pytest.raises(Overloaded) as refusal:
        router.enter()
    assert refusal.value.retry_after_seconds == pytest.approx(5 * 3.0, rel=0.2)


def test_request_is_refused_when_its_queue_deadline_passes(make_router):
    """Scenario S35 of tests/README.md: a request is neither refused at once nor kept forever."""
    router = make_router(queue_seconds_max=10)
    router.endpoint("a", leases_max=1)
    router.enter()
    waiting = router.enter()
    router.after(9.9)
    assert waiting.state is TicketState.WAITING
    router.after(0.2)
    assert router.changed == [waiting]
    assert isinstance(waiting.refusal, Overloaded)
    assert waiting.refusal.reason == "queue_wait_over"
    router.leave(waiting)
    assert router.core.stats().waiting == 0


def test_request_whose_own_queue_deadline_passes_gets_a_different_error(make_router):
    router = make_router(queue_seconds_max=10)
    router.endpoint("a", leases_max=1)
    router.enter()
    waiting = router.enter(queue_deadline=router.now + 2)
    router.after(2)
    assert isinstance(waiting.refusal, QueueWaitOver)


def test_router_keeps_no_state_of_requests_that_left(make_router):
    router = make_router(queue_requests_max=1000)
    router.endpoint("a", leases_max=1)
    router.enter()
    stays = router.enter(tenant="stays")
    for index in range(2000):
        router.leave(router.enter(tenant=f"tenant {index}"))
    for _ in range(2000):
        router.leave(router.enter(tenant="again"))
    assert len(router.core._deadlines) < 200
    newcomers = router.core._queues.models["m"].queues[None].newcomers._classes[0]
    assert len(newcomers._turns) < 200
    assert len(newcomers._turn_of) < 200
    assert stays.state is TicketState.WAITING


@pytest.mark.slow
def test_router_keeps_no_state_of_tenants_without_requests(make_router):
    router = make_router()
    router.endpoint("a", leases_max=1)
    waiting = [router.enter(tenant="first"), router.enter(tenant="second")]
    for index in range(12_000):  # The queue is never empty.
        waiting.append(router.enter(tenant=f"tenant {index}"))
        router.leave(waiting.pop(0))
    assert len(router.core._queues.models["m"].queues[None].newcomers._classes[0]._turn_of) < 9_000


# --- endpoints ---


def test_request_is_refused_without_an_endpoint(make_router):
    router = make_router()
    with pytest.raises(NoEndpoint):
        router.enter()
    router.endpoint("a", models="other")
    with pytest.raises(NoEndpoint):
        router.enter()


def test_waiting_request_is_served_when_a_starting_endpoint_is_healthy(make_router):
    router = make_router()
    starting = router.endpoint("a", well=False)
    waiting = router.enter()
    assert waiting.state is TicketState.WAITING
    router.core.note_health(starting, True, router.now)
    assert router.changed == [waiting]


def test_pinned_request_is_admitted_or_refused_at_once(make_router):
    router = make_router()
    router.endpoint("a", leases_max=1)
    router.endpoint("b", leases_max=1)
    holders = [router.enter(), router.enter()]
    waiting = router.enter()
    with pytest.raises(Overloaded) as refusal:
        router.enter(pinned="b")
    assert refusal.value.reason == "pinned_endpoint_overloaded"
    router.leave(waiting, *holders)
    router.enter(pinned="b")
    assert leases(router) == {"a": 0, "b": 1}
    with pytest.raises(NoEndpoint):
        router.enter(pinned="c")


def test_starting_pinned_endpoint_is_not_reported_as_full(make_router):
    router = make_router()
    router.endpoint("a", well=False)
    with pytest.raises(NoEndpoint):
        router.enter(pinned="a")


def test_two_endpoints_with_one_id_are_refused(make_router):
    router = make_router()
    router.endpoint("a")
    with pytest.raises(StartupError, match='two endpoints with the id "a"'):
        router.endpoint("a")
    with pytest.raises(StartupError, match="at least 1"):
        router.endpoint("b", leases_max=0)


def test_drained_endpoint_is_removed_when_its_last_request_ends(make_router):
    """Scenario S36 of tests/README.md: an endpoint stays while requests run there."""
    router = make_router()
    a = router.endpoint("a")
    running = router.sent()
    router.endpoint("b")
    router.core.drain_endpoint(a, router.now)
    assert router.sent().endpoint == "b"
    assert router.gone == []
    router.leave(running)
    assert router.gone == ["a"]
    assert "a" not in router.core.endpoints


def test_endpoint_added_again_while_draining_keeps_its_state(make_router):
    router = make_router()
    a = router.endpoint("a")
    running = router.sent()
    router.core.drain_endpoint(a, router.now)
    router.endpoint("a")
    assert router.enter().state is TicketState.LEASED
    router.leave(running)
    assert router.gone == []


def test_endpoint_added_again_uses_its_new_limit(make_router):
    router = make_router()
    a = router.endpoint("a", leases_max=8)
    running = [router.sent(), router.sent()]
    router.core.drain_endpoint(a, router.now)
    with pytest.raises(StartupError, match="at least 1"):
        router.endpoint("a", leases_max=0)
    router.endpoint("a", leases_max=2)
    waiting = router.enter()
    assert waiting.state is TicketState.WAITING
    router.leave(running[0])
    assert waiting.state is TicketState.LEASED


def test_waiting_request_is_refused_when_the_last_endpoint_is_removed(make_router):
    router = make_router()
    a = router.endpoint("a", leases_max=1)
    router.enter()
    waiting = router.enter()
    router.core.drain_endpoint(a, router.now)
    assert isinstance(waiting.refusal, NoEndpoint)


def test_sequences_waiting_inside_an_endpoint_are_limited(make_router):
    router = make_router(waiting_depth_max=2)
    a = router.endpoint("a", leases_max=64)
    router.core.note_load(a, EndpointLoad(running=4, waiting=0, max_num_seqs=4), router.now, sent_when_asked=0)
    assert [router.sent().state for _ in range(2)] == [TicketState.LEASED] * 2
    assert router.enter().state is TicketState.WAITING
    router.core.note_load(a, EndpointLoad(running=4, waiting=1, max_num_seqs=4), router.now, sent_when_asked=2)
    assert router.core.stats().waiting == 0


def test_requests_sent_after_a_load_report_was_requested_are_added_to_the_report(make_router):
    router = make_router(waiting_depth_max=0)
    a = router.endpoint("a")
    asked = router.core.sent_total
    router.sent()
    router.core.note_load(a, EndpointLoad(running=3, waiting=0, max_num_seqs=4), router.now, sent_when_asked=asked)
    assert router.enter().state is TicketState.WAITING


def test_request_sent_during_a_load_report_counts_even_if_another_request_ended(make_router):
    router = make_router(waiting_depth_max=0)
    a = router.endpoint("a")
    ends = router.sent()
    asked = router.core.sent_total
    router.leave(ends)  # At this moment, the endpoint creates its report. The report says that the endpoint is idle.
    router.sent()
    router.core.note_load(a, EndpointLoad(running=0, waiting=0, max_num_seqs=1), router.now, sent_when_asked=asked)
    assert router.enter().state is TicketState.WAITING


def test_unsent_request_with_a_lease_is_added_to_the_load_report(make_router):
    router = make_router(waiting_depth_max=0)
    a = router.endpoint("a")
    router.enter()
    router.core.note_load(a, EndpointLoad(running=3, waiting=0, max_num_seqs=4), router.now, sent_when_asked=0)
    assert router.enter().state is TicketState.WAITING


def test_slot_count_is_learned_from_load_reports_if_not_reported(make_router):
    router = make_router(waiting_depth_max=1)
    a = router.endpoint("a")
    router.core.note_load(a, EndpointLoad(running=3, waiting=0), router.now, sent_when_asked=0)
    assert [router.sent().state, router.enter().state] == [TicketState.LEASED, TicketState.WAITING]
    # The report includes the new request, so the endpoint has one more slot than was known.
    router.core.note_load(a, EndpointLoad(running=4, waiting=0), router.now, sent_when_asked=1)
    assert router.core.stats().waiting == 0
    router.core.note_load(a, EndpointLoad(running=4, waiting=1), router.now, sent_when_asked=2)
    assert router.enter().state is TicketState.WAITING


def test_stale_load_report_is_ignored(make_router):
    router = make_router(waiting_depth_max=0, load_seconds_max=2)
    a = router.endpoint("a")
    router.core.note_load(a, EndpointLoad(running=4, waiting=4, max_num_seqs=4), router.now, sent_when_asked=0)
    waiting = router.enter()
    assert waiting.state is TicketState.WAITING
    router.after(2.1)
    assert waiting.state is TicketState.LEASED


# --- failures ---


def test_failure_releases_the_lease_before_the_next_grant(make_router):
    router = make_router(policy="round_robin")
    router.endpoint("a", leases_max=1)
    router.endpoint("b", leases_max=1)
    ticket = router.sent()
    assert ticket.endpoint == "a"
    assert router.core.failed(ticket, Fault.UNREACHABLE, router.now)
    assert (ticket.state, ticket.endpoint) == (TicketState.LEASED, "b")
    assert leases(router) == {"a": 0, "b": 1}


def test_failed_request_waits_for_another_endpoint_before_newcomers(make_router):
    router = make_router(policy="round_robin")
    router.endpoint("a", leases_max=1)
    router.endpoint("b", leases_max=1)
    first, second = router.sent(), router.sent()
    waiting = router.enter()
    assert router.core.failed(first, Fault.BROKE, router.now)
    assert waiting.state is TicketState.LEASED  # The waiting request got the slot of the failed request.
    behind = router.enter()
    router.leave(second)
    assert first.endpoint == "b"
    assert behind.state is TicketState.WAITING


def test_prompt_of_a_request_that_waits_again_counts_against_the_queue_limit(make_router):
    router = make_router(queue_prompt_tokens_max=100)
    router.endpoint("a", leases_max=1)
    failing = router.sent(prompt_tokens=90)
    router.endpoint("b", leases_max=1)
    router.sent()
    assert router.core.failed(failing, Fault.BROKE, router.now)
    router.sent()
    assert router.core.stats().waiting_prompt_tokens == 90
    with pytest.raises(Overloaded, match="90 prompt tokens wait"):
        router.enter(prompt_tokens=11)
    router.leave(failing)
    assert router.core.stats().waiting_prompt_tokens == 0


def test_retries_avoid_failed_endpoints_and_are_limited(make_router):
    router = make_router(attempts_max=2)
    for id in "abc":
        router.endpoint(id)
    ticket = router.sent()
    assert router.core.failed(ticket, Fault.FAILED, router.now)
    router.core.sent(ticket)
    assert not router.core.failed(ticket, Fault.FAILED, router.now)
    assert ticket.state is TicketState.ENDED
    assert set(leases(router).values()) == {0}


def test_retries_are_limited_by_a_budget(make_router):
    router = make_router(retry_share_max=0.0, retries_per_second_min=0.2, failures_max=1000)
    router.endpoint("a")
    router.endpoint("b")
    retried = 0
    for _ in range(50):
        ticket = router.sent()
        retried += router.core.failed(ticket, Fault.FAILED, router.now)
        router.leave(ticket)
    assert retried == 2


def test_request_to_an_unreachable_endpoint_waits_for_a_passed_check(make_router):
    router = make_router(attempts_max=1, retry_share_max=0.0, retries_per_second_min=0.0, ejection_seconds=1)
    a = router.endpoint("a")
    ticket = router.sent()
    router.endpoint("b", leases_max=1)
    running = router.sent()
    for _ in range(3):
        assert router.core.failed(ticket, Fault.UNREACHABLE, router.now)
        router.after(1.5)
        assert router.core.endpoints[a].health is EndpointHealth.PROBING
        assert ticket.state is TicketState.WAITING, "passing time does not show that the endpoint is reachable"
        router.core.note_health(a, True, router.now)
        assert (ticket.state, ticket.endpoint) == (TicketState.LEASED, "a")
        router.core.sent(ticket)
    router.leave(ticket, running)
    assert leases(router) == {"a": 0, "b": 0}


def test_request_to_an_unreachable_endpoint_waits_at_most_until_its_deadline(make_router):
    router = make_router(queue_seconds_max=5, continuation_seconds_max=5)
    router.endpoint("a")
    ticket = router.sent()
    router.endpoint("b", leases_max=1)
    router.sent()
    assert router.core.failed(ticket, Fault.UNREACHABLE, router.now)
    router.after(5.1)
    assert isinstance(ticket.refusal, NoEndpoint)
    assert ticket.refusal.reason == "endpoint_lost"
    assert ticket.refusal.retry_after_seconds >= 1


def lose_all(router, tickets, fault=Fault.BROKE):
    for ticket in tickets:
        assert router.core.failed(ticket, fault, router.now)


@pytest.mark.parametrize("fault", [Fault.UNREACHABLE, Fault.BROKE, Fault.HUNG, Fault.LEAVING])
def test_requests_of_a_lost_endpoint_survive_without_a_retry_budget(make_router, fault):
    router = make_router(retry_share_max=0.0, retries_per_second_min=0.0, attempts_max=1 + 1)
    a = router.endpoint("a", leases_max=200)
    tickets = [router.sent() for _ in range(200)]
    router.endpoint("b", leases_max=10)
    lose_all(router, tickets, fault)
    router.core.note_health(a, False, router.now, is_hung=True)
    served = 0
    while waiting := [ticket for ticket in tickets if ticket.state is not TicketState.ENDED]:
        running = [ticket for ticket in waiting if ticket.state is TicketState.LEASED]
        assert len(running) == min(10, len(waiting)), "the free slots set the pace"
        for ticket in running:
            router.core.sent(ticket)
            router.core.first_token(ticket, router.now)
            router.leave(ticket)
            served += 1
    assert served == 200


def test_requests_wait_for_an_endpoint_to_recover_if_all_have_failed(make_router):
    router = make_router(queue_seconds_max=20, ejection_seconds=10, ejection_seconds_max=10)
    ids = [router.endpoint(id, leases_max=10) for id in "ab"]
    tickets = [router.sent() for _ in range(20)]
    for id in ids:
        router.core.note_health(id, False, router.now, is_hung=True)
    lose_all(router, tickets)
    router.after(15)
    assert {ticket.state for ticket in tickets} == {TicketState.WAITING}
    with pytest.raises(NoEndpoint):
        router.enter()  # Newcomers are refused while all endpoints are ejected.
    for id in ids:
        router.core.note_health(id, True, router.now)
    assert {ticket.state for ticket in tickets} == {TicketState.LEASED}
    assert leases(router) == {"a": 10, "b": 10}


def test_time_at_an_endpoint_that_failed_does_not_count_as_waiting(make_router):
    router = make_router(queue_seconds_max=20, continuation_seconds_max=8)
    a = router.endpoint("a")
    whole, patient = router.sent(), router.sent(queue_deadline=router.now + 3)
    router.after(100)
    lose_all(router, [whole, patient])
    router.core.note_health(a, False, router.now, is_hung=True)
    router.after(2.5)
    assert (whole.state, patient.state) == (TicketState.WAITING, TicketState.WAITING)
    router.after(1)
    assert isinstance(patient.refusal, QueueWaitOver), "its own queue deadline has passed"
    router.after(15)
    assert whole.state is TicketState.WAITING
    router.after(2)
    assert isinstance(whole.refusal, NoEndpoint)


@pytest.mark.parametrize("fault", [*sorted(LOST, key=str), Fault.FAILED, Fault.INVALID, Fault.REFUSED, Fault.BUSY])
def test_request_served_longer_than_its_wait_limit_is_retried_at_another_endpoint(make_router, fault):
    router = make_router(queue_seconds_max=60)
    router.endpoint("a")
    ticket = router.sent(queue_deadline=router.now + 3)
    router.endpoint("b")
    router.after(1000)
    assert router.core.failed(ticket, fault, router.now)
    assert (ticket.state, ticket.endpoint) == (TicketState.LEASED, "b")


@pytest.mark.parametrize("has_other", [True, False])
def test_request_leased_after_its_queue_deadline_is_retried_or_refused_after_a_failure(make_router, has_other):
    router = make_router()
    router.endpoint("a", leases_max=1)
    first, late = router.sent(), router.enter(queue_deadline=router.now + 3)
    router.now += 4  # A busy router has not called tick meanwhile.
    router.leave(first)
    router.core.sent(late)
    if has_other:
        router.endpoint("b")
    assert router.core.failed(late, Fault.BROKE, router.now)
    if has_other:
        assert (late.state, late.endpoint) == (TicketState.LEASED, "b")
    else:
        router.core.tick(router.now)
        assert isinstance(late.refusal, QueueWaitOver)


def test_requests_of_a_lost_endpoint_are_served_before_newcomers_but_do_not_starve_newcomers(make_router):
    router = make_router(continuations_in_a_row_max=3)
    router.endpoint("a", leases_max=8)
    lost = [router.sent(priority=1) for _ in range(8)]
    router.endpoint("b", leases_max=1)
    holder = router.sent(pinned="b")
    lose_all(router, lost, Fault.UNREACHABLE)
    names = {id(ticket): f"lost {index}" for index, ticket in enumerate(lost)}
    for name, priority in (("new", 1), ("new too", 1), ("urgent", 0), ("late", 2)):
        names[id(router.enter(priority=priority))] = name
    order = []
    router.changed.clear()
    router.leave(holder)
    while router.changed:
        ticket = router.changed.pop()
        order.append(names[id(ticket)])
        router.leave(ticket)
    assert order == [
        *("urgent", "lost 0", "lost 1", "lost 2", "new", "lost 3", "lost 4", "lost 5", "new too"),
        *("lost 6", "lost 7", "late"),
    ]


def test_request_ends_with_an_error_if_its_endpoints_fail_in_a_row(make_router):
    router = make_router(attempts_max=3)
    for id in "abcd":
        router.endpoint(id)
    ticket = router.sent()
    for _ in range(2):
        assert router.core.failed(ticket, Fault.BROKE, router.now)
        router.core.sent(ticket)
    assert not router.core.failed(ticket, Fault.BROKE, router.now)
    assert isinstance(ticket.refusal, RequestPoisoned)
    assert router.core.stats().continuations_refused_total == {"poisoned": 1}


def test_requests_that_lost_endpoints_together_get_more_tries(make_router):
    router = make_router(attempts_max=2)
    ids = [router.endpoint(id, leases_max=4) for id in "ab"]
    tickets = [router.sent() for _ in range(4)]
    for _ in range(3):
        for id in ids:
            router.core.note_health(id, False, router.now, is_hung=True)
        lose_all(router, tickets)
        for id in ids:
            router.core.note_health(id, True, router.now)
        for ticket in tickets:
            assert ticket.state is TicketState.LEASED
            router.core.sent(ticket)
    first, *others = [ticket for ticket in tickets if ticket.endpoint == tickets[0].endpoint]
    assert others, "they are still at one endpoint"
    assert not router.core.failed(first, Fault.BROKE, router.now)
    assert isinstance(first.refusal, RequestPoisoned)


def test_failure_of_an_endpoint_with_hundreds_of_requests_causes_few_lease_searches(make_router, monkeypatch):
    router = make_router(queue_requests_max=1000)
    router.endpoint("a", leases_max=300)
    tickets = [router.sent() for _ in range(300)]
    router.endpoint("b", leases_max=1)
    router.sent(pinned="b")
    asked = 0
    grant = router.core._fleet.grant

    def counted(ticket, now):
        nonlocal asked
        asked += 1
        return grant(ticket, now)

    monkeypatch.setattr(router.core._fleet, "grant", counted)
    lose_all(router, tickets)
    assert asked <= 2 * len(tickets)


def test_draining_router_serves_requests_that_lost_their_endpoint(make_router):
    router = make_router()
    router.endpoint("a")
    ticket = router.sent()
    b = router.endpoint("b", leases_max=1)
    holder = router.sent(pinned=b)
    lose_all(router, [ticket])
    router.core.drain(router.now)
    assert ticket.state is TicketState.WAITING
    router.leave(holder)
    assert (ticket.state, ticket.endpoint) == (TicketState.LEASED, "b")


def test_endpoints_that_shut_down_do_not_count_as_attempts(make_router):
    router = make_router(attempts_max=1, retry_share_max=0.0, retries_per_second_min=0.0)
    for id in "abc":
        router.endpoint(id)
    ticket = router.sent()
    for _ in range(2):
        assert router.core.failed(ticket, Fault.LEAVING, router.now)
        router.core.sent(ticket)
    assert not router.core.failed(ticket, Fault.FAILED, router.now)


def test_request_fails_at_once_if_all_healthy_endpoints_are_full(make_router):
    router = make_router()
    for id in "ab":
        router.endpoint(id)
    ticket = router.sent()
    assert router.core.failed(ticket, Fault.BUSY, router.now)
    router.core.sent(ticket)
    assert not router.core.failed(ticket, Fault.BUSY, router.now)
    assert ticket.refusal is None, "the client gets the endpoint's response"


def test_busy_endpoint_is_retried_while_others_are_ejected(make_router):
    router = make_router(failures_max=1, ejection_seconds=20)
    a = router.endpoint("a")
    ticket = router.sent()
    b = router.endpoint("b")
    router.core.note_health(b, False, router.now)
    assert router.core.failed(ticket, Fault.BUSY, router.now, busy_seconds=2)
    router.after(3)
    assert ticket.state is TicketState.WAITING
    router.core.note_health(a, True, router.now)
    assert (ticket.state, ticket.endpoint) == (TicketState.LEASED, "a")


def test_busy_endpoints_are_retried_within_the_budget(make_router):
    router = make_router(retry_share_max=0.0, retries_per_second_min=0.3, failures_max=1)
    a = router.endpoint("a")
    router.core.note_health(router.endpoint("b"), False, router.now)
    tickets = [router.sent() for _ in range(20)]
    assert sum(router.core.failed(ticket, Fault.BUSY, router.now) for ticket in tickets) == 3
    assert router.core.endpoints[a].health is EndpointHealth.HEALTHY


def test_failures_in_a_row_eject_an_endpoint_and_a_passed_probe_restores_it(make_router):
    router = make_router(failures_max=3, ejection_seconds=1, ejection_seconds_max=30)
    a = router.endpoint("a")
    for _ in range(3):
        ticket = router.sent()
        assert not router.core.failed(ticket, Fault.FAILED, router.now)
    state = router.core.endpoints[a]
    assert state.health is EndpointHealth.EJECTED
    with pytest.raises(NoEndpoint) as refusal:
        router.enter()
    assert refusal.value.retry_after_seconds >= 1
    router.after(1.0)
    probe, other = router.sent(), router.enter()
    assert (probe.state, other.state) == (TicketState.LEASED, TicketState.WAITING)
    router.core.first_token(probe, router.now)
    assert state.health is EndpointHealth.HEALTHY
    assert other.state is TicketState.LEASED


def ejected_by_requests(router):
    a = router.endpoint("a")
    for _ in range(3):
        router.core.failed(router.sent(), Fault.FAILED, router.now)
    router.after(1.0)
    return a, router.core.endpoints[a]


def test_endpoint_that_served_a_probe_is_healthy_after_the_next_check_even_without_requests(make_router):
    router = make_router(failures_max=3, ejection_seconds=1, ejection_seconds_max=30, sends_probes=True)
    a, state = ejected_by_requests(router)
    router.core.note_health(a, True, router.now)
    assert state.health is EndpointHealth.EJECTED
    router.core.note_probe(a, True, router.now)
    assert state.health is EndpointHealth.PROBING
    router.core.note_health(a, True, router.now)
    assert state.health is EndpointHealth.HEALTHY


@pytest.mark.parametrize("is_served", [True, None])
def test_probed_endpoint_with_a_clients_request_stays_probing_until_its_first_token(make_router, is_served):
    router = make_router(failures_max=3, ejection_seconds=1, ejection_seconds_max=30, sends_probes=True)
    a, state = ejected_by_requests(router)
    router.core.note_probe(a, is_served, router.now)
    if is_served is None:  # The endpoint refused the probe, so a passed check shows nothing about requests.
        router.core.note_health(a, True, router.now)
    ticket = router.sent()
    router.core.note_health(a, True, router.now)
    assert state.health is EndpointHealth.PROBING
    router.core.first_token(ticket, router.now)
    assert state.health is EndpointHealth.HEALTHY


def test_each_failed_probe_doubles_the_ejection(make_router):
    router = make_router(failures_max=1, ejection_seconds=1, ejection_seconds_max=3)
    a = router.endpoint("a")
    router.core.failed(router.sent(), Fault.BROKE, router.now)
    ends = []
    for _ in range(3):
        ends.append(router.core.endpoints[a].ejected_until - router.now)
        router.after(ends[-1])
        router.core.failed(router.sent(), Fault.BROKE, router.now)
    assert ends == [1, 2, 3]


def test_unreachable_endpoint_is_ejected_at_once(make_router):
    router = make_router(failures_max=5)
    a = router.endpoint("a")
    router.core.failed(router.sent(), Fault.UNREACHABLE, router.now)
    assert router.core.endpoints[a].health is EndpointHealth.EJECTED


def test_busy_endpoint_is_not_ejected(make_router):
    router = make_router(policy="round_robin", failures_max=1)
    a = router.endpoint("a")
    router.endpoint("b", leases_max=1)
    ticket = router.sent()
    assert router.core.failed(ticket, Fault.BUSY, router.now, busy_seconds=2)
    assert ticket.endpoint == "b"
    waiting = router.enter()
    assert router.core.endpoints[a].health is EndpointHealth.HEALTHY
    assert waiting.state is TicketState.WAITING
    router.after(2)
    assert waiting.endpoint == "a"


def test_probe_request_does_not_exceed_the_limit_of_the_endpoint(make_router):
    router = make_router(failures_max=1, ejection_seconds=1)
    a = router.endpoint("a", leases_max=2)
    failing, still_there = router.sent(), router.sent(sequences=2)
    router.core.failed(failing, Fault.UNREACHABLE, router.now)
    router.core.add_endpoint(EndpointId("b"), ["m"], router.now)  # This endpoint is still starting, so requests wait.
    waiting = [router.enter(), router.enter()]
    router.after(1)
    assert router.core.endpoints[a].health is EndpointHealth.PROBING
    assert [ticket.state for ticket in waiting] == [TicketState.WAITING] * 2
    router.leave(still_there)
    assert [ticket.state for ticket in waiting] == [TicketState.LEASED, TicketState.WAITING]


def test_probe_answered_as_busy_pauses_the_endpoint(make_router):
    router = make_router(failures_max=1, ejection_seconds=1)
    router.endpoint("a")
    router.core.failed(router.sent(), Fault.UNREACHABLE, router.now)
    router.after(1)
    probe, waiting = router.sent(), router.enter()
    router.core.failed(probe, Fault.BUSY, router.now, busy_seconds=2)
    assert waiting.state is TicketState.WAITING
    router.after(2)
    assert waiting.state is TicketState.LEASED


def test_longest_pause_of_several_busy_responses_applies(make_router):
    router = make_router()
    router.endpoint("a")
    first, second = router.sent(), router.sent()
    router.core.failed(first, Fault.BUSY, router.now, busy_seconds=30)
    router.core.failed(second, Fault.BUSY, router.now, busy_seconds=1)
    waiting = router.enter()
    router.after(29)
    assert waiting.state is TicketState.WAITING
    router.after(1)
    assert waiting.state is TicketState.LEASED


def test_passed_check_restores_an_endpoint_that_failed_checks(make_router):
    router = make_router(failures_max=2, ejection_seconds=20)
    a = router.endpoint("a")
    for _ in range(2):
        router.core.note_health(a, False, router.now)
    assert router.core.endpoints[a].health is EndpointHealth.EJECTED
    router.core.note_health(a, True, router.now)
    assert router.core.endpoints[a].health is EndpointHealth.HEALTHY


def test_passed_check_does_not_restore_an_endpoint_that_failed_requests(make_router):
    router = make_router(failures_max=1)
    a = router.endpoint("a")
    router.core.failed(router.sent(), Fault.BROKE, router.now)
    router.core.note_health(a, True, router.now)
    assert router.core.endpoints[a].health is EndpointHealth.EJECTED


def test_waiting_requests_keep_their_queue_positions_while_all_endpoints_are_ejected(make_router):
    router = make_router(failures_max=1, ejection_seconds=1)
    router.endpoint("a", leases_max=1)
    failing = router.sent()
    waiting = router.enter()
    router.core.failed(failing, Fault.UNREACHABLE, router.now)
    assert waiting.state is TicketState.WAITING
    router.after(1)
    assert waiting.state is TicketState.LEASED


def test_new_endpoint_starts_slowly_if_other_endpoints_run(make_router):
    router = make_router(slow_start_seconds=10)
    router.endpoint("a", leases_max=1)
    router.enter()
    router.endpoint("b", leases_max=10)
    tickets = [router.enter() for _ in range(10)]

    def served() -> int:
        return sum(ticket.state is TicketState.LEASED for ticket in tickets)

    assert served() == 1
    router.after(5)
    assert served() == 5
    router.after(5)
    assert served() == 10


@pytest.mark.parametrize("seconds", [0.1, 0.3, 0.7, 1.1, 2.3])
@pytest.mark.parametrize("began_at", [100.1, 1000.1, 54321.7, 1e7 + 0.1])
def test_endpoint_gets_requests_when_its_load_report_expires_despite_rounding(make_router, began_at, seconds):
    router = make_router(waiting_depth_max=0, load_seconds_max=seconds)
    router.now = began_at
    a = router.endpoint("a")
    router.core.note_load(a, EndpointLoad(running=4, waiting=4, max_num_seqs=4), router.now, sent_when_asked=0)
    waiting = router.enter()
    router.after(2 * seconds)
    assert waiting.state is TicketState.LEASED


@pytest.mark.parametrize("seconds", [0.1, 0.3, 0.7, 1.1, 2.3])
@pytest.mark.parametrize("began_at", [100.1, 1000.1, 54321.7, 1e7 + 0.1])
def test_slow_start_reaches_each_next_limit_despite_rounding(make_router, began_at, seconds):
    router = make_router(slow_start_seconds=seconds)
    router.now = began_at
    router.endpoint("a", leases_max=1)
    router.enter()
    router.endpoint("b", leases_max=10)
    tickets = [router.enter() for _ in range(10)]
    router.after(seconds * 0.501)
    assert sum(ticket.state is TicketState.LEASED for ticket in tickets) == 5


# --- shutdown ---


def test_drain_refuses_unsent_requests_and_keeps_sent_requests(make_router):
    router = make_router()
    router.endpoint("a", leases_max=2)
    running, granted, waiting = router.sent(), router.enter(), router.enter()
    router.core.drain(router.now)
    assert running.state is TicketState.LEASED
    assert isinstance(granted.refusal, Draining)
    assert isinstance(waiting.refusal, Draining)
    with pytest.raises(Draining):
        router.enter()
    assert leases(router) == {"a": 1}
    assert router.core.failed(running, Fault.BROKE, router.now), "it was accepted, so it waits for an endpoint"
    assert leases(router) == {"a": 0}


def test_idle_router_has_no_next_tick(make_router):
    router = make_router()
    router.endpoint("a")
    router.leave(router.enter())
    assert router.core.next_tick(router.now) == math.inf


def test_reports_of_removed_endpoints_are_ignored(make_router):
    router = make_router()
    gone = EndpointId("gone")
    router.core.note_health(gone, True, router.now)
    router.core.note_load(gone, EndpointLoad(running=0, waiting=0), router.now, sent_when_asked=0)
    router.core.set_models(gone, ["m"], router.now)
    assert router.core.endpoints == {}


def test_queues_of_an_unloaded_adapter_are_deleted(make_router):
    """Adapters are loaded and unloaded again and again. A queue with a request is kept until that request leaves."""
    router = make_router(leases_max=1)
    endpoint = router.endpoint("a")
    router.core.set_models(endpoint, ["m", "x"], router.now)
    runs, waits = router.sent(model="x"), router.enter(model="x")
    router.core.set_models(endpoint, ["m"], router.now)
    assert waits.state is TicketState.ENDED
    assert "x" in router.core._queues.models
    assert list(router.core.model_names()) == ["m"]
    router.core.leave(runs, router.now)
    assert "x" not in router.core._queues.models

    request = RoutedRequest(model="y")
    router.core.set_models(endpoint, ["m", "y"], router.now)
    router.core.prepare(request, router.now)
    router.core.set_models(endpoint, ["m"], router.now)
    router.core.prepared(request)
    assert "y" not in router.core._queues.models

    router.core.set_models(endpoint, ["m", "z"], router.now)
    router.core.leave(router.enter(model="z"), router.now)
    queues = router.core._queues.models["z"]
    router.core.set_models(endpoint, ["m", "z"], router.now)
    # The models were set again without a change, so the queues and their drain rate are kept.
    assert router.core._queues.models["z"] is queues
    router.core.set_models(endpoint, ["m"], router.now)
    assert "z" not in router.core._queues.models


def test_burst_in_a_full_queue_displaces_only_requests_of_its_own_tenant(make_router):
    router = make_router(queue_requests_max=4)
    router.endpoint("a", leases_max=1)
    router.enter()
    burst = [router.enter(tenant="burst") for _ in range(4)]
    steady = router.enter(tenant="steady")
    assert steady.state is TicketState.WAITING
    assert [ticket.state.value for ticket in burst] == ["waiting", "waiting", "waiting", "ended"]
    assert burst[3].refusal.reason == "queue_full"
    router.enter(tenant="steady")  # Both tenants have two requests, so neither tenant has more than the other.
    with pytest.raises(Overloaded, match="4 requests wait"):
        router.enter(tenant="steady")
    with pytest.raises(Overloaded, match="4 requests wait"):
        router.enter(tenant="burst")
