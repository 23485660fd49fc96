"""LoRA adapters of an engine: read, put where steps find them, and let go when nobody uses them any more.

What decides is AdapterBook. Whatever way a request leaves by, it gives its lease back in one synchronous call; a task
of the engine lets go of what has no lease any more, in the compute thread, behind the step in flight.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any, Protocol

import trio

from trioserve.contracts.adapter import AdapterContent, AdapterId
from trioserve.contracts.errors import AdapterRefused, ModelLoadError, RankLost, UnknownModel
from trioserve.core.adapters import AdapterBook, AdapterLease, AdapterState, LoadedAdapter
from trioserve.engine.open_request import OpenRequest
from trioserve.metrics.registry import Metrics
from trioserve.trio_tools.interrupts import uninterrupted

__all__ = ["AdapterPlace", "Adapters", "ReadAdapter", "show_adapters"]

logger = logging.getLogger(__name__)

NAME_CHARACTERS_MAX = 256

ReadAdapter = Callable[[str, bool], Awaitable[AdapterContent]]
"""read(path, is_checked): files are read elsewhere than here. is_checked: only from directories that are allowed.
Raises ModelLoadError."""


class AdapterPlace(Protocol):
    """What computes with adapters. Raises MemoryError, and RankLost where it has broken."""

    async def add(self, id: AdapterId, content: Any) -> None: ...
    async def remove(self, id: AdapterId) -> None: ...


async def _cannot_read(path: str, is_checked: bool) -> AdapterContent:
    raise ModelLoadError("this server takes no lora adapters: start it with --enable-lora")


@uninterrupted
class Adapters:
    """read: None: there are none. adapters_max: see AdapterBook. reserved_names: the model's own."""

    def __init__(
        self, read: ReadAdapter | None = None, *, adapters_max: int = 1, reserved_names: tuple[str, ...] = ()
    ) -> None:
        self.is_enabled = read is not None
        self.book = AdapterBook(adapters_max)
        self._read = read or _cannot_read
        self._reserved_names = reserved_names
        self._contents: dict[AdapterId, AdapterContent] = {}  # that are, or are to be, where steps find them
        self._place: AdapterPlace | None = None
        self._reading = trio.CapacityLimiter(1)
        self._has_idle = trio.Event()
        self._forgotten: dict[AdapterId, trio.Event] = {}  # for those who wait

    # --- who uses which ---

    @property
    def names(self) -> tuple[str, ...]:
        return self.book.names

    def acquire(self, name: str) -> AdapterLease:
        """Raises UnknownModel."""
        lease = self.book.acquire(name)
        if lease is None:
            raise UnknownModel(f'the adapter "{name}" is not loaded here (any more)', param="model")
        return lease

    def release(self, lease: AdapterLease) -> None:
        """Once for each lease; never waits."""
        lease.release()
        self._look()

    # --- loaded and unloaded ---

    async def load(self, name: str, path: str, *, replaces: bool = False, is_checked: bool = True) -> LoadedAdapter:
        """When this returns, requests may use it. replaces: it may take over the name of another one, which who has it
        keeps. is_checked: it is refused if it lies in no allowed directory. Raises AdapterRefused, ModelLoadError."""
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
            self._look()  # also for the one whose name it has taken
        if not is_done:
            raise AdapterRefused(f"The lora adapter '{name}' was unloaded while it was being loaded", reason="unloaded")
        logger.info("adapter loaded name=%s rank=%d bytes=%d", name, content.rank_max, content.byte_count)
        loaded = self.book.get(name)
        assert loaded is not None, "nothing was awaited since"
        return loaded

    def retire(self, name: str) -> list[AdapterId]:
        """From here on nobody gets it any more. Raises UnknownModel."""
        retired = self.book.retire(name)
        if not retired:
            raise UnknownModel(f"The lora adapter '{name}' cannot be found.", param="lora_name")
        self._look()
        return retired

    async def wait_until_forgotten(self, ids: list[AdapterId]) -> None:
        """Until nothing of these is in memory."""
        for id in ids:
            while self.book.knows(id):
                await self._forgotten.setdefault(id, trio.Event()).wait()

    # --- the engine's side ---

    async def keep(self) -> None:
        """Let go of what nobody uses. Runs until cancelled."""
        while True:
            for id in self.book.idle():
                self._contents.pop(id, None)  # first, so that whoever attaches a place meanwhile does not add it again
                if self._place is not None:
                    with suppress(RankLost):  # then it is gone, too
                        await self._place.remove(id)
                self.book.forget(id)
                if id in self._forgotten:
                    self._forgotten.pop(id).set()
            if not self.book.idle():
                self._has_idle = trio.Event()
                await self._has_idle.wait()

    async def attach(self, place: AdapterPlace) -> None:
        """An engine was opened, perhaps anew: what there is goes there."""
        self._place = place  # first: what is loaded from here on goes there by itself
        for id, content in [*self._contents.items()]:
            if id in self._contents:
                try:
                    await place.add(id, content)
                except MemoryError as error:
                    # It was being loaded when the last place broke, before that could refuse it.
                    self._give_up(id, error)

    def _give_up(self, id: AdapterId, error: MemoryError) -> None:
        """There is no room for it: nobody gets it from here on, and requests that have it fail in their next step."""
        name = self.book.name_of(id)
        logger.error("adapter given up, since there is no room for it name=%s error=%s", name, error)
        self.book.retire(name)
        self._look()

    def detach(self) -> None:
        """It is closed, or broke; what is to be let go of goes with it."""
        self._place = None

    def count_of(self, state: AdapterState) -> int:
        return self.book.count_of(state)

    @property
    def byte_count(self) -> int:
        return sum(content.byte_count for content in self._contents.values())

    def _look(self) -> None:
        if self.book.idle():
            self._has_idle.set()

    def _check_name(self, name: str) -> None:
        if not 1 <= len(name) <= NAME_CHARACTERS_MAX or not name.isprintable():
            raise AdapterRefused(
                f"lora_name has {len(name)} characters; it takes 1 to {NAME_CHARACTERS_MAX} that can be printed",
                reason="bad_name",
            )
        if name in self._reserved_names:
            raise AdapterRefused(f"'{name}' is the name of the model itself: choose another one", reason="bad_name")


async def _added(place: AdapterPlace, id: AdapterId, name: str, content: AdapterContent) -> None:
    try:
        with suppress(RankLost):  # the engine breaks with it, and finds the content when it is opened anew
            await place.add(id, content)
    except MemoryError:
        raise AdapterRefused(
            f"there is no memory for '{name}', which takes {content.byte_count} bytes", reason="no_memory"
        ) from None


def show_adapters(metrics: Metrics, adapters: Adapters, requests: Iterable[OpenRequest]) -> None:
    """Show adapters and the requests that use them as metrics, read at each scrape. Adapter names are the operator's.

    Args:
        requests: all requests that have been entered and not left.
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
