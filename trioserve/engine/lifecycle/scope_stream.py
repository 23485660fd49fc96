"""The caller's side of a request: iterate to read deltas, and leave the context to abort.

Entering the context puts the request into the queue before any expensive work. Leaving is one synchronous call that
aborts unfinished work.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from os import getpid
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from trioserve.contracts.errors import DeadlinePassed, RequestAborted, RequestFailed, TrioserveError
from trioserve.contracts.events import FinishReason
from trioserve.contracts.output import AnyDelta
from trioserve.engine.lifecycle.request_scope import RequestScope
from trioserve.trio_tools.interrupts import uninterrupted
from trioserve.trio_tools.own_run import OwnRun

__all__ = ["error_of", "ScopeStream"]


def error_of(delta: AnyDelta) -> TrioserveError | None:
    """Return the error for the last delta of a failed request, choice or image.

    Args:
        delta: any delta.

    Returns:
        The error. None if the delta has no finish reason, or a successful one.
    """
    if delta.finish_reason is FinishReason.DEADLINE:
        return DeadlinePassed(delta.message or "the request's deadline has passed")
    if delta.finish_reason is FinishReason.ABORT:
        return RequestAborted(delta.message or "the request was aborted")
    if delta.finish_reason is FinishReason.ERROR:
        return RequestFailed(delta.message or "the engine could not continue this request")
    return None


ScopeT = TypeVar("ScopeT", bound=RequestScope[Any, Any, Any])
DeltaT = TypeVar("DeltaT", bound=AnyDelta)


@uninterrupted
class ScopeStream(Generic[ScopeT, DeltaT]):
    """A stream of deltas: `async with engine.generate(...) as stream: async for delta in stream: ...`.

    Entering raises Overloaded, Draining or InvalidRequest if the request is refused. Then nothing needs to be released.

    Iteration yields deltas until each choice has had a delta with a finish_reason. It raises EngineFault if the engine
    broke. It raises Draining if the server shuts down before the request begins to run. If several tasks iterate over
    one stream, each delta goes to one of them, and all of them see the end.

    Read only inside the scope. A task that still waits when the scope is left gets AlreadyEnded.

    Args:
        request: the engine's state of the request.
        submit: admits the request, and adds it to the core.
        leave: aborts the request, and releases all its resources.
        own_run: checks that calls come from the right thread, Trio program and process.
    """

    def __init__(
        self,
        request: ScopeT,
        *,
        submit: Callable[[ScopeT], Awaitable[None]],
        leave: Callable[[ScopeT], None],
        own_run: OwnRun,
    ) -> None:
        self._request = request
        self._own_run = own_run
        self._process_id = getpid()
        self._submit = submit
        self._leave = leave

    async def __aenter__(self) -> Self:
        self._own_run.check("entering a request")
        self._request.enter()
        try:
            await self._submit(self._request)
        except BaseException:
            self._request.leave()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._own_run.check("leaving a request")
        self._request.leave()
        self._leave(self._request)

    def __aiter__(self) -> Self:
        return self

    # This function is not async, because one more call per delta takes measurable time.
    def __anext__(self) -> Awaitable[DeltaT]:
        if getpid() != self._process_id:
            self._own_run.check_process("reading a request")  # Without this check, a forked child would wait forever.
        return self._request.next_delta()

    @property
    def id(self) -> str:
        """Id of the request, which the caller chose or the engine generated."""
        return self._request.id

    @property
    def is_finished(self) -> bool:
        """True if every choice has ended with its last delta, or if the request failed."""
        return self._request.is_finished

    async def wait_until_begun(self) -> DeltaT | None:
        """Wait until the request runs. An HTTP handler can still choose the response status until then.

        Returns:
            None if the request runs. If the request ended in the queue, the last delta, which contains the reason.
            Iteration yields this delta, too.

        Raises:
            AlreadyEnded: the caller is outside of the scope.
            Exception: the error with which the request failed.
        """
        begun: DeltaT | None = await self._request.wait_until_begun()
        return begun
