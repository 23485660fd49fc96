"""Weight replacement for a model in ranks. First, each rank checks its shards. Then, all ranks write between two steps.

No rank writes while another rank may still refuse. A rank that fails while it writes breaks the group. The next group
has the weights of the start. A trainer sends its tensors once, to this process, which forwards each tensor to all
ranks. If the trainer stops, all ranks have received the same tensors, and the group continues.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from trioserve.contracts.errors import InvalidRequest, RankLost
from trioserve.contracts.weights import BroadcastWeights, ReplacementState, SharedWeights, WeightGroup, WeightSource
from trioserve.model.trainer_groups import TrainerGroups, arriving_tensors, dtype_named
from trioserve.ranks.messages import Answer, CheckWeights, ConfirmWeights, PutWeights, Refusal, WriteWeights
from trioserve.trio_tools.worker_thread import call_abandonable

__all__ = ["RankedWeights"]

PART_BYTES = 2**20  # maximum bytes of a tensor that are forwarded at a time; this limits the unsent bytes of each rank
LOOK_THREAD = "trioserve-weights"


class Ranks(Protocol):
    """The methods of RankGroup that this module uses."""

    @property
    def are_apart(self) -> bool: ...

    async def ask(
        self, make: Callable[[int], Any], *, may_leave: bool = False, is_timed: bool = True, is_beside: bool = False
    ) -> dict[int, Answer]: ...


class RankedWeights:
    """The WeightTarget of a model in ranks.

    Args:
        ranks: the group.
        groups: groups with trainers. This process joins as one member for all ranks.
        why_fixed: why the weights cannot be replaced (see ModelRunner). None if they can. The ranks do not check this.
    """

    def __init__(self, ranks: Ranks, groups: TrainerGroups, *, why_fixed: str | None = None) -> None:
        self._ranks = ranks
        self._groups = groups
        self._why_fixed = why_fixed
        self._offer_count = 0

    async def check(self, source: WeightSource) -> _Stored | _Sent:
        """Let all ranks check new weights.

        Args:
                source: where the weights are, or which tensors a trainer will send.

        Returns:
            The replacement, which has not begun yet.

        Raises:
            InvalidRequest: the weights do not fit the model, or the ranks find different weights.
            RankLost: the group broke.
        """
        if self._why_fixed is not None:
            raise InvalidRequest(f"the weights of this model cannot be replaced: {self._why_fixed}")
        self._offer_count += 1
        offer = self._offer_count
        if isinstance(source, BroadcastWeights):
            self._groups.check(source.group_name)
            arriving_tensors(source)
            await self._look(lambda serial: CheckWeights(serial=serial, offer=offer, sent=source))
            return _Sent(self._ranks, offer, source, self._groups)
        if isinstance(source, SharedWeights):
            await self._look(lambda serial: CheckWeights(serial=serial, offer=offer, shared=source))
        else:
            path = _absolute(source)
            is_named = self._ranks.are_apart
            names = await self._look(
                lambda serial: CheckWeights(serial=serial, offer=offer, path=path, is_named=is_named)
            )
            _check_equal(path, names)
        return _Stored(self._ranks, offer)

    async def _look(self, make: Callable[[int], CheckWeights]) -> Mapping[int, object]:
        """Return the value that each rank reports after its check, or raise InvalidRequest."""
        return _found(await self._ranks.ask(make, may_leave=True, is_timed=False, is_beside=True))

    async def join_group(self, group: WeightGroup) -> None:
        await call_abandonable(self._groups.join, group, thread_name=LOOK_THREAD)

    async def leave_group(self, name: str) -> None:
        await call_abandonable(self._groups.leave, name, thread_name=LOOK_THREAD)


class _Stored:
    """A Replacement for which each rank reads the weights itself."""

    def __init__(self, ranks: Ranks, offer: int) -> None:
        self._ranks = ranks
        self._offer = offer
        self.state = ReplacementState.CHECKED

    async def replace(self) -> None:
        """Let all ranks write the weights. A cancelled caller also waits until all ranks have written them.

        Raises:
            InvalidRequest: the weights have changed since the check. Nothing was written.
            RankLost: the group broke.
        """
        try:
            answers = await self._ranks.ask(lambda serial: ConfirmWeights(serial, self._offer), is_timed=False)
            _found(answers)
            self.state = ReplacementState.BEGUN
            await self._ranks.ask(lambda serial: WriteWeights(serial, self._offer), is_timed=False)
        except RankLost:
            self.state = ReplacementState.GONE
            raise
        self.state = ReplacementState.WHOLE


class _Sent:
    """A Replacement for which a trainer sends the weights. A cancel stops the replacement between two tensors."""

    def __init__(self, ranks: Ranks, offer: int, source: BroadcastWeights, groups: TrainerGroups) -> None:
        self._ranks = ranks
        self._offer = offer
        self._source = source
        self._groups = groups
        self.state = ReplacementState.CHECKED

    async def replace(self) -> None:
        """Receive all tensors and forward them to the ranks.

        Raises:
            WeightsLost: the trainer stopped.
            RankLost: the group broke.
        """
        source, group_name = self._source, self._source.group_name
        try:
            for name, shape, dtype in zip(source.names, source.shapes, source.dtypes, strict=True):
                values = await call_abandonable(
                    self._groups.receive, group_name, shape, dtype_named(dtype), thread_name=LOOK_THREAD
                )
                await self._put(name, values)
            self.state = ReplacementState.WHOLE
        except RankLost:
            self.state = ReplacementState.GONE
            raise
        finally:
            if self.state is not ReplacementState.WHOLE:  # The position in the trainer's stream is unknown.
                self._groups.forget(group_name)

    async def _put(self, name: str, values: Any) -> None:
        """Forward one tensor to all ranks. A cancel does not interrupt this."""
        content = values.reshape(-1).view("uint8")
        for first in range(0, max(1, content.size), PART_BYTES):
            part = content[first : first + PART_BYTES].tobytes()
            is_last = first + PART_BYTES >= content.size
            if is_last:
                self.state = ReplacementState.BEGUN
            order = functools.partial(_part, offer=self._offer, name=name, part=part, is_last=is_last)
            await self._ranks.ask(order, is_timed=False)


def _absolute(path: str) -> str:
    """Return an absolute path, because a rank on another machine has another working directory."""
    return os.path.abspath(path)


def _part(serial: int, *, offer: int, name: str, part: bytes, is_last: bool) -> PutWeights:
    return PutWeights(serial, offer, name, part, is_last)


def _found(answers: Mapping[int, Answer]) -> Mapping[int, object]:
    """Return the value of each rank, in order, or raise InvalidRequest if a rank refuses."""
    found = {rank: answers[rank].value for rank in sorted(answers)}
    refusals = {rank: value for rank, value in found.items() if isinstance(value, Refusal)}
    if refusals:
        raise _refused(refusals, len(found))
    return found


def _refused(refusals: Mapping[int, Refusal], rank_count: int) -> InvalidRequest:
    """Return the error for refusals. If all ranks give the same reason, the error is the same as without ranks."""
    first = next(iter(refusals.values()))
    if len(refusals) == rank_count and all(refusal == first for refusal in refusals.values()):
        return InvalidRequest(first.message, param=first.param)
    sentences = (f"rank {rank}: {refusal.message}" for rank, refusal in refusals.items())
    return InvalidRequest("; ".join(sentences), param=first.param)


def _check_equal(path: str, names: Mapping[int, object]) -> None:
    """Raise InvalidRequest if ranks on different machines found weights with different names."""
    others = [rank for rank, name in names.items() if name != names[0]]
    if others:
        ranks = ", ".join(map(str, others))
        raise InvalidRequest(
            f"ranks {ranks} find other weights in {path} than rank 0: they are on different machines, copy the same "
            "files to each",
            param="model_path",
        )
