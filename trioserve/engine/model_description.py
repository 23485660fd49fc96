"""What an engine serves, as its users are told."""

from __future__ import annotations

import msgspec

__all__ = ["ModelDescription"]


class ModelDescription(msgspec.Struct, frozen=True, kw_only=True):
    """What is served. name is the first of served_names; source is what it was loaded from, as it was named;
    created_at is in seconds since 1970."""

    served_names: tuple[str, ...]
    source: str
    context_tokens_max: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    created_at: int

    @property
    def name(self) -> str:
        return self.served_names[0]
