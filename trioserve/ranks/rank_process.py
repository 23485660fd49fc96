"""The process of one rank: `python -m trioserve.ranks.rank_process FD PLACE`.

FD is the file descriptor of the connection to the server, and PLACE is a RankPlace in JSON. The process executes
orders, and ends when the connection ends.

One thread reads orders while another thread computes. So the process notices during a step that the step is abandoned,
or that the server has ended. No state of a request is kept between steps.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from trioserve.contracts.errors import TrioserveError
from trioserve.contracts.step import IsAbandoned, StepPlan, StepResult
from trioserve.model.device import DeviceType, take_gpu, torch_now
from trioserve.model.drafts.checkpoints import draft_source
from trioserve.model.kv_storage import KVMemory
from trioserve.model.loading.checkpoint import Checkpoint, open_checkpoint
from trioserve.model.loading.stored_tensor import AdapterMatrix, AdapterWeights, StoredTensor
from trioserve.model.number_formats import values_of
from trioserve.model.parallel.collectives import Collectives, SharedMemoryCollectives
from trioserve.model.parallel.rank_checkpoint import RankCheckpoint, rank_adapter
from trioserve.model.parallel.stages import StageCheckpoint, stage_adapter
from trioserve.model.weight_replacement import DividedModel
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
    Log,
    Masks,
    Order,
    Ping,
    Pong,
    Progress,
    PutWeights,
    RankPlace,
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
from trioserve.ranks.offered_weights import OfferedWeights
from trioserve.ranks.stage_sockets import StageListener, StageSockets, connect_stage
from trioserve_kernels.native import NoNativeKernels, load_library

if TYPE_CHECKING:
    from trioserve.model.drafts.checkpoints import DraftSource
    from trioserve.model.runner import ModelRunner

__all__ = ["main"]

RECEIVE_BYTES = 1 << 20
STEPS_BEGUN_MAX = 2  # LaunchingExecutor has the same limit.
# Time limit for connections of torch.distributed. The server waits for a much shorter time, and ends a rank that hangs.
MEETING_SECONDS_MAX = 1800.0
ENDED_WITH_SERVER, FAILED = 0, 1
PR_SET_PDEATHSIG = 1


class _Connection:
    """The connection to the server. Any thread may send reports."""

    def __init__(self, server: socket.socket) -> None:
        self._server = server
        self._lock = threading.Lock()
        self._reader = FrameReader()

    def send_report(self, report: Report) -> None:
        message = framed(encode(report))
        with self._lock, contextlib.suppress(OSError):  # The reading thread handles the end of the connection.
            self._server.sendall(message)

    def orders(self) -> Iterator[Order]:
        """Yield orders until the connection ends."""
        while received := self._received():
            yield from map(decode_order, self._reader.feed(received))

    def _received(self) -> bytes:
        try:
            return self._server.recv(RECEIVE_BYTES)
        except OSError:
            return b""  # The connection was reset, because the server ended before it had read all bytes.


class _WireMasks:
    """The TokenMasks of a step. They arrive after the plan of the step."""

    def __init__(self, row_count: int, words_per_row: int) -> None:
        self.row_count, self.words_per_row = row_count, words_per_row
        self._bits = np.zeros((row_count, words_per_row), dtype=np.uint32)
        self._filled = ctypes.c_int(0)
        self._is_filled = threading.Event()
        self.address = int(self._bits.ctypes.data)
        self.filled_address = ctypes.addressof(self._filled)

    def fill(self, bits: bytes) -> None:
        self._bits[:] = np.frombuffer(bits, dtype=np.uint32).reshape(self._bits.shape)
        self._filled.value = 1
        self._is_filled.set()

    def wait(self) -> None:
        self._is_filled.wait()


class _Step:
    """A step that the server ordered. The reading thread and the computing thread use this object."""

    def __init__(self, run: Run) -> None:
        wire = run.plan
        self.serial = run.serial
        self.is_abandoned = IsAbandoned(1)
        self.masks = _WireMasks(wire.mask_rows, wire.mask_words) if wire.mask_rows else None
        self.plan: StepPlan = plan_from_wire(wire, self.masks)


class _ServerLog(logging.Handler):
    """Sends log records to the server, which logs them."""

    def __init__(self, connection: _Connection) -> None:
        super().__init__()
        self._connection = connection

    def emit(self, record: logging.LogRecord) -> None:
        self._connection.send_report(Log(record.levelno, record.name, record.getMessage()))


class _Rank:
    """Loads the model and executes orders, in the calling thread."""

    def __init__(self, setup: RankSetup, place: RankPlace, connection: _Connection) -> None:
        self._setup, self._place = setup, place
        self._connection = connection
        self._collectives: Collectives | None = None
        self._runner: ModelRunner | None = None
        self._checkpoint: RankCheckpoint | None = None
        self._stage: StageCheckpoint | None = None
        self._handover: StageSockets | None = None
        self._listener: StageListener | None = None  # None after the peer of the previous stage has connected
        self._offered: OfferedWeights | None = None
        self._begun: deque[tuple[_Step, Callable[[], StepResult | None]]] = deque()

    def load(self) -> None:
        from trioserve.model.runner import ModelRunner

        setup, send_report = self._setup, self._connection.send_report
        whole = open_checkpoint(
            Path(self._place.path or setup.path),
            context_tokens=setup.context_tokens,
            uses_further_layers=setup.uses_further_layers,
        )
        of_stage: Checkpoint = whole
        if setup.stage_count > 1:
            self._stage = of_stage = StageCheckpoint(whole, setup.stage, setup.stage_count)
            self._handover = StageSockets(*map(_socket_of, (self._place.before, self._place.behind)))
            if setup.stage > 0 and self._place.before is None:
                self._listener = StageListener()
        checkpoint = RankCheckpoint(
            of_stage, setup.rank_in_stage, setup.stage_size, expert_parallel=setup.expert_parallel
        )
        settings = take_gpu(setup.settings, self._place.local_rank)
        self._checkpoint = checkpoint
        if setup.stage_size > 1:
            device: DeviceType = "cuda" if settings.device == "cuda" else "cpu"
            self._collectives = _collectives(setup, self._place, device)
        self._runner = runner = ModelRunner.load(
            checkpoint,
            settings,
            draft=self._draft(whole),
            progress=lambda done, total: send_report(Progress("", done, total)),
            on_compile=lambda sentence, seconds: send_report(Progress(sentence, seconds, None)),
            collectives=self._collectives,
            handover=self._handover,
        )
        self._offered = OfferedWeights(runner, DividedModel(whole.config, self._part_of), setup.context_tokens)
        send_report(
            Loaded(
                device=runner.device,
                dtype=runner.dtype,
                kv_dtype=str(runner.kv_dtype),
                computed_by=runner.computed_by,
                arithmetic=runner.arithmetic,
                is_batch_invariant=runner.is_batch_invariant,
                launches=runner.launches,
                max_num_seqs=runner.max_num_seqs,
                step_tokens_max=runner.step_tokens_max,
                block_count=runner.block_count,
                state_slot_count=runner.state_slot_count,
                snapshot_slot_count=runner.snapshot_slot_count,
                block_bytes=runner.kv_cache_bytes // runner.block_count,
                step_weight_bytes=runner.step_weight_bytes,
                token_flops=runner.token_flops,
                attended_token_flops=runner.attended_token_flops,
                layout=None if runner.config.common_kv_entry is None else runner.kv_layout(""),
                kv_heads=checkpoint.kv_heads if runner.config.has_attention else (0, 0),
                stage_port=None if self._listener is None else self._listener.port,
            )
        )

    def _part_of(self, tensors: Iterable[StoredTensor]) -> Iterable[StoredTensor]:
        """Select this rank's shards of the tensors of the whole model."""
        assert self._checkpoint is not None, "weights are replaced after loading"
        return self._checkpoint.part_of(tensors if self._stage is None else self._stage.part_of(tensors))

    def _draft(self, whole: Checkpoint) -> DraftSource | None:
        draft = self._setup.draft
        if draft is None:
            return None
        path = None if draft.path is None else Path(draft.path)
        return draft_source(draft.name, path, whole, draft.settings, draft.token_count)

    def obey(self, orders: queue.SimpleQueue[Order | _Step]) -> None:
        """Execute the next order, or finish a step that was launched on a GPU.

        The call finishes a launched step when no order waits, or when STEPS_BEGUN_MAX steps are running. Every order
        except Run and CheckWeights is executed after the running steps have finished.

        Args:
            orders: queue that the reading thread fills.
        """
        begun, runner = self._begun, self._runner
        assert runner is not None, "orders are executed after loading"
        if begun and (orders.empty() or len(begun) == STEPS_BEGUN_MAX):
            self._finish()
            return
        order = orders.get()
        if isinstance(order, _Step):
            if runner.launches:
                begun.append((order, runner.launch(order.plan, order.is_abandoned)))
            else:
                begun.append((order, functools.partial(runner.execute, order.plan, order.is_abandoned)))
                self._finish()
            return
        if isinstance(order, CheckWeights):
            self._check_weights(order)
            return
        while begun:
            self._finish()
        self._connection.send_report(Answer(order.serial, self._done(order, runner)))  # type: ignore[union-attr]

    def _check_weights(self, order: CheckWeights) -> None:
        """Check new weights in a thread, in parallel to steps."""
        assert self._offered is not None, "weights are replaced after loading"
        send_report = self._connection.send_report

        def end(error: BaseException) -> None:
            traceback.print_exception(error)
            send_report(Fault("while it checked new weights", type(error).__name__, str(error)))
            sys.stderr.flush()
            os._exit(FAILED)

        self._offered.begin_check(order, lambda found: send_report(Answer(order.serial, found)), end)

    def _finish(self) -> None:
        step, finish = self._begun.popleft()
        begun_at, together = time.perf_counter(), self._together()
        result = finish()
        seconds = time.perf_counter() - begun_at, self._together() - together
        setup = self._setup
        if setup.stage < setup.stage_count - 1:
            result = None  # Only the last stage has a result.
        response = result if setup.rank_in_stage == 0 else None
        self._connection.send_report(Answer(step.serial, None, response, _digest(result), seconds))

    def _together(self) -> float:
        return 0.0 if self._collectives is None else self._collectives.seconds

    def _done(self, order: Order, runner: ModelRunner) -> bool | str | Refusal | None:
        if isinstance(order, Allocate):
            self._meet_stages(order)
            if runner.config.state_bytes:
                runner.state_slot_count, runner.snapshot_slot_count = order.state_slot_count, order.snapshot_slot_count
            descriptor = self._place.kv_memory
            runner.allocate_kv(order.block_count, None if descriptor is None else KVMemory(descriptor))
            return None
        if isinstance(order, WarmUp):
            runner.warm_up()
            return None
        if isinstance(order, Claim):
            return runner.claim_memory()
        if isinstance(order, AddAdapter):
            try:
                runner.add_adapter(order.id, self._adapter(order))
            except MemoryError as error:
                return str(error) or "no memory is left for the adapter"
            return None
        if isinstance(order, ConfirmWeights | WriteWeights | PutWeights):
            assert self._offered is not None, "weights are replaced after loading"
            if isinstance(order, ConfirmWeights):
                return self._offered.confirm(order)
            if isinstance(order, WriteWeights):
                self._offered.write(order)
            else:
                self._offered.put(order)
            return None
        assert isinstance(order, RemoveAdapter), f"unknown order: {order}"
        runner.remove_adapter(order.id)
        return None

    def _meet_stages(self, order: Allocate) -> None:
        """Connect to the peers of neighbor stages on other machines. Raise StartupError if that fails."""
        handover, listener, rank = self._handover, self._listener, self._setup.rank
        if handover is None:
            return
        # Each rank connects before it accepts. A connect succeeds although the peer does not accept yet, so ranks do
        # not deadlock.
        address = order.behind[rank] if rank < len(order.behind) else None
        if address is not None:
            handover.take_behind(connect_stage(*address, order.stage_key))
        if listener is not None:
            self._listener = None
            handover.take_before(listener.wait(order.stage_key))

    def _adapter(self, order: AddAdapter) -> AdapterWeights:
        def values(content: bytes, shape: tuple[int, int]) -> Any:
            raw = np.frombuffer(content, dtype=np.uint8)
            return values_of(raw, order.dtype).reshape(shape)

        matrices = {
            wire.name: AdapterMatrix(values(wire.a, wire.a_shape), values(wire.b, wire.b_shape))
            for wire in order.matrices
        }
        whole = AdapterWeights(order.digest, order.dtype, matrices)
        assert self._checkpoint is not None, "adapters are loaded after the model"
        return rank_adapter(whole if self._stage is None else stage_adapter(whole, self._stage), self._checkpoint)


def main(file_descriptor: int, place: RankPlace) -> int:
    """Execute orders until the server ends.

    Args:
        file_descriptor: the connection to the server.
        place: the resources of this rank on its machine.

    Returns:
        The exit code, if the server ended before its first message. Otherwise, the function ends the process and does
        not return.
    """
    _ignore_stop_signals()
    server = socket.socket(fileno=file_descriptor)
    server.set_inheritable(False)
    connection = _Connection(server)
    orders = connection.orders()
    setup = next(orders, None)
    if not isinstance(setup, RankSetup):
        return ENDED_WITH_SERVER
    if place.cpus:
        os.sched_setaffinity(0, place.cpus)  # No other thread runs yet, and later threads inherit the affinity.
    logging.basicConfig(level=setup.log_level, handlers=[_ServerLog(connection)])
    waiting: queue.SimpleQueue[Order | _Step] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(orders, waiting, connection), name="orders", daemon=True).start()
    doing = "while it loaded"
    try:
        rank = _Rank(setup, place, connection)
        rank.load()
        doing = "at work"
        while True:
            rank.obey(waiting)
    except BaseException as error:
        if not isinstance(error, TrioserveError):
            traceback.print_exc()
        connection.send_report(Fault(doing, type(error).__name__, str(error)))
    # `sys.exit` would wait for other threads, which may be blocked.
    sys.stderr.flush()
    os._exit(FAILED)


def _ignore_stop_signals() -> None:
    """Ignore the signals that stop a server, and let the kernel kill this process if the server dies.

    Only the server handles these signals. It closes the connections to its ranks after the last step, and then the
    ranks end. A stopped process (SIGSTOP) does not notice the end of its connection. For this case, PR_SET_PDEATHSIG
    makes the kernel send SIGKILL when the thread that started this process ends. This thread is the server's event
    loop thread.
    """
    with contextlib.suppress(OSError, AttributeError):  # Only Linux has prctl.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _read(orders: Iterator[Order], waiting: queue.SimpleQueue[Order | _Step], connection: _Connection) -> None:
    """Read orders in a separate thread, so that Abandon, Masks and Ping are handled during a step."""
    steps: deque[_Step] = deque(maxlen=2 * STEPS_BEGUN_MAX)  # The server sends no messages about older steps.
    try:
        for order in orders:
            if isinstance(order, Run):
                steps.append(_Step(order))
                waiting.put(steps[-1])
            elif isinstance(order, Ping):
                connection.send_report(Pong(order.serial))
            elif isinstance(order, Abandon | Masks):
                _apply_to_step(steps, order)
            else:
                waiting.put(order)
    except BaseException:
        traceback.print_exc()
        os._exit(FAILED)
    os._exit(ENDED_WITH_SERVER)


def _apply_to_step(steps: deque[_Step], order: Abandon | Masks) -> None:
    for step in steps:
        if step.serial != order.serial:
            continue
        if isinstance(order, Abandon):
            step.is_abandoned.leave()
        elif step.masks is not None:
            step.masks.fill(order.bits)


def _digest(result: StepResult | None) -> int | None:
    """Return the checksum of the choices that all ranks must agree on."""
    if result is None:
        return None
    return zlib.crc32(encode((result.token_ids, sorted(result.draft_token_ids.items()), sorted(result.errors))))


def _collectives(setup: RankSetup, place: RankPlace, device: DeviceType) -> Collectives:
    """Connect the ranks of a stage. Raise StartupError if they cannot connect."""
    if place.memory is not None and device == "cpu":
        with contextlib.suppress(NoNativeKernels):
            return SharedMemoryCollectives(load_library(), place.memory, setup.rank_in_stage, setup.stage_size)
    torch_now("a group of ranks that share no memory")
    from trioserve.model.parallel.torch_collectives import TorchCollectives

    return TorchCollectives(
        master_addr=setup.meeting_host,
        master_port=setup.meeting_port,
        rank=setup.rank_in_stage,
        size=setup.stage_size,
        timeout_seconds=MEETING_SECONDS_MAX,
        device=device,
    )


def _socket_of(descriptor: int | None) -> socket.socket | None:
    if descriptor is None:
        return None
    found = socket.socket(fileno=descriptor)
    found.set_inheritable(False)
    return found


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=RankPlace)))
