"""What an asyncio task holds of a request: iterate for text, leave to abort, as on Trio."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import trio

from trioserve.asyncio.delta_box import DeltaBox
from trioserve.asyncio.trio_thread import NoteStarted, TrioTask, TrioThread
from trioserve.contracts.errors import AlreadyEnded, TrioserveError
from trioserve.contracts.events import FinishReason, TokenLogprob
from trioserve.contracts.output import Delta
from trioserve.contracts.resume import Resume
from trioserve.engine.request_stream import RequestStream as TrioStream

__all__ = ["RequestStream"]

WHOLE = (FinishReason.STOP, FinishReason.LENGTH)


class RequestStream:
    """`async with engine.generate(...) as stream: async for delta in stream: ...`, in an asyncio task.

    Entering takes a place in the queue, and raises Overloaded, Draining, InvalidRequest or ContextTooLong; it then
    holds nothing. Leaving ends what still runs: by its end, an error, a break, a cancelled task, a timeout or a task
    group that failed. Its blocks are free when leaving returns, or right after the step in flight. Cancelling a task
    that waits for a delta loses none.

    A reader that is slower than the engine finds its deltas merged. Several tasks may iterate over one stream: each
    delta goes to one of them, and the end to all.
    """

    def __init__(self, thread: TrioThread, stream: TrioStream) -> None:
        self._thread = thread
        self._stream = stream
        self._box = DeltaBox()
        self._task: TrioTask[None] | None = None

    async def __aenter__(self) -> Self:
        if self._task is not None:
            raise AlreadyEnded(f"request {self.id} was entered before: call generate() again for another one")
        self._task = task = self._thread.begin(self._keep)
        try:
            await task.started.wait(cancel=task.cancel)
            if task.ended.is_set:
                task.result()
        except BaseException as error:
            await self._leave(task, error)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._task is not None, "it is left, and was not entered"
        await self._leave(self._task, error)

    async def _leave(self, task: TrioTask[None], error: BaseException | None) -> None:
        task.cancel()
        self._box.leave(self._ended())
        if not isinstance(error, GeneratorExit):  # where nothing may be awaited
            await task.ended.wait()

    async def _keep(self, note_started: NoteStarted) -> None:
        """The request's scope, in the Trio run."""
        try:
            async with self._stream:
                note_started()
                end: Exception = StopAsyncIteration()
                try:
                    async for delta in self._stream:
                        if not self._box.put(delta):
                            return
                except TrioserveError as error:
                    end = error  # rises where it is read
                self._box.close(end)
                await trio.sleep_forever()  # what is held of it is held until it is left
        except Exception as error:
            self._box.close(error)
            raise
        finally:
            # Whichever way it ends, nobody waits for what does not come.
            self._box.close(AlreadyEnded(f"request {self.id} has ended with its engine"))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        if self._task is None:
            raise self._ended()
        return await self._box.get()

    def _ended(self) -> AlreadyEnded:
        return AlreadyEnded(f"request {self.id} can be read only inside its `async with`")

    async def wait_until_begun(self) -> Delta | None:
        """Returns when the request runs; or, if it ended in the queue, the delta that says so, which is read as well.
        Raises what it failed with, and AlreadyEnded outside of its scope."""
        return await self._thread.run(self._stream.wait_until_begun)

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
    def id(self) -> str:
        """The caller's own, or the one that it was given."""
        return self._stream.id

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
    def cached_token_count(self) -> int:
        """Tokens of the prompt that were found in the prefix cache; known at the end of the first choice."""
        return self._stream.cached_token_count

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprob | None, ...] | None:
        """Of the prompt's own tokens, if they were asked for; complete with the first token."""
        return self._stream.prompt_logprobs

    @property
    def is_finished(self) -> bool:
        """Every choice has its last delta, read or not, or the request failed."""
        return self._stream.is_finished

    @property
    def is_held(self) -> bool:
        """Whether a connector holds blocks of it for another engine: of a choice that is over."""
        return self._stream.is_held
