"""What this engine asks of nixl: memory that others may read, and reads of theirs.

Every call here may take long, holds the GIL for a while, and is made in a thread, one at a time. It is NVIDIA's library
(NIXL, package `nixl`); on a machine without a fast network UCX copies through shared memory or TCP instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np

from trioserve.contracts.ids import BlockIndex
from trioserve.contracts.kv_transfer import KVPages

__all__ = ["Agent", "AgentError", "DevicePages", "MemoryKind", "Region", "regions_of"]

MemoryKind = Literal["DRAM", "VRAM"]


PAUSE_MICROSECONDS = 100_000  # of nixl's thread where nothing comes; what comes wakes it


class AgentError(Exception):
    """nixl has refused, or the other side is gone."""


class Region(NamedTuple):
    """Memory of this process. device: the index of the GPU; 0 for the host."""

    address: int
    byte_count: int
    device: int = 0


@runtime_checkable
class DevicePages(Protocol):
    """A KV cache on a device that nixl can read from."""

    def region(self, layer: int) -> tuple[int, int, int]:
        """Where a layer's blocks lie: the address on the device, the number of bytes, and the device's index."""
        ...


def regions_of(pages: KVPages) -> tuple[MemoryKind, list[Region]]:
    """Where the blocks of each layer lie, one behind the other; no regions where nobody else could read them."""
    layers = range(pages.layout.layer_count)
    if isinstance(pages, DevicePages):
        return "VRAM", [Region(*pages.region(layer)) for layer in layers]
    regions = []
    block_bytes = pages.layout.block_size * pages.layout.token_bytes
    for layer in layers:
        first, last = pages.view(layer, BlockIndex(0)), pages.view(layer, BlockIndex(pages.block_count - 1))
        if first is None or last is None:
            return "DRAM", []
        start = _address(first)
        if _address(last) != start + (pages.block_count - 1) * block_bytes:
            return "DRAM", []
        regions.append(Region(start, pages.block_count * block_bytes))
    return "DRAM", regions


class Agent:
    """name: differs from every other agent's. landing: where reads of this side arrive.

    Raises AgentError, here and in every call.
    """

    def __init__(self, name: str, kind: MemoryKind, regions: Sequence[Region], landing: bytearray) -> None:
        with _Translated("nixl cannot be loaded"):
            import nixl._bindings as bindings  # takes a second, and is an extra

        # Not by nixl's own wrapper around these, which leaves its thread no pause: without a GPU that takes a core from
        # whoever computes, and READs are ten times slower for it.
        config = bindings.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = PAUSE_MICROSECONDS
        # Calls come one at a time, but not always from the same thread.
        config.syncMode = bindings.NIXL_THREAD_SYNC_STRICT
        self._bindings = bindings
        self._segments = {"DRAM": bindings.DRAM_SEG, "VRAM": bindings.VRAM_SEG}
        self._landing = np.frombuffer(landing, np.uint8)  # so that it lives as long as this does
        self._registered: list[Any] = []
        with _Translated("nixl cannot be started"):
            self._agent = bindings.nixlAgent(name, config)
            self._agent.createBackend("UCX", {})
            self.landing_address = int(self._landing.ctypes.data)
            self._register("DRAM", [Region(self.landing_address, len(landing))])
            if regions:
                self._register(kind, regions)
            self.metadata: bytes = self._agent.getLocalMD()

    def add(self, metadata: bytes) -> str:
        """Another agent. Returns its name."""
        with _Translated("the other side's nixl cannot be reached"):
            name = self._agent.loadRemoteMD(metadata)
            return name.decode() if isinstance(name, bytes) else str(name)

    def remove(self, name: str) -> None:
        with _Translated("nixl"):
            self._agent.invalidateRemoteMD(name)

    def begin_read(self, name: str, kind: MemoryKind, here: Sequence[Region], there: Sequence[Region]) -> int:
        """Each piece there into the piece here, of the same length. Returns what `is_done` and `end` want."""
        with _Translated("nixl READ"):
            local, remote = self._pieces("DRAM", here), self._pieces(kind, there)
            handle: int = self._agent.createXferReq(self._bindings.NIXL_READ, local, remote, name, b"", [])
            try:
                self._check(self._agent.postXferReq(handle, b""))
            except BaseException:
                self.end(handle)
                raise
            return handle

    def is_done(self, handle: int) -> bool:
        """Raises AgentError when it has failed: it is over then, too."""
        with _Translated("nixl READ"):
            return self._check(self._agent.getXferStatus(handle))

    def end(self, handle: int) -> bool:
        """Let go of a read. Whether nothing more of it can be written; False: ask again."""
        try:
            self._agent.releaseXferReq(handle)
        except Exception:
            return False
        return True

    def close(self) -> None:
        """Nobody can read here any more, and nothing is read."""
        for registered in self._registered:
            with _Translated("nixl"):
                self._agent.deregisterMem(registered, [])
        self._registered.clear()
        del self._agent

    def _register(self, kind: MemoryKind, regions: Sequence[Region]) -> None:
        rows = [(region.address, region.byte_count, region.device, "") for region in regions]
        registered = self._bindings.nixlRegDList(self._segments[kind], rows)
        self._agent.registerMem(registered, [])
        self._registered.append(registered)

    def _pieces(self, kind: MemoryKind, regions: Sequence[Region]) -> Any:
        return self._bindings.nixlXferDList(self._segments[kind], np.array(regions, np.uint64))

    def _check(self, status: object) -> bool:
        """Whether it is done."""
        if status == self._bindings.NIXL_IN_PROG:
            return False
        if status != self._bindings.NIXL_SUCCESS:
            raise AgentError("nixl READ failed")
        return True


class _Translated:
    """What nixl raises has no root of its own but Exception."""

    def __init__(self, doing: str) -> None:
        self._doing = doing

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, AgentError):
            raise AgentError(f"{self._doing}: {str(error) or type(error).__name__}") from error


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)
