"""KV cache as bytes, for code that moves blocks (contracts.kv_transfer.KVPages)."""

from __future__ import annotations

from typing import Any

from trioserve.contracts.ids import BlockIndex
from trioserve.contracts.kv_transfer import KVLayout
from trioserve.model.device import DeviceType, torch_now
from trioserve.model.kv_storage import KVStorage

__all__ = ["make_kv_pages"]


class HostPages:
    """Pages in host memory: numpy arrays, or torch tensors on a CPU. Blocks are read and written in place."""

    def __init__(self, layout: KVLayout, storage: KVStorage[Any]) -> None:
        self.layout = layout
        self.block_count = storage.block_count
        self._block_bytes = layout.block_size * layout.token_bytes
        self._layers = [memoryview(_flat_bytes(pages)) for pages in storage.kept]

    def view(self, layer: int, block: BlockIndex) -> memoryview:
        return self._layers[layer][block * self._block_bytes : (block + 1) * self._block_bytes]

    def read(self, layer: int, block: BlockIndex) -> memoryview:
        return self.view(layer, block).toreadonly()

    def write(self, layer: int, block: BlockIndex, start: int, content: memoryview) -> None:
        self.view(layer, block)[start : start + len(content)] = content


class CudaPages:
    """Pages on a GPU. Each call copies and waits for the device.

    Copies run in the order of the device's work: a read sees everything that was computed before it, and later work
    sees what was written.
    """

    def __init__(self, layout: KVLayout, storage: KVStorage[Any]) -> None:
        self.layout = layout
        self.block_count = storage.block_count
        torch = torch_now()
        self._layers = [pages.view(torch.uint8).view(pages.shape[0], -1) for pages in storage.kept]

    def region(self, layer: int) -> tuple[int, int, int]:
        """Return the memory range of a layer's blocks.

        Args:
            layer: index among the layers that keep KV entries.

        Returns:
            Address on the device, number of bytes, and index of the device.
        """
        pages = self._layers[layer][: self.block_count]
        return pages.data_ptr(), pages.numel(), pages.get_device()

    def view(self, layer: int, block: BlockIndex) -> None:
        return None

    def read(self, layer: int, block: BlockIndex) -> memoryview:
        return memoryview(self._layers[layer][block].cpu().numpy()).toreadonly()

    def write(self, layer: int, block: BlockIndex, start: int, content: memoryview) -> None:
        torch = torch_now()
        there = self._layers[layer][block, start : start + len(content)]
        there.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))


def make_kv_pages(layout: KVLayout, storage: KVStorage[Any], device: DeviceType) -> HostPages | CudaPages:
    return CudaPages(layout, storage) if device == "cuda" else HostPages(layout, storage)


def _flat_bytes(pages: Any) -> Any:
    """Return a one-dimensional uint8 array that shares the memory."""
    if not hasattr(pages, "numpy"):
        return pages.reshape(-1).view("uint8")
    return pages.view(-1).view(torch_now().uint8).numpy()
