"""Describes the model that an engine serves, for the engine's users."""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from trioserve.contracts.media import AudioProcessing, SoundProcessing
from trioserve.contracts.pooling import PoolingMethod, PoolingParams
from trioserve.contracts.prompt import Processing
from trioserve.vision.families.registry import ImageProcessing

__all__ = ["ModelDescription", "PoolingModel"]

DIGEST_BYTES = 16


class PoolingModel(msgspec.Struct, frozen=True, kw_only=True):
    """Describes the vectors or scores that a model computes from prompts.

    Args:
        embedding_size: length of a vector.
        method: pooling method that the model's makers recommend.
        normalize: True if the model's makers recommend vectors of length 1.
        is_encoder: True if the model is an encoder, which computes the whole prompt in one step.
        continues_texts: True if the model can also generate text. False for encoders, and for decoders whose checkpoint
            has no output head.
        scores_pairs: True if the model scores a pair of texts and computes no vectors.
        label_count: labels that the model gives each token. Such a model computes no vector of a whole prompt. 0: none.
        whole_tokens_max: highest number of tokens in a prompt that is computed in one step.
    """

    embedding_size: int
    method: PoolingMethod = "last"
    normalize: bool = True
    is_encoder: bool = False
    continues_texts: bool = True
    scores_pairs: bool = False
    label_count: int = 0
    whole_tokens_max: int

    def is_whole(self, params: PoolingParams) -> bool:
        """Return True if the whole input must be computed in one step.

        Args:
            params: pooling options of the request.
        """
        return self.is_encoder or (params.method or self.method) != "last"


class ModelDescription(msgspec.Struct, frozen=True, kw_only=True):
    """Describes a served model.

    Attributes:
        served_names: model names that requests may use. The first name is the main name.
        source: path or name from which the model was loaded, as the user wrote it.
        context_tokens_max: highest number of tokens in prompt and output together.
        vocab_size: number of token ids.
        eos_token_ids: token ids that end a response.
        created_at: time at which the engine was opened, in seconds since 1970.
        pooled: the vectors or scores that the model can compute. None: it computes none.
        arithmetic: identifies everything that decides the bits of a result besides tokens and weights. Two
            batch-invariant engines with equal `arithmetic` and equal weights compute equal bits from equal tokens.
        batch_invariant: True if results do not depend on the other sequences of a step.
        fingerprint: identifies everything that decides the tokens of a response. Servers with equal fingerprints can
            resume each other's responses. None: the fingerprint was not computed.
        executor: short description of the computing backend, for humans. None: unknown.
        family: model family of the checkpoint, such as "llama". None: unknown.
        weight_bytes: size of the stored weights. 0: unknown.
        images: image format that the model expects in chats. None: the model reads no images.
        sounds: how the model hears sounds in chats. None: it hears none.
        encoder: how the model reads sound or text with an encoder to whose rows its decoder attends. None: the model
            has no such encoder.
    """

    served_names: tuple[str, ...]
    source: str
    context_tokens_max: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    created_at: int
    pooled: PoolingModel | None = None
    arithmetic: str = ""
    batch_invariant: bool = False
    fingerprint: str | None = None
    executor: str | None = None
    family: str | None = None
    weight_bytes: int = 0
    images: ImageProcessing | None = None
    sounds: SoundProcessing | None = None
    encoder: Processing | None = None

    @property
    def audio(self) -> AudioProcessing | None:
        """How the model hears. None: the model hears nothing."""
        return self.encoder if isinstance(self.encoder, AudioProcessing) else None

    def fingerprint_with(self, adapter_digest: str | None) -> str | None:
        """Return the fingerprint of responses that a model computes with an adapter.

        Args:
            adapter_digest: digest of the adapter. None: without adapter.

        Returns:
            The combined fingerprint, or None if the model has no fingerprint.
        """
        if adapter_digest is None or self.fingerprint is None:
            return self.fingerprint
        name, plus, promise = self.fingerprint.partition("+")
        return f"{name}.{adapter_digest}{plus}{promise}"

    def with_weights(self, version: str) -> ModelDescription:
        """Return a copy of this description with the fingerprint of other weights.

        Call this method on the description with which the engine was opened, and not on the result of an earlier call.

        Args:
            version: version of the new weights.
        """
        if self.fingerprint is None:
            return self
        name, plus, promise = self.fingerprint.partition("+")
        digest = blake2b(f"{name} {version}".encode(), digest_size=DIGEST_BYTES).hexdigest()
        return msgspec.structs.replace(self, fingerprint=f"{digest}{plus}{promise}")

    def pooling_tokens_max(self, params: PoolingParams) -> int:
        """Return the highest number of tokens that an input may have.

        Args:
            params: pooling options of the request.
        """
        pooled = self.pooled
        if pooled is None or not pooled.is_whole(params):
            return self.context_tokens_max
        return min(self.context_tokens_max, pooled.whole_tokens_max)

    @property
    def name(self) -> str:
        return self.served_names[0]
