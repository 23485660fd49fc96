"""The interface between the lifecycle of an engine and its work: texts and pooling, or images."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from trioserve.admission.dispatch import Dispatch
from trioserve.contracts.kv_transfer import RunningConnector
from trioserve.contracts.step import IsAbandoned
from trioserve.contracts.tracing import Tracer
from trioserve.engine.lifecycle.core_delivery import CoreDelivery
from trioserve.engine.lifecycle.engine_loop import WhenIdle
from trioserve.engine.lifecycle.request_scope import RequestsById, RequestScope
from trioserve.engine.lifecycle.restarts import RestartBudget
from trioserve.engine.lifecycle.step_watch import StepWatch
from trioserve.engine.lifecycle.stepped_core import AnyPlan
from trioserve.engine.weight_updates import WeightTarget, WeightUpdates

__all__ = ["CacheRelease", "Guard", "Host", "NoSteps", "Parts", "Work"]

Guard = Callable[[], Coroutine[Any, Any, None]]
"""Waits until the processes that compute are lost, also while the engine is idle, and raises the reason."""


PartsOut = TypeVar("PartsOut", covariant=True)


class CacheRelease(Protocol[PartsOut]):
    """Releases the memory of the KV cache and allocates it again, while the weights stay loaded."""

    async def release_cache(self) -> None:
        """Free all memory except the weights. The caller guarantees that no other code uses the parts."""
        ...

    async def rebuild_parts(self) -> PartsOut:
        """Allocate the memory again, with an empty KV cache.

        Returns:
            New parts for the engine.

        Raises:
            Exception: the same errors as when the engine is opened.
        """
        ...


class NoSteps:
    """Stands for what computes while an engine is being opened. No step may begin."""

    def run_step(self, plan: AnyPlan, is_abandoned: IsAbandoned) -> Coroutine[Any, Any, Any]:
        raise AssertionError(f"step {plan.step_index} of an engine that is being opened")


class Parts(Protocol):
    """Parts of one opening of an engine, which are lost with a fault. `EngineParts` documents the fields."""

    @property
    def core(self) -> Any: ...
    @property
    def steps(self) -> Any: ...
    @property
    def connector(self) -> RunningConnector | None: ...
    @property
    def readers_first(self) -> bool: ...
    @property
    def when_idle(self) -> WhenIdle | None: ...
    @property
    def guard(self) -> Guard | None: ...
    @property
    def cache_release(self) -> object: ...
    @property
    def weights(self) -> WeightTarget | str: ...


class Host(Protocol):
    """The lifecycle of an engine, as its work sees it. `EngineLifecycle` documents the members."""

    tracer: Tracer
    draining: bool
    requests: RequestsById[Any]
    kept_holds: RequestsById[Any]
    preparing_count: int
    weight_updates: WeightUpdates
    step_watch: StepWatch
    restarts: RestartBudget
    dispatch: Dispatch

    def wake(self) -> None: ...

    async def wait_until_admitted(self) -> None: ...

    async def wait_until_open(self) -> None: ...


ScopeT = TypeVar("ScopeT", bound=RequestScope[Any, Any, Any])
PartsT = TypeVar("PartsT", bound=Parts)


class Work(Protocol[ScopeT, PartsT]):
    """One kind of work of an engine: how its requests become sequences of its core.

    Attributes:
        part_name: name of the parts of a request, for error messages.
        step_times: receives the times of each step.
        tasks: run as long as the engine, until they are cancelled.
    """

    part_name: str
    step_times: Any
    tasks: Sequence[Callable[[], Awaitable[None]]]

    def attach(self, engine: Host) -> None:
        """Store the lifecycle of the engine. Called once, before all other methods.

        Args:
            engine: the lifecycle.
        """
        ...

    def install(self, parts: PartsT) -> tuple[Any, CoreDelivery[ScopeT, Any, Any, Any]]:
        """Use new parts, and forget the previous ones. Return their core, and the delivery of its results.

        Args:
            parts: the new parts.
        """
        ...

    def no_parts(self) -> PartsT:
        """Return the parts of an engine that is being reopened: an empty core, and no computation."""
        ...

    def continued(self) -> Callable[[Any], Any]:
        """Keep what the core knows of its sequences, because the core is dropped.

        Returns:
            A function that returns, for each part that the core had, how the part continues in the next core. None
            means that this is unknown, so the request ends with an error.
        """
        ...

    def check(self, request: ScopeT) -> None:
        """Raise InvalidRequest if this engine cannot serve the request. Called before anything is acquired.

        Args:
            request: the request.
        """
        ...

    def begin(self, request: ScopeT, *, is_waiting: bool) -> list[Any]:
        """Make the parts of a request that has entered the queue, each with a unique id for the core. Begin its trace,
        and acquire what the request has from the start.

        Args:
            request: the request.
            is_waiting: True if it has no lease yet.
        """
        ...

    async def prepare(self, request: ScopeT) -> None:
        """Make the input of the core's sequences. Called when the request has its lease.

        Args:
            request: the request.
        """
        ...

    def sequences(self, request: ScopeT) -> Sequence[Any]:
        """Return one sequence per part that has not ended.

        Args:
            request: the request.
        """
        ...

    def release(self, request: ScopeT) -> None:
        """Release what was acquired for a request, because the core has no part of it any more. May be called again.

        Args:
            request: the request.
        """
        ...

    def keeps_hold(self, request: ScopeT) -> bool:
        """Return True if blocks of a request that leaves stay held for another engine.

        Args:
            request: the request.
        """
        ...

    def gives_away(self, request: ScopeT) -> bool:
        """Return True if another engine resumes the request, from now on or already.

        Args:
            request: the request.
        """
        ...

    def use_weights(self, version: str | None, *, recomputes: bool = False) -> None:
        """Use new weights from now on. No step is in flight.

        Args:
            version: their version. None: the weights from opening.
            recomputes: True to compute the KV of all requests again.
        """
        ...

    def note_left(self, request: ScopeT) -> None:
        """Note that the scope of a request is over, and none of its blocks are held.

        Args:
            request: the request.
        """
        ...

    def note_leaving(self) -> None:
        """Notify subscribers that the engine accepts no new requests, or has broken."""
        ...

    def note_over(self) -> None:
        """Notify subscribers that no more steps will come from these parts, or that the engine drains."""
        ...

    def show(self, stats: Any) -> int:
        """Update the gauges of this kind of work. Return how many sequences wait for something else than blocks.

        Args:
            stats: counts of the core.
        """
        ...
