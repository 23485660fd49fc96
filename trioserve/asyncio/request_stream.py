"""What an asyncio task holds of a request for a text."""

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
    """See ScopeStream."""

    def __init__(self, thread: TrioThread, stream: TrioStream) -> None:
        super().__init__(thread, stream, merge)

    async def wait_until_released(self) -> None:
        """Returns when no block of it is held for another engine. Raises EngineFault if the engine breaks meanwhile,
        AlreadyEnded outside of its scope while something is held."""
        await self._thread.run(self._stream.wait_until_released)

    def resume_state(self) -> Resume:
        """All that is needed to have the same request go on behind what was read of it so far, in this engine or in
        another: `engine.generate(..., resume=stream.resume_state())`. May be asked for at any time, also when the
        stream has failed or its scope is over. What was not read is computed again."""

        def both() -> tuple[Resume, tuple[Delta, ...]]:
            return self._stream.resume_state(), self._box.unread()

        state, unread = self._thread.call(both)
        for delta in unread:
            state = state.without_last(delta.index, len(delta.token_ids), has_end=delta.finish_reason in WHOLE)
        return state

    def weight_versions(self, index: int = 0) -> WeightVersions:
        """Which weights sampled what came of this choice, read or not, in runs of a version and how many tokens it
        sampled. Empty: all are of those that the engine was opened with."""
        return self._stream.weight_versions(index)

    def keep_hold(self) -> None:
        """Let what is held of it outlive the scope: until it has been read, or is aborted by id, or its time is
        over. Whoever calls this has told somebody how to read it."""
        self._stream.keep_hold()

    def drop_hold(self) -> None:
        """Nobody is told how to read it: leaving the scope ends the hold."""
        self._stream.drop_hold()

    def forget_known(self) -> None:
        """Nobody asks for it again, and it need not be kept as long as the rest takes."""
        self._stream.forget_known()

    # What follows is read while the other thread goes on: what was true a moment ago.

    @property
    def choice_count(self) -> int:
        """How many choices were asked for: n."""
        return self._stream.choice_count

    @property
    def known(self) -> tuple[Delta, ...]:
        """What the response so far gave, where it goes on: choice by choice, and all tokens of it. Iterating does not
        give it again. Known once it is entered."""
        return self._stream.known

    @property
    def seed(self) -> int:
        """That of the first choice."""
        return self._stream.seed

    @property
    def adapter_digest(self) -> str | None:
        """Of the LoRA adapter that it is computed with; None: without one, or not entered yet."""
        return self._stream.adapter_digest

    @property
    def prompt_digest(self) -> str | None:
        """The name of its prompt's tokens (see Resume); None until it is entered."""
        return self._stream.prompt_digest

    @property
    def completion_token_count(self) -> int:
        """Tokens of all choices so far, shown or not."""
        return self._stream.completion_token_count

    @property
    def prompt_token_count(self) -> int:
        """Tokens of what was asked; known once it is entered."""
        return self._stream.prompt_token_count

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """Known once it is entered."""
        return self._stream.prompt_token_ids

    @property
    def ignored_keywords(self) -> tuple[str, ...]:
        """Keywords of the schema that the response does not keep to, each with its path."""
        return self._stream.ignored_keywords

    @property
    def cached_token_count(self) -> int:
        """Tokens of the prompt that were found in the prefix cache; known at the end of the first choice."""
        return self._stream.cached_token_count

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprob | None, ...] | None:
        """Of the prompt's own tokens, if they were asked for; complete with the first token."""
        return self._stream.prompt_logprobs

    @property
    def is_held(self) -> bool:
        """Whether a connector holds blocks of it for another engine: of a choice that is over."""
        return self._stream.is_held
