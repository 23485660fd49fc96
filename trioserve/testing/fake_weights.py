"""Fake weights for fake engines. The weights are a number that changes every token. A sleep frees no memory."""

from __future__ import annotations

import zlib
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import trio

from trioserve.contracts.errors import InvalidRequest, ModelLoadError
from trioserve.contracts.weights import BroadcastWeights, ReplacementState, SharedWeights, WeightGroup, WeightSource
from trioserve.testing.fake_executor import FakeExecutor

__all__ = ["FakeCacheRelease", "FakeWeightTarget"]

PartsT = TypeVar("PartsT")


class FakeCacheRelease(Generic[PartsT]):
    """Frees no memory when the engine sleeps, because the engine has no weights.

    Args:
        make_again: creates the parts of the engine when it wakes up.
    """

    def __init__(self, make_again: Callable[[], Awaitable[PartsT]]) -> None:
        self._make_again = make_again

    async def release_cache(self) -> None:
        await trio.lowlevel.checkpoint()

    async def limit_blocks(self, count: int) -> None:
        await trio.lowlevel.checkpoint()

    async def rebuild_parts(self) -> PartsT:
        return await self._make_again()


class FakeWeightTarget:
    """A WeightTarget of an engine without weights. Each source has different weights. A source with "missing" in its
    name is refused.

    Attributes:
        seconds: seconds that a write of new weights takes.
        breaks: if True, the next replacement fails after a part of the weights was written.
        groups: names of the joined groups.
    """

    def __init__(self) -> None:
        self._number = 0
        self._executor: FakeExecutor | None = None
        self.seconds = 0.0
        self.breaks = False
        self.groups: set[str] = set()

    def attach(self, executor: FakeExecutor) -> None:
        """Make an executor compute with the current weights. They stay the same after a restart of the engine.

        Args:
            executor: executor of the restarted engine.
        """
        self._executor = executor
        executor.use_weights(self._number)

    async def check(self, source: WeightSource) -> _FakeReplacement:
        await trio.lowlevel.checkpoint()
        if isinstance(source, BroadcastWeights):
            source = f"sent {source.names}"
        name = source.name if isinstance(source, SharedWeights) else source
        if "missing" in name:
            raise InvalidRequest(f"cannot load {name}: names with 'missing' are refused", param="model_path")
        return _FakeReplacement(self, zlib.crc32(name.encode()))

    async def join_group(self, group: WeightGroup) -> None:
        """Join a group at once. All other members count as present.

        Args:
            group: the group.
        """
        await trio.lowlevel.checkpoint()
        self.groups.add(group.group_name)

    async def leave_group(self, name: str) -> None:
        await trio.lowlevel.checkpoint()
        if name not in self.groups:
            raise InvalidRequest(f"no group {name} was joined", param="group_name")
        self.groups.remove(name)

    def write(self, number: int) -> None:
        assert self._executor is not None, "weights were written before an executor was attached"
        self._number = number
        self._executor.use_weights(number)


class _FakeReplacement:
    def __init__(self, place: FakeWeightTarget, number: int) -> None:
        self._place = place
        self._number = number
        self.state = ReplacementState.CHECKED

    async def replace(self) -> None:
        self.state = ReplacementState.BEGUN
        breaks, self._place.breaks = self._place.breaks, False
        with trio.CancelScope(shield=True):  # A real write runs in a thread, so a cancel must not interrupt this wait.
            await trio.sleep(self._place.seconds)
        if breaks:
            raise ModelLoadError("a test made this replacement fail")
        self._place.write(self._number)
        self.state = ReplacementState.WHOLE
        await trio.lowlevel.checkpoint_if_cancelled()
