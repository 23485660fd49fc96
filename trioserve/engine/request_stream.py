"""The caller's side of a request for text."""

from __future__ import annotations

from trioserve.contracts.events import TokenLogprob
from trioserve.contracts.output import Delta
from trioserve.contracts.resume import Resume
from trioserve.contracts.weights import WeightVersions
from trioserve.engine.lifecycle.scope_stream import ScopeStream
from trioserve.engine.open_request import OpenRequest
from trioserve.trio_tools.interrupts import uninterrupted

__all__ = ["RequestStream"]


@uninterrupted
class RequestStream(ScopeStream[OpenRequest, Delta]):
    """A response as a stream of deltas: `async with engine.generate(...) as stream: async for delta in stream: ...`.

    `ScopeStream` documents entering, iterating and leaving. Entering can also raise ContextTooLong.

    A connector may hold blocks of the finished response for another engine. Then `is_held` is True, and the last delta
    has `kv_transfer`. Leaving the scope ends the hold. To let the other engine read the blocks, either call
    `wait_until_released` inside the scope, or call `keep_hold`, and the hold outlives the scope. A hold uses no slot
    and no lease.
    """

    @property
    def choice_count(self) -> int:
        """Number of requested choices (`n`)."""
        return self._request.choice_count

    @property
    def known(self) -> tuple[Delta, ...]:
        """Deltas of the earlier part of a resumed response (see `Engine.generate`), choice by choice.

        Together they hold all of its tokens. Iteration does not yield them again. Available after entering.
        """
        return self._request.known

    def forget_known(self) -> None:
        """Drop the known deltas to save memory, because no reader needs them any more."""
        self._request.known = ()

    @property
    def ignored_keywords(self) -> tuple[str, ...]:
        """Paths of schema keywords that the response need not satisfy. Available after entering."""
        guides = self._request.guides
        return () if guides is None else guides.ignored_keywords

    @property
    def seed(self) -> int:
        """Seed of the first choice."""
        return self._request.seed

    @property
    def adapter_digest(self) -> str | None:
        """Digest of the LoRA adapter. None: no adapter, or not entered yet."""
        return self._request.adapter_digest

    @property
    def prompt_digest(self) -> str | None:
        """Digest of the prompt's tokens (see `Resume`). None until the stream is entered."""
        return self._request.prompt_digest

    def resume_state(self) -> Resume:
        """Return the state with which the same request can be resumed after the last delta that was read.

        Resume in this engine or in another one: `engine.generate(..., resume=stream.resume_state())`. This may be
        called at any time, also after the stream failed or its scope ended. Tokens that were not read are computed
        again.
        """
        return self._request.resume_state()

    def weight_versions(self, index: int = 0) -> WeightVersions:
        """Return which weight versions sampled the tokens that were read of a choice.

        Args:
            index: index of the choice.

        Returns:
            Runs of (version, token count). Empty: all tokens are from the weights with which the engine was opened.
        """
        return self._request.weight_versions_of(index)

    @property
    def completion_token_count(self) -> int:
        """Sampled tokens of all choices so far, including tokens that the client does not receive."""
        return self._request.completion_token_count

    @property
    def prompt_token_count(self) -> int:
        """Tokens of the prompt. Available after entering."""
        return self._request.prompt_token_count

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """Token ids of the prompt. Available after entering."""
        return self._request.prompt_token_ids

    @property
    def cached_token_count(self) -> int:
        """Prompt tokens that were found in the prefix cache. Available at the end of the first choice."""
        return self._request.cached_token_count

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprob | None, ...] | None:
        """Log probabilities of the prompt's own tokens, if requested. Complete when the first token arrives."""
        return self._request.prompt_logprobs

    @property
    def is_held(self) -> bool:
        """True while a connector holds blocks of a finished choice for another engine."""
        return self._request.is_held

    async def wait_until_released(self) -> None:
        """Wait until no block of this request is held for another engine.

        The wait ends when the blocks were read, were aborted, or their time has passed. If no block is held, it ends at
        once.

        Raises:
            EngineFault: the engine broke while blocks were held.
            AlreadyEnded: the scope is not entered, and blocks are held.
        """
        await self._request.wait_until_released()

    def keep_hold(self) -> None:
        """Let held blocks outlive the scope, until they are read, aborted by id, or expired.

        Call this after another engine was notified how to read the blocks.
        """
        self._request.is_hold_kept = True

    def drop_hold(self) -> None:
        """End the hold when the scope is left, because no other engine was notified how to read the blocks."""
        self._request.is_hold_kept = False
