"""Runs one history against one HostedModels, and checks all contracts after every event.

ModelsBook records what the orders and reports say of each model, and reads no state of the simulated code. Its rules:

- Models that are not unloaded never need more memory than there is.
- A load begins only if a request or an operator waits, not before a failed load may be repeated, and in the order of
  waiting. A model whose priority is better by 1 counts as having waited for 10 s longer, so every wait has a bound.
- A load or wake-up is a turn of the tenants that wait for it. Tenants take turns: no tenant's second model is before
  another tenant's first one, and a tenant's wait counts from its last turn.
- At most one model of a group is not unloaded.
- A KV cache becomes smaller only for a model that waits, and larger only if none waits, its model is busy, and a turn
  has passed since the last change. It never becomes smaller than its minimum. Its memory is free when the change ends.
- A model sleeps only without requests, for a model that waits, or because an operator requested it. It then keeps only
  its weights, and gives no leases. A model that waits and whose memory fits is woken.
- No model is unloaded for another one while an idle model could sleep.
- A model is unloaded only without leases, and only because neither a request nor an operator waits for its load,
  because it was idle for its time, because another model needs its memory or is of the same group, or because an
  operator requested it.
- A load, sleep or wake-up without progress for the stall time is stopped at the end of this time, and no other one is.
  A stopped load refuses the requests that wait, and is not repeated before the time of a failed load.
- A busy model drains only after its turn, and only for a model that has waited for as long.
- Of idle models, and of busy models after their turns, those of the worst priority give way first.
- What must happen, happens in the same call of `decide`: a load that fits begins, memory that may be freed for the
  first model that waits is freed, idle models are unloaded in time. `next_at` names the time of the next such change.
- A draining model whose memory no other model needs any more gives leases again. A loaded model gives a lease to each
  request.
- At the end, every request was served or refused, and only models that never become idle are loaded.

A history of a server with several models, as data: its limits, then its events.

    models memory=3 bytes=[2,2] turn=5
    arrive id="a" model=0
    loaded model=0
    advance seconds=1.5
    leave id="a"

A history stays valid when events are removed from it. For example, a report about a load without a load does nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from random import Random

import msgspec

from trioserve.contracts.errors import InvalidRequest, Overloaded
from trioserve.router.hosted_models import HostedModels, ModelLease, ModelOrder, ModelResize, ModelSpec, ModelState
from trioserve.router.settings import HostedModelsSettings
from trioserve.simulation.runs import EventSimulation, Trace

__all__ = ["ModelsGenerator", "ModelsSimulation"]


class ModelsWorld(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="models"):
    """Limits of the server.

    Attributes:
        memory: memory of all models together.
        bytes: memory of each model.
        pinned: numbers of the pinned models.
        turn: minimum time in seconds for which a busy model stays, and a model waits before a busy one gives way.
        keep_alive: seconds after which an idle model is unloaded. None: never.
        loads: number of models that load at the same time.
        caches: for each model, the part of its memory that is a KV cache, which may become smaller. Empty: all models
            keep their size.
        caches_min: for each model, the part of its KV cache that is never free while it is awake. Empty: none.
        groups: number of each model's group. 0: the model has none. Empty: no model has one.
        priorities: priority of each model. Empty: all are equal.
        stall: seconds without progress after which a load, sleep or wake-up is stopped. None: never.
    """

    memory: int = 2
    bytes: tuple[int, ...] = (1,)
    pinned: tuple[int, ...] = ()
    turn: float = 1.0
    keep_alive: float | None = None
    loads: int = 1
    caches: tuple[int, ...] = ()
    caches_min: tuple[int, ...] = ()
    groups: tuple[int, ...] = ()
    priorities: tuple[int, ...] = ()
    stall: float | None = None


class Arrive(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="arrive"):
    """A request for a model arrives. A second request with the same id is ignored."""

    id: str
    model: int
    tenant: str = ""


class Leave(msgspec.Struct, frozen=True, kw_only=True, tag="leave"):
    """A request ends: it is complete, or its client leaves while it waits or runs."""

    id: str


class Advance(msgspec.Struct, frozen=True, kw_only=True, tag="advance"):
    """Time passes."""

    seconds: float


class Loaded(msgspec.Struct, frozen=True, kw_only=True, tag="loaded"):
    """The load of a model ends, also if it was cancelled too late."""

    model: int


class Progresses(msgspec.Struct, frozen=True, kw_only=True, tag="progresses"):
    """The load of a model makes progress."""

    model: int


class LoadFails(msgspec.Struct, frozen=True, kw_only=True, tag="fails"):
    """The load of a model fails."""

    model: int


class Unloaded(msgspec.Struct, frozen=True, kw_only=True, tag="unloaded"):
    """The memory of a model that is being unloaded becomes free."""

    model: int


class Resized(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="resized"):
    """An ordered change of a model's KV cache ends."""

    model: int
    has_failed: bool = False


class Slept(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="slept"):
    """The KV cache of a model that was ordered to sleep is free, or the model cannot sleep."""

    model: int
    has_failed: bool = False


class Woken(msgspec.Struct, frozen=True, kw_only=True, tag="woken"):
    """A model is awake again."""

    model: int


class Crash(msgspec.Struct, frozen=True, kw_only=True, tag="crash"):
    """The process of a loaded model ends."""

    model: int


class LoadNow(msgspec.Struct, frozen=True, kw_only=True, tag="load"):
    """An operator requests a load."""

    model: int


class SleepNow(msgspec.Struct, frozen=True, kw_only=True, tag="sleep"):
    """An operator requests that a model sleeps."""

    model: int


class UnloadNow(msgspec.Struct, frozen=True, kw_only=True, tag="unload"):
    """An operator requests to unload a model."""

    model: int


ModelsEvent = (
    Arrive
    | Leave
    | Advance
    | Loaded
    | Progresses
    | LoadFails
    | Unloaded
    | Resized
    | Slept
    | Woken
    | Crash
    | LoadNow
    | SleepNow
    | UnloadNow
)


class ModelsHistory(msgspec.Struct, frozen=True):
    world: ModelsWorld
    events: tuple[ModelsEvent, ...]


UNLOADED, LOADING, LOADED = ModelState.UNLOADED, ModelState.LOADING, ModelState.LOADED
DRAINING, UNLOADING = ModelState.DRAINING, ModelState.UNLOADING
SLEEPING, WAKING = ModelState.SLEEPING, ModelState.WAKING
RETRY_SECONDS_MIN = 5.0  # A failed load is not repeated before this time.
STEADY_SECONDS = 60.0  # A model that crashes after this time is loaded again at once.
CACHING_WORLDS_SHARE = 0.5  # fraction of the worlds in which KV caches may become smaller
RESIZED_CHANCE = 0.4  # probability at each event of such a world that a change of a cache ends
SECONDS_PER_PRIORITY = 10.0  # A model that is better by 1 overtakes those that began to wait this much earlier.
SLEEP_CHANCE = 0.5  # probability at such an event, if no cache changes, that an operator lets a model sleep
TENANTS = ("a", "a", "a", "b", "b", "c")  # The first tenant sends half of the requests.
TENANTS_WORLDS_SHARE = 0.5  # fraction of the worlds with several tenants
RANKED_WORLDS_SHARE = 0.5  # fraction of the worlds in which models have groups and priorities
STALLING_WORLDS_SHARE = 0.5  # fraction of the worlds in which a load may hang
PROGRESS_CHANCE = 0.2  # probability at an event of such a world, while a model loads, that it makes progress
ROUNDS_MAX = 1_000  # No history needs this many rounds to its end.


class ModelRecord:
    """Record of one model in the book.

    Attributes:
        waiting: tenants of the requests that wait, by request.
        running: tenants of the requests with a lease, by request.
        since: time of the last change of `state`.
        progress_at: time of the last progress of a load, or of the last change of `state`.
        is_asked: True if an operator requested a load that has not ended.
        wanted_since: time from which on requests or an operator have waited without a break.
        must_unload: True if an operator requested to unload the model.
        blocked_until: time before which a failed load is not repeated.
        held: memory that the model may use while it is loaded. During a change of its KV cache, the larger number.
        held_next: memory after the ordered changes.
        resized_at: time of the last order to change the KV cache.
        held_awake: memory before the model began to sleep.
        is_fixed: True if a change failed.
        wake_seconds, load_seconds: times of the last wake-up and load.
    """

    def __init__(self, size: int, cache: int, cache_min: int, group: int, priority: int, *, is_pinned: bool) -> None:
        self.size = self.held = self.held_next = self.held_awake = size
        self.size_asleep = size - cache
        self.size_min = self.size_asleep + cache_min
        self.wake_seconds, self.load_seconds = 0.0, math.inf
        self.resized_at = -math.inf
        self.is_fixed = False
        self.group = group
        self.priority = priority
        self.is_pinned = is_pinned
        self.state = UNLOADED
        self.waiting: dict[str, str] = {}
        self.running: dict[str, str] = {}
        self.since = self.progress_at = 0.0
        self.used_at = 0.0
        self.loaded_at = 0.0
        self.is_asked = is_pinned
        self.wanted_since: float | None = -math.inf if is_pinned else None
        self.must_unload = False
        self.blocked_until = -math.inf

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running

    @property
    def can_sleep(self) -> bool:
        is_free = self.state is LOADED and self.is_idle and not (self.is_fixed or self.is_pinned)
        return is_free and self.size_asleep < self.held == self.held_next

    @property
    def wakes_fast(self) -> bool:
        return self.wake_seconds < self.load_seconds

    @property
    def can_grow(self) -> bool:
        is_settled = self.held == self.held_next < self.size and not self.is_fixed
        return self.state is LOADED and bool(self.running) and is_settled

    def note_wait(self, now: float) -> None:
        """Update `wanted_since` after a wait has begun or ended.

        Args:
            now: time in seconds.
        """
        if not self.waiting and not self.is_asked:
            self.wanted_since = None
        elif self.wanted_since is None:
            self.wanted_since = now


class ModelsBook:
    """Records all models, and asserts the rules.

    Args:
        world: limits of the server.
    """

    def __init__(self, world: ModelsWorld) -> None:
        self._world = world
        count = len(world.bytes)
        further = (world.caches, world.caches_min, world.groups, world.priorities)
        columns = (world.bytes, *(column or (0,) * count for column in further))
        self.models = [
            ModelRecord(*values, is_pinned=number in world.pinned)
            for number, values in enumerate(zip(*columns, strict=False))
        ]
        self.now = 0.0
        self.turn_at: dict[str, float] = {}  # Time of the last turn of each tenant.

    def change(self, model: ModelRecord, state: ModelState) -> None:
        model.state = state
        model.since = model.progress_at = self.now
        if state is UNLOADED:
            model.must_unload = model.is_fixed = False
            model.held = model.held_next = model.size
            model.resized_at = -math.inf

    def resize(self, number: int, order: ModelResize) -> None:
        """Record an order to change a KV cache, and assert that it is allowed.

        Args:
            number: the model.
        """
        model = self.models[number]
        size = model.size_asleep + order.kv_blocks
        assert model.state is LOADED, f"{number} is {model.state.value}, and changes its cache"
        assert not model.is_fixed, f"{number} has failed to change its cache, and is asked again"
        assert not model.is_pinned, f"{number} is pinned, and changes its cache"
        assert model.size_min <= size <= model.size, f"{number} has {size} of {model.size_min} to {model.size}"
        if size < model.held_next:
            first = self._first()
            assert first is not None, f"{number} becomes smaller, but no model waits"
            assert self._lacking(first) > 0, f"{number} becomes smaller, but enough memory becomes free"
        else:
            assert model.can_grow, f"{number} becomes larger, but is not busy, or changes already"
            assert not self._waiting(), f"{number} becomes larger, but {self._waiting()} need the memory"
            assert self.now >= model.resized_at + self._world.turn, f"{number} becomes larger too soon"
            model.held = size
        model.held_next = size
        model.resized_at = self.now
        self._check_memory()

    def _check_memory(self) -> None:
        assert self.held <= self._world.memory, f"the models take {self.held} of {self._world.memory}"

    @property
    def held(self) -> int:
        return sum(model.held for model in self.models if model.state is not UNLOADED)

    def follow(self, number: int, order: ModelOrder, *, is_asked: bool = False) -> None:
        """Record an order, and assert that it is allowed.

        Args:
            number: the model.
            is_asked: True if an operator requested that the model sleeps.
        """
        model = self.models[number]
        if order.state is LOADING:
            self._check_load(number, model)
        elif order.state is UNLOADING:
            self._check_unload(number, model)
        elif order.state is SLEEPING:
            assert model.can_sleep, f"{number} is {model.state.value}, and cannot sleep"
            first = self._first()
            is_needed = first is not None and self._lacking(first) > 0 and model.wakes_fast
            assert is_asked or is_needed, f"{number} sleeps, but no model needs its memory"
            model.held_awake, model.held_next = model.held, model.size_asleep
        elif order.state is WAKING:
            assert model.state is SLEEPING, f"{number} is {model.state.value}, and is woken"
            assert model.held == model.size_asleep, f"{number} is woken before it sleeps"
            assert self._first() is model, f"{number} is woken before a model that waits for a longer time"
            model.held = model.held_next = model.held_awake
        elif order.state is DRAINING:
            assert model.state is LOADED, f"{number} is {model.state.value}, and drains"
            assert model.running, f"{number} drains, but has no leases"
            assert not model.is_pinned, f"{number} is pinned, and drains"
            first, rivals = self._first(), self._rivals_of(model)
            assert model.must_unload or any(
                self._must_yield(model, other) for other in (*rivals, *([first] if first else []))
            ), f"{number} drains before its turn ends"
            if not (model.must_unload or rivals):
                self._check_least(number, model)
        else:
            assert (order.state, model.state) == (LOADED, DRAINING), f"{number} is {model.state.value}, order {order}"
            assert not model.must_unload, f"{number} must be unloaded, and gives leases again"
            assert not self._waiting(), f"{number} gives leases again, but {self._waiting()} need its memory"
        if order.state in (LOADING, WAKING):
            self.turn_at.update(dict.fromkeys(model.waiting.values(), self.now))
        self.change(model, order.state)
        self._check_memory()

    def _check_load(self, number: int, model: ModelRecord) -> None:
        assert model.state is UNLOADED, f"{number} is {model.state.value}, and is loaded"
        assert model.wanted_since is not None, f"{number} is loaded, but no request waits"
        assert self.now >= model.blocked_until, f"{number} is loaded again too soon after a failure"
        assert self._first() is model, f"{number} is loaded before a model that waits for a longer time"
        for other in self._others_of(model):
            assert other.state is UNLOADED, f"{number} is loaded, but one of its group is {other.state.value}"
        loading = sum(other.state is LOADING for other in self.models)
        assert loading < self._world.loads, f"{loading + 1} models load at the same time"

    def _check_unload(self, number: int, model: ModelRecord) -> None:
        assert not model.running, f"{number} is unloaded under {sorted(model.running)}"
        if self.hangs(model):
            if model.state is not LOADING:
                model.wake_seconds = math.inf
            return
        states = (LOADING, LOADED, DRAINING, SLEEPING, *((WAKING,) if model.must_unload else ()))
        assert model.state in states, f"{number} is {model.state.value}, and is unloaded"
        if model.state is LOADING:
            assert model.wanted_since is None, f"the load of {number} is cancelled, but a request waits"
            return
        assert not model.is_pinned, f"{number} is pinned, and is unloaded"
        if model.state in (LOADED, SLEEPING) and not model.must_unload:
            has_lapsed = model.is_idle and self.now >= self.lapses_at(model)
            if has_lapsed:
                return
            rivals = self._rivals_of(model)
            needing = [other for other in (*rivals, self._first()) if other is not None]
            is_needed = any(model.is_idle or self._must_yield(model, other) for other in needing)
            assert is_needed, f"{number} is unloaded without a reason"
            if not rivals:
                self._check_least(number, model)

    def _check_least(self, number: int, model: ModelRecord) -> None:
        """Assert that no model of worse priority could give its memory instead.

        The model that waits may sleep. It does not give way to itself.
        """
        first = self._first()
        assert first is not None, f"{number} gives way, but no model waits"
        for other in self.models:
            if other is first:
                continue
            is_like = other.state in (LOADED, SLEEPING) and other.is_idle == model.is_idle and not other.is_pinned
            if is_like and (model.is_idle or self._must_yield(other, first)):
                assert other.priority <= model.priority, f"{number} gives way before one of worse priority"

    def check_settled(self) -> None:
        """Assert that `decide` has left nothing undone."""
        for number, model in enumerate(self.models):
            assert not self.hangs(model), f"{number} is {model.state.value} without progress, and is not stopped"
            if model.state is LOADED:
                assert not model.waiting, f"{number} is loaded, and requests wait for it"
                assert not (model.is_idle and self.now >= self.lapses_at(model)), f"{number} is idle for too long"
            elif model.state is SLEEPING:
                assert not model.running, f"{number} sleeps, and has leases"
                assert not (model.is_idle and self.now >= self.lapses_at(model)), f"{number} sleeps for too long"
            elif model.state is LOADING:
                assert model.wanted_since is not None, f"{number} is loaded, but no request waits"
            elif model.state is DRAINING:
                assert model.running, f"{number} drains, and has no leases"
                assert model.must_unload or self._waiting(), f"{number} drains, but no other model waits"
        for waiting in self._waiting():
            for other in self._others_of(waiting):
                may_go = other.state in (LOADED, SLEEPING) and (other.is_idle or self._must_yield(other, waiting))
                assert not may_go, "a model of the group of one that waits is not unloaded"
        first = self._first()
        if first is None and self._waiting():
            return  # Models of the groups of all that wait are still loaded.
        if first is None:
            is_free = self.held < self._world.memory
            for number, model in enumerate(self.models):
                is_due = is_free and self.now >= model.resized_at + self._world.turn
                assert not (is_due and model.can_grow), f"{number} is busy, memory is free, and its cache stays small"
            return
        if self.held + self._needed(first) <= self._world.memory:
            assert first.state is UNLOADED, "a model that fits is not woken"
            loading = sum(model.state is LOADING for model in self.models)
            assert loading == self._world.loads, "a model that fits is not loaded"
            return
        may_leave, lacking = 0, self._lacking(first)
        for model in self.models:
            if model.state not in (LOADED, SLEEPING) or model is first:
                continue
            may_go = not model.is_pinned and (model.is_idle or self._must_yield(model, first))
            may_shrink = model.state is LOADED and not (model.is_pinned or model.is_fixed)
            may_leave += model.held_next if may_go else may_shrink * (model.held_next - model.size_min)
        assert lacking <= 0 or may_leave < lacking, "memory for the first model that waits is not freed"

    def _lacking(self, first: ModelRecord) -> int:
        """Return the memory that a model lacks, beyond the memory that becomes free already."""
        lacking = self.held + self._needed(first) - self._world.memory
        for model in self.models:
            if model.state in (UNLOADING, DRAINING):
                lacking -= model.held
            elif model.state in (LOADED, SLEEPING):
                lacking -= model.held - model.held_next
        return lacking

    def _needed(self, model: ModelRecord) -> int:
        """Return the memory that a model needs in addition to what it has, to be loaded or woken."""
        return model.held_awake - model.held if model.state is SLEEPING else model.size

    def check_batch(self, orders: Sequence[ModelOrder | ModelResize]) -> None:
        """Assert that no model was unloaded for another one while an idle model can sleep.

        Args:
            orders: the orders of one call of `decide`, which were followed.
        """
        is_unloaded = any(
            isinstance(order, ModelOrder) and order.state is UNLOADING and order.reason.endswith("needs its memory")
            for order in orders
        )
        for number, model in enumerate(self.models):
            could_sleep = is_unloaded and model.can_sleep and model.wakes_fast
            assert not could_sleep, f"{number} can sleep, but another model is unloaded"

    def lapses_at(self, model: ModelRecord) -> float:
        if model.is_pinned or self._world.keep_alive is None:
            return math.inf
        return model.used_at + self._world.keep_alive

    def hangs(self, model: ModelRecord) -> bool:
        is_under_way = model.state in (LOADING, WAKING) or (model.state is SLEEPING and model.held != model.held_next)
        return is_under_way and self._world.stall is not None and self.now >= model.progress_at + self._world.stall

    def _must_yield(self, model: ModelRecord, waiting: ModelRecord) -> bool:
        """Return True if the turn of a busy model has ended for a model that waits."""
        if waiting.wanted_since is None:
            return False
        return self.now >= waiting.wanted_since + self._world.turn and self.now >= model.since + self._world.turn

    def _waiting(self) -> list[ModelRecord]:
        """Return the models that wait to be loaded, in the order of their loads."""
        wanted = [
            model
            for model in self.models
            if model.state in (UNLOADED, SLEEPING)
            and model.wanted_since is not None
            and model.blocked_until <= self.now
        ]
        wanted.sort(key=self._waits_from)
        # In each round, each tenant has its first remaining model, and the operator has all models that it requested.
        places: dict[str, int] = {}
        keys = []
        for model in wanted:
            since = self._waits_from(model)
            delay = SECONDS_PER_PRIORITY * model.priority
            tenants = set(model.waiting.values())
            claims = [
                (places.get(tenant, 0), max(since, self.turn_at.get(tenant, -math.inf) + delay)) for tenant in tenants
            ]
            keys.append(min([*claims, (0, since)] if model.is_asked else claims))
            for tenant in tenants:
                places[tenant] = places.get(tenant, 0) + 1
        return [wanted[index] for index in sorted(range(len(wanted)), key=keys.__getitem__)]

    def _waits_from(self, model: ModelRecord) -> float:
        assert model.wanted_since is not None, "only models that wait have a turn"
        return model.wanted_since + SECONDS_PER_PRIORITY * model.priority

    def _first(self) -> ModelRecord | None:
        """Return the first model that waits to be loaded, whose group has no other one, and that is settled."""
        is_free = (
            all(other.state is UNLOADED for other in self._others_of(model))
            and (model.state is UNLOADED or model.held == model.size_asleep)
            for model in self._waiting()
        )
        return next(itertools.compress(self._waiting(), is_free), None)

    def _others_of(self, model: ModelRecord) -> list[ModelRecord]:
        """Return the other models of a group."""
        return [other for other in self.models if other.group == model.group != 0 and other is not model]

    def _rivals_of(self, model: ModelRecord) -> list[ModelRecord]:
        """Return the models of the same group that wait."""
        return [other for other in self._waiting() if other in self._others_of(model)]


class ModelsSimulation(EventSimulation[ModelsWorld]):
    """One run.

    Args:
        world: limits of the server.
        trace: called with a line for each effect.

    Attributes:
        requests: model of each request that waits or runs.
        book: records of all models.
    """

    def __init__(self, world: ModelsWorld, *, trace: Trace | None = None) -> None:
        super().__init__(world, trace)
        keep_alive = math.inf if world.keep_alive is None else world.keep_alive
        self._models = HostedModels(
            HostedModelsSettings(
                memory_bytes=world.memory,
                turn_seconds=world.turn,
                loads_max=world.loads,
                stall_seconds=math.inf if world.stall is None else world.stall,
            ),
            [
                ModelSpec(
                    name=str(number),
                    bytes=size,
                    kv_blocks=world.caches[number] if world.caches else 0,
                    kv_blocks_min=world.caches_min[number] if world.caches_min else 0,
                    kv_block_bytes=1 if world.caches else 0,
                    keep_alive_seconds=keep_alive,
                    is_pinned=number in world.pinned,
                    priority=world.priorities[number] if world.priorities else 0,
                    group=str(world.groups[number]) if world.groups and world.groups[number] else None,
                )
                for number, size in enumerate(world.bytes)
            ],
        )
        self.book = ModelsBook(world)
        self.requests: dict[str, int] = {}
        self._leases: dict[str, ModelLease] = {}
        self._lost: list[
            tuple[int, str, str]
        ] = []  # Requests that ran at a crashed model, and have not noted the crash.
        self._settle()

    def apply(self, event: ModelsEvent) -> None:
        if self._lost:
            self._wait_again()
            self._settle()
        if isinstance(event, Advance):
            self._advance(self.book.now + event.seconds)
            return
        if isinstance(event, Arrive):
            self._arrive(event)
        elif isinstance(event, Leave):
            self._leave(event.id)
        elif event.model < len(self.book.models):
            self._report(event, self.book.models[event.model])
        self._settle()

    def run_to_end(self) -> None:
        self._wait_again()
        self._settle()
        for _ in range(ROUNDS_MAX):
            for number, model in enumerate(self.book.models):
                if model.state is LOADING:
                    self.apply(Loaded(model=number))
                elif model.state is UNLOADING:
                    self.apply(Unloaded(model=number))
                elif model.state is WAKING:
                    self.apply(Woken(model=number))
                elif model.state is SLEEPING:
                    self.apply(Slept(model=number))
                elif model.held != model.held_next:
                    self.apply(Resized(model=number))
            for name in list(self._leases):
                self.apply(Leave(id=name))
            if not self.requests and all(model.wanted_since is None for model in self.book.models):
                break
            self._advance(min(self._models.next_at(self.book.now), self.book.now + self.world.turn))
        assert not self.requests, f"{sorted(self.requests)} wait for ever"
        if self.world.keep_alive is not None:
            self._advance(self.book.now + self.world.keep_alive)
        for number, model in enumerate(self.book.models):
            if model.state is UNLOADING:
                self.apply(Unloaded(model=number))
        for number, model in enumerate(self.book.models):
            stays = self.world.keep_alive is None or model.is_pinned
            is_settled = model.state in (LOADED, SLEEPING)
            assert model.state is UNLOADED or (stays and is_settled), f"{number} is {model.state.value}"
            assert not self._models[str(number)].leases, f"a lease on {number} is left"
        held = self.book.held
        assert self._models.held_bytes == held, f"{self._models.held_bytes} bytes are held, not {held}"

    def _advance(self, until: float) -> None:
        """Let time pass, and call `decide` at the times that `next_at` names."""
        while True:
            at = self._models.next_at(self.book.now)
            assert at > self.book.now, f"at {self.book.now}, the next decision was due at {at}"
            self.book.now = min(at, until)
            orders = self._settle()
            assert self.book.now == at or not orders, f"{orders} came late, the next decision was due at {at}"
            if self.book.now == until:
                return

    def _arrive(self, event: Arrive) -> None:
        if event.id in self.requests or event.model >= len(self.book.models):
            return
        model, now = self.book.models[event.model], self.book.now
        self._count("requests")
        others = sum(other.size for other in self.book.models if other.is_pinned and other is not model)
        try:
            self._models.wait(str(event.model), now, event.tenant)
        except InvalidRequest:
            self._count("refused: too large")
            assert model.size + others > self.world.memory, f"{event.id} is refused, but its model fits"
            return
        except Overloaded:
            self._count("refused: load failed")
            assert now < model.blocked_until, f"{event.id} is refused, but its model may be loaded"
            return
        assert model.size + others <= self.world.memory, f"{event.id} waits for a model that never fits"
        assert now >= model.blocked_until, f"{event.id} waits for a model whose load has just failed"
        self.requests[event.id] = event.model
        model.waiting[event.id] = event.tenant
        model.note_wait(now)

    def _leave(self, name: str) -> None:
        number = self.requests.pop(name, None)
        if number is None:
            return
        model = self.book.models[number]
        if name in model.waiting:
            self._count("left while waiting")
            tenant = model.waiting.pop(name)
            model.note_wait(self.book.now)
            self._models.stop_waiting(str(number), self.book.now, tenant)
            return
        lease = self._leases.pop(name)
        if name in model.running:
            self._count("served")
            del model.running[name]
            model.used_at = self.book.now
        # A crash has returned the lease already.
        self._models.release(lease, self.book.now)

    def _report(self, event: ModelsEvent, model: ModelRecord) -> None:
        assert not isinstance(event, (Arrive, Leave, Advance))
        name, now = str(event.model), self.book.now
        if isinstance(event, Loaded):
            if model.state is LOADING:
                self._count("loads")
                model.load_seconds = now - model.since
                self.book.change(model, LOADED)
                model.used_at = model.loaded_at = now
                model.is_asked = False
                model.note_wait(now)
                self._models.on_loaded(name, now)
            elif model.state is UNLOADING:
                self._models.on_loaded(name, now)
        elif isinstance(event, Progresses):
            if model.state is LOADING:
                self._count("progress of loads")
                model.progress_at = now
                self._models.on_progress(name, now)
        elif isinstance(event, LoadFails):
            if model.state is LOADING:
                self._count("loads failed")
                self._models.on_failed(name, now, "its load failed")
                self.book.change(model, UNLOADED)
                self._refuse(event.model, model)
        elif isinstance(event, Unloaded):
            if model.state is UNLOADING:
                self._count("unloads")
                self.book.change(model, UNLOADED)
                self._models.on_unloaded(name, now)
        elif isinstance(event, Resized):
            if model.state is not SLEEPING and model.held != model.held_next:
                self._count("changes of a cache" + " failed" * event.has_failed)
                if event.has_failed:
                    model.is_fixed = True
                    model.held_next = model.held
                model.held = model.held_next
                self._models.on_resized(name, now, has_failed=event.has_failed)
        elif isinstance(event, Slept):
            if model.state is SLEEPING and model.held != model.held_next:
                self._count("sleeps" + " failed" * event.has_failed)
                if event.has_failed:
                    model.is_fixed = True
                    model.held_next = model.held
                    self.book.change(model, LOADED)
                model.held = model.held_next
                self._models.on_slept(name, now, has_failed=event.has_failed)
        elif isinstance(event, Woken):
            if model.state is WAKING:
                self._count("wake-ups")
                model.wake_seconds = now - model.since
                self.book.change(model, LOADED)
                model.used_at = now
                model.is_asked = False
                model.note_wait(now)
                self._models.on_woken(name, now)
        elif isinstance(event, Crash):
            if model.state in (LOADED, DRAINING, UNLOADING, SLEEPING, WAKING):
                self._count("crashes")
                is_steady = model.state is not UNLOADING and now >= model.loaded_at + STEADY_SECONDS
                was_unloading = model.state is UNLOADING
                self._models.on_failed(name, now, "it crashed")
                self.book.change(model, UNLOADED)
                if not was_unloading:
                    self._note_failure(event.model, model, seconds_min=0.0 if is_steady else RETRY_SECONDS_MIN)
                    self._lost += [(event.model, *request) for request in sorted(model.running.items())]
                    model.running.clear()
        elif isinstance(event, LoadNow):
            self._load_now(event.model, model)
        elif isinstance(event, SleepNow):
            self._sleep_now(event.model, model)
        elif not model.is_pinned:
            self._count("unload requests")
            model.is_asked = False
            model.note_wait(now)
            model.must_unload = model.state in (LOADED, DRAINING, SLEEPING, WAKING)
            self._follow(self._models.request_unload(name, now))

    def _refuse(self, number: int, model: ModelRecord) -> None:
        """Refuse the requests that wait for a model whose load failed."""
        self._note_failure(number, model, seconds_min=RETRY_SECONDS_MIN)
        for request in sorted(model.waiting):
            self._leave(request)

    def _note_failure(self, number: int, model: ModelRecord, *, seconds_min: float) -> None:
        model.blocked_until = self._models[str(number)].retry_at
        assert model.blocked_until >= self.book.now + seconds_min, f"{number} is loaded again too soon"
        assert seconds_min or model.blocked_until <= self.book.now, f"{number} ran for long, and is not loaded again"
        model.is_asked = model.is_pinned
        model.note_wait(self.book.now)
        self._count("failures")

    def _wait_again(self) -> None:
        """Let the requests that ran at a crashed model wait for its next load. They note the crash one event later."""
        lost, self._lost = self._lost, []
        for number, name, tenant in lost:
            model, now = self.book.models[number], self.book.now
            self._models.release(self._leases.pop(name), now)
            self._models.wait(str(number), now, tenant, is_new=False)
            model.waiting[name] = tenant
            model.note_wait(now)

    def _load_now(self, number: int, model: ModelRecord) -> None:
        others = sum(other.size for other in self.book.models if other.is_pinned and other is not model)
        try:
            self._models.request_load(str(number), self.book.now)
        except InvalidRequest:
            assert model.size + others > self.world.memory, f"{number} is refused, but fits"
            return
        self._count("load requests")
        model.blocked_until = -math.inf
        if model.state in (UNLOADED, UNLOADING, SLEEPING):
            model.is_asked = True
            model.note_wait(self.book.now)

    def _sleep_now(self, number: int, model: ModelRecord) -> None:
        try:
            orders = self._models.request_sleep(str(number), self.book.now)
        except InvalidRequest:
            assert not model.can_sleep, f"{number} may not sleep, but could"
            assert model.state is not SLEEPING, f"{number} sleeps, and may not"
            return
        self._count("sleep requests")
        for order in orders:
            self.book.follow(number, order, is_asked=True)

    def _settle(self) -> list[ModelOrder | ModelResize]:
        """Give leases, and follow the decisions."""
        orders: list[ModelOrder | ModelResize] = []
        while True:
            for number, model in enumerate(self.book.models):
                for name, tenant in sorted(model.waiting.items()):
                    lease = self._models.lease(str(number), self.book.now, tenant)
                    assert (lease is not None) == (model.state is LOADED), f"{number} is {model.state.value}: {lease}"
                    if lease is not None:
                        model.running[name] = model.waiting.pop(name)
                        model.note_wait(self.book.now)
                        self._leases[name] = lease
                        self._count("leases")
            decided = self._models.decide(self.book.now)
            self._follow(decided)
            self.book.check_batch(decided)
            orders += decided
            if not decided:
                break
        self.book.check_settled()
        for number, model in enumerate(self.book.models):
            lease_count = len(self._models[str(number)].leases)
            assert lease_count == len(model.running), f"{number} has {lease_count} leases, not {len(model.running)}"
        return orders

    def _follow(self, orders: Sequence[ModelOrder | ModelResize]) -> None:
        for order in orders:
            if isinstance(order, ModelResize):
                self._log_line(f"  {order.name} has {order.kv_blocks} blocks: {order.reason}")
                self._count("orders: change of a cache")
                self.book.resize(int(order.name), order)
                continue
            self._log_line(f"  {order.name} {order.state.value}: {order.reason}")
            self._count(f"orders: {order.state.value}")
            model = self.book.models[int(order.name)]
            is_stopped = model.state is LOADING and self.book.hangs(model) and model.wanted_since is not None
            self.book.follow(int(order.name), order)
            if is_stopped:
                self._count("loads stopped")
                self._refuse(int(order.name), model)


class ModelsGenerator:
    """Draws a world, and then one event after another.

    Args:
        rng: source of randomness.
    """

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        count = rng.randint(1, 10)
        memory = rng.randint(2, 12)
        sizes = tuple(min(rng.choice((1, 1, 2, 3, 4)), memory + 1) for _ in range(count))
        pinned = tuple(number for number in range(count) if rng.random() < 0.1)
        while sum(sizes[number] for number in pinned) > memory:
            pinned = pinned[1:]
        self.world = ModelsWorld(
            memory=memory,
            bytes=sizes,
            pinned=pinned,
            turn=rng.choice((0.5, 2.0, 10.0)),
            keep_alive=rng.choice((None, 0.0, 3.0, 30.0)),
            loads=rng.choice((1, 1, 2)),
        )
        # Caches, groups and priorities are drawn from a separate source, so that other draws stay the same.
        self._cache_rng = Random(repr(self.world))
        if self._cache_rng.random() < CACHING_WORLDS_SHARE:
            # Large models with large caches, so that memory that is lacking is often that of a cache.
            sizes = tuple(min(2 * size, memory) for size in sizes) if not pinned else sizes
            caches = tuple(self._cache_rng.choice((size - 1, self._cache_rng.randint(0, size - 1))) for size in sizes)
            caches_min = tuple(self._cache_rng.randint(0, cache) for cache in caches)
            self.world = msgspec.structs.replace(self.world, bytes=sizes, caches=caches, caches_min=caches_min)
        if self._cache_rng.random() < RANKED_WORLDS_SHARE:
            groups = tuple(0 if number in pinned else self._cache_rng.choice((0, 0, 1, 2)) for number in range(count))
            priorities = tuple(self._cache_rng.choice((-1, 0, 0, 1)) for _ in range(count))
            self.world = msgspec.structs.replace(self.world, groups=groups, priorities=priorities)
        self._stall_rng = Random(f"stalls of {self.world!r}")
        if self._stall_rng.random() < STALLING_WORLDS_SHARE:
            self.world = msgspec.structs.replace(self.world, stall=self._stall_rng.choice((2.0, 10.0, 30.0)))
        self._tenant_rng = Random(f"tenants of {self.world!r}")
        self._tenants = TENANTS if self._tenant_rng.random() < TENANTS_WORLDS_SHARE else ("",)
        self._arrivals = 0
        self._favourites = [rng.randrange(count) for _ in range(2)]

    def next_event(self, simulation: ModelsSimulation) -> ModelsEvent:
        """Draw the next event.

        Args:
            simulation: the run so far.
        """
        rng, book = self._rng, simulation.book
        loading = [number for number, model in enumerate(book.models) if model.state is LOADING]
        if self.world.stall is not None and loading and self._stall_rng.random() < PROGRESS_CHANCE:
            return Progresses(model=self._stall_rng.choice(loading))
        if self.world.caches and self._cache_rng.random() < RESIZED_CHANCE:
            changing = [
                number
                for number, model in enumerate(book.models)
                if model.held != model.held_next or model.state is WAKING
            ]
            if changing:
                number, has_failed = self._cache_rng.choice(changing), self._cache_rng.random() < 0.1
                state = book.models[number].state
                if state is WAKING:
                    return Crash(model=number) if has_failed else Woken(model=number)
                return (Slept if state is SLEEPING else Resized)(model=number, has_failed=has_failed)
            if self._cache_rng.random() < SLEEP_CHANCE:
                idle = [number for number, model in enumerate(book.models) if model.can_sleep]
                asleep = [number for number, model in enumerate(book.models) if model.state is SLEEPING]
                if asleep and self._cache_rng.random() < 0.5:
                    return self._arrival(self._cache_rng.choice(asleep))
                return SleepNow(model=self._cache_rng.choice(idle or range(len(book.models))))
        kind = rng.random()
        if kind < 0.3:
            numbers = self._favourites if rng.random() < 0.4 else range(len(book.models))
            return self._arrival(rng.choice(numbers))
        if kind < 0.5 and simulation.requests:
            return Leave(id=rng.choice(list(simulation.requests)))
        if kind < 0.75:
            return Advance(seconds=round(rng.choice((0.1, 1.0, self.world.turn, 4.0, 40.0)) * rng.random(), 2) + 0.01)
        busy = [number for number, model in enumerate(book.models) if model.state in (LOADING, UNLOADING)]
        if kind < 0.94 and busy:
            number = rng.choice(busy)
            if book.models[number].state is UNLOADING:
                return Unloaded(model=number) if rng.random() < 0.8 else Loaded(model=number)
            return Loaded(model=number) if rng.random() < 0.85 else LoadFails(model=number)
        number = rng.randrange(len(book.models))
        return rng.choice((Crash(model=number), LoadNow(model=number), UnloadNow(model=number)))

    def _arrival(self, model: int) -> Arrive:
        self._arrivals += 1
        return Arrive(id=f"r{self._arrivals}", model=model, tenant=self._tenant_rng.choice(self._tenants))
