"""The two simulated engines of a conformance test. The test makes the calls that their cores would make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec
import trio

from trioserve.contracts.events import FinishReason
from trioserve.contracts.ids import RequestId
from trioserve.contracts.request import EngineRequest
from trioserve.testing.connector_conformance.side import KV, Load, Side

__all__ = ["ABORT", "LENGTH", "MOMENTS_MAX", "TOKENS", "Offered", "Stage"]

LENGTH, ABORT = FinishReason.LENGTH, FinishReason.ABORT
MOMENTS_MAX = 60  # Moments of a load beyond this number do not differ.
TOKENS = range(100, 130)  # This prompt fills seven and a half blocks of SMALL_LAYOUT.


class Offered(msgspec.Struct, frozen=True):
    """A prompt whose blocks a sender offers.

    Attributes:
        name: id of the sender's request.
        request: the request for the reader.
        kv: content of the prompt's positions.
    """

    name: RequestId
    request: EngineRequest
    kv: KV


class Waits(Protocol):
    """Time limits of the tests of one connector."""

    patience_seconds: float
    settle_seconds: float
    real_time: bool


class Stage:
    """The two simulated engines of one test.

    Args:
        suite: contains the time limits of the test.
        sender: engine that computes prompts and offers their blocks.
        reader: engine that loads blocks. It is `sender` for a connector that serves only one engine.
    """

    def __init__(self, suite: Waits, sender: Side, reader: Side) -> None:
        self.suite = suite
        self.sender, self.reader = sender, reader
        self.sides = [sender] if sender is reader else [sender, reader]
        self.scopes: dict[str, trio.CancelScope] = {}
        self._names = 0

    def name(self) -> str:
        self._names += 1
        return f"r{self._names}"

    def drain(self) -> None:
        for side in self.sides:
            side.drain()

    async def until(self, side: Side, is_so: Callable[[], bool], what: str) -> None:
        """Collect reports until a condition is True. The connector must call `wake` for each report.

        Args:
            side: the engine whose connector reports.
            is_so: the condition.
            what: name of the awaited event, for the error text.

        Raises:
            AssertionError: the condition is not True after `patience_seconds`.
        """
        with trio.move_on_after(self.suite.patience_seconds):
            while not is_so():
                woken = side.woken
                if not woken.is_set():
                    await woken.wait()
                side.drain()
            return
        raise AssertionError(
            f"{what} was not reported within {self.suite.patience_seconds} seconds, or `wake` was not called for it"
        )

    async def until_load_ends(self, load: Load) -> None:
        name = load.request.id
        await self.until(self.reader, lambda: name not in self.reader.loads, f"the end of the load of {name}")

    async def until_released(self, name: RequestId, side: Side | None = None) -> None:
        here = side or self.sender
        await self.until(here, lambda: name not in here.sends, f"the end of the send of {name}")

    async def settle(self) -> None:
        """Wait until all work has ended, and collect the reports."""
        if self.suite.real_time:
            await trio.sleep(self.suite.settle_seconds)
        else:
            await trio.sleep(self.suite.patience_seconds)
        self.drain()
        self.check()

    def check(self) -> None:
        for side in self.sides:
            side.check()
        broken = [f"{side.name}: {violation}" for side in self.sides for violation in side.violations]
        assert not broken, "; ".join(broken)

    def end(self, side: Side) -> None:
        """Cancel a connector's task, as at the end of its engine.

        Args:
            side: the engine.
        """
        self.scopes.pop(side.name).cancel()
