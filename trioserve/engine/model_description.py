"""What an engine serves, as its users are told."""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from trioserve.contracts.images import ImageProcessing
from trioserve.contracts.pooling import PoolingMethod, PoolingParams

__all__ = ["ModelDescription", "PooledModel"]

DIGEST_BYTES = 16


class PooledModel(msgspec.Struct, frozen=True, kw_only=True):
    """Describes the vectors or scores that a model makes of prompts.

    Args:
        embedding_size: the length of a vector.
        method: how the model's makers recommend to pool the tokens.
        normalize: whether the model's makers recommend vectors of length 1.
        is_encoder: the model computes the whole prompt in one step.
        continues_texts: the model can generate, too. Encoders cannot, nor can decoders that were saved without a head.
        scores_pairs: the model gives a pair of texts a score, and makes no vectors.
        whole_tokens_max: the most tokens of a prompt that is computed in one step.
    """

    embedding_size: int
    method: PoolingMethod = "last"
    normalize: bool = True
    is_encoder: bool = False
    continues_texts: bool = True
    scores_pairs: bool = False
    whole_tokens_max: int

    def is_whole(self, params: PoolingParams) -> bool:
        """Whether an input has to be computed in one step."""
        return self.is_encoder or (params.method or self.method) != "last"


class ModelDescription(msgspec.Struct, frozen=True, kw_only=True):
    """What is served. name is the first of served_names; source is what it was loaded from, as it was named;
    created_at is in seconds since 1970. pooled: what its prompts can be pooled to; None: nothing.

    arithmetic: what decides about the bits of a result besides tokens and weights. Engines of the same arithmetic and
    weights, both batch-invariant, compute the same bits from the same tokens. batch_invariant: they depend on nothing
    else. fingerprint: names all that decides about the tokens of a response, so that servers with the same one go on
    with each other's; None: nobody has looked.
    executor: what computes, in a few words for people. family: which model it is a checkpoint of, such as "llama".
    weight_bytes: of its weights, as they are stored; 0 where nobody has looked. images: how it wants those of a chat;
    None: it reads text alone."""

    served_names: tuple[str, ...]
    source: str
    context_tokens_max: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    created_at: int
    pooled: PooledModel | None = None
    arithmetic: str = ""
    batch_invariant: bool = False
    fingerprint: str | None = None
    executor: str | None = None
    family: str | None = None
    weight_bytes: int = 0
    images: ImageProcessing | None = None

    def fingerprint_with(self, adapter_digest: str | None) -> str | None:
        """The same of responses that are computed with an adapter."""
        if adapter_digest is None or self.fingerprint is None:
            return self.fingerprint
        name, plus, promise = self.fingerprint.partition("+")
        return f"{name}.{adapter_digest}{plus}{promise}"

    def with_weights(self, version: str) -> ModelDescription:
        """The same with other weights, and another fingerprint. To be asked of what the engine was opened with."""
        if self.fingerprint is None:
            return self
        name, plus, promise = self.fingerprint.partition("+")
        digest = blake2b(f"{name} {version}".encode(), digest_size=DIGEST_BYTES).hexdigest()
        return msgspec.structs.replace(self, fingerprint=f"{digest}{plus}{promise}")

    def pooled_tokens_max(self, params: PoolingParams) -> int:
        """Tokens that an input may have."""
        pooled = self.pooled
        if pooled is None or not pooled.is_whole(params):
            return self.context_tokens_max
        return min(self.context_tokens_max, pooled.whole_tokens_max)

    @property
    def name(self) -> str:
        return self.served_names[0]
