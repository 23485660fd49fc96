"""The scope in which a request waits, has its lease and goes to its endpoint: the router as a Trio program sees it.
Decides nothing; see router/core.

with dispatch.enter(request) as admission:      # refusals rise here; leaving gives back whatever it holds
    endpoint = await admission.lease()          # or here, for those that had to wait
    with admission.attempt():
        ...                                     # the request goes there; admission.first_token() once it answers

A request that is disaggregated has two leases, one after the other: admission.stage says what is to be done with the
one in hand, and admission.prefilled() gives the first one back.
"""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, KeysView
from contextlib import contextmanager

import trio

from trioserve.admission.ended_ids import EndedIds
from trioserve.admission.sent_times import SentTimes
from trioserve.contracts.endpoint import EndpointId, EndpointLoad, PairOutcome, RoutedRequest, Stage
from trioserve.contracts.errors import Draining, EndpointLost, RequestAborted, TrioserveError
from trioserve.contracts.events import AbortOutcome
from trioserve.contracts.kv_transfer import EngineRole
from trioserve.router.core import Fault, RouterCore, RouterStats
from trioserve.router.endpoint_state import EndpointState
from trioserve.router.policies import Policy, PolicyFactory, Rng
from trioserve.router.settings import RouterSettings
from trioserve.router.ticket import Ticket, TicketState
from trioserve.trio_tools.interrupts import uninterrupted

__all__ = ["AdmissionScope", "Dispatch", "Fault", "Taken"]

RETRY_SECONDS = 5.0


class Taken(EndpointLost):
    """The router takes the request from its endpoint. fault: why."""

    def __init__(self, message: str, fault: Fault) -> None:
        super().__init__(message)
        self.fault = fault


@uninterrupted
class Dispatch:
    """One router. Every method belongs to the thread of the Trio program that runs it.

    on_gone: told of an endpoint that was drained and is empty. on_move: told of a request that has a lease elsewhere,
    so that its endpoint may give it away; it owes `admission.take()`, unless the attempt ends before that.
    on_drain: told that nothing new is taken.
    on_wait_over: told how many seconds a request has waited when it gets its lease, or is refused in the queue.
    on_paired: told how many seconds a disaggregated request took from the end of its prompt to the first token of its
    response.
    """

    def __init__(self, settings: RouterSettings, policy: PolicyFactory, *, rng: Rng | None = None) -> None:
        self.core = RouterCore(
            settings,
            policy,
            on_change=self._wake_admission,
            rng=rng or random.Random(),
            on_gone=self._note_gone,
            on_move=self._move_admission,
        )
        self.on_gone: Callable[[EndpointId], None] = lambda id: None
        self.on_move: Callable[[AdmissionScope], None] = lambda admission: admission.take()
        self.on_drain: Callable[[], None] = lambda: None
        self.on_wait_over: Callable[[float], object] = lambda seconds: None
        self.on_paired: Callable[[float], object] = lambda seconds: None
        self._admissions: dict[int, AdmissionScope] = {}
        self._ended_ids = EndedIds()
        self._sent_times = SentTimes()
        self.load_reports_total = {"asked": 0, "pushed": 0}
        self._ticks_at = math.inf
        self._sooner = trio.Event()
        self._idle = trio.Event()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Does what only time brings: waits that are over, endpoints that may be probed. Runs until cancelled."""
        task_status.started()
        while True:
            self._sooner = trio.Event()
            self._ticks_at = self.core.next_tick(trio.current_time())
            with trio.move_on_at(self._ticks_at):
                await self._sooner.wait()
            self.core.tick(trio.current_time())

    def block_sizes(self, request: RoutedRequest) -> frozenset[int]:
        """In which sizes of blocks the policy wants the request named; none if it has no choice to make."""
        sizes = self.core.policy.block_sizes()
        return sizes if sizes and self.core.has_choice(request) else frozenset()

    @contextmanager
    def preparing(self, request: RoutedRequest) -> Iterator[None]:
        """Count a request while it is read, before it enters. Raises as `enter` does, and then holds nothing."""
        self.core.prepare(request, trio.current_time())
        try:
            yield
        finally:
            self.core.prepared(request)

    @contextmanager
    def enter(
        self, request: RoutedRequest, *, id: str | None = None, owner: str | None = None
    ) -> Iterator[AdmissionScope]:
        """A place in the queue, or a lease at once. id: under which it may be seen and aborted by its owner, or by
        those who may see everything. Raises Overloaded, Draining or NoEndpoint, and then holds nothing."""
        admission = self.begin(request, id=id, owner=owner)
        try:
            yield admission
        finally:
            self.leave(admission)

    def begin(self, request: RoutedRequest, *, id: str | None = None, owner: str | None = None) -> AdmissionScope:
        """The same for those whose scope is not a `with` block here. The caller owes `leave`."""
        ticket = self.core.enter(request, trio.current_time())
        admission = self._admissions[ticket.index] = AdmissionScope(self, self.core, ticket, id=id, owner=owner)
        if ticket.state is TicketState.WAITING:
            self.retime()  # the end of its wait may be the next thing that time brings
        return admission

    def leave(self, admission: AdmissionScope) -> None:
        """Whatever it holds is back. Nothing to do when it has left."""
        if self._admissions.pop(admission.index, None) is not None:
            self.core.leave(admission.ticket, trio.current_time())
            if admission.id is not None:
                self._ended_ids.note(admission.id, admission.owner)
            if not self._admissions:
                self._idle.set()

    def abort(self, ids: Iterable[str], *, owner: str | None = None) -> dict[str, AbortOutcome]:
        """End requests by their ids: out of the queue, or from their endpoint, at once; their clients are told. Never
        raises. owner: only theirs; those of others are unknown."""
        admissions: dict[str | None, list[AdmissionScope]] = {}
        for admission in self.live_admissions(owner=owner):
            admissions.setdefault(admission.id, []).append(admission)
        outcomes = {}
        for id in dict.fromkeys(ids):
            found = admissions.get(id, [])
            unfinished = [admission for admission in found if not admission.is_ended]
            for admission in unfinished:
                admission.end(RequestAborted("the request was aborted by its id"))
            if unfinished:
                outcomes[id] = AbortOutcome.ABORTED
            elif found or self._ended_ids.knows(id, owner=owner):
                outcomes[id] = AbortOutcome.ALREADY_FINISHED
            else:
                outcomes[id] = AbortOutcome.UNKNOWN
        return outcomes

    def live_admissions(self, *, owner: str | None = None) -> list[AdmissionScope]:
        """Every request that is entered and not left, oldest first. owner: only theirs."""
        return [admission for admission in self._admissions.values() if owner in (None, admission.owner)]

    def note_sent(self) -> None:
        """A request goes to its endpoint now."""
        self._sent_times.note(trio.current_time())

    def sent_total_at(self, moment: float) -> int:
        """What `sent_total` was then."""
        return self._sent_times.count_at(moment)

    def note_load(self, id: EndpointId, load: EndpointLoad, *, sent_when_asked: int, is_pushed: bool = False) -> None:
        """is_pushed: nobody has asked for it."""
        self.load_reports_total["pushed" if is_pushed else "asked"] += 1
        self.core.note_load(id, load, trio.current_time(), sent_when_asked=sent_when_asked)
        self.retime()

    def stats(self) -> RouterStats:
        return self.core.stats()

    @property
    def endpoints(self) -> Collection[EndpointState]:
        """Those that there are, to be looked at."""
        return self.core.endpoints.values()

    def model_names(self) -> KeysView[str]:
        """What the endpoints serve."""
        return self.core.model_names()

    @property
    def is_any_nameless(self) -> bool:
        """Whether an endpoint has not told yet what it serves."""
        return self.core.is_any_nameless

    @property
    def policy(self) -> Policy:
        """Who chooses among them."""
        return self.core.policy

    @property
    def is_draining(self) -> bool:
        return self.core.is_draining

    def endpoint(self, id: EndpointId) -> EndpointState | None:
        """The one of this name, to be looked at, if there is one."""
        return self.core.endpoints.get(id)

    def is_endpoint_draining(self, id: EndpointId) -> bool:
        return self.core.is_endpoint_draining(id)

    def is_pair_there(self, model: str) -> bool:
        """Whether a request for the model can be disaggregated: there are endpoints for both of its stages."""
        return self.core.is_pair_there(model)

    def add_endpoint(
        self,
        id: EndpointId,
        models: Iterable[str] = (),
        *,
        leases_max: int | None = None,
        role: EngineRole | None = None,
    ) -> None:
        """It gets requests once it is known to be well. Raises StartupError for an id that is taken."""
        self.core.add_endpoint(id, models, trio.current_time(), leases_max=leases_max, role=role)

    @property
    def wants_prefix(self) -> bool:
        """Whether it matters that requests name their prefixes."""
        return self.core.policy.wants_prefix

    @property
    def sent_total(self) -> int:
        """Requests that were sent anywhere; to be kept when an endpoint is asked for its load."""
        return self.core.sent_total

    def set_lease_share(self, id: EndpointId, share: int) -> None:
        self.core.set_lease_share(id, share, trio.current_time())
        self.retime()

    def lend(self, id: EndpointId, sequences: int) -> None:
        """The head of the queue gets a lease of so many sequences beyond the endpoint's share, as far as its limit has
        room. From then on the share counts as before."""
        state, now = self.core.endpoints[id], trio.current_time()
        share = state.leases_own_max
        self.core.set_lease_share(id, max(share, min(state.claims + sequences, state.leases_max)), now)
        self.core.set_lease_share(id, share, now)
        self.retime()

    def set_models(self, id: EndpointId, models: Iterable[str]) -> None:
        self.core.set_models(id, models, trio.current_time())
        self.retime()

    def set_role(self, id: EndpointId, role: EngineRole | None) -> None:
        self.core.set_role(id, role, trio.current_time())
        self.retime()

    def drain_endpoint(self, id: EndpointId, *, move_seconds: float | None = None) -> None:
        """Give it nothing more. move_seconds: and empty it: what can go on elsewhere is moved there as there is room,
        and after so long all that is left leaves that can."""
        self.core.drain_endpoint(id, trio.current_time(), move_seconds=move_seconds)
        self.retime()

    def note_health(self, id: EndpointId, is_well: bool, *, hangs: bool, is_hung: bool = False) -> None:
        """A health check ended. hangs: it got no response, or the response that a step there does not end. What an
        endpoint that is ejected for that has not begun to answer is taken from it, to be tried elsewhere, and so is
        what can go on elsewhere: that also later, once there is somewhere to go. is_hung: so it was for so long that
        the endpoint is ejected at once."""
        was_given = self._is_given(id)
        self.core.note_health(id, is_well, trio.current_time(), is_hung=is_hung)
        if hangs and not self._is_given(id):
            has_other = self._has_other(id)
            for admission in list(self._admissions.values()):
                admission.take_from(id, Fault.HUNG, unbegun=was_given, streams=has_other)
        self.retime()

    def note_leaving(self, id: EndpointId, *, move_seconds: float | None) -> None:
        """An endpoint says that it will stop: it gets nothing, and is emptied as by drain_endpoint, until a check finds
        it well."""
        self.core.note_leaving(id, trio.current_time(), move_seconds=move_seconds)
        self.retime()

    def wants_probe(self, id: EndpointId) -> bool:
        """Whether the endpoint has failed requests, and has to serve one of the router's own before it gets others."""
        state = self.core.endpoints.get(id)
        return state is not None and state.wants_probe(trio.current_time())

    def note_probe(self, id: EndpointId, is_well: bool) -> None:
        """Such a request has been answered, or not."""
        self.core.note_probe(id, is_well, trio.current_time())
        self.retime()

    def note_fingerprint(self, id: EndpointId, fingerprint: str | None) -> None:
        self.core.note_fingerprint(id, fingerprint)

    def drain(self) -> None:
        """Take nothing new, refuse who waits."""
        self.core.drain(trio.current_time())
        self.on_drain()

    def abort_all(self, message: str) -> None:
        """End those that are at an endpoint, too; each client is told the message."""
        for admission in list(self._admissions.values()):
            admission.end(Draining(message, reason="draining", retry_after_seconds=RETRY_SECONDS))

    async def wait_until_idle(self) -> None:
        """Returns when no request is entered. For use after drain()."""
        while self._admissions:
            if self._idle.is_set():
                self._idle = trio.Event()
            await self._idle.wait()

    def retime(self) -> None:
        """Something has changed that may bring the next tick forward."""
        if self.core.next_tick(trio.current_time()) < self._ticks_at:
            self._sooner.set()

    def _has_other(self, id: EndpointId) -> bool:
        """Whether another endpoint takes requests of one of its models."""
        there = self.core.endpoints.get(id)
        return there is not None and any(
            state.is_given and state.models & there.models for state in self.core.endpoints.values()
        )

    def _is_given(self, id: EndpointId) -> bool:
        state = self.core.endpoints.get(id)
        return state is not None and state.is_given

    def _note_gone(self, id: EndpointId) -> None:
        self.on_gone(id)

    def _move_admission(self, ticket: Ticket) -> None:
        admission = self._admissions[ticket.index]
        if ticket.has_token and not admission.can_go_on():
            self.core.stays(ticket, trio.current_time())
        elif ticket.next_lease is None:
            admission.take()
        else:
            self.on_move(admission)

    def _wake_admission(self, ticket: Ticket) -> None:
        admission = self._admissions.get(ticket.index)
        if admission is not None:  # one that is just entering looks for itself
            admission.wake()


@uninterrupted
class AdmissionScope:
    """One request, from entering the queue to leaving it. can_go_on: asked, once its client has a token, whether
    another endpoint could go on from what the client has. note_thought_ended: told when its endpoint has ended its
    thought by hand. headers: with which its endpoint may be asked about it, in
    its client's name. gives_partial: its client wants to have what there is, also where it is ended by another's hand.
    attempts: that have begun. taken: why the one at hand is to end, if so; is_telling: not before
    what is being sent to the client has been: see `tell`."""

    def __init__(
        self, dispatch: Dispatch, core: RouterCore, ticket: Ticket, *, id: str | None, owner: str | None
    ) -> None:
        self.ticket = ticket
        self.id = id
        self.owner = owner
        self.can_go_on: Callable[[], bool] = lambda: False
        self.note_thought_ended: Callable[[], None] = lambda: None
        self.headers: Callable[[], list[tuple[str, str]]] = list
        self.gives_partial = False
        self._dispatch = dispatch
        self._core = core
        self._changed = trio.Event()
        self._attempt: trio.CancelScope | None = None
        self._end: TrioserveError | None = None
        self.taken: Fault | None = None
        self.is_telling = False
        self.attempts = 0
        self._is_attempt_over = trio.Event()

    async def lease(self) -> EndpointId:
        """Wait for an endpoint. Raises what refuses the request: Overloaded when it waited too long here, QueueWaitOver
        when its own time is over, Draining, NoEndpoint, RequestAborted."""
        ticket = self.ticket
        while ticket.state is TicketState.WAITING and self._end is None:
            self._changed = trio.Event()
            await self._changed.wait()
        if self._end is not None:
            raise self._end
        if ticket.prefilled_by is None and not ticket.has_token:
            self._dispatch.on_wait_over(trio.current_time() - ticket.entered_at)
        if ticket.refusal is not None:
            raise ticket.refusal
        assert ticket.endpoint is not None
        return ticket.endpoint

    @property
    def index(self) -> int:
        """Of its arrival at this router."""
        return self.ticket.index

    @property
    def model(self) -> str:
        return self.ticket.request.model

    @property
    def priority(self) -> int:
        return self.ticket.request.priority

    @property
    def tenant(self) -> str:
        """With whom it shares its turn in the queue."""
        return self.ticket.request.tenant

    @property
    def prompt_tokens(self) -> int:
        """As they were counted or estimated when it came."""
        return self.ticket.request.prompt_tokens

    @property
    def sequence_count(self) -> int:
        return self.ticket.request.sequences

    @property
    def is_pinned(self) -> bool:
        """It may be at one endpoint only."""
        return self.ticket.request.pinned is not None

    @property
    def entered_at(self) -> float:
        return self.ticket.entered_at

    @property
    def leased_at(self) -> float:
        """When it got the lease in hand."""
        return self.ticket.leased_at

    @property
    def endpoint(self) -> EndpointId | None:
        """Where its lease is, or was when it went back at the first token."""
        return self.ticket.endpoint

    @property
    def prefilled_by(self) -> EndpointId | None:
        """The endpoint that computed its prompt for another one."""
        return self.ticket.prefilled_by

    @property
    def pair_outcome(self) -> PairOutcome | None:
        """What became of its being disaggregated."""
        return self.ticket.pair_outcome

    @property
    def has_token(self) -> bool:
        """Its client has seen a token."""
        return self.ticket.has_token

    @property
    def stage(self) -> Stage | None:
        """What is to be done with the lease in hand; None: the whole request. To be looked at after each `lease`."""
        return self.ticket.stage

    @property
    def state(self) -> str:
        """Where it is, in a word: "waiting" and "running", or what of a disaggregated request is being done."""
        if self.ticket.stage is Stage.DECODE:
            return "handover" if self.is_queued else "decode"
        if self.is_queued:
            return "waiting"
        return "running" if self.ticket.stage is None else "prefill"

    @property
    def is_waiting(self) -> bool:
        """It has no lease."""
        return self.ticket.state is TicketState.WAITING

    @property
    def is_queued(self) -> bool:
        """It waits, or has a lease that it has not used yet."""
        ticket = self.ticket
        return ticket.state in (TicketState.WAITING, TicketState.LEASED) and not ticket.is_sent

    def sent(self) -> None:
        """The request goes to its endpoint: for those whose attempt is not a `with` block here."""
        self._core.sent(self.ticket)
        self._dispatch.note_sent()

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """The request goes to its endpoint. Raises Taken if the router takes it from there, Draining if it ends the
        request."""
        self.sent()
        self.taken, self.is_telling = None, False
        self.attempts += 1
        self._is_attempt_over = trio.Event()
        with trio.CancelScope() as scope:
            self._attempt = scope
            try:
                yield
            finally:
                self._attempt = None  # from here on the end of the request is not the attempt's
                self._is_attempt_over.set()
        if scope.cancelled_caught:
            raise self._end or self._was_taken()

    async def wait_for_end(self, attempt: int) -> None:
        """Returns when the attempt of this number has ended; see attempts."""
        if self.attempts == attempt:
            await self._is_attempt_over.wait()

    def check_taken(self) -> None:
        """To be asked whenever something has come from the endpoint, before it is passed on. Raises Taken: then nobody
        is to get it."""
        if self.taken is not None and self._end is None:
            raise self._was_taken()

    async def tell(self, telling: Awaitable[None], *, is_last: bool = False) -> None:
        """Pass on to the client what an endpoint has said. Meanwhile the request is not taken from its endpoint: half
        of an event would reach the client, and the other half nobody. is_last: nor after it. Raises Taken."""
        self.is_telling = True
        await telling
        if not is_last:
            self.is_telling = False
            self.check_taken()

    def _was_taken(self) -> Taken:
        fault = self.taken or Fault.HUNG
        said = "is being emptied" if fault is Fault.LEAVING else "does not answer any more"
        return Taken(f'the endpoint "{self.ticket.endpoint}" {said}', fault)

    def first_token(self, *, is_last: bool = False) -> None:
        """The endpoint has begun to answer. is_last: all of its response is there, so that nobody knows when it
        began."""
        ticket, now = self.ticket, trio.current_time()
        if ticket.stage is Stage.DECODE and not ticket.has_token and not is_last:
            self._dispatch.on_paired(now - ticket.prefilled_at)
        self._core.first_token(ticket, now, can_go_on=self.can_go_on())
        self._dispatch.retime()

    def prefilled(self, *, outcome: PairOutcome | None = None) -> None:
        """The endpoint has computed the prompt, and its slot there is free: `lease` again, for the rest. outcome: why
        one endpoint has to do that alone; None: the blocks are held for a decode endpoint."""
        self._core.prefilled(self.ticket, trio.current_time(), outcome=outcome)
        self._dispatch.retime()

    def hold_lost(self) -> None:
        """The blocks are held no longer. Legal at any moment."""
        self._core.hold_lost(self.ticket, trio.current_time())
        self._dispatch.retime()

    def failed(
        self,
        fault: Fault,
        *,
        busy_seconds: float = 1.0,
        token_count: int = 0,
        is_certain: bool = False,
        reason: str | None = None,
    ) -> bool:
        """The endpoint failed the request before it began to answer, or in the middle of what can go on elsewhere;
        token_count: what its client has by then. is_certain: the endpoint has said itself that it is its fault. True:
        `lease` again; False: it has ended here, see `refusal`."""
        if fault is Fault.LEAVING and self.ticket.next_lease is not None:
            self._core.moved(self.ticket, trio.current_time())
            self._dispatch.retime()
            return True
        is_waiting = self._core.failed(
            self.ticket,
            fault,
            trio.current_time(),
            busy_seconds=busy_seconds,
            token_count=token_count,
            is_certain=is_certain,
            reason=reason,
        )
        self._dispatch.retime()
        return is_waiting

    def note_client_fault(self) -> bool:
        """Note that its endpoint refused it as its client's fault. Returns whether another one has to confirm that."""
        return self._core.note_client_fault(self.ticket)

    def wake(self) -> None:
        self._changed.set()

    def take_from(self, id: EndpointId, fault: Fault, *, unbegun: bool, streams: bool) -> None:
        """End the attempt if it is at this endpoint: unbegun: one that has brought nothing; streams: one that can go on
        elsewhere from what it has brought."""
        if self._attempt is None or self.ticket.endpoint != id:
            return
        if (streams and self.can_go_on()) if self.ticket.has_token else unbegun:
            self.take(fault)

    def take(self, fault: Fault = Fault.LEAVING) -> None:
        """End the attempt, which raises Taken, as soon as nothing is on its way to the client. Nothing to do when there
        is none."""
        if self._attempt is not None:
            self.taken = fault
            if not self.is_telling:
                self._attempt.cancel()

    @property
    def refusal(self) -> TrioserveError | None:
        """Why the router does not go on with it, if that is so."""
        return self.ticket.refusal

    @property
    def end_reason(self) -> TrioserveError | None:
        """Why somebody has ended it; None: nobody has."""
        return self._end

    @property
    def is_ended(self) -> bool:
        """Somebody has ended it, or the queue has refused it."""
        return self._end is not None or self.ticket.state is TicketState.ENDED

    def end(self, reason: TrioserveError) -> None:
        """End it, wherever it is. In the queue its place is free at once; an attempt ends with its scope."""
        self._end = reason
        if self._attempt is not None:
            self._attempt.cancel()
        else:
            self._core.leave(self.ticket, trio.current_time())
            self.wake()
