"""An engine's task from its first opening to its end: opens what it computes with, and opens that anew after a fault.

One task, one nursery around it. What breaks ends inside of one `async with`, so that threads, KV and connections of the
old parts are gone before the new ones are opened; requests, their queue and the front end do not notice but for the
pause. An engine that sleeps is one whose parts are gone; if it keeps its weights, they are emptied and made anew inside
of that `async with`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeVar

import trio
from trio.lowlevel import enable_ki_protection

from trioserve.engine.engine_parts import Nap
from trioserve.engine.shell.engine_life import EngineLife
from trioserve.trio_tools.errors_unwrapped import errors_unwrapped

__all__ = ["supervise"]


class Parts(Protocol):
    """Such as EngineParts."""

    @property
    def nap(self) -> Nap[Any] | str: ...


PartsType = TypeVar("PartsType", bound=Parts)
EngineType = TypeVar("EngineType", bound=EngineLife[Any, Any, Any, Any])


@enable_ki_protection
async def supervise(
    open_parts: Callable[[], AbstractAsyncContextManager[PartsType]],
    make_engine: Callable[[PartsType], EngineType],
    *,
    task_status: trio.TaskStatus[EngineType] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Started with the engine, which runs then. Ends when cancelled, with every block back. Raises what opening raises
    the first time, and EngineFault when the engine broke and is not opened anew (any more)."""
    engine: EngineType | None = None
    try:
        while True:
            try:
                async with open_parts() as parts:
                    is_first = engine is None
                    if engine is None:
                        engine = make_engine(parts)
                    else:
                        engine.reopen(parts)
                    nap = parts.nap
                    del parts  # from here on they are the engine's, which lets go of them when it breaks
                    await (_run_first(engine, task_status) if is_first else engine.run())
                    while engine.sleep_level == 1 and not isinstance(nap, str):
                        await nap.let_go()
                        await engine.sleep_on()
                        engine.reopen(await nap.make_anew())
                        await engine.run()
                    del nap  # as it has what computes
            except Exception as error:
                if engine is None or engine.reopens_at is None:
                    raise
                await engine.reopening_failed(error)
            assert engine.reopens_at is not None, "the engine has ended without a reason"
            if engine.sleep_level:
                await engine.sleep_on()
            await trio.sleep_until(engine.reopens_at)
    finally:
        if engine is not None and engine.reopens_at is not None:  # cancelled while there was none
            engine.close()


@enable_ki_protection
async def _run_first(engine: EngineType, task_status: trio.TaskStatus[EngineType]) -> None:
    with errors_unwrapped():
        async with trio.open_nursery() as nursery:
            await nursery.start(engine.run)
            task_status.started(engine)
