"""Names of weights, and fingerprint of everything that decides the tokens of a response.

Servers compare fingerprints before they resume each other's responses. Engines that exchange KV compare names of
weights, which do not depend on their location.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from hashlib import blake2b

import msgspec

from trioserve.contracts.version import VERSION
from trioserve.model.loading.checkpoint import Checkpoint
from trioserve.model.loading.stored_tensor import StoredTensor
from trioserve.model.model_config import Dtype

__all__ = ["EXACT", "fingerprint_of", "weights_name"]

DIGEST_BYTES = 16
EXACT = "+exact"
"""Suffix of a fingerprint whose engines give the same tokens whatever else runs in a batch.

Such an engine is batch-invariant, or it computes in float32, where rounding is far smaller than the difference between
two tokens' logits. Without the suffix, a choice between two nearly equal tokens may depend on the batch.
"""


def fingerprint_of(
    *,
    weights: str,
    arithmetic: str,
    dtype: Dtype,
    batch_invariant: bool,
    tokenizer: str,
    others: object,
) -> str:
    """Return 32 hexadecimal digits, and EXACT if equal fingerprints promise equal tokens.

    The program version is part of the fingerprint, because sampling may change between versions.

    Args:
        weights: name of the weights, see weights_name.
        arithmetic: see ModelRunner.
        dtype: number format of the model.
        batch_invariant: the bits of a row depend only on its tokens and the weights.
        tokenizer: name of vocabulary and chat template.
        others: anything else that decides tokens, which msgspec can encode.
    """
    parts = (weights, arithmetic, dtype, batch_invariant, tokenizer, VERSION, others)
    digest = blake2b(msgspec.json.encode(parts, order="deterministic"), digest_size=DIGEST_BYTES).hexdigest()
    return digest + EXACT if batch_invariant or dtype == "float32" else digest


WEIGHTS_DIGEST_BYTES = 8


def weights_name(checkpoint: Checkpoint) -> str:
    """Return a name that is equal for equal weights in files of equal format.

    Shapes alone cannot distinguish a model from its fine-tuned variants, which may differ in only a few matrices. So
    the name covers all norms, the value projections of the first and last layer, and some bytes from all over every
    other tensor. Reading everything would take as long as loading. Weights that differ in nothing of this get the same
    name. Quantized files of a model have other values than plain ones, and so another name. The image encoder counts
    like the rest: its rows are in the KV, and blocks identify an image by its file.

    Args:
        checkpoint: opened checkpoint.

    Raises:
        ModelLoadError: a file cannot be read.

    Cost:
        Reads some MiB.
    """
    config = checkpoint.config
    digest = hashlib.blake2b(msgspec.json.encode(config), digest_size=WEIGHTS_DIGEST_BYTES)
    read_whole = {f"layers.{layer}.v_proj.weight" for layer in (0, config.layer_count - 1)}
    _add_tensors(checkpoint.tensors(), read_whole, digest)
    vision = checkpoint.vision
    if vision is not None:
        digest.update(msgspec.json.encode((vision.config, vision.processing)))
        last = vision.config.layer_count - 1
        read_whole = {f"vision_model.encoder.layers.{layer}.self_attn.v_proj.weight" for layer in (0, last)}
        _add_tensors(vision.tensors(), read_whole, digest)
    return f"{config.family}-{digest.hexdigest()}"


def _add_tensors(tensors: Iterable[StoredTensor], whole: Collection[str], digest: hashlib.blake2b) -> None:
    """Add tensors to the digest.

    Args:
        whole: names of matrices of which every number counts.
    """
    for tensor in tensors:
        digest.update(f"{tensor.name} {tensor.shape} {tensor.block_type or tensor.dtype}\n".encode())
        if tensor.name in whole or len(tensor.shape) == 1:
            values = tensor.read(tensor.dtype) if tensor.read_blocks is None else tensor.read_blocks()
            digest.update(values.tobytes())
        else:
            digest.update(tensor.sample())
