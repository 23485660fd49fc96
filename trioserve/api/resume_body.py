"""Field `resume` of a request body in every API, which is also the partial result in an aborted response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from trioserve.contracts.events import TokenLogprob
from trioserve.contracts.resume import Resume

__all__ = ["LOGPROB_MIN", "ResumeBody", "resume_body", "shown_logprobs"]

LOGPROB_MIN = -9999.0  # OpenAI's value for an impossible token

UnixSeconds = Annotated[int, msgspec.Meta(ge=0, le=2**53)]  # every event of the response repeats it


class ResumeBody(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Output of a response that the client has received.

    Attributes:
        token_ids: all tokens of each choice that the client has, in the order of the choices' indices.
        finished: for each choice, whether it has ended.
        prompt_digest: digest of the prompt, from the head of the response.
        seed: seed of the response, from its head.
        created: Unix time at which the response began, from its head.
        id: id of the response, from its head.
        state: state of the API in the last `id:` line that has one.
        end_thinking: true if the reasoning was ended by request.
        logprobs: for each choice, the log probabilities of its tokens.
        weight_versions: for each choice, pairs of a weight version and the number of tokens that it sampled.
    """

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
    """Merge the states of all prompts of a request into one `resume`.

    Args:
        states: state of each prompt's response.
        prompt_digest: digest of all prompts. None: unknown.
        seed: seed of the response. None: none.
        created: Unix time at which the response began. None: unknown.
    """
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
    """Replace infinite log probabilities, which JSON cannot express.

    Args:
        entries: log probabilities of tokens. An impossible token has minus infinity.
    """
    return [_finite(entry) for entry in entries]


def _finite(entry: TokenLogprob) -> TokenLogprob:
    if entry.logprob > LOGPROB_MIN and (not entry.top or entry.top[-1][1] > LOGPROB_MIN):
        return entry
    top = tuple((token_id, max(value, LOGPROB_MIN)) for token_id, value in entry.top)
    return TokenLogprob(entry.token_id, max(entry.logprob, LOGPROB_MIN), top)
