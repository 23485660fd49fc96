"""`resume` in the body of a request, in every API: what its client has of the response."""

from __future__ import annotations

from typing import Annotated

import msgspec

__all__ = ["ResumeBody"]

UnixSeconds = Annotated[int, msgspec.Meta(ge=0, le=2**53)]  # every event of the response repeats it


class ResumeBody(msgspec.Struct, frozen=True, kw_only=True):
    """token_ids: of each choice, in the order of their indices, all tokens that the client has. finished: whether it
    has ended. state: that of the last group that had one. end_thinking: its thoughts were ended by hand. The rest comes
    from the head of the response that began."""

    token_ids: list[list[int]]
    finished: list[bool]
    prompt_digest: str | None = None
    seed: int | None = None
    created: UnixSeconds | None = None
    id: str | None = None
    state: str | None = None
    end_thinking: bool = False
