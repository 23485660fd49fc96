"""GGUF metadata of models whose hidden state has several streams: what no key says, but tensors' shapes do."""

from __future__ import annotations

from collections.abc import Mapping

from trioserve.model.loading.fields import Fields
from trioserve.model.loading.gguf import GgufTensor

__all__ = ["streams_values"]


def streams_values(fields: Fields, architecture: str | None, tensors: Mapping[str, GgufTensor]) -> dict[str, object]:
    """Nothing for another architecture. MLPs of these may differ in size from layer to layer. Raises ModelLoadError."""
    if architecture != "gemma3n":
        return {}
    key = f"{architecture}.feed_forward_length"
    values: dict[str, object] = {key: list(fields.wholes(key))}
    shapes = {"laurel_rank": "blk.0.laurel_l.weight", "vocab_size_per_layer_input": "per_layer_token_embd.weight"}
    return values | {field: tensors[name].shape[0] for field, name in shapes.items() if name in tensors}
