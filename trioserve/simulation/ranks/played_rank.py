"""One rank, played: it obeys orders as a real one does, one after another, and hears meanwhile what a real one hears.
What happens to it at which moment its group says."""

from __future__ import annotations

import ctypes
import zlib
from array import array
from collections import deque
from collections.abc import Coroutine
from typing import Any, Protocol

import msgspec
import trio

from trioserve.contracts.step import IsAbandoned, StepPlan, StepResult
from trioserve.ranks.frames import FrameReader, framed
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
)
from trioserve.ranks.plan_wire import plan_from_wire
from trioserve.simulation.ranks.memory_process import PEER_HOST, MemoryConnection, MemoryProcess
from trioserve.simulation.ranks.plan import BLOCK_SIZE, Harm, Moment, RanksStage
from trioserve.simulation.ranks.wire_executor import LookingModel, WireExecutor

__all__ = ["CAUSE", "END_CODE", "CameApart", "PlayedGroup", "PlayedRank", "Refused"]

END_CODE = 3
STEPS_KEPT = 4
LOADING_SECONDS = 0.05
CAUSE = "this is what broke"


class CameApart(Exception):
    """Another rank has gone, and this one has noticed."""


class Refused(Exception):
    """It cannot load, and says so."""


class PlayedGroup(Protocol):
    """What a rank asks of the others."""

    stage: RanksStage

    async def come_to(self, rank: PlayedRank, moment: Moment) -> None:
        """Whatever happens to it there happens. Raises what it breaks with."""

    async def meet(self, rank: PlayedRank, serial: int, view: bool) -> bool:
        """Waits for all ranks. Returns whether any of them has heard that the step is abandoned. Raises CameApart."""

    def take_step(self, rank: PlayedRank, plan: StepPlan) -> None:
        """It begins with this one."""

    def take_digest(self, rank: PlayedRank, serial: int, digest: int | None) -> None:
        """It says that it has chosen this."""

    def hear_abandoned(self, rank: PlayedRank, serial: int) -> None:
        """It was told of that."""

    def note_end(self) -> None:
        """It has gone, which others may notice."""

    def refusal(self, rank: PlayedRank, path: str) -> str | None:
        """Why it cannot have the weights that lie there; None: it can."""

    def take_weights(self, rank: PlayedRank, path: str) -> None:
        """It is about to write these."""

    def check(self) -> None:
        """Whatever has to hold at any moment."""


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
        assert self.filled.is_set(), "a rank computes with masks that it does not have"


class _Step:
    def __init__(self, run: Run) -> None:
        wire = run.plan
        self.serial = run.serial
        self.is_abandoned = IsAbandoned(1)
        self.masks = _Masks(wire.mask_rows, wire.mask_words) if wire.mask_rows else None
        self.plan: StepPlan = plan_from_wire(wire, self.masks)


class PlayedRank:
    """process: None: it is on another machine. stray: what it says next is something else than the others have.
    is_over: it does nothing any more. weights: where those were that it has; None: those that it was loaded with, or
    some that are being written."""

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
        self._looked: tuple[int, str] | None = None  # at what, and where that was
        self.doing = "while it loaded"
        self._scope = trio.CancelScope()
        self._claims_left = stage.claim_count
        self._steps: deque[_Step] = deque(maxlen=STEPS_KEPT)
        self._has_orders, self._orders = trio.Event(), deque[Order | _Step]()

    # --- how it ends ---

    async def run(self) -> None:
        """Until it ends, or does nothing any more."""
        with self._scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._read)
                await self._faulting(self._work(nursery))

    def stop(self) -> None:
        """It does nothing any more."""
        self.is_over = True
        self._scope.cancel()

    async def end(self, how: str | None) -> None:
        """It ends: how, as the kernel says of a process; the server sees it when that comes through. None: by
        SIGKILL."""
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
        self.connection.say(framed(b"\xc1"))

    # --- what it hears ---

    async def _read(self) -> None:
        reader = FrameReader()
        while received := await self.connection.take():
            for message in reader.feed(received):
                self._hear(decode_order(message))
            self._group.check()
        self.stop()  # with its server

    def _hear(self, order: Order) -> None:
        if isinstance(order, Ping):
            self._say(Pong(order.serial))
        elif isinstance(order, Abandon | Masks):
            if isinstance(order, Abandon):
                self._group.hear_abandoned(self, order.serial)
            for step in self._steps:
                if step.serial == order.serial:
                    self._tell(step, order)
        else:
            if isinstance(order, Run):
                self._steps.append(_Step(order))
            self._orders.append(self._steps[-1] if isinstance(order, Run) else order)
            self._has_orders.set()

    def _tell(self, step: _Step, order: Abandon | Masks) -> None:
        if isinstance(order, Abandon):
            step.is_abandoned.leave()
        else:
            assert step.masks is not None, f"step {step.plan.step_index} has no masks, and gets some"
            step.masks.fill(order.bits)

    def _say(self, report: Report) -> None:
        self.connection.say(framed(encode(report)))

    # --- what it does ---

    async def _work(self, nursery: trio.Nursery) -> None:
        while True:
            while not self._orders:
                self._has_orders = trio.Event()
                await self._has_orders.wait()
            order = self._orders.popleft()
            if isinstance(order, CheckWeights):
                nursery.start_soon(self._faulting, self._look(order))  # beside the steps
            else:
                await self._obey(order)

    async def _faulting(self, doing: Coroutine[Any, Any, None]) -> None:
        try:
            await doing
        except (RuntimeError, Refused, CameApart) as error:
            kind = {Refused: "ModelLoadError", CameApart: "RuntimeError"}.get(type(error), "KeyError")
            self._say(Fault(self.doing, kind, str(error)))
            with trio.CancelScope(shield=True):
                await self.end(f"ended with code {END_CODE}")

    async def _obey(self, order: Order | _Step) -> None:
        come_to = self._group.come_to
        if isinstance(order, _Step):
            await self._compute(order)
        elif isinstance(order, RankSetup):
            await self._load(order)
        elif isinstance(order, Allocate):
            await come_to(self, "allocate")
            stage = self._group.stage
            assert order.block_count == stage.block_count, f"rank {self.number} makes {order.block_count} blocks"
            model = LookingModel(vocab_size=stage.vocab_size)
            self.executor = WireExecutor(block_count=order.block_count, block_size=BLOCK_SIZE, model=model)
            self._say(Answer(order.serial))
        elif isinstance(order, WarmUp):
            await come_to(self, "warm_up")
            self.doing = "at work"
            self._say(Answer(order.serial))
        elif isinstance(order, Claim):
            await come_to(self, "claim")
            self._claims_left -= self._claims_left > 0
            self._say(Answer(order.serial, self._claims_left > 0))
        elif isinstance(order, AddAdapter):
            await come_to(self, "adapter")
            self._say(Answer(order.serial, self._added(order)))
        elif isinstance(order, ConfirmWeights):
            self._say(Answer(order.serial))
        elif isinstance(order, WriteWeights):
            await self._write(order)
        else:
            assert isinstance(order, RemoveAdapter), f"no order: {order}"
            await come_to(self, "adapter")
            assert self.executor is not None
            self.executor.adapters.discard(order.id)
            self._say(Answer(order.serial))

    async def _load(self, setup: RankSetup) -> None:
        assert setup.rank == self.number, f"rank {self.number} is told that it is {setup.rank}"
        await self._group.come_to(self, "setup")
        for done in range(3):
            await trio.sleep(LOADING_SECONDS / 3)
            self._say(Progress("", done + 1, 3))
        stage = self._group.stage
        spare = 0 if self.number == stage.rank_count - 1 else 1 + self.number  # the last has the least room
        self._say(
            Loaded(
                device="cpu",
                dtype="float32",
                kv_dtype="float32",
                computed_by="a simulation",
                arithmetic="exact",
                is_batch_invariant=True,
                launches=False,
                block_count=stage.block_count + spare,
                state_slot_count=0,
                snapshot_slot_count=0,
                block_bytes=100,
                step_weight_bytes=1,
                token_flops=1,
                attended_token_flops=1,
            )
        )

    async def _look(self, order: CheckWeights) -> None:
        path = order.path
        assert path is not None, f"rank {self.number} is to find weights nowhere"
        await self._group.come_to(self, "look")
        why = self._group.refusal(self, path)
        if why is None:
            self._looked = order.offer, path
        self._say(Answer(order.serial, None if why is None else Refusal(why, "model_path")))

    async def _write(self, order: WriteWeights) -> None:
        assert self._looked is not None, f"rank {self.number} is to write what it has not looked at"
        offer, path = self._looked
        assert offer == order.offer, f"rank {self.number} is to write {order.offer}, and has looked at {offer}"
        self._group.take_weights(self, path)
        self.weights = None
        await self._group.come_to(self, "write")
        await trio.sleep(self._group.stage.write_seconds)
        self.weights = path
        self._say(Answer(order.serial))

    def _added(self, order: AddAdapter) -> str | None:
        executor = self.executor
        assert executor is not None
        assert order.id not in executor.adapters, f"adapter {order.id} is there already"
        for matrix in order.matrices:
            content = order.digest.encode()
            assert (matrix.a, matrix.b) == (content, content[::-1]), f"adapter {order.id} has come as something else"
        if self.number == 0 and len(executor.adapters) == self._group.stage.adapters_max:
            return "no room is left"
        executor.adapters.add(order.id)
        return None

    async def _compute(self, step: _Step) -> None:
        group, stage, plan, executor = self._group, self._group.stage, step.plan, self.executor
        assert executor is not None
        group.take_step(self, plan)
        await group.come_to(self, "step")
        await trio.sleep(stage.step_seconds[plan.step_index % len(stage.step_seconds)])
        is_abandoned = await group.meet(self, step.serial, step.is_abandoned())
        if step.masks is not None and not is_abandoned:
            await group.come_to(self, "masks")
            await step.masks.filled.wait()
        agreed = IsAbandoned(0 if is_abandoned else 1)
        result = executor.execute(plan, agreed)
        await group.come_to(self, "met")
        digest = _digest(result)
        if digest is not None and self.stray is not None:
            digest += 1
        group.take_digest(self, step.serial, digest)
        response = result if self.number == 0 else None
        self._say(Answer(step.serial, None, response, digest))
        await group.come_to(self, "answered")


def _digest(result: StepResult | None) -> int | None:
    return None if result is None else zlib.crc32(msgspec.msgpack.encode(result.token_ids))
