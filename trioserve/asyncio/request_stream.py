"""A text request, held by an asyncio task."""

from __future__ import annotations

from trioserve.asyncio.scope_stream import ScopeStream
from trioserve.asyncio.trio_thread import TrioThread
from trioserve.contracts.events import FinishReason, TokenLogprob
from trioserve.contracts.output import Delta
from trioserve.contracts.resume import Resume
from trioserve.contracts.weights import WeightVersions
from trioserve.engine.request_stream import RequestStream as TrioStream
from trioserve.text.output import merge

__all__ = ["RequestStream"]

WHOLE = (FinishReason.STOP, FinishReason.LENGTH)


class RequestStream(ScopeStream[TrioStream, Delta]):
    """A text request. See ScopeStream.

    Args:
        thread: the engine's thread.
        stream: the request in that thread.
    """

    def __init__(self, thread: TrioThread, stream: TrioStream) -> None:
        super().__init__(thread, stream, merge)

    async def wait_until_released(self) -> None:
        """Wait until no block of the request is held for another engine.

        Raises:
            EngineFault: the engine broke meanwhile.
            AlreadyEnded: the scope was left while blocks were held.
        """
        await self._thread.run(self._stream.wait_until_released)

    def resume_state(self) -> Resume:
        """Return the state from which this or another engine can resume the request after the deltas that were read.

        Pass it on: `engine.generate(..., resume=stream.resume_state())`. May be called at any time, also after the
        stream failed or its scope was left. Tokens that were not read are computed again.
        """

        def both() -> tuple[Resume, tuple[Delta, ...]]:
            return self._stream.resume_state(), self._box.unread()

        state, unread = self._thread.call(both)
        for delta in unread:
            state = state.without_last(delta.index, len(delta.token_ids), has_end=delta.finish_reason in WHOLE)
        return state

    def weight_versions(self, index: int = 0) -> WeightVersions:
        """Return the weight versions that sampled a choice, as runs of a version and a number of tokens.

        Args:
            index: the choice.

        Returns:
            The runs of all tokens so far, read or not. Empty: all tokens are from the weights that the engine was
                opened with.
        """
        return self._stream.weight_versions(index)

    def keep_hold(self) -> None:
        """Keep the hold of the request's blocks after the scope ends, until another engine read them, an abort, or a
        timeout.

        The caller must have given another engine the data to read them.
        """
        self._stream.keep_hold()

    def drop_hold(self) -> None:
        """End the hold of the request's blocks when the scope ends, because no other engine will read them."""
        self._stream.drop_hold()

    def forget_known(self) -> None:
        """Drop `known` early, because the caller does not need it any more."""
        self._stream.forget_known()

    # The properties below are read while the other thread runs, so their values may be slightly old.

    @property
    def choice_count(self) -> int:
        """Number of choices that were requested (n)."""
        return self._stream.choice_count

    @property
    def known(self) -> tuple[Delta, ...]:
        """Output that the request resumed from: one delta for each choice, with all its tokens. Iterating does not
        repeat
        it. Known once the stream is entered.
        """
        return self._stream.known

    @property
    def seed(self) -> int:
        """Seed of the first choice."""
        return self._stream.seed

    @property
    def adapter_digest(self) -> str | None:
        """Digest of the request's LoRA adapter. None: no adapter, or not entered yet."""
        return self._stream.adapter_digest

    @property
    def prompt_digest(self) -> str | None:
        """Digest of the prompt's tokens (see Resume). None until the stream is entered."""
        return self._stream.prompt_digest

    @property
    def completion_token_count(self) -> int:
        """Tokens of all choices so far, including hidden ones."""
        return self._stream.completion_token_count

    @property
    def prompt_token_count(self) -> int:
        """Tokens of the prompt. Known once the stream is entered."""
        return self._stream.prompt_token_count

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """Token ids of the prompt. Known once the stream is entered."""
        return self._stream.prompt_token_ids

    @property
    def ignored_keywords(self) -> tuple[str, ...]:
        """Schema keywords that the response need not follow, each with its path."""
        return self._stream.ignored_keywords

    @property
    def cached_token_count(self) -> int:
        """Prompt tokens found in the prefix cache. Known when the first choice ends."""
        return self._stream.cached_token_count

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprob | None, ...] | None:
        """Log probabilities of the prompt tokens, if requested. Complete with the first output token."""
        return self._stream.prompt_logprobs

    @property
    def is_held(self) -> bool:
        """True if a connector holds blocks of a finished choice for another engine."""
        return self._stream.is_held
