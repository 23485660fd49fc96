"""Records of LoRA adapters: which adapters are loaded, how many requests use each adapter, and when an adapter may be
unloaded.

This module stores names and counts, but no weights.

    LOADING ──► READY ──► RETIRED ──► (forgotten)
        └────────────────────┘

A name refers to the adapter that is READY under this name. A lease belongs to one loaded adapter, and stays valid if
another adapter gets the same name. A RETIRED adapter has no name any more, and is unloaded when its last lease is
released.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator

from trioserve.contracts.errors import AdapterRefused
from trioserve.contracts.weights import AdapterId, AdapterRef

__all__ = ["AdapterBook", "AdapterLease", "AdapterState", "LoadedAdapter"]


class AdapterState(enum.Enum):
    LOADING = "loading"
    READY = "ready"
    RETIRED = "retired"


class LoadedAdapter:
    """One loaded adapter. If an adapter is loaded again, the second load is another object.

    Args:
        id: id of this load, unique among all loads.
        name: name that requests use for the adapter.
        source: origin of the adapter, as text for humans.
        replaces: True if the adapter may take over the name of a ready adapter.

    Attributes:
        ref: reference for steps. None until the load has finished and the digest is known.
        is_owed: True until the loader has reported the end of the load. Until then, the loader may still write weights.
        user_count: number of leases that are not released yet.
    """

    __slots__ = ("id", "is_owed", "name", "ref", "replaces", "source", "state", "user_count")

    def __init__(self, id: AdapterId, name: str, source: str, *, replaces: bool) -> None:
        self.id = id
        self.name = name
        self.source = source
        self.replaces = replaces
        self.state = AdapterState.LOADING
        self.ref: AdapterRef | None = None
        self.user_count = 0
        self.is_owed = True


class AdapterLease:
    """A request's right to use an adapter. The request must release it exactly once.

    Args:
        adapter: a ready adapter.
    """

    __slots__ = ("_adapter", "_is_released", "name", "ref")

    def __init__(self, adapter: LoadedAdapter) -> None:
        assert adapter.ref is not None, f"{adapter.name} is used before it is ready"
        self.name = adapter.name
        self.ref = adapter.ref
        self._adapter = adapter
        self._is_released = False
        adapter.user_count += 1

    def release(self) -> None:
        """Release the lease. A second call is a bug of the caller and fails an assertion."""
        assert not self._is_released, f"the lease on {self.name} is released twice"
        self._is_released = True
        self._adapter.user_count -= 1
        assert self._adapter.user_count >= 0, f"{self.name} has {self._adapter.user_count} users"


class AdapterBook:
    """All adapters of an engine that are loading, ready or retired.

    Args:
        adapters_max: highest number of names, including names that are being loaded. In addition, the same number of
            retired adapters may still be in use. A load that exceeds either limit is refused.
    """

    def __init__(self, adapters_max: int) -> None:
        self.adapters_max = adapters_max
        # All adapters, including retired adapters that are still in use.
        self._adapters: dict[AdapterId, LoadedAdapter] = {}
        self._ready: dict[str, LoadedAdapter] = {}
        self._loading: dict[str, LoadedAdapter] = {}
        self._count = 0

    def __iter__(self) -> Iterator[LoadedAdapter]:
        """Iterate over ready adapters, in the order in which their names were first loaded."""
        return iter(self._ready.values())

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of ready adapters."""
        return tuple(self._ready)

    def get(self, name: str) -> LoadedAdapter | None:
        return self._ready.get(name)

    def begin_load(self, name: str, source: str, *, replaces: bool = False) -> AdapterId:
        """Start to load an adapter under a name. The caller must later call finish_load or fail_load.

        Args:
            name: name that requests will use.
            source: origin of the adapter, for humans.
            replaces: True to take over the name of a ready adapter.

        Raises:
            AdapterRefused: the name is in use or being loaded, or there are too many adapters. Nothing was changed.
        """
        if name in self._loading:
            raise AdapterRefused(f"The lora adapter '{name}' is being loaded: wait until it is ready", reason="loading")
        if name in self._ready and not replaces:
            raise AdapterRefused(
                f"The lora adapter '{name}' has already been loaded: unload it first, or send load_inplace",
                reason="already_loaded",
            )
        names = {*self._ready, *self._loading, name}
        if len(names) > self.adapters_max:
            raise AdapterRefused(
                f"{self.adapters_max} lora adapters are loaded, which is the maximum: unload one, or raise "
                "--max-cpu-loras",
                reason="too_many",
            )
        retired = self.count_of(AdapterState.RETIRED)
        if retired >= self.adapters_max:
            raise AdapterRefused(
                f"{retired} lora adapters were unloaded but are still used by requests: wait for these requests",
                reason="too_many",
            )
        self._count += 1
        adapter = LoadedAdapter(AdapterId(self._count), name, source, replaces=replaces)
        self._adapters[adapter.id] = self._loading[name] = adapter
        return adapter.id

    def finish_load(self, id: AdapterId, digest: str) -> AdapterRef | None:
        """Make a loaded adapter ready. From now on, the name refers to this adapter.

        Args:
            id: id from begin_load.
            digest: digest of the weights.

        Returns:
            The reference that steps use. None if the adapter was retired while it was being loaded.
        """
        adapter = self._adapters[id]
        adapter.is_owed = False
        if adapter.state is AdapterState.RETIRED:
            return None
        assert adapter.state is AdapterState.LOADING, f"{adapter.name} is loaded twice"
        before = self._ready.get(adapter.name)
        if before is not None:
            assert adapter.replaces, f"{adapter.name} is ready already"
            before.state = AdapterState.RETIRED
        del self._loading[adapter.name]
        adapter.ref = AdapterRef(id, digest)
        adapter.state = AdapterState.READY
        self._ready[adapter.name] = adapter
        return adapter.ref

    def fail_load(self, id: AdapterId) -> None:
        """Note that a load failed. If the adapter was retired during the load, it can now be forgotten.

        Args:
            id: id from begin_load.
        """
        adapter = self._adapters[id]
        assert adapter.state is not AdapterState.READY, f"{adapter.name} is ready"
        adapter.is_owed = False
        if adapter.state is AdapterState.LOADING:
            del self._loading[adapter.name]
            adapter.state = AdapterState.RETIRED

    def acquire(self, name: str) -> AdapterLease | None:
        """Return a lease on an adapter.

        Args:
            name: name from the request.

        Returns:
            The lease. None if no adapter with this name is ready.
        """
        adapter = self._ready.get(name)
        return None if adapter is None else AdapterLease(adapter)

    def retire(self, name: str) -> list[AdapterId]:
        """Retire the ready adapter with a name, and the adapter that is being loaded under this name.

        Args:
            name: name to free.

        Returns:
            Ids of the retired adapters. The list is empty if no adapter has the name.
        """
        retired = [found for names in (self._ready, self._loading) if (found := names.pop(name, None)) is not None]
        for adapter in retired:
            adapter.state = AdapterState.RETIRED
        return [adapter.id for adapter in retired]

    def idle(self) -> list[AdapterId]:
        """Return the ids of retired adapters without leases. The caller must unload them, and then call forget."""
        return [
            adapter.id
            for adapter in self._adapters.values()
            if adapter.state is AdapterState.RETIRED and not adapter.user_count and not adapter.is_owed
        ]

    def forget(self, id: AdapterId) -> None:
        """Remove an adapter whose weights were removed from memory.

        Args:
            id: id of an idle adapter.
        """
        adapter = self._adapters.pop(id)
        assert adapter.state is AdapterState.RETIRED, f"{adapter.name} is forgotten while it is {adapter.state.value}"
        assert not adapter.user_count, f"{adapter.name} is forgotten while {adapter.user_count} use it"

    def name_of(self, id: AdapterId) -> str:
        """Return the current name of an adapter, or its last name if it was retired.

        Args:
            id: id of an adapter that was not passed to `forget`.
        """
        return self._adapters[id].name

    def has(self, id: AdapterId) -> bool:
        return id in self._adapters

    def user_count(self, id: AdapterId) -> int:
        adapter = self._adapters.get(id)
        return 0 if adapter is None else adapter.user_count

    @property
    def lease_count(self) -> int:
        """Return the number of leases on all adapters together."""
        return sum(adapter.user_count for adapter in self._adapters.values())

    def count_of(self, state: AdapterState) -> int:
        return sum(adapter.state is state for adapter in self._adapters.values())

    def check(self) -> None:
        """Assert what must be true after every call. The cost is O(adapters), so only tests may call it."""
        by_state = {state: [a for a in self._adapters.values() if a.state is state] for state in AdapterState}
        assert {a.name: a for a in by_state[AdapterState.READY]} == self._ready
        assert {a.name: a for a in by_state[AdapterState.LOADING]} == self._loading
        assert len(by_state[AdapterState.READY]) == len(self._ready), "two adapters are ready under one name"
        assert len({*self._ready, *self._loading}) <= self.adapters_max
        for adapter in self._adapters.values():
            assert adapter.user_count >= 0, f"{adapter.name} has {adapter.user_count} users"
            assert adapter.state is not AdapterState.LOADING or not adapter.user_count, f"{adapter.name} is not ready"
            assert adapter.ref is not None or not adapter.user_count, f"{adapter.name} is used but has no ref"
            assert adapter.is_owed <= (adapter.ref is None), f"{adapter.name} has a ref but is still being loaded"
