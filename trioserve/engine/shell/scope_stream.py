"""What a request's task holds, whatever the request asks for: iterate for what is new, leave to abort.

Entering takes a place in the waiting queue, before anything costly is done; leaving, in whichever way, is one
synchronous call that ends what still runs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from trioserve.contracts.output import AnyDelta
from trioserve.engine.shell.request_scope import RequestScope
from trioserve.trio_tools.interrupts import uninterrupted
from trioserve.trio_tools.own_run import OwnRun

__all__ = ["ScopeStream"]

ScopeT = TypeVar("ScopeT", bound=RequestScope[Any, Any, Any])
DeltaT = TypeVar("DeltaT", bound=AnyDelta)


@uninterrupted
class ScopeStream(Generic[ScopeT, DeltaT]):
    """`async with engine.generate(...) as stream: async for delta in stream: ...`.

    Entering raises Overloaded, Draining or InvalidRequest, and then holds nothing. Iterating yields the deltas of all
    that was asked for until each has one with a finish_reason, and raises EngineFault when the engine broke, or
    Draining when the server is leaving and the request had not begun to run. Several tasks may iterate over one stream:
    each delta goes to one of them, and the end to all. All that waits for it belongs inside of the scope: whoever still
    does when the scope is left, in whichever task, gets AlreadyEnded.
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
        self._request.check_may_leave()
        self._request.leave()
        self._leave(self._request)

    def __aiter__(self) -> Self:
        return self

    def __anext__(self) -> Awaitable[DeltaT]:  # not async: a call more for every delta would be seen
        self._own_run.check_process("reading a request")  # a forked child would wait for ever
        return self._request.next_delta()

    @property
    def id(self) -> str:
        """The caller's own, or the one that it was given."""
        return self._request.id

    @property
    def is_finished(self) -> bool:
        """All that was asked for has had its last delta, or the request failed."""
        return self._request.is_finished

    async def wait_until_begun(self) -> DeltaT | None:
        """Returns when the request runs; or, if it ended in the queue, the delta that says so, which is read as well.
        Raises what it failed with, and AlreadyEnded outside of its scope. So whoever answers over HTTP can still choose
        the status."""
        begun: DeltaT | None = await self._request.wait_until_begun()
        return begun
