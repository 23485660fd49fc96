"""Work that the compute thread does between two steps: replacing weights, encoding images, and copying KV blocks.

A separate thread checks new weights. The compute thread writes them after the step in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import trio

from trioserve.contracts.ids import BlockIndex
from trioserve.contracts.kv_transfer import KVLayout
from trioserve.contracts.weights import BroadcastWeights, ReplacementState, WeightGroup, WeightSource
from trioserve.engine.weight_updates import Replacement
from trioserve.trio_tools.worker_thread import WorkerThread, call_abandonable

__all__ = [
    "Encoding",
    "LaunchedCopy",
    "LaunchesCopies",
    "ThreadedCopies",
    "ThreadedEncoder",
    "ThreadedWeights",
    "WrittenWeights",
]


CHECK_THREAD = "trioserve-weights"


class WrittenWeights(Protocol):
    """New weights that were checked. `replace` writes them, and blocks its thread meanwhile.

    Attributes:
        state: progress of the replacement. Any thread may read it.
    """

    @property
    def state(self) -> ReplacementState: ...

    def replace(self) -> None:
        """Write the weights. Called in the compute thread."""
        ...


class SentWeights(Protocol):
    """New weights that arrive tensor by tensor.

    Attributes:
        state: progress of the replacement. Any thread may read it.
        forms: name, shape and dtype of each tensor, in the order in which the tensors arrive.
    """

    @property
    def state(self) -> ReplacementState: ...

    @property
    def forms(self) -> Sequence[tuple[str, tuple[int, ...], Any]]: ...

    def put(self, name: str, values: Any) -> None:
        """Write one tensor. Called in the compute thread.

        Args:
            name: name of the tensor.
            values: the tensor.
        """
        ...


class Groups(Protocol):
    """Groups of trainers. The calls block until the other members act, see `TrainerGroups`."""

    def join(self, asked: WeightGroup) -> None: ...
    def check(self, name: str) -> None: ...
    def leave(self, name: str) -> None: ...
    def forget(self, name: str) -> None: ...
    def receive(self, name: str, shape: Sequence[int], dtype: Any) -> Any: ...


class ThreadedWeights:
    """Replaces the weights of a model that computes in a thread. Implements `WeightTarget`.

    Calls that wait for a trainer run in separate threads. A cancelled caller abandons such a thread, because only the
    call's own deadline can end it.

    Args:
        read: reads and checks weights in files or shared memory. Raises InvalidRequest if the model cannot use them.
        check_sent: checks the description of weights that a trainer will send. Raises InvalidRequest.
        groups: groups of trainers.
        compute: the compute thread.
    """

    def __init__(
        self,
        read: Callable[[WeightSource], WrittenWeights],
        check_sent: Callable[[BroadcastWeights], SentWeights],
        groups: Groups,
        compute: WorkerThread,
    ) -> None:
        self._read = read
        self._check_sent = check_sent
        self._groups = groups
        self._compute = compute

    async def check(self, source: WeightSource) -> Replacement:
        # Do not run this check in the compute thread. Reading a file may hang, and cannot be stopped from outside.
        if isinstance(source, BroadcastWeights):
            self._groups.check(source.group_name)
            sent = await call_abandonable(self._check_sent, source, thread_name=CHECK_THREAD)
            return _SentReplacement(sent, self._groups, source.group_name, self._compute)
        found = await call_abandonable(self._read, source, thread_name=CHECK_THREAD)
        return _ThreadedReplacement(found, self._compute)

    async def join_group(self, group: WeightGroup) -> None:
        await call_abandonable(self._groups.join, group, thread_name=CHECK_THREAD)

    async def leave_group(self, name: str) -> None:
        await call_abandonable(self._groups.leave, name, thread_name=CHECK_THREAD)


class _SentReplacement:
    """Receives each tensor in one thread, and writes it in the compute thread. So nothing is written after a cancel."""

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
                    self._groups.receive, self._group_name, shape, dtype, thread_name=CHECK_THREAD
                )
                await self._compute.run(self._weights.put, name, values)
        finally:
            # Leave the group, because it is unknown which tensor the trainer sends next.
            if self.state is not ReplacementState.WHOLE:
                self._groups.forget(self._group_name)


class _ThreadedReplacement:
    def __init__(self, weights: WrittenWeights, compute: WorkerThread) -> None:
        self._weights = weights
        self._compute = compute

    @property
    def state(self) -> ReplacementState:
        return self._weights.state

    async def replace(self) -> None:
        await self._compute.run(self._weights.replace)  # This call writes all weights, even when it is cancelled.


class Encoding(Protocol):
    """The encoding of one image or of one window of sound, computed step by step.

    Attributes:
        rows: the embeddings, set when `advance` has returned True. See `ImageEncoder.encode`.
    """

    @property
    def rows(self) -> object: ...

    def advance(self) -> bool:
        """Compute the next part of the encoding. Return True if the encoding is complete."""
        ...


class ThreadedEncoder:
    """Encodes images, sound or texts in the compute thread. Implements `ImageEncoder` and `InputEncoder`.

    An encoding has several parts. Each part is submitted after the previous one has ended, so a waiting step runs
    first.

    Args:
        begin: begins an encoding. Called in the compute thread.
        thread: the compute thread.
    """

    def __init__(self, begin: Callable[..., Encoding], thread: WorkerThread) -> None:
        self._begin = begin
        self._thread = thread

    async def encode(self, *inputs: object) -> object:
        encoding = await self._thread.run_cancellable(self._begin, *inputs)
        while not await self._thread.run_cancellable(encoding.advance):
            pass
        return encoding.rows


class LaunchedCopy(Protocol):
    """A copy of blocks that was launched on the device. `wait` blocks its thread until the copy is over."""

    def wait(self) -> memoryview: ...


class LaunchesCopies(Protocol):
    """Starts copies of blocks, and does not wait for them. See BlockCopies."""

    @property
    def layout(self) -> KVLayout: ...

    def pinned(self, byte_count: int, content: memoryview | None = None) -> Any:
        """Return host memory for a copy. Any thread may call it.

        Args:
            byte_count: size of the memory.
            content: bytes to copy into the memory. None leaves it undefined.
        """
        ...

    def begin_fetch(self, layers: range, blocks: Sequence[int], host: Any) -> LaunchedCopy: ...

    def begin_store(self, layers: range, blocks: Sequence[int], host: Any, last_token_count: int) -> LaunchedCopy: ...


COPIES_MAX = 16  # Threads that prepare copies or wait for copies. They use no CPU while they wait.


class ThreadedCopies:
    """Copies blocks of a device, see BlockCopies.

    The compute thread only launches a copy. Other threads prepare its host memory, and wait for its end. Steps and
    copies are launched by one thread, and the device executes a store before the steps that are launched after it. So a
    block that is freed before `is_wanted` is called gets no late write, and no lock is needed.

    Args:
        pages: launches the copies.
        compute: the compute thread.
    """

    def __init__(self, pages: LaunchesCopies, compute: WorkerThread) -> None:
        self._pages = pages
        self._compute = compute
        self._block_bytes = pages.layout.block_size * pages.layout.token_bytes
        self._beside = trio.CapacityLimiter(COPIES_MAX)

    async def fetch(self, layers: range, blocks: Sequence[BlockIndex]) -> memoryview:
        host = await self._run(self._pages.pinned, len(layers) * len(blocks) * self._block_bytes)
        copy = await self._compute.run(self._pages.begin_fetch, layers, blocks, host)
        found: memoryview = await self._run(copy.wait)
        return found

    async def store(
        self,
        layers: range,
        blocks: Sequence[BlockIndex],
        content: memoryview,
        last_token_count: int,
        is_wanted: Callable[[], bool],
    ) -> bool:
        host = await self._run(self._pages.pinned, len(content), content)
        begin = partial(self._pages.begin_store, layers, blocks, host, last_token_count)
        copy = await self._compute.run(lambda: begin() if is_wanted() else None)
        if copy is None:
            return False
        await self._run(copy.wait)
        return True

    async def _run(self, call: Callable[..., Any], *arguments: Any) -> Any:
        # A copy keeps its memory, so a cancelled caller may abandon the thread.
        return await trio.to_thread.run_sync(call, *arguments, limiter=self._beside, abandon_on_cancel=True)
