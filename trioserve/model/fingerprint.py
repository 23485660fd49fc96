"""One name for all that decides about the tokens of a response, so that servers know whether they go on with each
other's."""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from trioserve.contracts.version import VERSION
from trioserve.model.model_config import Dtype

__all__ = ["EXACT", "fingerprint_of"]

DIGEST_BYTES = 16
EXACT = "+exact"
"""How the name of an engine ends that gives the same tokens as every other one with this name, whatever else runs
there: it is batch-invariant, or computes in float32, where rounding is far below what decides between two tokens.
Without it a token that was nearly another one may depend on the batch."""


def fingerprint_of(
    *,
    weights: str,
    arithmetic: str,
    dtype: Dtype,
    batch_invariant: bool,
    tokenizer: str,
    others: object,
) -> str:
    """32 hexadecimal digits, and whether they promise the same tokens (EXACT).

    weights: see weights_name. arithmetic: see ModelRunner. tokenizer: names its vocabulary and the chat template.
    others: what else a response depends on. So it does on the version of this program: how it samples may change.
    """
    parts = (weights, arithmetic, dtype, batch_invariant, tokenizer, VERSION, others)
    digest = blake2b(msgspec.json.encode(parts, order="deterministic"), digest_size=DIGEST_BYTES).hexdigest()
    return digest + EXACT if batch_invariant or dtype == "float32" else digest
