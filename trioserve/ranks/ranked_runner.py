"""Presents a model in ranks as one model: its sizes and names, and the KV caches of all ranks as one KV cache.

A KV block is assembled from the KV heads of all ranks. So engines with different numbers of ranks can exchange KV.

`RankedWeights` replaces the weights. First, each rank checks its shards. Then, all ranks write between two steps. No
rank writes while another rank may still refuse. A rank that fails while it writes breaks the group. The next group has
the weights of the start. A trainer sends its tensors once, to this process, which forwards each tensor to all ranks. If
the trainer stops, all ranks have received the same tensors, and the group continues.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from trioserve.contracts.errors import InvalidRequest, RankLost, StartupError
from trioserve.contracts.ids import BlockIndex
from trioserve.contracts.kv_transfer import KVLayout, KVPages
from trioserve.contracts.weights import BroadcastWeights, ReplacementState, SharedWeights, WeightGroup, WeightSource
from trioserve.model.device import with_images
from trioserve.model.kv_storage import KVMemory
from trioserve.model.number_formats import Dtype
from trioserve.model.trainer_groups import TrainerGroups, arriving_tensors, dtype_named
from trioserve.ranks.messages import Answer, CheckWeights, ConfirmWeights, Loaded, PutWeights, Refusal, WriteWeights
from trioserve.trio_tools.worker_thread import call_abandonable

if TYPE_CHECKING:
    from trioserve.model.vision.tower import VisionTower

__all__ = ["HeadRange", "RankPages", "RankedRunner", "RankedWeights", "StagePages", "head_ranges"]


class RankedRunner:
    """The sizes and names of a model that several processes compute. It has those attributes and
    methods of ModelRunner that are needed to assemble an engine.

    Args:
        loaded: the summary of all ranks.
        ranks: the report of each rank, in order.
        kv_memories: see HostRanks.
        vision: computes image rows in this process. None if the model accepts no images.
        block_size: tokens per block.
        stage_size: ranks of each stage.
    """

    def __init__(
        self,
        loaded: Loaded,
        ranks: Sequence[Loaded],
        kv_memories: Sequence[int],
        vision: VisionTower | None,
        block_size: int,
        stage_size: int,
    ) -> None:
        self.vision = vision
        self._in_ranks = f", in {len(ranks)} ranks"
        self._ranks, self._kv_memories, self._stage_size = ranks, kv_memories, stage_size
        self.device = loaded.device
        self.dtype: Dtype = loaded.dtype
        self.kv_dtype = loaded.kv_dtype
        self.computed_by = loaded.computed_by + self._in_ranks
        self.arithmetic = with_images(
            loaded.arithmetic + self._in_ranks, self.dtype, None if vision is None else vision.dtype
        )
        self.is_batch_invariant = loaded.is_batch_invariant
        self.launches = loaded.launches
        self.max_num_seqs, self.step_tokens_max = loaded.max_num_seqs, loaded.step_tokens_max
        self.block_size = block_size
        self.block_count = loaded.block_count
        self.state_slot_count = loaded.state_slot_count
        self.snapshot_slot_count = loaded.snapshot_slot_count
        self.kv_cache_bytes = loaded.block_count * loaded.block_bytes
        self.step_weight_bytes = loaded.step_weight_bytes
        self.token_flops = loaded.token_flops
        self.attended_token_flops = loaded.attended_token_flops

    def kv_pages(self, model_name: str) -> KVPages:
        """Return access to the KV cache of all ranks, see ModelRunner.kv_pages.

        Args:
            model_name: name that engines compare before they exchange KV.

        Raises:
            StartupError: this process cannot read the ranks' KV caches.
        """
        if not self._kv_memories or self.device != "cpu":
            raise StartupError(
                "the model's ranks are on GPUs or on other machines, and connectors cannot read their KV caches: "
                "remove --kv-transfer-config"
            )
        stages = []
        for first in range(0, len(self._ranks), self._stage_size):
            ranks = self._ranks[first : first + self._stage_size]
            layout = ranks[0].layout
            if layout is None:
                continue  # The layers of this stage have no KV.
            suffix = layout.model and layout.model + self._in_ranks
            heads = [HeadRange(*rank.kv_heads) for rank in ranks]
            memories = self._kv_memories[first : first + self._stage_size]
            layout = msgspec.structs.replace(layout, model=model_name + suffix)
            stages.append(RankPages(layout, self.block_count, heads, memories))
        assert stages, "a model without KV has no connector"
        return stages[0] if len(stages) == 1 else StagePages(stages)


class HeadRange(msgspec.Struct, frozen=True):
    """The range of KV heads of a rank.

    Attributes:
        first: index of the first head in the whole model.
        count: number of heads.
    """

    first: int
    count: int

    @property
    def end(self) -> int:
        return self.first + self.count


def head_ranges(ranks: Sequence[HeadRange]) -> tuple[tuple[HeadRange, ...], int]:
    """Select a rank for each head, so that each head is read once even if several ranks have copies of it.

    Args:
        ranks: the heads of each rank, in ascending order.

    Returns:
        The heads to read from each rank (the first rank that has a head), and the number of heads of the model.
    """
    found: list[HeadRange] = []
    end = 0
    for rank in ranks:
        assert rank.first <= end, "the ranks together have all heads, in ascending order"
        first = min(max(rank.first, end), rank.end)
        found.append(HeadRange(first, rank.end - first))
        end = max(end, rank.end)
    return tuple(found), end


class RankPages:
    """The KVPages of the ranks of one stage, which use the CPUs of this machine. Reading returns copies.

    Args:
        layout: layout of a rank. Its number of heads is replaced by the number of heads of the model.
        block_count: blocks of the KV cache.
        heads: heads of each rank.
        descriptors: file descriptor of each rank's KVMemory.
    """

    def __init__(
        self,
        layout: KVLayout,
        block_count: int,
        heads: Sequence[HeadRange],
        descriptors: Sequence[int],
    ) -> None:
        self._read_from, head_count = head_ranges(heads)
        self._heads = tuple(heads)
        self.layout = msgspec.structs.replace(layout, kv_head_count=head_count)
        self.block_count = block_count
        self._block_bytes = layout.block_size * self.layout.token_bytes
        # For each rank and layer, an array with shape [blocks, block_size * part_count, heads, bytes of a head].
        self._pages: list[list[npt.NDArray[np.uint8]]] = []
        for descriptor, own in zip(descriptors, heads, strict=True):
            memory = KVMemory(descriptor)
            token_bytes = msgspec.structs.replace(layout, kv_head_count=own.count).token_bytes
            shape = (block_count, layout.block_size * layout.part_count, own.count, -1)
            byte_count = block_count * layout.block_size * token_bytes
            self._pages.append([memory.take(byte_count).reshape(shape) for _ in range(layout.layer_count)])

    def view(self, layer: int, block: BlockIndex) -> None:
        return None

    def read(self, layer: int, block: BlockIndex) -> memoryview:
        parts = [
            pages[layer][block][:, heads.first - own.first : heads.end - own.first]
            for pages, heads, own in zip(self._pages, self._read_from, self._heads, strict=True)
            if heads.count
        ]
        joined: npt.NDArray[np.uint8] = np.concatenate(parts, axis=1)
        return joined.reshape(-1).data.toreadonly()

    def write(self, layer: int, block: BlockIndex, start: int, content: memoryview) -> None:
        if len(content) == self._block_bytes:
            whole = np.frombuffer(content, dtype=np.uint8)
        else:
            whole = np.array(self.read(layer, block))
            whole[start : start + len(content)] = content
        by_head = whole.reshape(self.layout.block_size * self.layout.part_count, self.layout.kv_head_count, -1)
        for pages, own in zip(self._pages, self._heads, strict=True):
            pages[layer][block] = by_head[:, own.first : own.end]


class StagePages:
    """The KVPages of all stages. The layers of each stage follow the layers of the previous stage.

    Args:
        stages: the stages that have layers with KV, in order. There is at least one.
    """

    def __init__(self, stages: Sequence[RankPages]) -> None:
        self._places = [(stage, layer) for stage in stages for layer in range(stage.layout.layer_count)]
        self.layout = msgspec.structs.replace(stages[0].layout, layer_count=len(self._places))
        self.block_count = stages[0].block_count

    def view(self, layer: int, block: BlockIndex) -> None:
        return None

    def read(self, layer: int, block: BlockIndex) -> memoryview:
        stage, own_layer = self._places[layer]
        return stage.read(own_layer, block)

    def write(self, layer: int, block: BlockIndex, start: int, content: memoryview) -> None:
        stage, own_layer = self._places[layer]
        stage.write(own_layer, block, start, content)


PART_BYTES = 2**20  # maximum bytes of a tensor that are forwarded at a time; this limits the unsent bytes of each rank
CHECK_THREAD = "trioserve-weights"


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
        ranks: the group of ranks that compute the model.
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
        await call_abandonable(self._groups.join, group, thread_name=CHECK_THREAD)

    async def leave_group(self, name: str) -> None:
        await call_abandonable(self._groups.leave, name, thread_name=CHECK_THREAD)


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
                    self._groups.receive, group_name, shape, dtype_named(dtype), thread_name=CHECK_THREAD
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
