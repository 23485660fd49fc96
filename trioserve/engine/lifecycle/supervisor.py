"""The task that runs an engine from its first opening to its end. It reopens the engine after a fault.

There is one task with one nursery. A fault ends the `async with` of the engine's parts, so their threads, KV memory and
connections are released before new parts are opened. Requests, the queue and the HTTP server only notice the delay. A
sleeping engine has no open parts. If it keeps its weights while it sleeps, its parts stay open. They release the KV
cache and allocate it again inside the same `async with`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeVar

import trio
from trio.lowlevel import enable_ki_protection

from trioserve.engine.lifecycle.engine_lifecycle import EngineLifecycle
from trioserve.engine.lifecycle.work import CacheRelease
from trioserve.trio_tools.errors_unwrapped import errors_unwrapped

__all__ = ["supervise"]


class Parts(Protocol):
    """The parts of an engine, such as `EngineParts`."""

    @property
    def cache_release(self) -> CacheRelease[Any] | str: ...


PartsType = TypeVar("PartsType", bound=Parts)
EngineType = TypeVar("EngineType", bound=EngineLifecycle[Any, Any])


@enable_ki_protection
async def supervise(
    open_parts: Callable[[], AbstractAsyncContextManager[PartsType]],
    make_engine: Callable[[PartsType], EngineType],
    *,
    task_status: trio.TaskStatus[EngineType] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Run an engine until it is cancelled or cannot be reopened. `task_status` reports the engine once it runs.

    When this function ends, every block is free.

    Args:
        open_parts: opens the parts of the engine.
        make_engine: creates the engine with the parts of the first opening.
        task_status: receives the engine.

    Raises:
        Exception: the first opening failed with this error.
        EngineFault: the engine broke, and is not reopened again.
    """
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
                    cache_release = parts.cache_release
                    # Drop this reference, because the engine must be able to free the parts when it breaks.
                    del parts
                    await (_run_first(engine, task_status) if is_first else engine.run())
                    while engine.sleep_level == 1 and not isinstance(cache_release, str):
                        await cache_release.release_cache()
                        await engine.sleep_on()
                        engine.reopen(await cache_release.rebuild_parts())
                        await engine.run()
                    del cache_release  # Drop this reference, because it keeps the executor alive.
            except Exception as error:
                if engine is None or engine.reopens_at is None:
                    raise
                await engine.reopening_failed(error)
            assert engine.reopens_at is not None, "the engine has ended without a reason"
            if engine.sleep_level:
                await engine.sleep_on()
            await trio.sleep_until(engine.reopens_at)
    finally:
        # The task was cancelled while the engine had no parts.
        if engine is not None and engine.reopens_at is not None:
            engine.close()


@enable_ki_protection
async def _run_first(engine: EngineType, task_status: trio.TaskStatus[EngineType]) -> None:
    with errors_unwrapped():
        async with trio.open_nursery() as nursery:
            await nursery.start(engine.run)
            task_status.started(engine)
