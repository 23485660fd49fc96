"""Decides which models of one server are loaded, within one memory budget.

A request for a model waits until the model is loaded, and then holds a lease on it. A model with leases is never
unloaded. If memory is short, it is taken in this order, each from the model of the least priority on:

1. KV caches of idle models become smaller. What they contain is lost.
2. Idle models sleep: they keep their weights, and free their whole KV caches. A request wakes the model, which is
   faster than a load.
3. Idle and sleeping models are unloaded.
4. KV caches of busy models become smaller, when the requests that use the last blocks have ended.
5. A busy model gives way to one that waits, but only after both have waited or run for `turn_seconds`: it then gets no
   new leases, and is unloaded after its last lease.

The KV cache of a busy model becomes larger again when no model waits for memory, `turn_seconds` after its last change.

At most one model of a group is loaded. The next one replaces it by rules 3 and 5, even if memory is free.

A load without progress for `stall_seconds` is stopped, and counts as failed. A model that does not sleep or wake up in
this time is unloaded.

Models wait in the order of their arrival. A model whose priority is better by 1 counts as having waited for
`SECONDS_PER_PRIORITY` longer, so a model is overtaken for a bounded time only. Tenants take turns (round robin): the
first waiting model of each tenant comes before the second one of any tenant. A tenant's wait counts from its last turn,
which is the last load or wake-up for which the tenant waited. So of models with equal priority, another tenant's get
one turn at most while the first one of a tenant waits.

    UNLOADED ──a request waits──► LOADING ──on_loaded──► LOADED ──memory is needed──► DRAINING
        ▲                            │ no request waits     │ idle for keep_alive_seconds │ last lease released
        └──────on_unloaded───────────┴──────UNLOADING ◄─────┴─────────────────────────────┘

    LOADED ──memory is needed──► SLEEPING ──a request waits──► WAKING ──on_woken──► LOADED
                                     └──memory is needed, or idle for keep_alive_seconds──► UNLOADING

The caller reports what happens, calls `decide` after each report and at `next_at`, and follows the orders.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from trioserve.contracts.errors import InvalidRequest, NoEndpoint, StartupError
from trioserve.router.settings import HostedModelsSettings

__all__ = ["HostedModel", "HostedModels", "ModelLease", "ModelOrder", "ModelResize", "ModelSpec", "ModelState"]

RETRY_SECONDS: Final = 5.0  # The first failed load is repeated after this time, each further one after twice the time.
RETRY_SECONDS_MAX: Final = 300.0
STEADY_SECONDS: Final = 60.0  # A model that crashes after it was loaded for this time is loaded again at once.
# An idle model that takes a second longer to load counts as used this many seconds later.
SECONDS_PER_LOAD_SECOND: Final = 10.0
SECONDS_PER_PRIORITY: Final = 10.0


class ModelState(enum.Enum):
    """State of a model at a server. A model in any state but UNLOADED takes its memory."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    DRAINING = "draining"
    UNLOADING = "unloading"
    SLEEPING = "sleeping"
    WAKING = "waking"


UNLOADED, LOADING, LOADED = ModelState.UNLOADED, ModelState.LOADING, ModelState.LOADED
DRAINING, UNLOADING = ModelState.DRAINING, ModelState.UNLOADING
SLEEPING, WAKING = ModelState.SLEEPING, ModelState.WAKING
# A model becomes UNLOADED without being UNLOADING if its load fails, or if it crashes.
TRANSITIONS: Final[dict[ModelState, frozenset[ModelState]]] = {
    UNLOADED: frozenset({LOADING}),
    LOADING: frozenset({LOADED, UNLOADING, UNLOADED}),
    LOADED: frozenset({DRAINING, UNLOADING, UNLOADED, SLEEPING}),
    DRAINING: frozenset({LOADED, UNLOADING, UNLOADED}),
    UNLOADING: frozenset({UNLOADED}),
    SLEEPING: frozenset({WAKING, LOADED, UNLOADING, UNLOADED}),
    WAKING: frozenset({LOADED, UNLOADING, UNLOADED}),
}


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a model that may be loaded.

    Attributes:
        name: name of the model.
        adapters: names of its LoRA adapters at the start. A request for an adapter is a request for the model.
        bytes: memory of weights, KV cache and everything else, which the loaded model never exceeds.
        kv_blocks: blocks of the KV cache, which are a part of this memory.
        kv_blocks_min: smallest number of blocks.
        kv_block_bytes: memory that is free for each block less. 0: the cache keeps its size, and the model never
            sleeps.
        kv_block_tokens: tokens of a block.
        load_seconds: estimated time of a load. It is measured from the first load on.
        keep_alive_seconds: an idle model is unloaded after this time. It counts from the end of the last request.
        is_pinned: True if the model is loaded at the start, is never unloaded for another model or for being idle, and
            keeps the size of its KV cache.
        priority: a model with a lower number is loaded earlier, and gives way later.
        group: at most one model of a group is loaded. None: the model has no group.
    """

    name: str
    bytes: int
    adapters: tuple[str, ...] = ()
    kv_blocks: int = 0
    kv_blocks_min: int = 0
    kv_block_bytes: int = 0
    kv_block_tokens: int = 1
    load_seconds: float = 1.0
    keep_alive_seconds: float = math.inf
    is_pinned: bool = False
    priority: int = 0
    group: str | None = None

    def bytes_with(self, kv_blocks: int) -> int:
        """Return the memory of the loaded model with a smaller KV cache.

        Args:
            kv_blocks: blocks of the cache.
        """
        return self.bytes - (self.kv_blocks - kv_blocks) * self.kv_block_bytes


class ModelOrder(msgspec.Struct, frozen=True):
    """An order to the caller.

    Attributes:
        name: the model.
        state: LOADING: begin to load it. UNLOADING: cancel its load, or unload it. DRAINING: it gets no more leases.
            LOADED: it gets leases again. SLEEPING: free its KV cache, and report the end with `on_slept`. WAKING:
            allocate its KV cache, and report the end with `on_woken`.
        reason: reason for users.
    """

    name: str
    state: ModelState
    reason: str


class ModelResize(msgspec.Struct, frozen=True):
    """An order to change the KV cache of a loaded model. The caller reports its end with `on_resized`.

    Attributes:
        name: the model.
        kv_blocks: new number of blocks.
        kv_tokens: tokens of these blocks.
        reason: reason for users.
    """

    name: str
    kv_blocks: int
    kv_tokens: int
    reason: str


class ModelLease:
    """A request's hold on a loaded model. `HostedModels.release` returns it."""

    __slots__ = ("model",)

    def __init__(self, model: HostedModel) -> None:
        self.model = model


class HostedModel:
    """The state of one model.

    Attributes:
        spec: its description.
        state: state at the server.
        waiting: number of requests that wait for the model, by tenant.
        waiting_since: time from which on requests, or an operator, have waited for the model without a break. None if
            none waits.
        is_requested: True if an operator requested to load the model, until it is loaded or its load failed. Loads of
            a pinned model are repeated.
        must_unload: True if an operator requested to unload the model, until it is unloaded.
        leases: open leases.
        kv_blocks: blocks of the KV cache that the model may use. During a change, it is the larger number.
        wanted_blocks: blocks after the ordered changes of the cache.
        awake_blocks: blocks of the KV cache before the model began to sleep. It has them again after a wake-up.
        resized_at: time of the last order to change the KV cache.
        is_fixed: True if a change of the KV cache failed, until the model is unloaded.
        changed_at: time of the last change of `state`.
        progress_at: time of the last progress of the load.
        used_at: time at which the last lease ended, or at which the model was loaded.
        keep_alive_seconds: an idle model is unloaded after this time. At first, it is the value of the description.
        load_seconds: time of the last load, or its estimate.
        wake_seconds: time of the last wake-up. 0: the model has never slept. Infinity: it hung.
        loaded_at: time at which the last load ended.
        failure: reason of the last failed load. None after a load that succeeded.
        failure_count: failed loads in a row.
        retry_at: time before which a failed load is not repeated.
    """

    __slots__ = (
        "awake_blocks",
        "changed_at",
        "failure",
        "failure_count",
        "is_fixed",
        "is_requested",
        "keep_alive_seconds",
        "kv_blocks",
        "leases",
        "load_seconds",
        "loaded_at",
        "must_unload",
        "progress_at",
        "resized_at",
        "retry_at",
        "spec",
        "state",
        "used_at",
        "waiting",
        "waiting_since",
        "wake_seconds",
        "wanted_blocks",
    )

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.state = UNLOADED
        self.waiting: Counter[str] = Counter()
        self.waiting_since: float | None = None
        self.is_requested = False
        self.must_unload = False
        self.leases: set[ModelLease] = set()
        self.kv_blocks = self.wanted_blocks = self.awake_blocks = spec.kv_blocks
        self.resized_at = -math.inf
        self.is_fixed = False
        self.changed_at = self.progress_at = 0.0
        self.used_at = 0.0
        self.loaded_at = 0.0
        self.keep_alive_seconds = spec.keep_alive_seconds
        self.load_seconds = spec.load_seconds
        self.wake_seconds = 0.0
        self.failure: str | None = None
        self.failure_count = 0
        self.retry_at = -math.inf

    @property
    def is_idle(self) -> bool:
        """True if no request needs the model."""
        return not self.leases and not self.waiting

    @property
    def delay_seconds(self) -> float:
        """Time by which a wait for the model counts as shorter. Negative for a model that is loaded earlier."""
        return SECONDS_PER_PRIORITY * self.spec.priority

    @property
    def bytes(self) -> int:
        """Memory that the model may use while it is not UNLOADED."""
        return self.spec.bytes_with(self.kv_blocks)

    @property
    def bytes_to_come(self) -> int:
        """Memory that the model may use after the ordered changes of its KV cache."""
        return self.spec.bytes_with(self.wanted_blocks)

    @property
    def can_shrink(self) -> bool:
        """True if the KV cache may become smaller now."""
        is_free = self.state is LOADED and not self.is_fixed and self.spec.kv_block_bytes > 0
        return is_free and self.wanted_blocks > self.spec.kv_blocks_min

    @property
    def can_sleep(self) -> bool:
        """True if the model may sleep now."""
        is_free = self.state is LOADED and self.is_idle and not (self.is_fixed or self.spec.is_pinned)
        is_settled = self.wanted_blocks == self.kv_blocks > 0 and self.spec.kv_block_bytes > 0
        return is_free and is_settled

    @property
    def wake_bytes(self) -> int:
        """Memory that the model needs in addition to what it has, to be loaded or woken."""
        return self.spec.bytes_with(self.awake_blocks) - self.bytes if self.state is SLEEPING else self.spec.bytes

    @property
    def is_asleep(self) -> bool:
        """True if the model sleeps, and its KV cache is free."""
        return self.state is SLEEPING and self.kv_blocks == 0

    @property
    def hangs_from(self) -> float:
        """Time since which a load, a sleep or a wake-up has made no progress. Infinity if nothing is under way."""
        is_under_way = self.state in (LOADING, WAKING) or (self.state is SLEEPING and not self.is_asleep)
        return self.progress_at if is_under_way else math.inf

    def fail(self, reason: str, now: float, *, is_steady: bool = False) -> None:
        """Note that a load failed, or that a loaded model crashed.

        Args:
            reason: reason for the clients.
            now: time in seconds.
            is_steady: True if the model is loaded again at once.
        """
        self.failure = reason
        self.retry_at = now
        if not is_steady:
            self.retry_at += min(RETRY_SECONDS * 2.0**self.failure_count, RETRY_SECONDS_MAX)
        self.failure_count += 1
        self.is_requested = self.spec.is_pinned
        self.note_waits(now)

    @property
    def idle_until(self) -> float:
        """Time at which the model is unloaded if it stays idle."""
        return math.inf if self.spec.is_pinned else self.used_at + self.keep_alive_seconds

    def end_wait(self, tenant: str, now: float) -> None:
        """Note that a request of a tenant waits no longer.

        Args:
            tenant: tenant of the request.
            now: time in seconds.
        """
        assert self.waiting[tenant], f"no request of {tenant!r} waits for {self.spec.name}"
        self.waiting[tenant] -= 1
        if not self.waiting[tenant]:
            del self.waiting[tenant]
        self.note_waits(now)

    def note_waits(self, now: float) -> None:
        """Update `waiting_since` after a wait has begun or ended.

        Args:
            now: time in seconds.
        """
        if not self.waiting and not self.is_requested:
            self.waiting_since = None
        elif self.waiting_since is None:
            self.waiting_since = now

    def change(self, state: ModelState, now: float) -> None:
        """Change the state of the model. An illegal transition fails an assertion.

        Args:
            state: the new state, which TRANSITIONS must allow.
            now: time in seconds.
        """
        assert state in TRANSITIONS[self.state], f"{self.spec.name} is {self.state.value}, and cannot be {state.value}"
        self.state = state
        self.changed_at = self.progress_at = now
        if state is UNLOADED:
            self.must_unload = self.is_fixed = False
            self.kv_blocks = self.wanted_blocks = self.spec.kv_blocks
            self.resized_at = -math.inf


class HostedModels:
    """The models of one server. Methods accept the name of an adapter for its model.

    Args:
        settings: limits.
        specs: the models.

    Raises:
        StartupError: the pinned models need more memory than there is, or a group with a pinned model has another
            model.
    """

    def __init__(self, settings: HostedModelsSettings, specs: Iterable[ModelSpec]) -> None:
        self._settings = settings
        models = [HostedModel(spec) for spec in specs]
        self._models = {name: model for model in models for name in (model.spec.name, *model.spec.adapters)}
        self._turn_at: dict[str, float] = {}  # Time of each tenant's last turn, as long as an earlier wait continues.
        self._removed: set[str] = set()  # Adapters that are gone, whose last requests may still run.
        pinned_bytes = sum(model.spec.bytes for model in self if model.spec.is_pinned)
        if pinned_bytes > settings.memory_bytes:
            raise StartupError(
                f"the pinned models need {pinned_bytes} bytes, but all models together may have "
                f"{settings.memory_bytes}: pin fewer models"
            )
        for model in self:
            if not model.spec.is_pinned:
                continue
            model.is_requested, model.waiting_since = True, -math.inf
            for other in self._group_of(model):
                raise StartupError(
                    f"the model {model.spec.name} is pinned, so that {other.spec.name} of the same group is never "
                    f"loaded: take one of them out of the group"
                )

    def __iter__(self) -> Iterator[HostedModel]:
        return (model for name, model in self._models.items() if name == model.spec.name)

    def __contains__(self, name: str) -> bool:
        return name in self._models

    def __getitem__(self, name: str) -> HostedModel:
        return self._models[name]

    @property
    def held_bytes(self) -> int:
        """Memory of all models that are not UNLOADED."""
        return sum(model.bytes for model in self if model.state is not UNLOADED)

    def rivals(self, model: HostedModel) -> list[HostedModel]:
        """Return the models that must be unloaded before a model of the same group is loaded.

        Args:
            model: the model that waits.
        """
        return [other for other in self._group_of(model) if other.state is not UNLOADED]

    @property
    def names(self) -> frozenset[str]:
        """Names of the models and of their adapters."""
        return frozenset(self._models) - self._removed

    def add_adapter(self, name: str, adapter: str) -> None:
        """Add a LoRA adapter.

        Args:
            name: its model.
            adapter: its name.

        Raises:
            InvalidRequest: the name belongs to a model, or to an adapter of another model.
        """
        self.check_adapter(name, adapter)
        self._models[adapter] = self._models[name]
        self._removed.discard(adapter)

    def check_adapter(self, name: str, adapter: str) -> None:
        """Check that a model may have an adapter with a name.

        Args:
            name: the model.
            adapter: the name.

        Raises:
            InvalidRequest: the name belongs to a model, or to an adapter of another model.
        """
        known = None if adapter in self._removed else self._models.get(adapter)
        if known is not None and (known is not self._models[name] or adapter == known.spec.name):
            raise InvalidRequest(
                f'the name "{adapter}" belongs to the model {known.spec.name}: choose another one', param="lora_name"
            )

    def remove_adapter(self, adapter: str) -> None:
        """Remove a LoRA adapter. Requests that use it still find its model, until they end.

        Args:
            adapter: name of the adapter.
        """
        self._removed.add(adapter)

    # --- requests ---

    def check(self, name: str, now: float) -> None:
        """Check that a model may be loaded.

        Args:
            name: the model.
            now: time in seconds.

        Raises:
            NoEndpoint: the model's last load failed a short time ago.
            InvalidRequest: the model does not fit into the memory.
        """
        model = self._models[name]
        if now < model.retry_at:
            raise NoEndpoint(
                f"the model {model.spec.name} could not be loaded: {model.failure}",
                reason="model_load_failed",
                retry_after_seconds=model.retry_at - now,
            )
        others_bytes = sum(other.spec.bytes for other in self if other.spec.is_pinned and other is not model)
        if model.spec.bytes + others_bytes > self._settings.memory_bytes:
            raise InvalidRequest(
                f"the model {model.spec.name} needs {model.spec.bytes} bytes of memory, but models may have "
                f"{self._settings.memory_bytes - others_bytes}: use a smaller model, or raise the limit",
                param="model",
            )

    def wait(self, name: str, now: float, tenant: str = "", *, is_new: bool = True) -> None:
        """Note that a request begins to wait for a model.

        Args:
            name: the model.
            now: time in seconds.
            tenant: tenant of the request.
            is_new: False if the request had a lease, so that it is not refused. It waits for the next load.

        Raises:
            NoEndpoint: the model's last load failed a short time ago.
            InvalidRequest: the model does not fit into the memory.
        """
        model = self._models[name]
        if is_new:
            self.check(name, now)
        model.waiting[tenant] += 1
        model.note_waits(now)

    def stop_waiting(self, name: str, now: float, tenant: str = "") -> None:
        """Note that a request stops to wait, because it was refused or its client left.

        Args:
            name: the model.
            now: time in seconds.
            tenant: tenant of the request.
        """
        self._models[name].end_wait(tenant, now)

    def lease(self, name: str, now: float, tenant: str = "") -> ModelLease | None:
        """Turn the wait of a request into a lease.

        Args:
            name: the model, for which the request waits.
            now: time in seconds.
            tenant: tenant of the request.

        Returns:
            The lease. None if the model gives no leases now: the request continues to wait.
        """
        model = self._models[name]
        if model.state is not LOADED:
            return None
        model.end_wait(tenant, now)
        lease = ModelLease(model)
        model.leases.add(lease)
        return lease

    def release(self, lease: ModelLease, now: float) -> None:
        """Return a lease. A lease on a model that crashed is already returned, then nothing happens.

        Args:
            now: time in seconds.
        """
        if lease in lease.model.leases:
            lease.model.leases.remove(lease)
            lease.model.used_at = now

    # --- reports and operators ---

    def on_progress(self, name: str, at: float) -> None:
        """Note that the load of a model makes progress.

        Args:
            name: the model.
            at: time of the progress, in seconds. It may be in the past.
        """
        model = self._models[name]
        model.progress_at = max(model.progress_at, at)

    def on_loaded(self, name: str, now: float) -> None:
        """Note that a model is loaded. A load that was cancelled in the meantime stays cancelled.

        Args:
            name: the model.
            now: time in seconds.
        """
        model = self._models[name]
        if model.state is not LOADING:
            return
        model.load_seconds = now - model.changed_at
        model.change(LOADED, now)
        model.used_at = model.loaded_at = now
        model.failure, model.failure_count = None, 0
        model.is_requested = False
        model.note_waits(now)

    def on_slept(self, name: str, now: float, *, has_failed: bool = False) -> None:
        """Note that the KV cache of a model that was ordered to sleep is free, or that the model cannot sleep.

        Args:
            name: the model.
            now: time in seconds.
            has_failed: True if the model is still awake. It does not sleep again before its next load.
        """
        model = self._models[name]
        if model.state is SLEEPING and not model.is_asleep:
            model.kv_blocks = model.wanted_blocks = model.kv_blocks if has_failed else 0
            if has_failed:
                model.is_fixed = True
                model.change(LOADED, now)

    def on_woken(self, name: str, now: float) -> None:
        """Note that a model is awake again. It is idle from now on if no request waits.

        Args:
            name: the model.
            now: time in seconds.
        """
        model = self._models[name]
        if model.state is WAKING:
            model.wake_seconds = now - model.changed_at
            model.change(LOADED, now)
            model.used_at = now
            model.is_requested = False
            model.note_waits(now)

    def on_failed(self, name: str, now: float, reason: str) -> None:
        """Note that a load failed, or that a loaded model crashed. Its memory is free, and its leases are returned.

        After a failed load, the requests that wait for the model must be refused. After a crash, they wait for the next
        load. Nothing else happens if the model was being unloaded.

        Args:
            name: the model.
            now: time in seconds.
            reason: reason for the clients.
        """
        model = self._models[name]
        model.leases.clear()
        before = model.state
        model.change(UNLOADED, now)
        if before is UNLOADING:
            return
        is_steady = before is not LOADING and now >= model.loaded_at + STEADY_SECONDS
        model.fail(reason, now, is_steady=is_steady)

    def on_unloaded(self, name: str, now: float) -> None:
        """Note that the memory of a model, or of its cancelled load, is free.

        Args:
            name: the model.
            now: time in seconds.
        """
        self._models[name].change(UNLOADED, now)

    def on_resized(self, name: str, now: float, *, has_failed: bool = False) -> None:
        """Note that the KV cache of a model has the ordered size, or that it keeps its size.

        Args:
            name: the model.
            now: time in seconds.
            has_failed: True if the size cannot be changed.
        """
        model = self._models[name]
        if has_failed:
            model.is_fixed = True
            model.wanted_blocks = model.kv_blocks
        model.kv_blocks = model.wanted_blocks

    def request_load(self, name: str, now: float) -> None:
        """Load a model for an operator, as if a request waited for it.

        Args:
            name: the model.
            now: time in seconds.

        Raises:
            InvalidRequest: the model does not fit into the memory.
        """
        model = self._models[name]
        model.retry_at = -math.inf
        self.check(name, now)
        if model.state in (UNLOADED, UNLOADING, SLEEPING):
            model.is_requested = True
            model.note_waits(now)

    def request_sleep(self, name: str, now: float) -> list[ModelOrder]:
        """Let a model sleep for an operator.

        Args:
            name: the model.
            now: time in seconds.

        Returns:
            The orders. Empty if the model sleeps already.

        Raises:
            InvalidRequest: the model is not loaded, in use, pinned, or cannot free its KV cache.
        """
        model = self._models[name]
        if model.state is SLEEPING:
            return []
        if not model.can_sleep:
            raise InvalidRequest(
                f"the model {model.spec.name} cannot sleep now: only a loaded model without requests can, whose KV "
                f"cache may be freed, and which is not pinned; use /models/unload otherwise",
                param="model",
            )
        return [self._order(model, SLEEPING, now, "sleep was requested")]

    def request_unload(self, name: str, now: float) -> list[ModelOrder]:
        """Unload a model for an operator: at once if it is idle, else after its last lease.

        Args:
            name: the model.
            now: time in seconds.

        Returns:
            The orders. Empty if the model is not loaded, or its unload has already begun.
        """
        model = self._models[name]
        model.is_requested = False
        model.note_waits(now)
        if model.state not in (LOADED, DRAINING, SLEEPING, WAKING):
            return []
        model.must_unload = True
        if model.state is DRAINING:
            return []
        return [self._order(model, DRAINING if model.leases else UNLOADING, now, "unload was requested")]

    # --- decisions ---

    def decide(self, now: float) -> list[ModelOrder | ModelResize]:
        """Return the orders that follow from the present state. The states already have the ordered values.

        Args:
            now: time in seconds.
        """
        orders: list[ModelOrder | ModelResize] = []
        for model in self:
            if model.state is LOADING and not (model.waiting or model.is_requested):
                orders.append(self._order(model, UNLOADING, now, "no request waits for it any more"))
            elif now >= model.hangs_from + self._settings.stall_seconds:
                orders.append(self._stop(model, now))
            elif model.state is DRAINING and not model.leases:
                orders.append(self._order(model, UNLOADING, now, "its last request has ended"))
            elif model.state in (LOADED, SLEEPING) and model.is_idle and now >= model.idle_until:
                orders.append(self._order(model, UNLOADING, now, "it was idle"))
        wanted = self._wanted(now)
        for model in wanted:
            orders += self._replace(model, now)
        if not wanted:
            for model in self:
                if model.state is DRAINING and not model.must_unload:
                    orders.append(self._order(model, LOADED, now, "no other model needs its memory any more"))
            for model in self._growing():
                free_bytes = self._settings.memory_bytes - self.held_bytes
                count = min(model.spec.kv_blocks, model.kv_blocks + free_bytes // model.spec.kv_block_bytes)
                if count > model.kv_blocks and now >= model.resized_at + self._settings.turn_seconds:
                    model.kv_blocks = count  # The memory belongs to the model from the order on.
                    orders.append(self._resize(model, count, now, "memory is free"))
        loading_count = sum(model.state is LOADING for model in self)
        while wanted:
            model, *wanted = wanted
            if self.rivals(model):
                continue  # The memory of the rival becomes free first.
            lacking_bytes = self.held_bytes + model.wake_bytes - self._settings.memory_bytes
            if lacking_bytes > 0:
                orders += self._free(model, lacking_bytes, now)
                break  # No later model in the loop may get the memory that this model waits for.
            if model.state is SLEEPING:
                if model.is_asleep:
                    # From now on, `bytes` includes the memory of the awake model.
                    model.kv_blocks = model.wanted_blocks = model.awake_blocks
                    orders.append(self._order(model, WAKING, now, "requests wait for it"))
            elif loading_count == self._settings.loads_max:
                break
            else:
                loading_count += 1
                orders.append(self._order(model, LOADING, now, "requests wait for it"))
            # The turn of a tenant may have changed the order of the rest.
            wanted = [each for each in self._wanted(now) if each in wanted]
        return orders

    def next_at(self, now: float) -> float:
        """Return the time at which `decide` must be called again if nothing happens before.

        Args:
            now: time in seconds.

        Returns:
            The time in seconds, or infinity.
        """
        times = [model.idle_until for model in self if model.state in (LOADED, SLEEPING) and model.is_idle]
        times += [model.hangs_from + self._settings.stall_seconds for model in self]
        times += [model.retry_at for model in self if model.state is UNLOADED and model.waiting_since is not None]
        wanted = self._wanted(now)
        for model in wanted:
            assert model.waiting_since is not None
            times.append(model.waiting_since + self._settings.turn_seconds)
        if wanted:
            times += [
                model.changed_at + self._settings.turn_seconds for model in self if model.state in (LOADED, SLEEPING)
            ]
        else:
            times += [model.resized_at + self._settings.turn_seconds for model in self._growing()]
        return min((time for time in times if time > now), default=math.inf)

    # --- private methods ---

    def _wanted(self, now: float) -> list[HostedModel]:
        """Return the models that must be loaded, in the order of their turns."""
        waits = {
            model.spec.name: model.waiting_since + model.delay_seconds
            for model in self
            if model.state in (UNLOADED, SLEEPING) and model.waiting_since is not None and model.retry_at <= now
        }
        earlier_counts: Counter[str] = Counter()  # For each tenant, the models before the current one.
        turns: dict[str, tuple[int, float, float, str]] = {}
        for waits_from, name in sorted((waits_from, name) for name, waits_from in waits.items()):
            model = self._models[name]
            # A load that an operator requested has a turn of its own.
            places = [(0, waits_from)] if model.is_requested else []
            for tenant in model.waiting:
                turn_at = self._turn_at.get(tenant, -math.inf) + model.delay_seconds
                places.append((earlier_counts[tenant], max(waits_from, turn_at)))
            turns[name] = (*min(places), waits_from, name)
            earlier_counts.update(model.waiting.keys())
        return [self._models[name] for name in sorted(turns, key=turns.__getitem__)]

    def _group_of(self, model: HostedModel) -> list[HostedModel]:
        """Return the other models of a model's group."""
        return [other for other in self if other.spec.group == model.spec.group is not None and other is not model]

    def _replace(self, wanted: HostedModel, now: float) -> list[ModelOrder | ModelResize]:
        """Unload the model of the same group, if it may give way now."""
        reason = f"{wanted.spec.name} of the same group is needed"
        return [
            self._order(model, DRAINING if model.leases else UNLOADING, now, reason)
            for model in self.rivals(wanted)
            if model.state in (LOADED, SLEEPING) and (model.is_idle or self._is_due(model, wanted, now))
        ]

    def _is_due(self, model: HostedModel, wanted: HostedModel, now: float) -> bool:
        """Return True if a busy model must give way to a model that waits."""
        assert wanted.waiting_since is not None
        can_turn_at = wanted.waiting_since + self._settings.turn_seconds
        return now >= can_turn_at and now >= model.changed_at + self._settings.turn_seconds

    def _free(self, wanted: HostedModel, lacking_bytes: int, now: float) -> list[ModelOrder | ModelResize]:
        """Choose caches that become smaller and models that give way, if that frees enough memory."""
        lacking_bytes -= sum(model.bytes for model in self if model.state in (UNLOADING, DRAINING))
        lacking_bytes -= sum(model.bytes - model.bytes_to_come for model in self if model.state in (LOADED, SLEEPING))
        loaded = [
            model
            for model in self
            if model.state in (LOADED, SLEEPING) and not model.spec.is_pinned and model is not wanted
        ]
        idle = sorted((model for model in loaded if model.is_idle), key=_value)
        busy = sorted(
            (model for model in loaded if not model.is_idle),
            key=lambda model: (-model.spec.priority, model.changed_at),
        )
        due = [model for model in busy if self._is_due(model, wanted, now)]
        blocks: dict[str, int] = {}  # New numbers of blocks of the models that become smaller, by name.
        sleepers: dict[str, HostedModel] = {}
        victims: list[HostedModel] = []
        for group, leavers in ((idle, idle), (busy, due)):
            for model in group:
                if lacking_bytes > 0 and model.can_shrink:
                    size = model.spec.kv_block_bytes
                    count = min(model.wanted_blocks - model.spec.kv_blocks_min, -(-lacking_bytes // size))
                    blocks[model.spec.name] = model.wanted_blocks - count
                    lacking_bytes -= count * size
            for model in group:
                count = blocks.get(model.spec.name, model.wanted_blocks)
                if lacking_bytes > 0 and model.can_sleep and count and model.wake_seconds < model.load_seconds:
                    blocks.pop(model.spec.name, None)
                    lacking_bytes -= count * model.spec.kv_block_bytes
                    sleepers[model.spec.name] = model
            for model in leavers:
                if lacking_bytes > 0:
                    count = blocks.pop(model.spec.name, model.wanted_blocks)
                    lacking_bytes -= model.spec.bytes_with(0 if sleepers.pop(model.spec.name, None) else count)
                    victims.append(model)
        if lacking_bytes > 0:
            return []
        reason = f"{wanted.spec.name} needs its memory"
        return [
            *(self._resize(self._models[name], count, now, reason) for name, count in blocks.items()),
            *(self._order(model, SLEEPING, now, reason) for model in sleepers.values()),
            *(self._order(model, DRAINING if model.leases else UNLOADING, now, reason) for model in victims),
        ]

    def _stop(self, model: HostedModel, now: float) -> ModelOrder:
        """Unload a model that hangs. A load then counts as failed, and the requests that wait must be refused."""
        activity = {LOADING: "load", WAKING: "wake-up"}.get(model.state, "sleep")
        reason = f"its {activity} made no progress for {self._settings.stall_seconds:g} s"
        if model.state is LOADING:
            model.fail(reason, now)
        else:
            model.wake_seconds = math.inf  # It never sleeps again for another model.
        return self._order(model, UNLOADING, now, reason)

    def _growing(self) -> list[HostedModel]:
        """Return the busy models whose KV caches should become larger."""
        return [
            model
            for model in self
            if model.state is LOADED
            and model.leases
            and model.wanted_blocks == model.kv_blocks < model.spec.kv_blocks
            and not model.is_fixed
        ]

    def _resize(self, model: HostedModel, kv_blocks: int, now: float, reason: str) -> ModelResize:
        model.wanted_blocks = kv_blocks
        model.resized_at = now
        return ModelResize(model.spec.name, kv_blocks, kv_blocks * model.spec.kv_block_tokens, reason)

    def _order(self, model: HostedModel, state: ModelState, now: float, reason: str) -> ModelOrder:
        model.change(state, now)
        if state in (LOADING, WAKING):
            self._turn_at.update(dict.fromkeys(model.waiting, now))
            # A turn before the longest wait has no effect.
            since = [each.waiting_since for each in self if each.waiting and each.waiting_since is not None]
            waits_from = min(since, default=now)
            self._turn_at = {tenant: at for tenant, at in self._turn_at.items() if at > waits_from}
        if state is SLEEPING:
            model.awake_blocks, model.wanted_blocks = model.kv_blocks, 0
        return ModelOrder(model.spec.name, state, reason)


def _value(model: HostedModel) -> tuple[int, float]:
    """Return the priority, and the time at which an idle model counts as used. The least value is unloaded first."""
    return -model.spec.priority, model.used_at + SECONDS_PER_LOAD_SECOND * model.load_seconds
