"""`resume` in the body of a request, in every API: what its client has of the response. And in a response that was cut
off: what there is of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from trioserve.contracts.events import TokenLogprob
from trioserve.contracts.resume import Resume

__all__ = ["LOGPROB_MIN", "ResumeBody", "resume_body", "shown_logprobs"]

LOGPROB_MIN = -9999.0  # what OpenAI's API says for "impossible"

UnixSeconds = Annotated[int, msgspec.Meta(ge=0, le=2**53)]  # every event of the response repeats it


class ResumeBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """token_ids: of each choice, in the order of their indices, all tokens that the client has. finished: whether it
    has ended. state: that of the last group that had one. end_thinking: its thoughts were ended by hand. logprobs,
    weight_versions: of each choice those of its tokens: log probabilities, and runs of a version and how many tokens it
    sampled. The rest comes from the head of the response that began."""

    token_ids: list[list[int]]
    finished: list[bool]
    prompt_digest: str | None = None
    seed: int | None = None
    created: UnixSeconds | None = None
    id: str | None = None
    state: str | None = None
    end_thinking: bool = False
    logprobs: list[list[TokenLogprob]] | None = None
    weight_versions: list[list[tuple[str, int]]] | None = None


def resume_body(
    states: Sequence[Resume], *, prompt_digest: str | None, seed: int | None, created: int | None = None
) -> ResumeBody:
    """Of responses that are one to their client: those of its prompts."""
    has_logprobs = all(state.logprobs is not None for state in states)
    has_versions = any(state.weight_versions for state in states)
    return ResumeBody(
        token_ids=[list(token_ids) for state in states for token_ids in state.token_ids],
        finished=[is_finished for state in states for is_finished in state.finished],
        prompt_digest=prompt_digest,
        seed=seed,
        created=created,
        end_thinking=any(state.end_thinking for state in states),
        logprobs=[shown_logprobs(of_choice) for state in states for of_choice in state.logprobs or ()]
        if has_logprobs
        else None,
        weight_versions=[
            list(runs) for state in states for runs in state.weight_versions or ((),) * len(state.token_ids)
        ]
        if has_versions
        else None,
    )


def shown_logprobs(entries: Sequence[TokenLogprob]) -> list[TokenLogprob]:
    """JSON has no infinity, which is that of a token that could not come."""
    return [_finite(entry) for entry in entries]


def _finite(entry: TokenLogprob) -> TokenLogprob:
    if entry.logprob > LOGPROB_MIN and (not entry.top or entry.top[-1][1] > LOGPROB_MIN):
        return entry
    top = tuple((token_id, max(value, LOGPROB_MIN)) for token_id, value in entry.top)
    return TokenLogprob(entry.token_id, max(entry.logprob, LOGPROB_MIN), top)
