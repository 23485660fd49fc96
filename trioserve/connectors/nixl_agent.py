"""Wrapper for NIXL, NVIDIA's library (package `nixl`), that exposes memory to other engines and reads their memory.

Every call may take long and holds the GIL for some time. So calls run in a thread, one at a time. On a machine without
a fast network, UCX copies through shared memory or TCP.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np

from trioserve.contracts.ids import BlockIndex
from trioserve.contracts.kv_transfer import KVPages

__all__ = ["Agent", "AgentError", "DevicePages", "MemoryKind", "Region", "regions_of"]

MemoryKind = Literal["DRAM", "VRAM"]


PAUSE_MICROSECONDS = 100_000  # pause of nixl's thread when nothing arrives; arriving data wakes the thread


class AgentError(Exception):
    """nixl has refused a call, or the other agent is gone."""


class Region(NamedTuple):
    """Memory region of a process.

    Attributes:
        address: Start address.
        byte_count: Length in bytes.
        device: Index of the GPU. 0 for host memory.
    """

    address: int
    byte_count: int
    device: int = 0


@runtime_checkable
class DevicePages(Protocol):
    """KV cache on a device from which nixl can read."""

    def region(self, layer: int) -> tuple[int, int, int]:
        """Return the location of a layer's blocks.

        Args:
            layer: Index of the layer.

        Returns:
            Address on the device, length in bytes, and index of the device.
        """
        ...


def regions_of(pages: KVPages) -> tuple[MemoryKind, list[Region]]:
    """Return the memory kind and the regions of a KV cache, one region per layer.

    Args:
        pages: KV cache of the engine.

    Returns:
        Regions with contiguous blocks. Empty if other engines cannot read the cache.
    """
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
    """NIXL agent of this engine.

    Args:
        name: Name that no other agent has.
        kind: Kind of the cache's memory.
        regions: Regions of the cache. Empty if other engines cannot read it.
        landing: Buffer that receives data read from other engines.

    Attributes:
        landing_address: Address of the buffer.
        metadata: Description of this agent for other agents.

    Raises:
        AgentError: nixl refused a call. All methods may raise it.
    """

    def __init__(self, name: str, kind: MemoryKind, regions: Sequence[Region], landing: bytearray) -> None:
        with _Translated("nixl cannot be loaded"):
            import nixl._bindings as bindings  # This import takes a second, and nixl is an optional dependency.

        # The wrapper that nixl provides for these bindings sets no pause for the thread of nixl. Without a GPU, this
        # thread would occupy a core that the model needs, and READs would be ten times slower.
        config = bindings.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = PAUSE_MICROSECONDS
        # The agent is called from different threads, but only by one thread at a time.
        config.syncMode = bindings.NIXL_THREAD_SYNC_STRICT
        self._bindings = bindings
        self._segments = {"DRAM": bindings.DRAM_SEG, "VRAM": bindings.VRAM_SEG}
        self._landing = np.frombuffer(landing, np.uint8)  # This reference keeps the buffer alive as long as the agent.
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
        """Connect to another agent.

        Args:
            metadata: Description of the other agent.

        Returns:
            Name of the other agent.
        """
        with _Translated("the other side's nixl cannot be reached"):
            name = self._agent.loadRemoteMD(metadata)
            return name.decode() if isinstance(name, bytes) else str(name)

    def remove(self, name: str) -> None:
        with _Translated("nixl"):
            self._agent.invalidateRemoteMD(name)

    def begin_read(self, name: str, kind: MemoryKind, here: Sequence[Region], there: Sequence[Region]) -> int:
        """Start reading memory of another agent.

        Args:
            name: Name of the other agent.
            kind: Kind of the other agent's memory.
            here: Regions in the landing buffer.
            there: Regions of the other agent, with the same lengths.

        Returns:
            Handle for `is_done` and `end`.
        """
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
        """Return True if a read is complete.

        Args:
            handle: Handle of the read.

        Raises:
            AgentError: the read has failed, and is over.
        """
        with _Translated("nixl READ"):
            return self._check(self._agent.getXferStatus(handle))

    def end(self, handle: int) -> bool:
        """Release a read.

        Args:
            handle: Handle of the read.

        Returns:
            False if the read may still write memory. The caller must try again.
        """
        try:
            self._agent.releaseXferReq(handle)
        except Exception:
            return False
        return True

    def close(self) -> None:
        """End the agent. Nobody can read its memory afterwards."""
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
        """Return True if a call is complete, and False if the call still runs."""
        if status == self._bindings.NIXL_IN_PROG:
            return False
        if status != self._bindings.NIXL_SUCCESS:
            raise AgentError("nixl READ failed")
        return True


class _Translated:
    """Context manager that turns errors of nixl into AgentError, because their only common base class is Exception."""

    def __init__(self, doing: str) -> None:
        self._doing = doing

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, AgentError):
            raise AgentError(f"{self._doing}: {str(error) or type(error).__name__}") from error


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)
