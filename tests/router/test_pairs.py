"""Tests requests whose prompt and response are computed at different endpoints: queues, and use of one endpoint."""

from __future__ import annotations

import pytest

from trioserve.contracts.endpoint import EndpointId, PairOutcome, Stage
from trioserve.contracts.errors import Draining, NoEndpoint, QueueWaitOver
from trioserve.router.core import Fault
from trioserve.router.ticket import TicketState


@pytest.fixture
def pair(make_router):
    """Make routers with a prefill endpoint p and a decode endpoint d, by default with one slot each."""

    def made(prefill: str = "p", decode: str = "d", leases_max: int = 1, **settings: object):
        router = make_router(**settings)
        for id in prefill.split():
            router.endpoint(id, role="prefill", leases_max=leases_max)
        for id in decode.split():
            router.endpoint(id, role="decode", leases_max=leases_max)
        return router

    return made


def leases(router) -> dict[str, int]:
    return dict(router.core.stats().leases)


def outcomes(router) -> dict[PairOutcome, int]:
    return {outcome: count for outcome, count in router.core.stats().pairs_total.items() if count}


def split(router, **fields: object):
    return router.enter(can_be_disaggregated=True, prompt_tokens=100, **fields)


def computed(router, **fields: object):
    """Return a ticket whose prompt is computed."""
    ticket = split(router, **fields)
    router.core.sent(ticket)
    router.core.prefilled(ticket, router.now)
    return ticket


def test_request_has_one_lease_for_its_prompt_and_then_one_for_its_response(pair):
    router = pair()
    ticket = split(router)
    assert (ticket.stage, ticket.endpoint, leases(router)) == (Stage.PREFILL, "p", {"p": 1, "d": 0})
    router.core.sent(ticket)
    router.core.prefilled(ticket, router.now)
    assert (ticket.stage, ticket.endpoint, leases(router)) == (Stage.DECODE, "d", {"p": 0, "d": 1})
    assert not ticket.is_sent
    router.core.sent(ticket)
    router.core.first_token(ticket, router.now)
    router.leave(ticket, ticket)
    assert leases(router) == {"p": 0, "d": 0}
    assert outcomes(router) == {PairOutcome.PAIRED: 1}


def test_requests_that_wait_for_one_stage_do_not_block_the_other_stage(pair):
    router = pair()
    first, second = computed(router), split(router)
    third, whole = split(router), router.enter(sequences=1)
    assert (first.endpoint, second.endpoint) == ("d", "p")
    assert [ticket.state for ticket in (third, whole)] == [TicketState.WAITING] * 2
    router.leave(first)
    assert (whole.endpoint, third.state) == ("d", TicketState.WAITING)
    router.leave(second)
    assert third.endpoint == "p"


def test_request_with_a_computed_prompt_is_served_before_newcomers(pair):
    router = pair()
    holder = router.enter()
    assert holder.endpoint == "d"
    ticket = computed(router)
    in_the_way = split(router)
    newcomer = router.enter()
    router.leave(holder)
    assert (ticket.endpoint, newcomer.state) == ("d", TicketState.WAITING)
    router.leave(in_the_way, ticket, newcomer)
    assert leases(router) == {"p": 0, "d": 0}


def test_whole_requests_use_a_prefill_endpoint_if_no_other_endpoint_has_a_free_slot(pair):
    router = pair()
    assert [router.enter().endpoint for _ in range(2)] == ["d", "p"]


def test_no_prompt_starts_while_too_many_requests_wait_for_a_decode_endpoint(pair):
    router = pair(handover_waiting_max=2)
    holder = router.enter()
    first, second = computed(router), computed(router)
    third = split(router)
    assert third.state is TicketState.WAITING
    assert leases(router) == {"p": 0, "d": 1}
    router.leave(holder)
    assert (first.endpoint, second.state, third.endpoint) == ("d", TicketState.WAITING, "p")


@pytest.mark.parametrize("outcome", [PairOutcome.NOT_HELD, PairOutcome.FINISHED])
def test_prefill_endpoint_computes_the_rest_of_the_request_if_it_holds_no_blocks(pair, outcome):
    router = pair(prefill="p q")
    ticket = split(router)
    prefilled_by = ticket.endpoint
    router.core.sent(ticket)
    router.core.prefilled(ticket, router.now, outcome=outcome)
    assert (ticket.stage, ticket.endpoint) == (None, prefilled_by)
    assert outcomes(router) == {outcome: 1}


def test_request_runs_at_one_endpoint_if_its_blocks_are_lost_while_it_waits_for_decode(pair):
    router = pair()
    holder = router.enter()
    ticket = computed(router)
    assert ticket.state is TicketState.WAITING
    router.core.hold_lost(ticket, router.now)
    assert (ticket.stage, ticket.endpoint, leases(router)) == (None, "p", {"p": 1, "d": 1})
    assert outcomes(router) == {PairOutcome.HOLD_LOST: 1}
    router.leave(holder)


def test_lease_is_released_if_the_blocks_are_lost_before_the_request_is_sent(pair):
    router = pair()
    ticket = computed(router)
    assert ticket.endpoint == "d"
    router.core.hold_lost(ticket, router.now)
    assert (ticket.stage, ticket.endpoint, leases(router)) == (None, "p", {"p": 1, "d": 0})


def test_loss_of_blocks_is_ignored_after_the_request_was_sent(pair):
    router = pair()
    ticket = computed(router)
    router.core.sent(ticket)
    router.core.hold_lost(ticket, router.now)
    assert (ticket.stage, ticket.endpoint) == (Stage.DECODE, "d")
    router.core.first_token(ticket, router.now)
    assert outcomes(router) == {PairOutcome.PAIRED: 1}


def test_request_of_failed_decode_endpoints_moves_to_another_one_and_finally_to_the_prefill_endpoint(pair):
    router = pair(decode="d e", attempts_max=4, retries_per_second_min=10.0)
    ticket = computed(router)
    first = ticket.endpoint
    router.core.sent(ticket)
    assert router.core.failed(ticket, Fault.BROKE, router.now)
    assert (ticket.stage, ticket.endpoint) == (Stage.DECODE, "e" if first == "d" else "d")
    router.core.sent(ticket)
    assert router.core.failed(ticket, Fault.TRANSFER, router.now)
    assert (ticket.stage, ticket.endpoint) == (None, "p")
    assert outcomes(router) == {PairOutcome.TRANSFER_FAILED: 1}
    assert leases(router) == {"p": 1, "d": 0, "e": 0}


def test_failed_transfer_does_not_count_as_a_failure_of_any_endpoint(pair):
    router = pair(failures_max=1)
    ticket = computed(router)
    router.core.sent(ticket)
    router.core.failed(ticket, Fault.TRANSFER, router.now)
    assert router.core.stats().health[EndpointId("d")].value == "healthy"


@pytest.mark.parametrize(("lost", "outcome"), [("p", PairOutcome.NO_ENDPOINT), ("d", PairOutcome.NO_ENDPOINT)])
def test_split_of_waiting_requests_is_undone_if_no_pair_of_endpoints_is_left(pair, lost, outcome):
    router = pair()
    holders = [split(router), router.enter()]
    waiting = [split(router), split(router)]
    router.core.drain_endpoint(EndpointId(lost), router.now)
    assert [ticket.stage for ticket in waiting] == [None, None]
    router.leave(*holders)
    assert waiting[0].endpoint == ("d" if lost == "p" else "p")
    assert outcomes(router)[outcome] == 2


def test_request_with_a_computed_prompt_is_refused_if_no_endpoint_is_left(pair):
    router = pair()
    ticket = split(router)
    router.core.sent(ticket)
    for id in "pd":
        router.core.drain_endpoint(EndpointId(id), router.now)
    router.core.prefilled(ticket, router.now)
    assert isinstance(ticket.refusal, NoEndpoint)
    assert router.changed == [ticket]


def test_prefill_time_does_not_count_as_waiting(pair):
    router = pair()
    holder = router.enter()
    ticket = split(router, queue_deadline=router.now + 2)
    router.core.sent(ticket)
    router.after(30)
    router.core.prefilled(ticket, router.now)
    router.after(1.5)
    assert ticket.state is TicketState.WAITING
    router.after(1)
    assert isinstance(ticket.refusal, QueueWaitOver)
    router.leave(holder)
    assert leases(router) == {"p": 0, "d": 0}


def test_draining_router_serves_requests_with_a_computed_prompt(pair):
    router = pair()
    holder = router.enter()
    handed, unsent = computed(router), split(router)
    router.core.drain(router.now)
    assert isinstance(unsent.refusal, Draining)
    assert isinstance(holder.refusal, Draining), "it has a lease, but was not sent"
    assert handed.endpoint == "d"


@pytest.mark.parametrize("fields", [{"pinned": "d"}, {"can_be_disaggregated": False}])
def test_requests_that_must_not_be_disaggregated_are_not_split(pair, fields):
    router = pair()
    assert router.enter(**{"can_be_disaggregated": True, **fields}).stage is None


def test_router_uses_roles_of_endpoints_reported_later(make_router):
    router = make_router()
    for id in "ab":
        router.endpoint(id, leases_max=4)
    assert split(router).stage is None
    router.core.set_role(EndpointId("a"), "both", router.now)
    assert split(router).stage is None, "one endpoint is not a pair"
    router.core.set_role(EndpointId("b"), "decode", router.now)
    ticket = computed(router)
    assert (ticket.stage, ticket.prefilled_by, ticket.endpoint) == (Stage.DECODE, "a", "b")
    router.core.set_role(EndpointId("b"), None, router.now)
    assert split(router).stage is None
    router.core.set_role(EndpointId("gone"), "both", router.now)


@pytest.mark.parametrize("moment", ["leased", "sent", "waiting", "leased again", "sent again", "answering"])
def test_disaggregated_request_that_leaves_releases_leases_and_held_blocks_once(pair, moment):
    """Scenario S10 of tests/README.md: at every moment the request has at most one lease. After the request has left,
    it has no lease.
    """
    router = pair()
    holder = router.enter() if moment == "waiting" else None
    ticket = split(router)
    if moment != "leased":
        router.core.sent(ticket)
    if moment not in ("leased", "sent"):
        router.core.prefilled(ticket, router.now)
    if moment in ("sent again", "answering"):
        router.core.sent(ticket)
    if moment == "answering":
        router.core.first_token(ticket, router.now)
    router.leave(ticket, ticket)
    if holder is not None:
        router.leave(holder)
    stats = router.core.stats()
    assert leases(router) == {"p": 0, "d": 0}
    assert stats.waiting == 0
    assert outcomes(router) == {PairOutcome.PAIRED if moment == "answering" else PairOutcome.LEFT: 1}
    router.core.prefilled(ticket, router.now)
    router.core.hold_lost(ticket, router.now)
    assert leases(router) == {"p": 0, "d": 0}


def test_request_refused_without_an_endpoint_counts_as_left(pair):
    router = pair()
    ticket = split(router)
    router.core.sent(ticket)
    for id in ("d", "p"):
        router.core.drain_endpoint(EndpointId(id), router.now)
    router.core.prefilled(ticket, router.now)
    assert isinstance(ticket.refusal, NoEndpoint)
    assert outcomes(router) == {PairOutcome.LEFT: 1}
