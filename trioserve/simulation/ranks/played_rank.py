"""A simulated rank. Like a real rank, it executes one order at a time, and receives further orders meanwhile.

The rank's group decides which fault the simulation injects into the rank, and when.

The rank's connection is in memory, and its process is an object. Its model computes from the message that the rank
receives, and uses all fields that a real model uses. So missing or wrong fields give different tokens.
"""

from __future__ import annotations

import ctypes
import errno
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Protocol

import msgspec
import trio

from trioserve.contracts.events import TokenLogprob
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import CHOOSING_FIELDS
from trioserve.contracts.step import IsAbandoned, ScheduledChunk, StepPlan, StepResult
from trioserve.ranks.link import KILLED
from trioserve.ranks.messages import (
    Abandon,
    AddAdapter,
    Allocate,
    Answer,
    CheckWeights,
    Claim,
    ConfirmWeights,
    Fault,
    FrameReader,
    Loaded,
    Masks,
    Order,
    Ping,
    Pong,
    Progress,
    RankSetup,
    Refusal,
    RemoveAdapter,
    Report,
    Run,
    WarmUp,
    WriteWeights,
    decode_order,
    encode,
    framed,
    plan_from_wire,
)
from trioserve.simulation.ranks.plan import BLOCK_SIZE, Harm, Moment, RanksStage
from trioserve.testing.fake_executor import FakeExecutor, FakeModel

__all__ = [
    "CAUSE",
    "END_CODE",
    "PEER_HOST",
    "CameApart",
    "LookingModel",
    "MemoryConnection",
    "MemoryProcess",
    "PlayedGroup",
    "PlayedRank",
    "Refused",
    "WireExecutor",
]


NUMBERS = [name for name in CHOOSING_FIELDS if name not in ("min_tokens", "logit_bias", "logprobs", "prompt_logprobs")]
"""Parameters that change the probabilities of all tokens."""


class LookingModel(FakeModel):
    """A model whose next token depends on every sampling parameter and, with penalties, on the tokens so far."""

    def next_token_id(self, request: EngineRequest, tokens: Sequence[int], digest: int) -> int:
        sampling = request.sampling
        looked_at: Sequence[int] = ()
        if sampling.repetition_penalty != 1.0:
            looked_at = tokens
        elif sampling.presence_penalty or sampling.frequency_penalty:
            looked_at = tokens[len(request.prompt_token_ids) :]
        numbers = [
            *(float(getattr(sampling, name)) for name in NUMBERS),
            *(float(number) for entry in sorted((sampling.logit_bias or {}).items()) for number in entry),
        ]
        asked = zlib.crc32(repr((numbers, list(looked_at))).encode())
        return super().next_token_id(request, tokens, digest ^ asked)


class WireExecutor(FakeExecutor):
    """An executor of a rank. It has no tokens from before a chunk, so it cannot check the content of its slots."""

    def _check_plan(self, plan: StepPlan, chunks: Iterable[ScheduledChunk]) -> None:
        assert plan.step_index == self.plans, f"step {plan.step_index} comes after {self.plans} steps"
        assert plan.chunks, "a step has no chunks"
        assert plan.token_count == sum(chunk.row_count for chunk in plan.chunks)
        for chunk in chunks:
            end = chunk.start + chunk.row_count
            block_count = -(-end // self.block_size)
            assert len(chunk.block_table) == block_count, f"{chunk.request.id}: {len(chunk.block_table)} blocks"
            assert len(chunk.row_tokens) == chunk.row_count, f"{chunk.request.id}: tokens are missing"

    def _read(self, chunk: ScheduledChunk) -> list[int]:
        digests: list[int] = []
        for position in range(chunk.start + chunk.row_count):
            found = self._slots[self._slot(chunk, position)]
            assert found is not None, f"{chunk.request.id}: position {position} was never written"
            digests.append(found[0])
        return digests

    def _prompt_logprobs(self, chunk: ScheduledChunk, digests: list[int], top_count: int) -> tuple[TokenLogprob, ...]:
        prompt = chunk.request.prompt_token_ids
        return tuple(
            self.model.logprob(prompt[position], digests[position - 1], top_count)
            for position in range(chunk.start + 1, min(chunk.start + chunk.count, len(prompt) - 1) + 1)
        )


PEER_HOST = "10.0.0.2"


class MemoryConnection:
    """A connection in memory between the server and a rank. One object has the methods of both ends.

    Args:
        pipe_bytes: capacity of the connection to the rank, in bytes.
        piece_bytes: maximum number of bytes that the server receives at a time.

    Attributes:
        is_closed: True if the server has closed the connection.
    """

    def __init__(self, pipe_bytes: int, piece_bytes: int) -> None:
        self._pipe_bytes, self._piece_bytes = pipe_bytes, piece_bytes
        self._to_rank, self._from_rank = bytearray(), bytearray()
        self._is_ended = False
        self.is_closed = False
        self.peer_host = PEER_HOST
        self._changed = trio.Event()

    # --- Methods of the server's end ---

    async def wait_readable(self) -> None:
        await self._until(lambda: bool(self._from_rank) or self._is_ended)

    async def wait_writable(self) -> None:
        await self._until(lambda: len(self._to_rank) < self._pipe_bytes or self._is_ended)

    def receive(self, byte_count_max: int) -> bytes:
        assert not self.is_closed, "the server reads from a connection that it has closed"
        if self._from_rank:
            piece = bytes(self._from_rank[: min(byte_count_max, self._piece_bytes)])
            del self._from_rank[: len(piece)]
            return piece
        if not self._is_ended:
            raise BlockingIOError
        if self._to_rank:  # The kernel reports a reset too if the rank has ended with unread bytes.
            raise OSError(errno.ECONNRESET, "Connection reset by peer")
        return b""

    def send(self, content: bytes | bytearray) -> int:
        assert not self.is_closed, "the server writes to a connection that it has closed"
        if self._is_ended:
            raise OSError(errno.EPIPE, "Broken pipe")
        room = self._pipe_bytes - len(self._to_rank)
        if room <= 0:
            raise BlockingIOError
        self._to_rank += content[:room]
        self._note()
        return min(room, len(content))

    def close(self) -> None:
        self.is_closed = True
        self._note()

    # --- Methods of the rank's end ---

    async def take(self) -> bytes:
        """Wait for bytes from the server.

        Returns:
            All received bytes, or b"" after the server has closed the connection.
        """
        await self._until(lambda: bool(self._to_rank) or self.is_closed)
        taken = bytes(self._to_rank)
        self._to_rank.clear()
        self._note()
        return taken

    def send_to_server(self, content: bytes) -> None:
        self._from_rank += content
        self._note()

    def end(self) -> None:
        """Close the rank's end, as the kernel does when a process ends."""
        self._is_ended = True
        self._note()

    async def _until(self, holds: Callable[[], bool]) -> None:
        await trio.lowlevel.checkpoint()
        while not holds():
            await self._changed.wait()

    def _note(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


class MemoryProcess:
    """The process of a simulated rank, with the interface of Process.

    Args:
        pid: the process id.
        on_kill: ends the simulated rank.
    """

    def __init__(self, pid: int, on_kill: Callable[[], None]) -> None:
        self.pid = pid
        self._on_kill = on_kill
        self._how: str | None = None
        self._ended = trio.Event()

    def kill(self) -> None:
        if self._how is None:
            self.end(f"{KILLED} by SIGKILL")
        self._on_kill()

    async def exited(self) -> None:
        await self._ended.wait()

    def how_ended(self) -> str | None:
        return self._how

    def close(self) -> None:
        self.kill()

    def end(self, how: str) -> None:
        """Record that the process has ended.

        Args:
            how: how the process ended, in the kernel's words.
        """
        self._how = self._how or how
        self._ended.set()


END_CODE = 3
STEPS_KEPT = 4
LOADING_SECONDS = 0.05
CAUSE = "the simulation broke this rank"


class CameApart(Exception):
    """Raised in a rank that notices the end of another rank."""


class Refused(Exception):
    """Raised in a rank that cannot load the model."""


class PlayedGroup(Protocol):
    """The interface of a simulated group for its ranks."""

    stage: RanksStage

    async def reach(self, rank: PlayedRank, moment: Moment) -> None:
        """Inject the fault that the plan has for a rank at this moment of the rank's work.

        Args:
            moment: the moment that the rank has reached.

        Raises:
            Exception: the error that breaks the rank.
        """

    async def wait_for_step(self, rank: PlayedRank, serial: int, view: bool) -> bool:
        """Wait until all ranks have arrived at a step.

        Args:
            serial: serial of the step.
            view: True if this rank knows that the step is abandoned.

        Returns:
            True if any rank knows that the step is abandoned.

        Raises:
            CameApart: a rank is gone.
        """

    def record_step(self, rank: PlayedRank, plan: StepPlan) -> None:
        """Record that a rank begins a step.

        Args:
            plan: the step.
        """

    def record_digest(self, rank: PlayedRank, serial: int, digest: int | None) -> None:
        """Record which tokens a rank has chosen.

        Args:
            serial: serial of the step.
            digest: digest of the tokens, or None if the step was abandoned.
        """

    def note_abandoned(self, rank: PlayedRank, serial: int) -> None:
        """Record that a rank was notified of an abandoned step.

        Args:
            serial: serial of the step.
        """

    def note_end(self) -> None:
        """Record that a rank has ended. Other ranks may notice it later."""

    def refusal(self, rank: PlayedRank, path: str) -> str | None:
        """Return the reason why a rank refuses weights.

        Args:
            path: path of the weights.

        Returns:
            The error text, or None if the weights fit the rank.
        """

    def record_weights(self, rank: PlayedRank, path: str) -> None:
        """Record that a rank is about to write weights.

        Args:
            path: path of the weights.
        """

    def check(self) -> None:
        """Check the rules that must hold at any time."""


class _Masks:
    def __init__(self, row_count: int, words_per_row: int) -> None:
        self.row_count, self.words_per_row = row_count, words_per_row
        self._words = array("I", bytes(4 * row_count * words_per_row))
        self._flag = ctypes.c_int(0)
        self.filled = trio.Event()
        self.address, _ = self._words.buffer_info()
        self.filled_address = ctypes.addressof(self._flag)

    def fill(self, bits: bytes) -> None:
        ctypes.memmove(self.address, bits, 4 * len(self._words))
        self._flag.value = 1
        self.filled.set()

    def wait(self) -> None:
        assert self.filled.is_set(), "a rank computes with masks that have not arrived"


class _Step:
    def __init__(self, run: Run) -> None:
        wire = run.plan
        self.serial = run.serial
        self.is_abandoned = IsAbandoned(1)
        self.masks = _Masks(wire.mask_rows, wire.mask_words) if wire.mask_rows else None
        self.plan: StepPlan = plan_from_wire(wire, self.masks)


class PlayedRank:
    """A simulated rank.

    Args:
        group: the group of all ranks.
        number: number of the rank.
        pid: process id of the rank. None: the rank is on another machine.

    Attributes:
        process: the rank's process. None: the rank is on another machine.
        stray: harm that changes the rank's next digest, or None.
        is_over: True if the rank has stopped working for good.
        weights: path of the rank's weights. None: the weights from the start, or weights that are being written.
    """

    def __init__(self, group: PlayedGroup, number: int, pid: int | None) -> None:
        stage = group.stage
        self._group = group
        self.number = number
        self.connection = MemoryConnection(stage.pipe_bytes, stage.piece_bytes)
        self.process = None if pid is None else MemoryProcess(pid, self._vanish)
        self.name = f"rank {number} (on {PEER_HOST})" if pid is None else f"rank {number} (process {pid})"
        self.executor: WireExecutor | None = None
        self.stray: Harm | None = None
        self.is_over = False
        self.weights: str | None = None
        self._checked: tuple[int, str] | None = None  # serial and path of the weights that this rank has checked
        self.doing = "while it loaded"
        self._scope = trio.CancelScope()
        self._claims_left = stage.claim_count
        self._steps: deque[_Step] = deque(maxlen=STEPS_KEPT)
        self._has_orders, self._orders = trio.Event(), deque[Order | _Step]()

    # --- Start and end ---

    async def run(self) -> None:
        """Run until the rank ends or is stopped."""
        with self._scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._read)
                await self._faulting(self._work(nursery))

    def stop(self) -> None:
        """Stop all work of the rank. Its process and its connection stay."""
        self.is_over = True
        self._scope.cancel()

    async def end(self, how: str | None) -> None:
        """End the rank. The server notices the end of the connection and of the process later.

        Args:
            how: how the process ended, in the kernel's words, or None for SIGKILL.
        """
        self.stop()
        self._group.note_end()
        seconds = self._group.stage.ending_seconds
        await trio.sleep(seconds)
        self.connection.end()
        await trio.sleep(seconds)
        if self.process is not None:
            self.process.end(how or f"{KILLED} by SIGKILL")

    def _vanish(self) -> None:
        self.stop()
        self.connection.end()

    def garble(self) -> None:
        self.connection.send_to_server(framed(b"\xc1"))

    # --- Received messages ---

    async def _read(self) -> None:
        reader = FrameReader()
        while received := await self.connection.take():
            for message in reader.feed(received):
                self._receive(decode_order(message))
            self._group.check()
        self.stop()  # A rank ends when its server has closed the connection.

    def _receive(self, order: Order) -> None:
        if isinstance(order, Ping):
            self._send(Pong(order.serial))
        elif isinstance(order, Abandon | Masks):
            if isinstance(order, Abandon):
                self._group.note_abandoned(self, order.serial)
            for step in self._steps:
                if step.serial == order.serial:
                    self._apply(step, order)
        else:
            if isinstance(order, Run):
                self._steps.append(_Step(order))
            self._orders.append(self._steps[-1] if isinstance(order, Run) else order)
            self._has_orders.set()

    def _apply(self, step: _Step, order: Abandon | Masks) -> None:
        if isinstance(order, Abandon):
            step.is_abandoned.leave()
        else:
            assert step.masks is not None, f"step {step.plan.step_index} has no masks, but the rank gets some"
            step.masks.fill(order.bits)

    def _send(self, report: Report) -> None:
        self.connection.send_to_server(framed(encode(report)))

    # --- Execution of orders ---

    async def _work(self, nursery: trio.Nursery) -> None:
        while True:
            while not self._orders:
                self._has_orders = trio.Event()
                await self._has_orders.wait()
            order = self._orders.popleft()
            if isinstance(order, CheckWeights):
                nursery.start_soon(self._faulting, self._check_weights(order))  # runs concurrently with steps
            else:
                await self._obey(order)

    async def _faulting(self, doing: Coroutine[Any, Any, None]) -> None:
        try:
            await doing
        except (RuntimeError, Refused, CameApart) as error:
            kind = {Refused: "ModelLoadError", CameApart: "RuntimeError"}.get(type(error), "KeyError")
            self._send(Fault(self.doing, kind, str(error)))
            with trio.CancelScope(shield=True):
                await self.end(f"ended with code {END_CODE}")

    async def _obey(self, order: Order | _Step) -> None:
        reach = self._group.reach
        if isinstance(order, _Step):
            await self._compute(order)
        elif isinstance(order, RankSetup):
            await self._load(order)
        elif isinstance(order, Allocate):
            await reach(self, "allocate")
            stage = self._group.stage
            assert order.block_count == stage.block_count, f"rank {self.number} makes {order.block_count} blocks"
            model = LookingModel(vocab_size=stage.vocab_size)
            self.executor = WireExecutor(block_count=order.block_count, block_size=BLOCK_SIZE, model=model)
            self._send(Answer(order.serial))
        elif isinstance(order, WarmUp):
            await reach(self, "warm_up")
            self.doing = "at work"
            self._send(Answer(order.serial))
        elif isinstance(order, Claim):
            await reach(self, "claim")
            self._claims_left -= self._claims_left > 0
            self._send(Answer(order.serial, self._claims_left > 0))
        elif isinstance(order, AddAdapter):
            await reach(self, "adapter")
            self._send(Answer(order.serial, self._added(order)))
        elif isinstance(order, ConfirmWeights):
            self._send(Answer(order.serial))
        elif isinstance(order, WriteWeights):
            await self._write(order)
        else:
            assert isinstance(order, RemoveAdapter), f"no order: {order}"
            await reach(self, "adapter")
            assert self.executor is not None
            self.executor.adapters.discard(order.id)
            self._send(Answer(order.serial))

    async def _load(self, setup: RankSetup) -> None:
        assert setup.rank == self.number, f"rank {self.number} got the setup of rank {setup.rank}"
        await self._group.reach(self, "setup")
        for done in range(3):
            await trio.sleep(LOADING_SECONDS / 3)
            self._send(Progress("", done + 1, 3))
        stage = self._group.stage
        spare = 0 if self.number == stage.rank_count - 1 else 1 + self.number  # The last rank has the least memory.
        self._send(
            Loaded(
                device="cpu",
                dtype="float32",
                kv_dtype="float32",
                computed_by="a simulation",
                arithmetic="exact",
                is_batch_invariant=True,
                launches=False,
                max_num_seqs=64,
                step_tokens_max=512,
                block_count=stage.block_count + spare,
                state_slot_count=0,
                snapshot_slot_count=0,
                block_bytes=100,
                step_weight_bytes=1,
                token_flops=1,
                attended_token_flops=1,
            )
        )

    async def _check_weights(self, order: CheckWeights) -> None:
        path = order.path
        assert path is not None, f"rank {self.number} must check weights, but has no path"
        await self._group.reach(self, "look")
        why = self._group.refusal(self, path)
        if why is None:
            self._checked = order.offer, path
        self._send(Answer(order.serial, None if why is None else Refusal(why, "model_path")))

    async def _write(self, order: WriteWeights) -> None:
        assert self._checked is not None, f"rank {self.number} must write weights that it has not checked"
        offer, path = self._checked
        assert offer == order.offer, f"rank {self.number} must write {order.offer}, but has checked {offer}"
        self._group.record_weights(self, path)
        self.weights = None
        await self._group.reach(self, "write")
        await trio.sleep(self._group.stage.write_seconds)
        self.weights = path
        self._send(Answer(order.serial))

    def _added(self, order: AddAdapter) -> str | None:
        executor = self.executor
        assert executor is not None
        assert order.id not in executor.adapters, f"adapter {order.id} is already loaded"
        for matrix in order.matrices:
            content = order.digest.encode()
            assert (matrix.a, matrix.b) == (content, content[::-1]), f"adapter {order.id} was loaded with other weights"
        if self.number == 0 and len(executor.adapters) == self._group.stage.adapters_max:
            return "no memory is left"
        executor.adapters.add(order.id)
        return None

    async def _compute(self, step: _Step) -> None:
        group, stage, plan, executor = self._group, self._group.stage, step.plan, self.executor
        assert executor is not None
        group.record_step(self, plan)
        await group.reach(self, "step")
        await trio.sleep(stage.step_seconds[plan.step_index % len(stage.step_seconds)])
        is_abandoned = await group.wait_for_step(self, step.serial, step.is_abandoned())
        if step.masks is not None and not is_abandoned:
            await group.reach(self, "masks")
            await step.masks.filled.wait()
        agreed = IsAbandoned(0 if is_abandoned else 1)
        result = executor.execute(plan, agreed)
        await group.reach(self, "met")
        digest = _digest(result)
        if digest is not None and self.stray is not None:
            digest += 1
        group.record_digest(self, step.serial, digest)
        response = result if self.number == 0 else None
        self._send(Answer(step.serial, None, response, digest))
        await group.reach(self, "answered")


def _digest(result: StepResult | None) -> int | None:
    return None if result is None else zlib.crc32(msgspec.msgpack.encode(result.token_ids))
