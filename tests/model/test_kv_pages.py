"""Tests that KV pages read and write blocks in the model's own arrays."""

from __future__ import annotations

import types
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trioserve.contracts.ids import BlockIndex
from trioserve.contracts.kv_transfer import KVLayout
from trioserve.model.kv_storage import CudaPages, KVStorage, make_kv_pages
from trioserve.model.layer_config import KVEntry
from trioserve.model.model_config import ModelConfig

LAYOUT = KVLayout(model="m", layer_count=2, block_size=4, kv_head_count=3, head_dim=8, dtype="bfloat16")
ENTRIES = {
    "keys and values": KVEntry(part_count=2, head_count=3, head_dim=8),
    "latents": KVEntry(part_count=1, head_count=1, head_dim=48),
}


class Shape:
    """Attributes of a config that KVStorage reads."""

    def __init__(self, entry: KVEntry) -> None:
        self.kv_entries = (entry, entry)


@pytest.mark.parametrize("kind", ["numpy", "torch", "device"])
@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_kv_pages_read_and_write_the_arrays_of_the_model(kind, entry):
    layout = msgspec.structs.replace(
        LAYOUT, part_count=entry.part_count, kv_head_count=entry.head_count, head_dim=entry.head_dim
    )

    def make(shape):
        return np.zeros(shape, np.uint16) if kind == "numpy" else torch.zeros(shape, dtype=torch.bfloat16)

    config: ModelConfig = Shape(entry)  # type: ignore[assignment]
    storage = KVStorage(config, block_count=5, block_size=4, make=make, has_spare=True)
    pages = CudaPages(layout, storage) if kind == "device" else make_kv_pages(layout, storage, "cpu")
    assert pages.block_count == 5  # The count excludes the spare block, which no request owns.
    block_bytes = layout.block_size * layout.token_bytes
    assert block_bytes == 4 * 2 * 3 * 8 * 2

    content = bytes(range(256)) * 2
    pages.write(1, BlockIndex(3), layout.token_bytes, memoryview(content[: layout.token_bytes]))
    assert bytes(pages.read(1, BlockIndex(3)))[layout.token_bytes : 2 * layout.token_bytes] == content[:96]
    raw = storage.pages[1] if kind == "numpy" else storage.pages[1].view(torch.uint16).numpy()
    assert raw[3, 1].tobytes() == content[:96]
    assert raw.any(axis=(2, 3, 4)).sum() == 1  # Only this token has changed.
    assert not any(pages.read(0, BlockIndex(3)))
    assert len(pages.read(0, BlockIndex(0))) == block_bytes
    with pytest.raises(TypeError):
        pages.read(0, BlockIndex(0))[0] = 1

    if isinstance(pages, CudaPages):
        address, byte_count, device = pages.region(1)
        assert (address, byte_count) == (storage.pages[1].data_ptr(), 5 * block_bytes)
        assert device == storage.pages[1].get_device()

    view = pages.view(0, BlockIndex(4))
    assert (view is None) == (kind == "device")
    if view is not None:
        view[:2] = b"\x01\x02"
        raw = storage.pages[0] if kind == "numpy" else storage.pages[0].view(torch.uint16).numpy()
        assert raw[4, 0, 0, 0, 0] == 0x0201


class Operations(TorchDispatchMode):
    """Counts the copies of torch: operations that read or write the bytes of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func).split(".")[1]
        if name in ("index_select", "index_copy_", "copy_", "_to_copy", "stack", "cat"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("is_joined", (True, False))
@pytest.mark.parametrize("layers", (range(6), range(2, 4)))
def test_device_copies_many_blocks_of_many_layers_at_once(is_joined, layers):
    entry = KVEntry(part_count=2, head_count=3, head_dim=8)
    config: Any = types.SimpleNamespace(kv_entries=(entry, None, *(entry,) * 5))
    layout = msgspec.structs.replace(LAYOUT, layer_count=6)
    made: list[tuple[int, ...]] = []

    def make(shape):
        made.append(shape)
        return torch.randint(0, 100, shape).to(torch.bfloat16)

    storage = KVStorage(config, block_count=9, block_size=4, make=make, has_spare=True, is_joined=is_joined)
    assert len(made) == (2 if is_joined else 7)
    assert storage.pages[1].numel() == 0
    pages = CudaPages(layout, storage)
    blocks = [7, 0, 3]
    byte_count = len(layers) * len(blocks) * 4 * layout.token_bytes
    host = pages.pinned(byte_count)
    with Operations() as operations:
        fetched = pages.begin_fetch(layers, blocks, host).wait()
    assert bytes(fetched) == b"".join(bytes(pages.read(layer, BlockIndex(b))) for layer in layers for b in blocks)
    if is_joined:
        assert operations.names == ["index_select", "copy_"]

    before = [pages_.clone() for pages_ in storage.kept]
    host = pages.pinned(byte_count, fetched)
    with Operations() as operations:
        pages.begin_store(layers, [5, 2, 8], host, last_token_count=3).wait()
    if is_joined:
        assert operations.names == ["index_copy_", "index_copy_"]  # whole blocks, and a part of the last one
    for layer, (old, new) in enumerate(zip(before, storage.kept, strict=True)):
        if layer in layers:
            old[5], old[2], old[8, :3] = old[7], old[0], old[3, :3]
        assert torch.equal(old, new)
