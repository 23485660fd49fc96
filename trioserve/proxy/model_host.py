"""Joins models that are loaded on demand with the router: a loaded model is an endpoint.

A request for a model that is not loaded waits in the router's queue, with its deadlines, like any request that waits
for a free slot. Each change of its state is reported to the models, which are loaded for it and leased by it.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from trioserve.admission.model_runs import ModelFollower, ModelRuns
from trioserve.contracts.endpoint import RoutedRequest
from trioserve.contracts.errors import EndpointLost, InvalidRequest, NoEndpoint
from trioserve.proxy.fleet import EndpointSpec, Fleet
from trioserve.router.hosted_models import ModelLease, ModelState
from trioserve.router.ticket import Ticket, TicketFollower
from trioserve.trio_tools.interrupts import uninterrupted

if TYPE_CHECKING:
    from trioserve.metrics.registry import Metrics
    from trioserve.proxy.remote_endpoint import RemoteEndpoint

__all__ = ["ModelHost"]

ANSWER_BYTES_MAX = 65_536
SOURCE = "hosted"
"""Name of the source of the endpoints, in the list of endpoints."""


@uninterrupted
class ModelHost(TicketFollower, ModelFollower[EndpointSpec]):
    """Adds loaded models to the endpoints of a router, and reports the router's requests to the models.

    Args:
        fleet: endpoints of the router.
        models: the models, with the specifications of their endpoints.
    """

    def __init__(self, fleet: Fleet, models: ModelRuns[EndpointSpec]) -> None:
        self._fleet = fleet
        self._models = models
        self._waiting: set[int] = set()  # Indexes of the tickets that wait for a model.
        self._leases: dict[int, ModelLease] = {}  # By the index of the ticket.
        self._shown = Counter[tuple[str, str]]()
        self._metrics: Metrics | None = None
        models.follower = self
        fleet.dispatch.host(models.served_names, self)
        fleet.hosted_adapters = models.served_names - models.names

    def show(self, metrics: Metrics) -> None:
        """Update the metrics of the models at every scrape. Call this method once.

        Args:
            metrics: metrics of the router.
        """
        models = self._models
        self._metrics = metrics

        def show() -> None:
            metrics.hosted_models_bytes.set(models.held_bytes)
            totals = {"loaded": models.loads_total, "failed": models.failures_total, "unloaded": models.unloads_total}
            for name, status in models.statuses().items():
                metrics.hosted_model_loaded.labels(name).set(status.state in ("loaded", "draining"))
                metrics.hosted_model_sleeping.labels(name).set(status.state == "sleeping")
                metrics.hosted_model_waiting_requests.labels(name).set(status.waiting)
                for outcome, by_model in totals.items():
                    more = by_model[name] - self._shown[name, outcome]
                    metrics.hosted_model_loads_total.labels(name, outcome).inc(more)
                    self._shown[name, outcome] = by_model[name]

        metrics.on_scrape(show)

    # --- transitions of tickets ---

    def check(self, request: RoutedRequest) -> None:
        if request.model in self._models:
            self._models.check(request.model)

    def waits(self, ticket: Ticket) -> None:
        if ticket.request.model in self._models:
            lease = self._leases.pop(ticket.index, None)
            if lease is not None:
                self._models.release(lease)
            self._begin_wait(ticket)

    def leased(self, ticket: Ticket) -> None:
        name = ticket.request.model
        if name not in self._models or ticket.index in self._leases:
            return
        self._begin_wait(ticket)
        lease = self._models.lease(name, ticket.request.tenant)
        # If several models change at once, the router may send a request to a model whose change it does not know yet.
        # The model then ends as if the request were not there, and the router sends the request to its next process.
        if lease is not None:
            self._waiting.remove(ticket.index)
            self._leases[ticket.index] = lease

    def ended(self, ticket: Ticket) -> None:
        lease = self._leases.pop(ticket.index, None)
        if lease is not None:
            self._models.release(lease)
        elif ticket.index in self._waiting:
            self._waiting.remove(ticket.index)
            self._models.stop_waiting(ticket.request.model, ticket.request.tenant)

    def _begin_wait(self, ticket: Ticket) -> None:
        if ticket.index not in self._waiting:
            self._models.wait(ticket.request.model, ticket.request.tenant)
            self._waiting.add(ticket.index)

    # --- changes of models ---

    def model_changed(self, state: ModelState, loaded: EndpointSpec) -> None:
        if state is ModelState.LOADED:
            self._fleet.add(loaded, source=SOURCE)
            self.adapters_changed(self._models.base(next(iter(loaded.models or ()))))
        else:
            self._fleet.drain(loaded.endpoint_id)

    def model_crashed(self, loaded: EndpointSpec) -> None:
        self._fleet.drain(loaded.endpoint_id)

    def load_finished(self, seconds: float) -> None:
        if self._metrics is not None:
            self._metrics.hosted_model_load_seconds.observe(seconds)

    def load_failed(self, name: str, error: NoEndpoint) -> None:
        for admission in self._fleet.dispatch.live_admissions():
            if admission.is_waiting and admission.model in self._models and self._models.base(admission.model) == name:
                admission.end(error)

    def adapters_changed(self, name: str) -> None:
        # Requests for present adapters go to the model's endpoint, and requests for removed ones are refused.
        spec = self._models.loaded(name)
        if spec is not None:
            self._fleet.dispatch.set_models(spec.endpoint_id, self._models.names_of(name))
        self._fleet.dispatch.set_hosted(self._models.served_names)
        self._fleet.hosted_adapters = self._models.served_names - self._models.names

    async def resize(self, loaded: EndpointSpec, tokens: int) -> None:
        if loaded.endpoint_id not in self._fleet.specs():
            raise EndpointLost("the model is being unloaded")
        await _post(self._fleet.remote(loaded.endpoint_id), f"/kv_cache?tokens={tokens}")

    async def set_asleep(self, loaded: EndpointSpec, asleep: bool) -> None:
        path = "/sleep?level=1&mode=wait" if asleep else "/wake_up"
        remote = self._fleet.connect(loaded)  # A sleeping model is no endpoint of the router.
        try:
            await _post(remote, path)
        finally:
            remote.close()


async def _post(remote: RemoteEndpoint, path: str) -> None:
    """Send a request of an operator to the process of a model.

    Raises:
        InvalidRequest: the process refused it.
        EndpointLost: it did not answer.
    """
    async with remote.request("POST", path, [], b"") as response:
        answer = await response.whole(ANSWER_BYTES_MAX) or b""
        if response.status != 200:
            raise InvalidRequest(f"status {response.status}: {answer[:500].decode('utf-8', 'replace')}")
