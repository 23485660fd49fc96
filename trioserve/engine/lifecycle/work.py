"""Protocols between the lifecycle of an engine and the code for its requests: text and pooling, or images."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

from trioserve.admission.dispatch import Dispatch
from trioserve.contracts.kv_transfer import RunningConnector
from trioserve.contracts.step import IsAbandoned
from trioserve.contracts.tracing import Tracer
from trioserve.engine.lifecycle.core_delivery import CoreDelivery
from trioserve.engine.lifecycle.engine_loop import AnyPlan, WhenIdle
from trioserve.engine.lifecycle.request_scope import RequestsById, RequestScope
from trioserve.engine.lifecycle.restarts import RestartBudget
from trioserve.engine.lifecycle.step_times import StepWatch
from trioserve.engine.weight_updates import WeightTarget, WeightUpdates
from trioserve.trio_tools.deadline_keeper import Alarm

__all__ = ["CacheRelease", "Guard", "Host", "NoSteps", "Parts", "Work"]

Guard = Callable[[], Coroutine[Any, Any, None]]
"""Waits until the processes that compute are lost, also while the engine is idle, and raises the reason."""


PartsOut = TypeVar("PartsOut", covariant=True)


class CacheRelease(Protocol[PartsOut]):
    """Releases the memory of the KV cache and allocates it again, while the weights stay loaded."""

    async def release_cache(self) -> None:
        """Free all memory except the weights. The caller guarantees that nothing else uses the parts."""
        ...

    async def rebuild_parts(self) -> PartsOut:
        """Allocate the memory again, with an empty KV cache.

        Returns:
            New parts for the engine.

        Raises:
            Exception: the same errors as when the engine is first opened.
        """
        ...


class NoSteps:
    """A placeholder for the executor while an engine is being opened. No step may begin."""

    def run_step(self, plan: AnyPlan, is_abandoned: IsAbandoned) -> Coroutine[Any, Any, Any]:
        raise AssertionError(f"step {plan.step_index} of an engine that is being opened")


class Parts(Protocol):
    """Parts that are opened together, and are lost when the engine breaks. `EngineParts` documents the fields."""

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
    """The interface of `EngineLifecycle` that a `Work` uses. `EngineLifecycle` documents the members."""

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

    def call_at(self, at: float, function: Callable[[], None]) -> Alarm: ...

    async def wait_until_admitted(self) -> None: ...

    async def wait_until_open(self) -> None: ...


ScopeT = TypeVar("ScopeT", bound=RequestScope[Any, Any, Any])
PartsT = TypeVar("PartsT", bound=Parts)


class Work(Protocol[ScopeT, PartsT]):
    """Defines how an engine's requests become sequences in its core. There is one implementation per engine type.

    Attributes:
        part_name: name of a choice or image, for error messages.
        step_times: receives the times of each step.
        tasks: functions that run as long as the engine, until they are cancelled.
    """

    part_name: str
    step_times: Any
    tasks: Sequence[Callable[[], Awaitable[None]]]

    def attach(self, engine: Host) -> None:
        """Store the lifecycle of the engine. This is called once, before all other methods.

        Args:
            engine: the lifecycle.
        """
        ...

    def install(self, parts: PartsT) -> tuple[Any, CoreDelivery[ScopeT, Any, Any, Any]]:
        """Use new parts, and forget the old ones. Return the new core, and the delivery of its results.

        Args:
            parts: the new parts.
        """
        ...

    def no_parts(self) -> PartsT:
        """Return placeholder parts for an engine that is being reopened: an empty core, and no executor."""
        ...

    def continued(self) -> Callable[[Any], Any]:
        """Save the core's state of its sequences, because the core is about to be dropped.

        Returns:
            A function that takes a choice that was in the core, and returns its sequence for the next core. None means
            that the choice cannot be continued, so its request ends with an error.
        """
        ...

    def check(self, request: ScopeT) -> None:
        """Raise InvalidRequest if this engine cannot serve the request. Called before any resource is acquired."""
        ...

    def begin(self, request: ScopeT, *, is_waiting: bool) -> list[Any]:
        """Create the choices of a request that has entered the queue, each with a unique id for the core. Begin the
        request's trace, and acquire the resources that the request needs from the start.

        Args:
            is_waiting: True if the request has no lease yet.
        """
        ...

    async def prepare(self, request: ScopeT) -> None:
        """Compute the input of the request's sequences. Called when the request has its lease."""
        ...

    def sequences(self, request: ScopeT) -> Sequence[tuple[Any, Any]]:
        """Return each choice that has not ended, with its sequence for the core.

        Args:
            request: a prepared request.
        """
        ...

    def release(self, request: ScopeT) -> None:
        """Release the resources of a request that has no sequence in the core any more. This may be called more than
        once.
        """
        ...

    def keeps_hold(self, request: ScopeT) -> bool:
        """Return True if blocks of a request stay held for another engine after its scope has ended."""
        ...

    def try_hand_over(self, request: ScopeT) -> bool:
        """Hand the request over to another engine. Return False if this is not possible."""
        ...

    def use_weights(self, version: str | None, *, recomputes: bool = False) -> None:
        """Use new weights from now on. Call this when no step is in flight.

        Args:
            version: version of the new weights. None: the weights with which the engine was opened.
            recomputes: True to compute the KV of all requests again.
        """
        ...

    def note_left(self, request: ScopeT) -> None:
        """Note that the scope of a request has ended, and none of its blocks are held."""
        ...

    def note_leaving(self) -> None:
        """Notify subscribers that the engine accepts no new requests, or has broken."""
        ...

    def note_stopped(self) -> None:
        """Notify subscribers that these parts will compute no more steps, or that the engine drains."""
        ...

    def show(self, stats: Any) -> int:
        """Update the gauges of this engine type. Return how many sequences wait for something other than blocks.

        Args:
            stats: counts of the core.
        """
        ...
