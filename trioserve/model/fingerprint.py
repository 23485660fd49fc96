"""Fingerprint of everything that decides the tokens of a response. Servers compare it before they resume each other's
responses.
"""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from trioserve.contracts.version import VERSION
from trioserve.model.model_config import Dtype

__all__ = ["EXACT", "fingerprint_of"]

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
