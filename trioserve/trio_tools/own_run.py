"""The Trio run that an object belongs to; and a sentence for whoever calls it from somewhere else."""

from __future__ import annotations

import sys

import trio

from trioserve.contracts.errors import WrongLoop

__all__ = ["OwnRun", "check_is_in_trio"]


class OwnRun:
    """Made in the Trio run that is meant."""

    def __init__(self) -> None:
        self._token = trio.lowlevel.current_trio_token()

    def check(self, what: str) -> None:
        """what: is called. Raises WrongLoop anywhere else, also in another run."""
        check_is_in_trio(what)
        if trio.lowlevel.current_trio_token() is not self._token:
            raise WrongLoop(
                f"{what} was called in another Trio run than the one that opened the engine: call it there, with "
                "trio.from_thread.run and the trio_token of that run, or open an engine here"
            )


def check_is_in_trio(what: str) -> None:
    """what: is called. Raises WrongLoop outside of Trio."""
    if trio.lowlevel.in_trio_run():
        return
    if _runs_asyncio():
        raise WrongLoop(
            f"{what} was called in an asyncio program, and this engine is one for Trio: open it with "
            "`async with trioserve.asyncio.open_engine(...)`, which has the same methods"
        )
    raise WrongLoop(
        f"{what} was called where no Trio loop runs: call it inside of an async function that `trio.run(...)` runs; in "
        "another thread, with trio.from_thread.run and the trio_token of the engine's run"
    )


def _runs_asyncio() -> bool:
    module = sys.modules.get("asyncio")  # who has not loaded it does not run it
    if module is None:
        return False
    try:
        module.get_running_loop()
    except RuntimeError:
        return False
    return True
