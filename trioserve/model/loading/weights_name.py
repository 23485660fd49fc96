"""A name for weights that is the same wherever they lie, so that engines which exchange KV know that they agree."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable

import msgspec

from trioserve.model.loading.checkpoint import Checkpoint
from trioserve.model.loading.stored_tensor import StoredTensor

__all__ = ["weights_name"]

DIGEST_BYTES = 8


def weights_name(checkpoint: Checkpoint) -> str:
    """Equal for equal weights in equal files' formats. Shapes alone would not tell a model from its fine-tuned
    children, which may differ in a few matrices only. So all norms are looked at, the values of the first and of the
    last layer, and some numbers from all over every matrix: reading all would take as long as loading does. Weights
    that differ in nothing of this have the same name. Quantized files of one model have other values than the plain
    ones, and another name. What sees images counts as much as what reads texts: its rows are in the KV, and blocks know
    an image by its file. Reads some MiB; raises ModelLoadError if that is not possible.
    """
    config = checkpoint.config
    digest = hashlib.blake2b(msgspec.json.encode(config), digest_size=DIGEST_BYTES)
    looked_at = {f"layers.{layer}.v_proj.weight" for layer in (0, config.layer_count - 1)}
    _look_at(checkpoint.tensors(), looked_at, digest)
    vision = checkpoint.vision
    if vision is not None:
        digest.update(msgspec.json.encode((vision.config, vision.processing)))
        last = vision.config.layer_count - 1
        looked_at = {f"vision_model.encoder.layers.{layer}.self_attn.v_proj.weight" for layer in (0, last)}
        _look_at(vision.tensors(), looked_at, digest)
    return f"{config.family}-{digest.hexdigest()}"


def _look_at(tensors: Iterable[StoredTensor], whole: Collection[str], digest: hashlib.blake2b) -> None:
    """whole: names of matrices of which every number counts."""
    for tensor in tensors:
        digest.update(f"{tensor.name} {tensor.shape} {tensor.block_type or tensor.dtype}\n".encode())
        if tensor.name in whole or len(tensor.shape) == 1:
            values = tensor.read(tensor.dtype) if tensor.read_blocks is None else tensor.read_blocks()
            digest.update(values.tobytes())
        else:
            digest.update(tensor.sample())
