"""Requests that asyncio tasks make: for text, for pooling, and for images."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator, Sequence
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import trio

from trioserve.asyncio.trio_thread import NoteStarted, TrioTask, TrioThread, Waiters
from trioserve.contracts.errors import AlreadyEnded, TrioserveError
from trioserve.contracts.events import FinishReason, TokenLogprob
from trioserve.contracts.image_generation import ImageDelta, RGBImage
from trioserve.contracts.output import AnyDelta, Delta, hold_unread, pop_unread
from trioserve.contracts.pooling import PoolingResult
from trioserve.contracts.resume import Resume
from trioserve.contracts.weights import WeightVersions
from trioserve.engine.image_engine import ImageStream as TrioImageStream
from trioserve.engine.image_engine import images_of
from trioserve.engine.lifecycle.request_scope import ScopeStream as TrioScopeStream
from trioserve.engine.lifecycle.request_scope import error_of
from trioserve.engine.open_image import merge as merge_images
from trioserve.engine.request_stream import PoolingStream as TrioPoolingStream
from trioserve.engine.request_stream import RequestStream as TrioStream
from trioserve.text.output import merge

__all__ = ["DeltaBox", "ImageStream", "PoolingStream", "RequestStream"]


DeltaT = TypeVar("DeltaT", bound=AnyDelta)


class DeltaBox(Generic[DeltaT]):
    """Passes the deltas of one request from the Trio thread to its asyncio readers.

    One thread calls `put` and `close`. Asyncio tasks of any loop call `get` and `leave`. Unread deltas of a choice are
    merged, so slow readers need only bounded memory. Cancelling a read loses no delta.

    Args:
        merge: joins two consecutive deltas of one choice.
    """

    def __init__(self, merge: Callable[[DeltaT, DeltaT], DeltaT]) -> None:
        self._merge = merge
        self._lock = threading.Lock()
        self._pending: dict[int, list[DeltaT]] = {}  # The unread deltas of each choice, see hold_unread.
        self._end: BaseException | None = None  # The error that `get` raises after the pending deltas.
        self._is_left = False
        self._waiters = Waiters()

    def put(self, delta: DeltaT) -> bool:
        """Add a delta.

        Returns:
            False if the loop of a waiting reader was closed, so that nothing will be read any more.
        """
        with self._lock:
            hold_unread(self._pending.setdefault(delta.index, []), delta, self._merge)
        return self._waiters.wake()

    def close(self, error: BaseException) -> None:
        """Add no more deltas.

        Args:
            error: error that `get` raises after the last delta. If `close` is called again, the first error is kept.
        """
        with self._lock:
            self._end = self._end or error
        self._waiters.wake()

    def leave(self, error: BaseException) -> None:
        """Record that the request's scope was left. Readers then get only the error, and no pending deltas.

        Args:
            error: error that `get` raises.
        """
        with self._lock:
            self._end = error
            self._is_left = True
        self._waiters.wake()

    async def get(self) -> DeltaT:
        """Return the next delta, or raise the error that was given to `close` or `leave`."""
        waiter = self._waiters.add()
        if self._has_something():
            await asyncio.sleep(0)  # If the engine is faster than the reader, this sleep lets other tasks run.
        while True:
            with self._lock:
                if self._pending and not self._is_left:
                    index, held = next(iter(self._pending.items()))
                    delta = pop_unread(held, self._merge)
                    del self._pending[index]
                    if held:
                        # The choice moves to the end, so that the other choices are read first.
                        self._pending[index] = held
                    return delta
                if self._end is not None:
                    raise self._end
            await waiter
            waiter = self._waiters.add()

    def unread(self) -> tuple[DeltaT, ...]:
        """Return the deltas that no reader has taken."""
        with self._lock:
            return tuple(delta for held in self._pending.values() for delta in held)

    def _has_something(self) -> bool:
        return bool(self._pending) or self._end is not None


StreamT = TypeVar("StreamT", bound=TrioScopeStream[Any, Any])


class ScopeStream(Generic[StreamT, DeltaT]):
    """A request with a scope: `async with engine.generate(...) as stream: async for delta in stream: ...`.

    Entering puts the request into the queue. If it raises Overloaded, Draining, InvalidRequest or ContextTooLong, no
    resources are in use. Leaving the scope ends the request if it still runs. The reason for leaving does not matter:
    the end of the body, an error, a break, a cancelled task, a timeout, or a failed task group. All resources are free
    when the scope has been left, or right after the step in flight. Cancelling a task that waits for a delta loses no
    delta.

    A reader that is slower than the engine gets merged deltas. Several tasks may iterate over one stream: each delta
    goes to one task, and the end of the stream goes to all tasks.

    Args:
        thread: the engine's thread.
        stream: the request in that thread.
        merge: joins two consecutive deltas of one choice.
    """

    def __init__(self, thread: TrioThread, stream: StreamT, merge: Callable[[DeltaT, DeltaT], DeltaT]) -> None:
        self._thread = thread
        self._stream = stream
        self._box = DeltaBox[DeltaT](merge)
        self._task: TrioTask[None] | None = None
        self._is_left = False

    async def __aenter__(self) -> Self:
        if self._task is not None:
            raise AlreadyEnded(f"request {self.id} was entered before: ask for another one")
        self._task = task = self._thread.begin(self._hold_scope)
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
        self._thread.own_process.check("leaving a request")
        if self._task is None or self._is_left:
            how = "was left before" if self._is_left else "was not entered"
            raise AlreadyEnded(f"request {self.id} {how}: leave its scope once, after entering it")
        await self._leave(self._task, error)

    async def _leave(self, task: TrioTask[None], error: BaseException | None) -> None:
        self._is_left = True
        task.cancel()
        self._box.leave(self._ended())
        if not isinstance(error, GeneratorExit):  # A generator that is being closed must not await.
            await task.ended.wait()

    async def _hold_scope(self, note_started: NoteStarted) -> None:
        """Enter the request's scope in the Trio run, and keep it open until the asyncio scope is left."""
        try:
            async with self._stream:
                note_started()
                end: Exception = StopAsyncIteration()
                try:
                    async for delta in self._stream:
                        if not self._box.put(delta):
                            return
                except TrioserveError as error:
                    end = error  # `get` raises this error in the reader.
                self._box.close(end)
                await trio.sleep_forever()  # Blocks for another engine stay held until the scope is left.
        except Exception as error:
            self._box.close(error)
            raise
        finally:
            # However the request ends, no reader may wait forever.
            self._box.close(AlreadyEnded(f"request {self.id} has ended with its engine"))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> DeltaT:
        if self._task is None:
            raise self._ended()
        self._thread.own_process.check("reading a request")
        return await self._box.get()

    def _ended(self) -> AlreadyEnded:
        return AlreadyEnded(f"request {self.id} can be read only inside its `async with`")

    async def wait_until_begun(self) -> DeltaT | None:
        """Wait until the request runs or has ended in the queue.

        Returns:
            None if the request runs, or the last delta of a request that ended in the queue. That delta then counts as
            read.

        Raises:
            TrioserveError: the request failed.
            AlreadyEnded: the scope was left.
        """
        begun: DeltaT | None = await self._thread.run(self._stream.wait_until_begun)
        return begun

    # The properties below are read while the engine's thread runs, so their values may be slightly old.

    @property
    def id(self) -> str:
        """Id of the request, which the caller gave or the engine generated."""
        return self._stream.id

    @property
    def is_finished(self) -> bool:
        """True if every choice has its last delta, read or not, or the request failed."""
        return self._stream.is_finished


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
            EngineFault: the engine failed for good before that.
            AlreadyEnded: the scope was left while blocks were held.
        """
        await self._thread.run(self._stream.wait_until_released)

    def resume_state(self) -> Resume:
        """Return the state from which this or another engine can resume the request after the deltas that were read.

        Use the state as `engine.generate(..., resume=stream.resume_state())`. You may call this at any time, also after
        the stream failed or its scope was left. Tokens that were not read are computed again.
        """

        def both() -> tuple[Resume, tuple[Delta, ...]]:
            return self._stream.resume_state(), self._box.unread()

        state, unread = self._thread.call(both)
        for delta in unread:
            state = state.without_last(delta.index, len(delta.token_ids), has_end=delta.finish_reason in WHOLE)
        return state

    def weight_versions(self, index: int = 0) -> WeightVersions:
        """Return which weight versions computed a choice's tokens, as pairs of a version and a number of tokens.

        Args:
            index: index of the choice.

        Returns:
            The pairs for all tokens so far, read or not. Empty if all tokens are from the weights that the engine was
            opened with.
        """
        return self._stream.weight_versions(index)

    def await_tools(self, tools: Sequence[str]) -> None:
        """Note the tools that the complete response calls, so that the session's next turn is expected after them.

        Args:
            tools: names of the called tools, at least one.
        """
        self._thread.call(lambda: self._stream.await_tools(tools))

    def keep_hold(self) -> None:
        """Keep the request's blocks held after the scope ends, until another engine has read the blocks, the request is
        aborted, or a timeout passes.

        Before that, the caller must have given another engine the data that it needs to read the blocks.
        """
        self._stream.keep_hold()

    def drop_hold(self) -> None:
        """Release the request's held blocks when the scope ends, because no other engine will read them."""
        self._stream.drop_hold()

    def forget_known(self) -> None:
        """Drop `known` to free its memory, because the caller does not need it any more."""
        self._stream.forget_known()

    # The properties below are read while the engine's thread runs, so their values may be slightly old.

    @property
    def choice_count(self) -> int:
        """Number of choices that were requested (n)."""
        return self._stream.choice_count

    @property
    def known(self) -> tuple[Delta, ...]:
        """Output that the request resumed from: one delta for each choice, with all tokens of the choice. Iterating
        does not yield these tokens again. Known once the stream is entered.
        """
        return self._stream.known

    @property
    def seed(self) -> int:
        """Seed of the first choice."""
        return self._stream.seed

    @property
    def adapter_digest(self) -> str | None:
        """Digest of the request's LoRA adapter. None if it has no adapter, or the stream is not entered yet."""
        return self._stream.adapter_digest

    @property
    def prompt_digest(self) -> str | None:
        """Digest of the prompt's tokens (see Resume). None until the stream is entered."""
        return self._stream.prompt_digest

    @property
    def completion_token_count(self) -> int:
        """Number of output tokens of all choices so far, including tokens that the client does not receive."""
        return self._stream.completion_token_count

    @property
    def prompt_token_count(self) -> int:
        """Number of prompt tokens. Known once the stream is entered."""
        return self._stream.prompt_token_count

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """Token ids of the prompt. Known once the stream is entered."""
        return self._stream.prompt_token_ids

    @property
    def ignored_keywords(self) -> tuple[str, ...]:
        """Schema keywords that the response need not follow, each with its location in the schema."""
        return self._stream.ignored_keywords

    @property
    def cached_token_count(self) -> int:
        """Number of prompt tokens that were found in the prefix cache. Known when the first choice ends."""
        return self._stream.cached_token_count

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprob | None, ...] | None:
        """Log probabilities of the prompt tokens, if requested. Complete with the first output token."""
        return self._stream.prompt_logprobs

    @property
    def is_held(self) -> bool:
        """True if a connector holds blocks of a finished choice for another engine."""
        return self._stream.is_held


class PoolingStream(RequestStream):
    """A pooling request. Await the stream to get the results, or enter it and call `results`. Leaving the stream aborts
    the request.

    Shortest use: `vectors = await engine.embed(texts)`. With access to the stream's properties: `async with
    engine.embed(texts) as stream: vectors = await stream.results()`.

    Iterating yields one delta for each input, with the index of the input and the reason why it ended. `results`
    iterates by itself.

    Args:
        thread: the engine's thread.
        stream: the request in that thread.
    """

    def __init__(self, thread: TrioThread, stream: TrioPoolingStream) -> None:
        super().__init__(thread, stream)
        self._pooling_stream = stream

    def __await__(self) -> Generator[Any, Any, tuple[PoolingResult, ...]]:
        return self._all().__await__()

    async def _all(self) -> tuple[PoolingResult, ...]:
        async with self:
            return await self.results()

    async def results(self) -> tuple[PoolingResult, ...]:
        """Wait until all inputs are computed, and return the results in the order of the inputs.

        Raises:
            RequestFailed, RequestAborted, DeadlinePassed: the reason why the first input without a result has none.
            EngineFault: the engine failed for good.
        """
        async for delta in self:
            if (error := error_of(delta)) is not None:
                raise error
        return self.pooled

    @property
    def pooled(self) -> tuple[PoolingResult, ...]:
        """The results. Valid once the stream was read to its end without an error."""
        return self._pooling_stream.pooled

    @property
    def input_token_counts(self) -> tuple[int, ...]:
        """Number of tokens of each input. Known once the stream is entered."""
        return self._pooling_stream.input_token_counts


class ImageStream(ScopeStream[TrioImageStream, ImageDelta]):
    """A request for images. Await the stream to get all images, or enter it to read partial images. Leaving the stream
    aborts the request.

    Shortest use: `pictures = await engine.generate_image("a cat")`. With partial images: `async with
    engine.generate_image("a cat") as stream: async for delta in stream: ...`. See ScopeStream.

    Args:
        thread: the engine's thread.
        stream: the request in that thread.
    """

    def __init__(self, thread: TrioThread, stream: TrioImageStream) -> None:
        super().__init__(thread, stream, merge_images)

    def __await__(self) -> Generator[Any, Any, tuple[RGBImage, ...]]:
        return self._all().__await__()

    async def _all(self) -> tuple[RGBImage, ...]:
        async with self:
            return await self.pictures()

    async def pictures(self) -> tuple[RGBImage, ...]:
        """Wait until all images are finished, and return them in the order of the request.

        Raises:
            RequestFailed, RequestAborted, DeadlinePassed: the reason why the first unfinished image was not finished.
            EngineFault: the engine failed for good.
        """
        return await images_of(self)

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seed of each image."""
        return self._stream.seeds

    @property
    def step_count(self) -> int:
        """Number of denoising steps of each image. Known once the stream is entered."""
        return self._stream.step_count

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of each image in pixels. Known once the stream is entered."""
        return self._stream.size
