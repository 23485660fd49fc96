"""The LoRA adapters of an engine: loading, attaching to the executor, and removal when no request uses them.

`AdapterBook` makes the decisions. However a request ends, one synchronous call releases its lease on the adapter. A
task of the engine removes adapters that have no lease. The removal runs in the compute thread, after the step in
flight.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any, Protocol

import trio

from trioserve.contracts.errors import AdapterRefused, ModelLoadError, RankLost, UnknownModel
from trioserve.contracts.weights import AdapterContent, AdapterId
from trioserve.core.adapters import AdapterBook, AdapterLease, AdapterState, LoadedAdapter
from trioserve.engine.open_request import OpenRequest
from trioserve.metrics.registry import Metrics
from trioserve.trio_tools.interrupts import uninterrupted

__all__ = ["AdapterTarget", "Adapters", "ReadAdapter", "show_adapters"]

logger = logging.getLogger(__name__)

NAME_CHARACTERS_MAX = 256

ReadAdapter = Callable[[str, bool], Awaitable[AdapterContent]]
"""Reads an adapter: `await read(path, is_checked)`. Files are not read in the calling thread.

If `is_checked` is True, the directory must be an allowed one. Raises ModelLoadError.
"""


class AdapterTarget(Protocol):
    """The executor's methods for adapters. They raise MemoryError, or RankLost if a process is lost."""

    async def add(self, id: AdapterId, content: Any) -> None: ...
    async def remove(self, id: AdapterId) -> None: ...


async def _cannot_read(path: str, is_checked: bool) -> AdapterContent:
    raise ModelLoadError("LoRA adapters are disabled: start the server with --enable-lora")


@uninterrupted
class Adapters:
    """Loads, attaches and removes the adapters of an engine.

    Args:
        read: reads an adapter. None: adapters are disabled.
        adapters_max: see `AdapterBook`.
        reserved_names: names of the model, which adapters cannot have.

    Attributes:
        is_enabled: False if adapters are disabled.
        book: names, leases and states of the adapters.
    """

    def __init__(
        self, read: ReadAdapter | None = None, *, adapters_max: int = 1, reserved_names: tuple[str, ...] = ()
    ) -> None:
        self.is_enabled = read is not None
        self.book = AdapterBook(adapters_max)
        self._read = read or _cannot_read
        self._reserved_names = reserved_names
        # Adapters that are attached to the executor, or will be attached.
        self._contents: dict[AdapterId, AdapterContent] = {}
        self._place: AdapterTarget | None = None
        self._reading = trio.CapacityLimiter(1)
        self._has_idle = trio.Event()
        self._forgotten: dict[AdapterId, trio.Event] = {}  # The event of an adapter is set when the adapter is removed.

    # --- leases ---

    @property
    def names(self) -> tuple[str, ...]:
        return self.book.names

    def acquire(self, name: str) -> AdapterLease:
        """Give a request a lease on an adapter.

        Args:
            name: name of the adapter.

        Raises:
            UnknownModel: no such adapter is loaded.
        """
        lease = self.book.acquire(name)
        if lease is None:
            raise UnknownModel(f'the adapter "{name}" is not loaded', param="model")
        return lease

    def release(self, lease: AdapterLease) -> None:
        """Release a lease. The caller must call this once for each lease. Never waits."""
        lease.release()
        self._wake_if_idle()

    # --- loading and unloading ---

    async def load(self, name: str, path: str, *, replaces: bool = False, is_checked: bool = True) -> LoadedAdapter:
        """Load an adapter. Requests may use the adapter as soon as this method returns.

        Args:
            name: name of the adapter.
            path: directory in the format of peft.
            replaces: True to take over the name of a loaded adapter. Requests that use the old adapter keep it.
            is_checked: True to refuse a directory that is not allowed.

        Raises:
            AdapterRefused: the adapter cannot be loaded under this name, or there is not enough memory.
            ModelLoadError: the adapter cannot be read.
        """
        self._check_name(name)
        id = self.book.begin_load(name, path, replaces=replaces)
        is_done = False
        try:
            async with self._reading:
                content = await self._read(path, is_checked)
            self._contents[id] = content
            if self._place is not None:
                await _added(self._place, id, name, content)
            is_done = self.book.finish_load(id, content.digest) is not None
        finally:
            if not is_done:
                self.book.fail_load(id)
            self._wake_if_idle()  # If this adapter replaced another one, the other one may be idle now.
        if not is_done:
            raise AdapterRefused(f"The lora adapter '{name}' was unloaded while it was being loaded", reason="unloaded")
        logger.info("adapter loaded name=%s rank=%d bytes=%d", name, content.rank_max, content.byte_count)
        loaded = self.book.get(name)
        assert loaded is not None, "no await since the load was finished"
        return loaded

    def retire(self, name: str) -> list[AdapterId]:
        """Unload the adapters with a name. No further request can use them.

        Args:
            name: name of the adapters.

        Returns:
            Ids of the unloaded adapters. Each stays in memory until its last lease is released.

        Raises:
            UnknownModel: no such adapter is loaded.
        """
        retired = self.book.retire(name)
        if not retired:
            raise UnknownModel(f"The lora adapter '{name}' cannot be found.", param="lora_name")
        self._wake_if_idle()
        return retired

    async def wait_until_forgotten(self, ids: list[AdapterId]) -> None:
        """Wait until adapters are removed from the memory of the executor.

        Args:
            ids: ids of the adapters.
        """
        for id in ids:
            while self.book.has(id):
                await self._forgotten.setdefault(id, trio.Event()).wait()

    # --- called by the engine ---

    async def keep(self) -> None:
        """Remove adapters that no request uses. Runs until cancelled."""
        while True:
            for id in self.book.idle():
                # Drop the content before the removal, so that a concurrent `attach` does not add the adapter again.
                self._contents.pop(id, None)
                if self._place is not None:
                    with suppress(RankLost):  # A lost process has lost the adapter's memory, too.
                        await self._place.remove(id)
                self.book.forget(id)
                if id in self._forgotten:
                    self._forgotten.pop(id).set()
            if not self.book.idle():
                self._has_idle = trio.Event()
                await self._has_idle.wait()

    async def attach(self, place: AdapterTarget) -> None:
        """Attach all adapters to the executor of an engine that was opened or reopened.

        Args:
            place: the adapter methods of the new executor.
        """
        # Set this before the loop, so that `load` itself adds adapters that are loaded during the loop.
        self._place = place
        for id, content in [*self._contents.items()]:
            if id in self._contents:
                try:
                    await place.add(id, content)
                except MemoryError as error:
                    # The last executor broke while this adapter was being loaded, so that executor could not refuse it.
                    self._abandon(id, error)

    def _abandon(self, id: AdapterId, error: MemoryError) -> None:
        """Unload an adapter for which the executor has too little memory. Requests that use it fail in their next
        step.
        """
        name = self.book.name_of(id)
        logger.error("adapter unloaded, because there is not enough memory name=%s error=%s", name, error)
        self.book.retire(name)
        self._wake_if_idle()

    def detach(self) -> None:
        """Forget the executor, because it is closed or broken. Its adapters are lost, too."""
        self._place = None

    def count_of(self, state: AdapterState) -> int:
        return self.book.count_of(state)

    @property
    def byte_count(self) -> int:
        return sum(content.byte_count for content in self._contents.values())

    def _wake_if_idle(self) -> None:
        if self.book.idle():
            self._has_idle.set()

    def _check_name(self, name: str) -> None:
        if not 1 <= len(name) <= NAME_CHARACTERS_MAX or not name.isprintable():
            raise AdapterRefused(
                f"lora_name has {len(name)} characters; allowed are 1 to {NAME_CHARACTERS_MAX} printable characters",
                reason="bad_name",
            )
        if name in self._reserved_names:
            raise AdapterRefused(f"'{name}' is the name of the model itself: choose another one", reason="bad_name")


async def _added(place: AdapterTarget, id: AdapterId, name: str, content: AdapterContent) -> None:
    try:
        with suppress(RankLost):  # The lost process makes the engine reopen, and `attach` then adds the content.
            await place.add(id, content)
    except MemoryError:
        raise AdapterRefused(
            f"there is not enough memory for '{name}', which needs {content.byte_count} bytes", reason="no_memory"
        ) from None


def show_adapters(metrics: Metrics, adapters: Adapters, requests: Iterable[OpenRequest]) -> None:
    """Show the adapters, and the requests that use them, as metrics. The values are read at each scrape. The operator
    chooses the adapter names, so the number of labels is bounded.

    Args:
        metrics: registry to update.
        requests: all requests whose scope is entered.
    """

    def show() -> None:
        if not adapters.is_enabled:
            return
        for state in AdapterState:
            metrics.adapters.labels(state.value).set(adapters.count_of(state))
        metrics.adapter_bytes.set(adapters.byte_count)
        running: Counter[str] = Counter()
        waiting: Counter[str] = Counter()
        for request in requests:
            if request.adapter_lease is not None:
                (running if request.has_run else waiting)[request.adapter_lease.name] += 1
        metrics.adapter_requests.clear()
        for name in {*adapters.names, *running, *waiting}:
            metrics.adapter_requests.labels(name).set(running[name] + waiting[name])
        metrics.lora_requests_info.clear()
        names = (str(adapters.book.adapters_max), ",".join(sorted(waiting)), ",".join(sorted(running)))
        metrics.lora_requests_info.labels(*names).set(time.time())

    metrics.on_scrape(show)
