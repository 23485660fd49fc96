"""New weights, looked at in a thread of their own and written in the compute thread, behind the step in flight."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from trioserve.contracts.weights import BroadcastWeights, ReplacementState, WeightGroup, WeightSource
from trioserve.engine.weight_updates import Replacement
from trioserve.trio_tools.daemon_thread import call_abandonable
from trioserve.trio_tools.worker_thread import WorkerThread

__all__ = ["ThreadedWeights", "WrittenWeights"]

LOOK_THREAD = "trioserve-weights"


class WrittenWeights(Protocol):
    """A Replacement of what blocks. state: may be read in any thread."""

    @property
    def state(self) -> ReplacementState: ...

    def replace(self) -> None:
        """To be called in the compute thread."""
        ...


class SentWeights(Protocol):
    """Weights that come tensor by tensor. state: as above."""

    @property
    def state(self) -> ReplacementState: ...

    @property
    def forms(self) -> Sequence[tuple[str, tuple[int, ...], Any]]:
        """Name, shape and type of each, in the order in which they come."""
        ...

    def put(self, name: str, values: Any) -> None:
        """To be called in the compute thread."""
        ...


class Groups(Protocol):
    """Of trainers. Calls wait for others; see TrainerGroups."""

    def join(self, asked: WeightGroup) -> None: ...
    def check(self, name: str) -> None: ...
    def leave(self, name: str) -> None: ...
    def forget(self, name: str) -> None: ...
    def receive(self, name: str, shape: Sequence[int], dtype: Any) -> Any: ...


class ThreadedWeights:
    """A WeightPlace. look, look_at_sent: read of a source what there is, and raise InvalidRequest. What waits for a
    trainer has a thread that is not waited for, since nothing ends it but its own deadline."""

    def __init__(
        self,
        look: Callable[[WeightSource], WrittenWeights],
        look_at_sent: Callable[[BroadcastWeights], SentWeights],
        groups: Groups,
        compute: WorkerThread,
    ) -> None:
        self._look = look
        self._look_at_sent = look_at_sent
        self._groups = groups
        self._compute = compute

    async def check(self, source: WeightSource) -> Replacement:
        # Files that hang cannot be ended from outside: not in a thread that steps need.
        if isinstance(source, BroadcastWeights):
            self._groups.check(source.group_name)
            sent = await call_abandonable(self._look_at_sent, source, thread_name=LOOK_THREAD)
            return _SentReplacement(sent, self._groups, source.group_name, self._compute)
        found = await call_abandonable(self._look, source, thread_name=LOOK_THREAD)
        return _ThreadedReplacement(found, self._compute)

    async def join_group(self, group: WeightGroup) -> None:
        await call_abandonable(self._groups.join, group, thread_name=LOOK_THREAD)

    async def leave_group(self, name: str) -> None:
        await call_abandonable(self._groups.leave, name, thread_name=LOOK_THREAD)


class _SentReplacement:
    """One thread waits for a tensor, and another one writes it, so that nothing is written once the caller is gone."""

    def __init__(self, weights: SentWeights, groups: Groups, group_name: str, compute: WorkerThread) -> None:
        self._weights = weights
        self._groups = groups
        self._group_name = group_name
        self._compute = compute

    @property
    def state(self) -> ReplacementState:
        return self._weights.state

    async def replace(self) -> None:
        try:
            for name, shape, dtype in self._weights.forms:
                values = await call_abandonable(
                    self._groups.receive, self._group_name, shape, dtype, thread_name=LOOK_THREAD
                )
                await self._compute.run(self._weights.put, name, values)
        finally:
            if self.state is not ReplacementState.WHOLE:  # nobody knows any more what the trainer sends next
                self._groups.forget(self._group_name)


class _ThreadedReplacement:
    def __init__(self, weights: WrittenWeights, compute: WorkerThread) -> None:
        self._weights = weights
        self._compute = compute

    @property
    def state(self) -> ReplacementState:
        return self._weights.state

    async def replace(self) -> None:
        await self._compute.run(self._weights.replace)  # ends also when cancelled
