"""Computes a name of a model's weights, and a fingerprint of everything that determines the tokens of a response.

Servers compare fingerprints before they resume each other's responses. Engines that exchange KV compare names of
weights. The name does not depend on the location of the files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from hashlib import blake2b

import msgspec

from trioserve.contracts.extras import VERSION
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
    """Return 32 hexadecimal digits. The suffix EXACT follows if equal fingerprints guarantee equal tokens.

    The program version is part of the fingerprint, because sampling may change between versions.

    Args:
        weights: name of the weights, see weights_name.
        arithmetic: see ModelRunner.
        dtype: number format of the model.
        batch_invariant: the bits of a row depend only on its tokens and the weights.
        tokenizer: name of the vocabulary and the chat template.
        others: all other values that influence tokens. msgspec must be able to encode them.
    """
    parts = (weights, arithmetic, dtype, batch_invariant, tokenizer, VERSION, others)
    digest = blake2b(msgspec.json.encode(parts, order="deterministic"), digest_size=DIGEST_BYTES).hexdigest()
    return digest + EXACT if batch_invariant or dtype == "float32" else digest


WEIGHTS_DIGEST_BYTES = 8


def weights_name(checkpoint: Checkpoint) -> str:
    """Return a name that is equal for equal weights in files of equal format.

    Shapes cannot distinguish a model from its fine-tuned variants, which may differ in only a few matrices. Therefore,
    the name is a hash of all norms, of the value projections of the first and last layer, and of byte samples from
    every other tensor. Reading all bytes would take as long as loading the model. Weights that differ only in bytes
    outside of the samples get equal names. Quantized files of a model get a different name than unquantized files. The
    hash includes the weights of the image or audio encoder, because its output is the input of KV blocks, and blocks
    identify an image only by the image's file, and sound only by its spectra.

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
        values = [name for name in vision.config.shapes() if name.endswith((".v_proj.weight", ".qkv.weight"))]
        read_whole = {*values[:1], *values[-1:]}
        _add_tensors(vision.tensors(), read_whole, digest)
    audio = checkpoint.encoder
    if audio is not None:
        digest.update(msgspec.json.encode((audio.config, audio.processing), order="sorted"))
        last = audio.config.layer_count - 1
        read_whole = {f"layers.{layer}.self_attn.v_proj.weight" for layer in (0, last)}
        _add_tensors(audio.tensors(), read_whole, digest)
    return f"{config.family}-{digest.hexdigest()}"


def _add_tensors(tensors: Iterable[StoredTensor], whole: Collection[str], digest: hashlib.blake2b) -> None:
    """Add tensors to the digest.

    Args:
        whole: names of matrices that are hashed completely. All other matrices are sampled.
    """
    for tensor in tensors:
        digest.update(f"{tensor.name} {tensor.shape} {tensor.block_type or tensor.dtype}\n".encode())
        if tensor.name in whole or len(tensor.shape) == 1:
            values = tensor.read(tensor.dtype) if tensor.read_blocks is None else tensor.read_blocks()
            digest.update(values.tobytes())
        else:
            digest.update(tensor.sample())
