"""What a task holds of a request for text."""

from __future__ import annotations

from trioserve.contracts.events import TokenLogprob
from trioserve.contracts.output import Delta
from trioserve.contracts.resume import Resume
from trioserve.contracts.weights import WeightVersions
from trioserve.engine.open_request import OpenRequest
from trioserve.engine.shell.scope_stream import ScopeStream
from trioserve.trio_tools.interrupts import uninterrupted

__all__ = ["RequestStream"]


@uninterrupted
class RequestStream(ScopeStream[OpenRequest, Delta]):
    """`async with engine.generate(...) as stream: async for delta in stream: ...`. See ScopeStream; entering raises
    ContextTooLong besides.

    A response may leave blocks that are held for another engine (is_held; the last delta has kv_transfer then). Leaving
    the scope ends the hold like everything else, so whoever wants it read waits for that inside
    (wait_until_released), or says that it may outlive the scope (keep_hold). A hold takes no place and no lease.
    """

    @property
    def choice_count(self) -> int:
        """How many choices were asked for: n."""
        return self._request.choice_count

    @property
    def known(self) -> tuple[Delta, ...]:
        """What the response so far gave, where it goes on (see Engine.generate): choice by choice, and all tokens of
        it. Iterating does not give it again. Known once it is entered."""
        return self._request.known

    def forget_known(self) -> None:
        """Nobody asks for it again, and it need not be kept as long as the rest takes."""
        self._request.known = ()

    @property
    def ignored_keywords(self) -> tuple[str, ...]:
        """Paths of the keywords of its schemas that the response need not keep to. Known once it is entered."""
        guides = self._request.guides
        return () if guides is None else guides.ignored_keywords

    @property
    def seed(self) -> int:
        """That of the first choice."""
        return self._request.seed

    @property
    def adapter_digest(self) -> str | None:
        """Of the LoRA adapter that it is computed with; None: without one, or not entered yet."""
        return self._request.adapter_digest

    @property
    def prompt_digest(self) -> str | None:
        """The name of its prompt's tokens (see Resume); None until it is entered."""
        return self._request.prompt_digest

    def resume_state(self) -> Resume:
        """All that is needed to have the same request go on behind what was read of it so far, in this engine or in
        another: `engine.generate(..., resume=stream.resume_state())`. May be asked for at any time, also when the
        stream has failed or its scope is over. What was not read is computed again."""
        return self._request.resume_state()

    def weight_versions(self, index: int = 0) -> WeightVersions:
        """Which weights sampled what was read of this choice, in runs of a version and how many tokens it sampled.
        Empty: all are of those that the engine was opened with."""
        return self._request.weight_versions_of(index)

    @property
    def completion_token_count(self) -> int:
        """Tokens of all choices so far, shown or not."""
        return self._request.completion_token_count

    @property
    def prompt_token_count(self) -> int:
        """Tokens of what was asked; known once it is entered."""
        return self._request.prompt_token_count

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """Known once it is entered."""
        return self._request.prompt_token_ids

    @property
    def cached_token_count(self) -> int:
        """Tokens of the prompt that were found in the prefix cache; known at the end of the first choice."""
        return self._request.cached_token_count

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprob | None, ...] | None:
        """Of the prompt's own tokens, if they were asked for; complete with the first token."""
        return self._request.prompt_logprobs

    @property
    def is_held(self) -> bool:
        """Whether a connector holds blocks of it for another engine: of a choice that is over."""
        return self._request.is_held

    async def wait_until_released(self) -> None:
        """Returns when no block of it is held for another engine: they have been read, or nobody wants them any more,
        or their time is over. At once where none is. Raises EngineFault if the engine breaks meanwhile, AlreadyEnded
        outside of its scope while something is held."""
        await self._request.wait_until_released()

    def keep_hold(self) -> None:
        """Let what is held of it outlive the scope: until it has been read, or is aborted by id, or its time is
        over. Whoever calls this has told somebody how to read it."""
        self._request.is_hold_kept = True

    def drop_hold(self) -> None:
        """Nobody is told how to read it: leaving the scope ends the hold."""
        self._request.is_hold_kept = False
