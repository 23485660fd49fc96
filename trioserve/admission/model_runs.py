"""Loads and unloads models on demand, in tasks of a Trio program.

`HostedModels` decides which models are loaded. This module follows its orders: it runs each model in a task of its own,
from the order to load it until its memory is free. A loaded model is an object of any kind, such as an engine, or the
address of a process.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Generic, Protocol, TypeVar

import msgspec
import trio

from trioserve.contracts.errors import InvalidRequest, NoEndpoint, TrioserveError
from trioserve.contracts.tracing import NO_SPAN, NO_TRACER, Tracer
from trioserve.router.hosted_models import (
    HostedModel,
    HostedModels,
    ModelLease,
    ModelOrder,
    ModelResize,
    ModelSpec,
    ModelState,
)
from trioserve.router.settings import HostedModelsSettings
from trioserve.trio_tools.errors_unwrapped import errors_unwrapped
from trioserve.trio_tools.interrupts import uninterrupted

__all__ = ["ModelFollower", "ModelRuns", "ModelStatus", "RunModel"]

logger = logging.getLogger(__name__)

WAITING_STATES = (ModelState.UNLOADED, ModelState.SLEEPING)
"""States in which a model waits for memory if requests wait for the model."""

SPAN_NAMES = {
    ModelState.LOADING: "load",
    ModelState.DRAINING: "drain",
    ModelState.UNLOADING: "unload",
    ModelState.SLEEPING: "sleep",
    ModelState.WAKING: "wake_up",
}
"""Names of trace spans, by the state in which a model is during the span."""

LoadedT = TypeVar("LoadedT")
LoadedT_co = TypeVar("LoadedT_co", covariant=True)


class RunModel(Protocol[LoadedT_co]):
    """Type of functions that run a model."""

    async def __call__(
        self,
        name: str,
        *,
        on_loaded: Callable[[LoadedT_co], None],
        on_progress: Callable[[str, float | None], None],
        stopping: trio.Event,
    ) -> str:
        """Load a model, and keep it loaded until `stopping` is set. If this call is cancelled, the model ends at once.

        Args:
            name: the model.
            on_loaded: called once with the loaded model.
            on_progress: called with the current activity of the load, for users, and its share that is done, from 0 to
                1. None: the share is unknown. Any thread may call this function.
            stopping: when this event is set, the load or the model must end.

        Returns:
            How the model ended, for users.
        """


class ModelStatus(msgspec.Struct, frozen=True, kw_only=True):
    """State of a hosted model, for users.

    Attributes:
        name: name of the model.
        state: unloaded, loading, loaded, draining, unloading, sleeping or waking.
        reason: why it has this state.
        activity: what a load does at the moment, such as "loading chat". None: nothing is loaded, or it is unknown.
        progress: share of the activity that is done, from 0 to 1. None: it is unknown.
        state_seconds: time since the last change of the state.
        bytes: memory that the model may use. A KV cache that was made smaller for another model counts less.
        waiting: requests that wait for the model.
        leases: requests that use the model.
        unloads_in_seconds: time until the model is unloaded if it stays idle. None: it is in use, not loaded, or never
            unloaded for being idle.
        is_pinned: True if the model is always loaded.
        failure: reason of the last failed load. None if the last load succeeded.
        loads: finished loads since the start of the server.
        load_seconds: time of the last load, or its estimate.
    """

    name: str
    state: str
    reason: str
    activity: str | None
    progress: float | None
    state_seconds: float
    bytes: int
    waiting: int
    leases: int
    unloads_in_seconds: float | None
    is_pinned: bool
    failure: str | None
    loads: int
    load_seconds: float


class ModelFollower(Generic[LoadedT]):
    """Follows the models of ModelRuns, and changes loaded models. Here, every notification is ignored, and every change
    is refused.
    """

    def model_changed(self, state: ModelState, loaded: LoadedT) -> None:
        """Note the new state of a loaded model.

        Args:
            state: LOADED (also after a load or a wake-up), DRAINING, UNLOADING, SLEEPING or WAKING.
            loaded: the model.
        """

    def model_crashed(self, loaded: LoadedT) -> None:
        """Note that a loaded model ended without an order.

        Args:
            loaded: the model.
        """

    def load_finished(self, seconds: float) -> None:
        """Note the time of a load.

        Args:
            seconds: the time.
        """

    def load_failed(self, name: str, error: NoEndpoint) -> None:
        """Note that a load failed.

        Args:
            name: the model.
            error: the error for all requests that wait for the model.
        """

    def adapters_changed(self, name: str) -> None:
        """Note that a model got or lost an adapter.

        Args:
            name: the model.
        """

    async def resize(self, loaded: LoadedT, tokens: int) -> None:
        """Change the KV cache of a loaded model, and return when the memory of the rest is free.

        Args:
            loaded: the model.
            tokens: new size of the cache.

        Raises:
            TrioserveError: the cache keeps its size.
        """
        raise InvalidRequest("the KV cache of this model cannot change")

    async def set_asleep(self, loaded: LoadedT, asleep: bool) -> None:
        """Free the whole KV cache of a loaded model, or allocate it again, and return when this has happened.

        Args:
            loaded: the model.
            asleep: True to free the cache.

        Raises:
            TrioserveError: the model is awake if `asleep` is True. Otherwise, it must end.
        """
        raise InvalidRequest("this model cannot sleep")


class _Run(Generic[LoadedT]):
    """The run of one model, from the order to load it until its memory is free."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.stopping = trio.Event()
        self.loaded: LoadedT | None = None
        self.resizing = trio.Lock()
        self.progress: tuple[str | None, float | None] = None, None
        self.progress_at = -math.inf
        self.span = NO_SPAN
        self._clock = trio.lowlevel.current_clock()

    def note_progress(self, activity: str, share: float | None) -> None:
        """Note what the load does. Any thread may call this. A repeated report is no progress."""
        if self.progress != (activity, share):
            self.progress_at = self._clock.current_time()
            self.progress = activity, share  # One assignment, because other threads read it.


@uninterrupted
class ModelRuns(Generic[LoadedT]):
    """Runs the models of one server or program. All methods run in the thread of its Trio program.

    Args:
        settings: limits.
        specs: the models.
        run_model: runs one model.

    Attributes:
        names: names of the models.
        follower: follows and changes the models. Set it before `run`.
        tracer: records a span for each load, drain, unload, sleep and wake-up. Set it before `run`.
        on_adapter: called with a model, an adapter and its path, which the model has at each load from now on. Called
            with None when the adapter is removed.
        loads_total: finished loads, by model.
        failures_total: failed loads and crashes, by model.
        unloads_total: unloads, by model.
    """

    def __init__(
        self, settings: HostedModelsSettings, specs: Iterable[ModelSpec], run_model: RunModel[LoadedT]
    ) -> None:
        self.settings = settings
        self.loads_total: Counter[str] = Counter()
        self.failures_total: Counter[str] = Counter()
        self.unloads_total: Counter[str] = Counter()
        self.follower = ModelFollower[LoadedT]()
        self.tracer: Tracer = NO_TRACER
        self.on_adapter: Callable[[str, str, str | None], None] = lambda name, adapter, path: None
        self._run_model = run_model
        self._models = HostedModels(settings, specs)
        self.names = frozenset(model.spec.name for model in self._models)
        self._reasons = dict.fromkeys(self.names, "no request has asked for it")
        self._runs: dict[str, _Run[LoadedT]] = {}
        self._changed = trio.Event()
        self._nursery: trio.Nursery | None = None
        self._begun_at = math.inf

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Load and unload models until cancelled. Then all models end.

        Args:
            task_status: reports to the parent task that models are loaded from now on.
        """
        self._begun_at = trio.current_time()
        async with trio.open_nursery() as self._nursery:
            task_status.started()
            while True:
                self._changed.set()  # If only time passed, no other task has set the event.
                self._changed = trio.Event()
                for run in self._runs.values():
                    self._models.on_progress(run.name, run.progress_at)
                for order in self._models.decide(trio.current_time()):
                    self._follow(order)
                with trio.move_on_at(self._models.next_at(trio.current_time())):
                    await self._changed.wait()

    def __contains__(self, name: str) -> bool:
        return name in self._models

    @property
    def served_names(self) -> frozenset[str]:
        """Names of the models and of their LoRA adapters. Methods accept an adapter for its model."""
        return self._models.names

    def base(self, name: str) -> str:
        """Return the name of the model that serves a name.

        Args:
            name: a hosted model, or one of its adapters.
        """
        return self._models[name].spec.name

    def loaded(self, name: str) -> LoadedT | None:
        """Return a model if it is loaded.

        Args:
            name: a hosted model, or one of its adapters.
        """
        return self._runs[self.base(name)].loaded if self.is_loaded(name) else None

    def names_of(self, name: str) -> frozenset[str]:
        """Return the names of a model and of its LoRA adapters.

        Args:
            name: the model.
        """
        return frozenset(each for each in self.served_names if self.base(each) == name)

    def check_adapter(self, name: str, adapter: str) -> None:
        """Check that a model may have an adapter with a name.

        Args:
            name: the model.
            adapter: the name.

        Raises:
            InvalidRequest: the name belongs to a model, or to an adapter of another model.
        """
        self._models.check_adapter(name, adapter)

    def set_adapter(self, name: str, adapter: str, path: str | None) -> None:
        """Add a LoRA adapter to a model, also for its further loads, or remove it.

        Args:
            name: the model.
            adapter: name of the adapter.
            path: its directory. None: it is removed.

        Raises:
            InvalidRequest: the name belongs to a model, or to an adapter of another model.
        """
        if path is None:
            self._models.remove_adapter(adapter)
        else:
            self._models.add_adapter(name, adapter)
        self.on_adapter(name, adapter, path)
        self.follower.adapters_changed(name)

    # --- requests, see HostedModels ---

    def check(self, name: str) -> None:
        """Check that a model may be loaded.

        Args:
            name: the model.

        Raises:
            NoEndpoint: the model's last load failed a short time ago.
            InvalidRequest: the model does not fit into the memory.
        """
        self._models.check(name, trio.current_time())

    def wait(self, name: str, tenant: str = "") -> None:
        """Note that a request begins to wait for a model, after `check` or after its lease.

        Args:
            name: the model.
            tenant: tenant of the request.
        """
        self._models.wait(name, trio.current_time(), tenant, is_new=False)
        self._changed.set()

    def stop_waiting(self, name: str, tenant: str = "") -> None:
        """Note that a request stops to wait.

        Args:
            name: the model.
            tenant: tenant of the request.
        """
        self._models.stop_waiting(name, trio.current_time(), tenant)
        self._changed.set()

    def lease(self, name: str, tenant: str = "") -> ModelLease | None:
        """Turn the wait of a request into a lease.

        Args:
            name: the model.
            tenant: tenant of the request.

        Returns:
            The lease. None if the model gives no leases now.
        """
        lease = self._models.lease(name, trio.current_time(), tenant)
        if lease is not None:
            self._changed.set()
        return lease

    def release(self, lease: ModelLease) -> None:
        """Return a lease."""
        self._models.release(lease, trio.current_time())
        self._changed.set()

    @asynccontextmanager
    async def leased(self, name: str) -> AsyncIterator[LoadedT]:
        """Wait until a model is loaded, and hold a lease on it inside of the scope.

        Args:
            name: the model.

        Raises:
            NoEndpoint: the load failed, or failed a short time ago.
            InvalidRequest: the model does not fit into the memory.
        """
        self.check(name)
        self.wait(name)
        lease = None
        try:
            while (lease := self.lease(name)) is None:
                failures = self.failures_total[self.base(name)]
                await self._changed.wait()
                await trio.lowlevel.checkpoint()  # `run` replaces the event.
                if self.failures_total[self.base(name)] != failures:
                    self.check(name)
            loaded = self._runs[self.base(name)].loaded
            assert loaded is not None, "only loaded models give leases"
            yield loaded
        finally:
            if lease is None:
                self.stop_waiting(name)
            else:
                self.release(lease)

    # --- methods for operators ---

    def load(self, name: str) -> None:
        """Load a model, as if a request waited for it.

        Args:
            name: a hosted model.

        Raises:
            InvalidRequest: the model does not fit into the memory.
        """
        self._models.request_load(name, trio.current_time())
        self._changed.set()

    def unload(self, name: str) -> None:
        """Unload a model when its last request has ended.

        Args:
            name: a hosted model.
        """
        for order in self._models.request_unload(name, trio.current_time()):
            self._follow(order)
        self._changed.set()

    def sleep(self, name: str) -> None:
        """Free the KV cache of an idle model. A request or `load` wakes it.

        Args:
            name: a hosted model.

        Raises:
            InvalidRequest: the model is not loaded, in use, pinned, or cannot free its KV cache.
        """
        for order in self._models.request_sleep(name, trio.current_time()):
            self._follow(order)
        self._changed.set()

    def keep_alive(self, name: str, seconds: float | None) -> None:
        """Set how long a model stays loaded while it is idle.

        Args:
            name: a hosted model.
            seconds: time from the end of its last request on. math.inf: it stays until another model needs the memory.
                None: the model's default.
        """
        model = self._models[name]
        model.keep_alive_seconds = model.spec.keep_alive_seconds if seconds is None else seconds
        self._changed.set()

    async def wait_until_settled(self, name: str) -> ModelStatus:
        """Wait until a model is neither being loaded nor unloaded, and no request waits for it.

        Args:
            name: a hosted model.

        Returns:
            The state at the end.
        """
        while self._is_changing(self._models[name]):
            await self._changed.wait()
            await trio.lowlevel.checkpoint()  # `run` replaces the event.
        return self.status(name)

    def is_loaded(self, name: str) -> bool:
        """Return True if requests for a model get leases.

        Args:
            name: a hosted model.
        """
        return self._models[name].state is ModelState.LOADED

    def status(self, name: str) -> ModelStatus:
        """Return the state of a model.

        Args:
            name: a hosted model.
        """
        model, now = self._models[name], trio.current_time()
        name = model.spec.name
        is_loading = model.state is ModelState.LOADING
        activity, progress = self._runs[name].progress if is_loading else (None, None)
        idles = model.state is ModelState.LOADED and model.is_idle and model.idle_until < math.inf
        return ModelStatus(
            name=name,
            state=model.state.value,
            reason=self._reason(model, now),
            activity=activity,
            progress=progress,
            state_seconds=max(0.0, now - max(model.changed_at, self._begun_at)),
            bytes=model.bytes,
            waiting=model.waiting.total(),
            leases=len(model.leases),
            unloads_in_seconds=max(0.0, model.idle_until - now) if idles else None,
            is_pinned=model.spec.is_pinned,
            failure=model.failure,
            loads=self.loads_total[name],
            load_seconds=model.load_seconds,
        )

    def statuses(self) -> Mapping[str, ModelStatus]:
        """Return the states of all models by name."""
        return {name: self.status(name) for name in sorted(self.names)}

    @property
    def held_bytes(self) -> int:
        """Memory of all models that are not unloaded."""
        return self._models.held_bytes

    # --- orders ---

    def _follow(self, order: ModelOrder | ModelResize) -> None:
        if isinstance(order, ModelResize):
            assert self._nursery is not None, "orders are followed only inside of run"
            self._nursery.start_soon(self._resize, self._runs[order.name], order)
            return
        name, state = order.name, order.state
        self._reasons[name] = order.reason
        logger.info("model %s model=%s reason=%s", state.value, name, order.reason)
        if state is ModelState.LOADING:
            run = self._runs[name] = _Run(name)
            self._begin_span(run, order)
            assert self._nursery is not None, "orders are followed only inside of run"
            self._nursery.start_soon(self._run, run)
            return
        run = self._runs[name]
        is_unloading = state is ModelState.UNLOADING
        has_hung = is_unloading and run.loaded is None and trio.current_time() < self._models[name].retry_at
        if has_hung:
            run.span.end("model_load_failed")
        self._begin_span(run, order)
        if run.loaded is not None:
            self.follower.model_changed(state, run.loaded)
        if is_unloading:
            run.stopping.set()
            if has_hung:
                self.failures_total[name] += 1
                self._refuse_waiting(name)
        elif state in (ModelState.SLEEPING, ModelState.WAKING):
            assert self._nursery is not None, "orders are followed only inside of run"
            self._nursery.start_soon(self._set_asleep, run, state is ModelState.SLEEPING)

    def _begin_span(self, run: _Run[LoadedT], order: ModelOrder) -> None:
        """Begin the span of an order. The span of the order before ends: its work is done, or has been cancelled."""
        run.span.end()
        if order.state not in SPAN_NAMES:
            return
        run.span = self.tracer.begin(
            f"{SPAN_NAMES[order.state]} {run.name}",
            attributes={
                "gen_ai.request.model": run.name,
                "trioserve.reason": order.reason,
                "trioserve.model.waiting_requests": self._models[run.name].waiting.total(),
            },
        )

    async def _run(self, run: _Run[LoadedT]) -> None:
        """Run a model from the start of its load to its end."""
        name = run.name

        def note_loaded(loaded: LoadedT) -> None:
            if self._models[name].state is not ModelState.LOADING:
                return  # The load was cancelled in the meantime.
            run.loaded = loaded
            run.span.end()
            self._models.on_loaded(name, trio.current_time())
            self._reasons[name] = "it was loaded"
            self.loads_total[name] += 1
            self.follower.load_finished(self._models[name].load_seconds)
            self.follower.model_changed(ModelState.LOADED, loaded)
            self._changed.set()

        ended = await self._run_model(name, on_loaded=note_loaded, on_progress=run.note_progress, stopping=run.stopping)
        state, now = self._models[name].state, trio.current_time()
        del self._runs[name]
        run.span.end(None if state is ModelState.UNLOADING else f"model_{SPAN_NAMES.get(state, 'run')}_failed")
        if state is ModelState.UNLOADING:
            self.unloads_total[name] += 1
            self._models.on_unloaded(name, now)
        else:
            if run.loaded is not None:
                self.follower.model_crashed(run.loaded)
            self.failures_total[name] += 1
            self._reasons[name] = ended
            logger.error("model failed model=%s state=%s reason=%s", name, state.value, ended)
            self._models.on_failed(name, now, ended)
            if state is ModelState.LOADING:
                self._refuse_waiting(name)
        self._changed.set()

    def _refuse_waiting(self, name: str) -> None:
        """Refuse the requests that wait for a model whose load failed."""
        try:
            self.check(name)
        except NoEndpoint as error:
            self.follower.load_failed(name, error)

    async def _resize(self, run: _Run[LoadedT], order: ModelResize) -> None:
        """Change the KV cache of a loaded model, after earlier changes."""
        name, error = run.name, None
        logger.info("KV cache changes model=%s tokens=%s reason=%s", name, order.kv_tokens, order.reason)
        async with run.resizing:
            if self._runs.get(name) is not run:
                return  # The model ended in the meantime.
            assert run.loaded is not None, "only loaded models change their cache"
            try:
                with errors_unwrapped():
                    await self.follower.resize(run.loaded, order.kv_tokens)
            except TrioserveError as raised:
                error = raised
        if self._runs.get(name) is not run:
            return
        if error is not None:
            logger.warning("KV cache keeps its size model=%s reason=%s", name, error)
        self._models.on_resized(name, trio.current_time(), has_failed=error is not None)
        self._changed.set()

    async def _set_asleep(self, run: _Run[LoadedT], asleep: bool) -> None:
        """Let a loaded model sleep, or wake it. A model that does not wake up ends, and is loaded again."""
        name, error = run.name, None
        async with run.resizing:
            if self._runs.get(name) is not run:
                return  # The model ended in the meantime.
            assert run.loaded is not None, "only loaded models sleep"
            try:
                with errors_unwrapped():
                    await self.follower.set_asleep(run.loaded, asleep)
            except TrioserveError as raised:
                error = raised
        if self._runs.get(name) is not run:
            return
        run.span.end(None if error is None else f"model_{'sleep' if asleep else 'wake_up'}_failed")
        if error is not None:
            logger.warning("model cannot %s model=%s reason=%s", "sleep" if asleep else "wake up", name, error)
        if asleep:
            self._models.on_slept(name, trio.current_time(), has_failed=error is not None)
        elif error is not None:
            run.stopping.set()
            return
        else:
            self._models.on_woken(name, trio.current_time())
        if self._models[name].state is ModelState.LOADED:
            self._reasons[name] = "it was woken" if error is None else "it cannot sleep"
            self.follower.model_changed(ModelState.LOADED, run.loaded)
        self._changed.set()

    def _reason(self, model: HostedModel, now: float) -> str:
        """Return why a model has its state, or what it waits for."""
        if model.state not in WAITING_STATES or model.waiting_since is None:
            return self._reasons[model.spec.name]
        if now < model.retry_at:
            return f"it is loaded again in {model.retry_at - now:.0f} s: {model.failure}"
        for rival in self._models.rivals(model):
            return f"it waits for {rival.spec.name} of the same group"
        return "it waits for the memory of other models"

    def _is_changing(self, model: HostedModel) -> bool:
        if model.state in WAITING_STATES:
            return model.waiting_since is not None or (model.state is ModelState.SLEEPING and not model.is_asleep)
        return model.state is not ModelState.LOADED
