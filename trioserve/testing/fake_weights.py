"""Weights of an engine that has none: a number in everything that is said with them."""

from __future__ import annotations

import zlib

import trio

from trioserve.contracts.errors import InvalidRequest, ModelLoadError
from trioserve.contracts.weights import BroadcastWeights, ReplacementState, SharedWeights, WeightGroup, WeightSource
from trioserve.testing.fake_executor import FakeExecutor

__all__ = ["FakeWeightPlace"]


class FakeWeightPlace:
    """A WeightPlace of an engine without weights: each source has others, but for one that has "missing" in its name,
    which is refused. executor: that says something else from then on. seconds: that writing takes. breaks: the next
    one ends halfway."""

    def __init__(self) -> None:
        self._number = 0
        self._executor: FakeExecutor | None = None
        self.seconds = 0.0
        self.breaks = False
        self.groups: set[str] = set()

    def attach(self, executor: FakeExecutor) -> None:
        """It computes with the weights that are here, which stay when it is made anew."""
        self._executor = executor
        executor.use_weights(self._number)

    async def check(self, source: WeightSource) -> _FakeReplacement:
        await trio.lowlevel.checkpoint()
        if isinstance(source, BroadcastWeights):
            source = f"sent {source.names}"
        name = source.name if isinstance(source, SharedWeights) else source
        if "missing" in name:
            raise InvalidRequest(f"cannot load {name}: a test wants it so", param="model_path")
        return _FakeReplacement(self, zlib.crc32(name.encode()))

    async def join_group(self, group: WeightGroup) -> None:
        """Whoever asks finds all the others."""
        await trio.lowlevel.checkpoint()
        self.groups.add(group.group_name)

    async def leave_group(self, name: str) -> None:
        await trio.lowlevel.checkpoint()
        if name not in self.groups:
            raise InvalidRequest(f"no group {name} was joined", param="group_name")
        self.groups.remove(name)

    def write(self, number: int) -> None:
        assert self._executor is not None, "written before anything computes"
        self._number = number
        self._executor.use_weights(number)


class _FakeReplacement:
    def __init__(self, place: FakeWeightPlace, number: int) -> None:
        self._place = place
        self._number = number
        self.state = ReplacementState.CHECKED

    async def replace(self) -> None:
        self.state = ReplacementState.BEGUN
        breaks, self._place.breaks = self._place.breaks, False
        with trio.CancelScope(shield=True):  # as a thread that is not left before its end
            await trio.sleep(self._place.seconds)
        if breaks:
            raise ModelLoadError("a test broke the weights")
        self._place.write(self._number)
        self.state = ReplacementState.WHOLE
        await trio.lowlevel.checkpoint_if_cancelled()
