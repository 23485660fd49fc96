"""Tests that KV pages read and write blocks in the model's own arrays."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

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
