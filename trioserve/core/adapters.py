"""Which LoRA adapters there are, who uses them, and when one may be let go. Knows names and counts, and no weights.

    LOADING ──► READY ──► RETIRED ──► (forgotten)
        └────────────────────┘

A name leads to the adapter that is READY under it. Whoever acquires it has a lease on that one loading: another one
that takes the name over does not change it. RETIRED has no name any more, and is let go when its last lease is given
back.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator

from trioserve.contracts.adapter import AdapterId, AdapterRef
from trioserve.contracts.errors import AdapterRefused

__all__ = ["AdapterBook", "AdapterLease", "AdapterState", "LoadedAdapter"]


class AdapterState(enum.Enum):
    LOADING = "loading"
    READY = "ready"
    RETIRED = "retired"


class LoadedAdapter:
    """One loading. ref: once its content is known. source: where it came from, for people."""

    __slots__ = ("id", "is_owed", "name", "ref", "replaces", "source", "state", "user_count")

    def __init__(self, id: AdapterId, name: str, source: str, *, replaces: bool) -> None:
        self.id = id
        self.name = name
        self.source = source
        self.replaces = replaces
        self.state = AdapterState.LOADING
        self.ref: AdapterRef | None = None
        self.user_count = 0
        self.is_owed = True  # whoever loads it has not said how that ended, and may still be putting it into memory


class AdapterLease:
    """One request's use of an adapter, given back once."""

    __slots__ = ("_adapter", "_is_released", "name", "ref")

    def __init__(self, adapter: LoadedAdapter) -> None:
        assert adapter.ref is not None, f"{adapter.name} is used before it is there"
        self.name = adapter.name
        self.ref = adapter.ref
        self._adapter = adapter
        self._is_released = False
        adapter.user_count += 1

    def release(self) -> None:
        """To be called once: a second time is our bug."""
        assert not self._is_released, f"the lease on {self.name} is given back twice"
        self._is_released = True
        self._adapter.user_count -= 1
        assert self._adapter.user_count >= 0, f"{self.name} has {self._adapter.user_count} users"


class AdapterBook:
    """adapters_max: how many names there may be, those that are being loaded included. As many more may be retired and
    still in use: a load beyond that is refused, too."""

    def __init__(self, adapters_max: int) -> None:
        self.adapters_max = adapters_max
        self._adapters: dict[AdapterId, LoadedAdapter] = {}  # all that are not forgotten
        self._ready: dict[str, LoadedAdapter] = {}
        self._loading: dict[str, LoadedAdapter] = {}
        self._count = 0

    def __iter__(self) -> Iterator[LoadedAdapter]:
        """Those that are ready, in the order of their names' first loading."""
        return iter(self._ready.values())

    @property
    def names(self) -> tuple[str, ...]:
        """Under which one is ready."""
        return tuple(self._ready)

    def get(self, name: str) -> LoadedAdapter | None:
        """The one that is ready under the name."""
        return self._ready.get(name)

    def begin_load(self, name: str, source: str, *, replaces: bool = False) -> AdapterId:
        """A place for one more. replaces: it may take a name over. The caller owes finish_load or fail_load. Raises
        AdapterRefused, and has changed nothing."""
        if name in self._loading:
            raise AdapterRefused(f"The lora adapter '{name}' is being loaded: wait for that", reason="loading")
        if name in self._ready and not replaces:
            raise AdapterRefused(
                f"The lora adapter '{name}' has already been loaded: unload it first, or send load_inplace",
                reason="already_loaded",
            )
        names = {*self._ready, *self._loading, name}
        if len(names) > self.adapters_max:
            raise AdapterRefused(
                f"{self.adapters_max} lora adapters are loaded, and no more are allowed: unload one, or raise "
                "--max-cpu-loras",
                reason="too_many",
            )
        retired = self.count_of(AdapterState.RETIRED)
        if retired >= self.adapters_max:
            raise AdapterRefused(
                f"{retired} lora adapters were unloaded and are still used by requests: wait for these",
                reason="too_many",
            )
        self._count += 1
        adapter = LoadedAdapter(AdapterId(self._count), name, source, replaces=replaces)
        self._adapters[adapter.id] = self._loading[name] = adapter
        return adapter.id

    def finish_load(self, id: AdapterId, digest: str) -> AdapterRef | None:
        """It is where steps find it. From here on its name leads to it. None: it was retired meanwhile."""
        adapter = self._adapters[id]
        adapter.is_owed = False
        if adapter.state is AdapterState.RETIRED:
            return None
        assert adapter.state is AdapterState.LOADING, f"{adapter.name} is loaded twice"
        before = self._ready.get(adapter.name)
        if before is not None:
            assert adapter.replaces, f"{adapter.name} is there already"
            before.state = AdapterState.RETIRED
        del self._loading[adapter.name]
        adapter.ref = AdapterRef(id, digest)
        adapter.state = AdapterState.READY
        self._ready[adapter.name] = adapter
        return adapter.ref

    def fail_load(self, id: AdapterId) -> None:
        """Nothing comes of it. Nothing to do if it was retired."""
        adapter = self._adapters[id]
        assert adapter.state is not AdapterState.READY, f"{adapter.name} is there"
        adapter.is_owed = False
        if adapter.state is AdapterState.LOADING:
            del self._loading[adapter.name]
            adapter.state = AdapterState.RETIRED

    def acquire(self, name: str) -> AdapterLease | None:
        """None: no adapter of this name is ready."""
        adapter = self._ready.get(name)
        return None if adapter is None else AdapterLease(adapter)

    def retire(self, name: str) -> list[AdapterId]:
        """Take the name away, from the one that is being loaded under it, too. Returns those it was taken from; none if
        nobody has it."""
        retired = [found for names in (self._ready, self._loading) if (found := names.pop(name, None)) is not None]
        for adapter in retired:
            adapter.state = AdapterState.RETIRED
        return [adapter.id for adapter in retired]

    def idle(self) -> list[AdapterId]:
        """Those that are retired and used by nobody: to be let go, and then forgotten."""
        return [
            adapter.id
            for adapter in self._adapters.values()
            if adapter.state is AdapterState.RETIRED and not adapter.user_count and not adapter.is_owed
        ]

    def forget(self, id: AdapterId) -> None:
        """Nothing of it is in memory any more."""
        adapter = self._adapters.pop(id)
        assert adapter.state is AdapterState.RETIRED, f"{adapter.name} is forgotten while it is {adapter.state.value}"
        assert not adapter.user_count, f"{adapter.name} is forgotten while {adapter.user_count} use it"

    def name_of(self, id: AdapterId) -> str:
        """Of one that is not forgotten: that which leads to it, or has."""
        return self._adapters[id].name

    def knows(self, id: AdapterId) -> bool:
        """Whether it is not forgotten."""
        return id in self._adapters

    def user_count(self, id: AdapterId) -> int:
        adapter = self._adapters.get(id)
        return 0 if adapter is None else adapter.user_count

    @property
    def lease_count(self) -> int:
        """Of all adapters together."""
        return sum(adapter.user_count for adapter in self._adapters.values())

    def count_of(self, state: AdapterState) -> int:
        return sum(adapter.state is state for adapter in self._adapters.values())

    def check(self) -> None:
        """Assert what has to hold after every call. O(adapters): for tests and simulations."""
        by_state = {state: [a for a in self._adapters.values() if a.state is state] for state in AdapterState}
        assert {a.name: a for a in by_state[AdapterState.READY]} == self._ready
        assert {a.name: a for a in by_state[AdapterState.LOADING]} == self._loading
        assert len(by_state[AdapterState.READY]) == len(self._ready), "two are ready under one name"
        assert len({*self._ready, *self._loading}) <= self.adapters_max
        for adapter in self._adapters.values():
            assert adapter.user_count >= 0, f"{adapter.name} has {adapter.user_count} users"
            assert adapter.state is not AdapterState.LOADING or not adapter.user_count, f"{adapter.name} is not there"
            assert adapter.ref is not None or not adapter.user_count, f"{adapter.name} is used, and not there"
            assert adapter.is_owed <= (adapter.ref is None), f"{adapter.name} is there, and still being loaded"
