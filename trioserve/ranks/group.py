"""The server's view of the ranks of one model: a StepRunner whose steps several processes compute together.

All ranks get the same orders in the same order, and each answers every order. The first rank of the last stage sends
the result of a step. The other ranks of that stage send a checksum of the tokens that they chose, and all must agree.

The group breaks if a rank ends, fails, chooses different tokens, or does not answer in time, because the other ranks
cannot compute without this rank. Then every waiting caller gets an error that names the rank. All processes of the
broken group have ended before a new group is opened.
"""

from __future__ import annotations

import ctypes
import logging
import math
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
import outcome
import trio

from trioserve.contracts.errors import ModelLoadError, RankLost, StartupError
from trioserve.contracts.guide import BITS, TokenMasks
from trioserve.contracts.step import IsAbandoned, StepPlan, StepResult
from trioserve.contracts.weights import AdapterId
from trioserve.ranks.link import KILLED, RankLink
from trioserve.ranks.messages import (
    Abandon,
    AddAdapter,
    Allocate,
    Answer,
    Claim,
    Fault,
    Loaded,
    Log,
    Masks,
    Ping,
    Pong,
    Progress,
    RankSetup,
    RemoveAdapter,
    Report,
    Run,
    WarmUp,
    WireMatrix,
    encode,
    plan_to_wire,
)
from trioserve.ranks.stage_sockets import KEY_BYTES
from trioserve.trio_tools.errors_unwrapped import errors_unwrapped
from trioserve.trio_tools.interrupts import uninterrupted, uninterrupted_context
from trioserve.trio_tools.worker_thread import call_abandonable

__all__ = ["RankGroup", "open_ranks"]

logger = logging.getLogger(__name__)

PING_SECONDS = 1.0
# The group waits this long after the first sign of a failure, because the sign of the real cause may arrive later.
SIGNS_SECONDS = 0.02
ANSWER_SECONDS_MAX = 60.0  # StepWatch has the same values for this limit and for LONGEST_ANSWERS_MAX.
LONGEST_ANSWERS_MAX = 10.0

OnProgress = Callable[[Progress], None]
FindMissing = Callable[[], Sequence[int]]
"""Returns the ranks that the others wait for inside a collective."""
WaitForMasks = Callable[[TokenMasks], Awaitable[None]]
"""Waits until token masks are filled. It can be cancelled."""


async def _wait_in_thread(masks: TokenMasks) -> None:
    # The thread only reads the masks, so a cancelled caller may abandon the thread.
    await call_abandonable(masks.wait, thread_name="trioserve-masks")


@uninterrupted
class _Order:
    """An order that was sent to the ranks. Its caller resumes when all ranks have answered.

    The caller of a step resumes when the responder has answered.

    Args:
        ranks: ranks that must answer.
        begun_at: when the order was sent, in seconds of Trio's clock.
        responder: the rank that answers a step with its result. None if the order is not a step.
        is_timed: True if the time limit for answers applies. Orders that read weights have no time limit.
        is_beside: True if ranks execute the order in parallel to other orders. All other orders are executed one after
            the other.
    """

    def __init__(
        self, ranks: Sequence[int], begun_at: float, responder: int | None, *, is_timed: bool, is_beside: bool
    ) -> None:
        self.waiting = set(ranks)
        self.answers: dict[int, Answer] = {}
        self.begun_at = begun_at
        self.responder = responder
        self.is_timed = is_timed
        self.is_beside = is_beside
        self.result: outcome.Outcome[Any] | None = None
        self.task: trio.lowlevel.Task | None = None

    @property
    def is_step(self) -> bool:
        return self.responder is not None

    @property
    def ready(self) -> outcome.Value[Any] | None:
        """The result of the order, or None if the required answers have not arrived."""
        if self.responder is None:
            return None if self.waiting else outcome.Value(self.answers)
        answer = self.answers.get(self.responder)
        return None if answer is None else outcome.Value(answer.result)

    def finish(self, result: outcome.Outcome[Any]) -> None:
        """Resume the caller with a result. Later results are ignored."""
        if self.result is not None:
            return
        self.result = result
        if self.task is not None:
            trio.lowlevel.reschedule(self.task)

    async def wait(self, *, may_leave: bool = False) -> Any:
        """Wait for the result.

        By default, a cancelled caller also waits for the result, because the ranks read the KV cache until the step has
        ended. The wait is limited, because a rank that hangs breaks the group.
        """

        def leave(_raise_cancel: object) -> trio.lowlevel.Abort:
            if not may_leave:
                return trio.lowlevel.Abort.FAILED
            self.task = None
            return trio.lowlevel.Abort.SUCCEEDED

        if self.result is None:
            self.task = trio.lowlevel.current_task()
            await trio.lowlevel.wait_task_rescheduled(leave)
        else:
            await trio.lowlevel.cancel_shielded_checkpoint()
        assert self.result is not None, "finish sets the result before it resumes the task"
        return self.result.unwrap()


class _Sign(NamedTuple):
    """An event that shows that the group has failed.

    Attributes:
        rank: the rank whose report or connection shows the failure.
        how: description of the failure, which completes a sentence about the rank.
        error: an exception to raise unchanged. None raises RankLost.
        is_end: True if the connection of the rank has ended. False if the rank reported a fault.
    """

    rank: int
    how: str
    error: Exception | None
    is_end: bool

    @property
    def doubt(self) -> int:
        """A number that is larger if this failure more likely follows from another rank's failure. 0 means: never.

        A reported fault has the largest number. It may only report the loss of another rank that ended without a
        report.
        """
        if self.error is not None or KILLED in self.how:
            return 0
        return 1 if self.is_end else 2


@uninterrupted
class RankGroup:
    """Sends orders to the ranks of one model and collects their answers. Created by open_ranks.

    Args:
        block_size: tokens per block.
        stage_size: ranks of each stage.
        answer_seconds_max: longest time for an answer. 0 means no limit. None derives the limit from the longest step
            so far, with a minimum of ANSWER_SECONDS_MAX.
        find_missing: returns the ranks that the other ranks wait for.
        wait_for_masks: waits for token masks that are still being filled.
        on_progress: called with the progress of loading.

    Attributes:
        loaded: the summary of all ranks, with the sizes that fit every rank.
        ranks: the report of each rank, in order. Empty until all ranks have loaded.
        step_seconds: for each rank, the duration of its last step and the part of it spent in collectives.
        rank_seconds: for each rank, the sums of step_seconds.
        failure: the error that broke the group. None while the group works.
    """

    loaded: Loaded
    ranks: tuple[Loaded, ...] = ()

    def __init__(
        self,
        *,
        block_size: int,
        stage_size: int,
        answer_seconds_max: float | None,
        find_missing: FindMissing,
        wait_for_masks: WaitForMasks,
        on_progress: OnProgress,
    ) -> None:
        self._block_size = block_size
        self._stage_size = stage_size
        self._fixed_seconds_max = answer_seconds_max
        self._longest_seconds = 0.0
        self._answered_at = -math.inf  # time when the last rank answered the last order
        self._find_missing = find_missing
        self._wait_for_masks = wait_for_masks
        self._on_progress = on_progress
        self._links: list[RankLink] = []
        # By serial number: the orders that not all ranks have answered. The oldest order comes first.
        self._orders: OrderedDict[int, _Order] = OrderedDict()
        self._serial = 0
        self._loaded: dict[int, Loaded] = {}
        self._all_loaded = trio.Event()
        self._progress: dict[int, tuple[float, int | None]] = {}
        # For each rank: serial and time of the oldest ping that the rank has not answered.
        self._pings: dict[int, tuple[int, float]] = {}
        self._signs: list[_Sign] = []
        self._has_sign, self._has_cause = trio.Event(), trio.Event()
        self._is_closed = False
        self._is_step_failure_raised = False
        self.step_seconds: dict[int, tuple[float, float]] = {}
        self.rank_seconds: list[tuple[float, float]] = []
        self.failure: Exception | None = None
        self._failed = trio.Event()

    # --- operations ---

    def run_step(self, plan: StepPlan, is_abandoned: IsAbandoned) -> Coroutine[Any, Any, StepResult | None]:
        """Send a step to all ranks, see StepRunner.

        Args:
            plan: the step.
            is_abandoned: returns True when the result is no longer needed. The ranks are then notified.

        Returns:
            A coroutine that waits for the result. The step runs even if the coroutine is not awaited yet. The result
            is None if the step was abandoned.

        Raises:
            RankLost: the group broke. Raised by the coroutine.
        """
        order, serial = self._begin(lambda serial: Run(serial, plan_to_wire(plan, self._block_size)), is_step=True)
        if is_abandoned():
            self._send(Abandon(serial))
        else:
            is_abandoned.on_abandoned = lambda: self._send(Abandon(serial))
        return self._result(order, serial, plan)

    async def _result(self, order: _Order, serial: int, plan: StepPlan) -> StepResult | None:
        if plan.masks is None:
            result: StepResult | None = await order.wait()
            return result
        async with trio.open_nursery() as nursery:
            # The wait for the step is shielded, too. The step can only end after the masks are sent.
            nursery.cancel_scope.shield = True
            nursery.start_soon(self._send_masks, serial, plan)
            result = await order.wait()
            nursery.cancel_scope.cancel()
        return result

    async def _send_masks(self, serial: int, plan: StepPlan) -> None:
        masks = plan.masks
        assert masks is not None
        if not ctypes.c_int.from_address(masks.filled_address).value:
            await self._wait_for_masks(masks)
        byte_count = masks.row_count * masks.words_per_row * (BITS // 8)
        self._send(Masks(serial, ctypes.string_at(masks.address, byte_count)))

    async def load(self) -> None:
        """Wait until all ranks have loaded, then allocate KV caches of equal size and warm up the ranks.

        Raises:
            ModelLoadError: a rank cannot load the model.
            StartupError: the settings or the machines do not allow the start.
            RankLost: the group broke for another reason.
        """
        await self._wait_until_loaded()
        loaded = self.loaded
        sizes = {
            "block_count": loaded.block_count,
            "state_slot_count": loaded.state_slot_count,
            "snapshot_slot_count": loaded.snapshot_slot_count,
        }
        behind, key = self._next_stages(), secrets.token_bytes(KEY_BYTES)
        await self.ask(
            lambda serial: Allocate(serial=serial, behind=behind, stage_key=key, **sizes),
            may_leave=True,
            is_timed=False,
        )
        await self.ask(WarmUp, may_leave=True, is_timed=False)

    def _next_stages(self) -> tuple[tuple[str, int] | None, ...]:
        """Return the address of each rank's peer in the next stage. None if the peer is on the same machine."""
        ports = [rank.stage_port for rank in self.ranks[self._stage_size :]]
        links = self._links[self._stage_size :]
        return tuple(None if port is None else (link.host, port) for link, port in zip(links, ports, strict=True))

    async def claim_memory(self) -> bool:
        """Touch a small part of each rank's KV cache before its first use. Return False when all memory was touched."""
        return any(answer.value for answer in (await self.ask(Claim, may_leave=True)).values())

    async def add(self, id: AdapterId, content: Any) -> None:
        """Load an adapter into all ranks, see AdapterTarget.

        Args:
            id: number of the adapter.
            content: the whole adapter, an AdapterWeights.

        Raises:
            MemoryError: a rank has no memory for the adapter. No rank keeps the adapter.
            RankLost: the group broke.
        """
        matrices = tuple(
            WireMatrix(name, matrix.a.tobytes(), matrix.a.shape, matrix.b.tobytes(), matrix.b.shape)
            for name, matrix in content.matrices.items()
        )
        answers = await self.ask(lambda serial: AddAdapter(serial, id, content.digest, content.dtype, matrices))
        refused = [f"rank {rank}: {answer.value}" for rank, answer in answers.items() if answer.value is not None]
        if refused:
            await self.remove(id)
            raise MemoryError("; ".join(refused))

    async def remove(self, id: AdapterId) -> None:
        await self.ask(lambda serial: RemoveAdapter(serial, id))

    async def guard(self) -> None:
        """Wait until the group breaks, then raise the cause."""
        await self._failed.wait()
        assert self.failure is not None
        raise self.failure

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks on this machine."""
        return [link.process.pid for link in self._links if link.process is not None]

    @property
    def are_apart(self) -> bool:
        """True if some ranks are on other machines."""
        return any(link.process is None for link in self._links)

    # --- orders and answers ---

    def _begin(
        self, make: Callable[[int], Any], *, is_step: bool = False, is_timed: bool = True, is_beside: bool = False
    ) -> tuple[_Order, int]:
        self._serial += 1
        responder = len(self._links) - self._stage_size if is_step else None
        order = _Order(range(len(self._links)), trio.current_time(), responder, is_timed=is_timed, is_beside=is_beside)
        if self.failure is not None:
            self._fail_order(order, self.failure)
            return order, self._serial
        self._orders[self._serial] = order
        self._send(make(self._serial))
        return order, self._serial

    async def ask(
        self, make: Callable[[int], Any], *, may_leave: bool = False, is_timed: bool = True, is_beside: bool = False
    ) -> dict[int, Answer]:
        """Send an order to all ranks and wait for their answers.

        Args:
            make: function that makes the order with the given serial number.
            may_leave: True if a cancelled caller returns at once. Otherwise, the caller waits for the answers.
            is_timed: True if the time limit of a step applies.
            is_beside: True if ranks may execute the order while they execute other orders.

        Returns:
            The answer of each rank.

        Raises:
            RankLost: the group broke.
        """
        order, _ = self._begin(make, is_timed=is_timed, is_beside=is_beside)
        answers: dict[int, Answer] = await order.wait(may_leave=may_leave)
        return answers

    def _send(self, message: Any) -> None:
        if self.failure is not None:
            return
        encoded = encode(message)
        for link in self._links:
            link.send(encoded)

    def _on_report(self, rank: int, report: Report) -> None:
        if self.failure is not None:
            return
        if isinstance(report, Answer):
            self._on_answer(rank, report)
        elif isinstance(report, Pong):
            self._pings.pop(rank, None)
        elif isinstance(report, Log):
            logging.getLogger(report.name).log(report.level, "%s rank=%d", report.message, rank)
        elif isinstance(report, Progress):
            self._note_progress(rank, report)
        elif isinstance(report, Fault):
            self._note_fault(rank, report)
        elif isinstance(report, Loaded):
            self._loaded[rank] = report
            if len(self._loaded) == len(self._links):
                self._all_loaded.set()

    def _on_answer(self, rank: int, answer: Answer) -> None:
        order = self._orders[answer.serial]
        order.waiting.discard(rank)
        order.answers[rank] = answer
        if order.is_step:
            self.step_seconds[rank] = answer.seconds
            steps, together = self.rank_seconds[rank]
            self.rank_seconds[rank] = steps + answer.seconds[0], together + answer.seconds[1]
            self._compare(order, rank, answer)
        if self.failure is not None:
            return
        ready = order.ready
        if ready is not None:
            order.finish(ready)
        if not order.waiting:
            del self._orders[answer.serial]
            now = trio.current_time()
            if order.is_step:
                self._longest_seconds = max(self._longest_seconds, now - self._owed_since(order))
            if not order.is_beside:
                self._answered_at = now

    def _compare(self, order: _Order, rank: int, answer: Answer) -> None:
        """Break the group if ranks chose different tokens.

        For an abandoned step, one rank may report a digest and another rank None, because only the first rank finished
        the step before it was abandoned.
        """
        digests = {other: their.digest for other, their in order.answers.items() if their.digest is not None}
        if answer.digest is not None and any(digest != answer.digest for digest in digests.values()):
            ranks = " and ".join(map(str, sorted(digests)))
            self._break(
                RankLost(
                    f"ranks {ranks} have chosen different tokens in one step: they compute with different weights, "
                    "versions or processors. Use the same on all machines"
                )
            )

    def _note_progress(self, rank: int, report: Progress) -> None:
        if report.total is None:
            if rank == 0:
                self._on_progress(report)
            return
        self._progress[rank] = report.done, report.total
        done, total = (sum(part) for part in zip(*self._progress.values(), strict=True))
        if len(self._progress) == len(self._links):
            self._on_progress(Progress("", done, total))

    # --- failures ---

    def _note_fault(self, rank: int, fault: Fault) -> None:
        error: Exception | None = None
        sentence = f"{fault.kind}: {fault.message}"
        if fault.kind in (StartupError.__name__, ModelLoadError.__name__):
            kind = StartupError if fault.kind == StartupError.__name__ else ModelLoadError
            error = kind(fault.message)
        self._note_sign(_Sign(rank, f"failed {fault.doing}: {sentence}", error, is_end=False))

    def _on_end(self, rank: int, how: str) -> None:
        if not any(sign.rank == rank for sign in self._signs):
            self._note_sign(_Sign(rank, how, None, is_end=True))

    def _note_sign(self, sign: _Sign) -> None:
        if self._is_closed or self.failure is not None:
            return
        self._signs.append(sign)
        self._has_sign.set()
        if sign.doubt == 0:
            self._has_cause.set()

    async def judge(self) -> None:
        """Wait for a sign of a failure, then break the group with the most likely cause of the failure.

        Waits SIGNS_SECONDS for further signs. If a rank loses another rank, its report may arrive before the server
        notices the end of the lost rank.
        """
        await self._has_sign.wait()
        with trio.move_on_after(SIGNS_SECONDS):
            await self._has_cause.wait()
        sign = min(self._signs, key=lambda sign: sign.doubt)
        self._break(sign.error or RankLost(f"{self._links[sign.rank]} {sign.how}"))

    def _break(self, error: Exception) -> None:
        if self.failure is not None:
            return
        for link in self._links:
            if link.process is not None:
                link.process.kill()
        self._fail_orders(error)
        self._failed.set()

    def _fail_orders(self, error: Exception) -> None:
        """Fail all orders that wait for answers, and all later orders."""
        self.failure = error
        for order in self._orders.values():
            if order.result is None:
                self._fail_order(order, error)
        self._orders.clear()

    def _fail_order(self, order: _Order, error: Exception) -> None:
        """Fail an order. Only the first step raises the error. Later steps return None, as if they were abandoned."""
        if order.is_step and self._is_step_failure_raised:
            order.finish(outcome.Value(None))
            return
        self._is_step_failure_raised = self._is_step_failure_raised or order.is_step
        order.finish(outcome.Error(error))

    async def watch(self) -> None:
        """Send pings, and break the group if an answer or a pong takes too long."""
        serial, ping_at = 0, -math.inf
        while True:
            now = trio.current_time()
            since = self._waited_since(now)
            if now >= since + self._seconds_max:
                self._break(self._hanging(now - since))
                return
            if now >= ping_at:
                serial += 1
                for link in self._links:
                    if link.rank not in self._pings:
                        self._pings[link.rank] = serial, now
                        link.send(encode(Ping(serial)))
                ping_at = now + min(PING_SECONDS, self._seconds_max / 4)
            await trio.sleep_until(min(ping_at, self._waited_since(now) + self._seconds_max))

    def _waited_since(self, now: float) -> float:
        """Return when the wait for the oldest missing answer or pong began, or `now` if nothing is missing."""
        since = [asked_at for _, asked_at in self._pings.values()]
        if self._oldest_timed is not None:
            since.append(self._owed_since(self._oldest_timed))
        return min(since, default=now)

    @property
    def _oldest_timed(self) -> _Order | None:
        """The order that the ranks execute now, if it has a time limit.

        None while the ranks execute an order without a limit, even if orders with a limit wait behind that order.
        """
        oldest = next((order for order in self._orders.values() if not order.is_beside), None)
        return oldest if oldest is not None and oldest.is_timed else None

    def _owed_since(self, order: _Order) -> float:
        """Return when the ranks began an order: when it was sent, or when the previous order ended."""
        return max(order.begun_at, self._answered_at)

    @property
    def _seconds_max(self) -> float:
        if self._fixed_seconds_max is None:
            return max(ANSWER_SECONDS_MAX, LONGEST_ANSWERS_MAX * self._longest_seconds)
        if not self._fixed_seconds_max:
            return math.inf
        # A new process cannot answer pings until its interpreter has started, which may take longer than a step.
        return max(self._fixed_seconds_max, 0.0 if self._all_loaded.is_set() else ANSWER_SECONDS_MAX)

    def _hanging(self, seconds: float) -> RankLost:
        """Return the error for answers that take too long. The error names the ranks that block the other ranks.

        The first of these groups that is not empty is named: the ranks that do not answer pings (if some ranks do),
        the ranks that are missing in a collective, and the ranks that have not answered the order.
        """
        frozen = [link for link in self._links if link.rank in self._pings]
        missing = self._find_missing()
        late = [link for link in self._links if link.rank in missing]
        named = frozen if 0 < len(frozen) < len(self._links) else late or self._owing() or frozen or self._links
        names = ", ".join(map(str, named))
        return RankLost(f"{names} has not answered for {seconds:.1f} s, {self._seconds_max:g} s are allowed")

    def _owing(self) -> list[RankLink]:
        """Return the ranks that have not answered the oldest order.

        For a step, only ranks of the first stage with a missing answer are returned, because later stages wait for it.
        """
        oldest = self._oldest_timed
        if oldest is None:
            return []
        owing = [link for link in self._links if link.rank in oldest.waiting]
        stage = min(oldest.waiting) // self._stage_size
        return [link for link in owing if link.rank // self._stage_size == stage] if oldest.is_step else owing

    # --- start and end ---

    def _take_links(self, links: Sequence[RankLink]) -> None:
        self._links.extend(links)
        self.rank_seconds = [(0.0, 0.0)] * len(self._links)

    async def _wait_until_loaded(self) -> None:
        async with trio.open_nursery() as nursery:

            async def raise_failure() -> None:
                await self._failed.wait()
                nursery.cancel_scope.cancel()

            nursery.start_soon(raise_failure)
            await self._all_loaded.wait()
            nursery.cancel_scope.cancel()
        if self.failure is not None:
            raise self.failure
        self.ranks = ranks = tuple(self._loaded[link.rank] for link in self._links)
        with_states = [rank for rank in ranks if rank.state_slot_count]  # Some stages may have no layers with states.
        self.loaded = msgspec.structs.replace(
            ranks[0],
            computed_by=_joined(rank.computed_by for rank in ranks),
            arithmetic=_joined(rank.arithmetic for rank in ranks),
            is_batch_invariant=all(rank.is_batch_invariant for rank in ranks),
            launches=all(rank.launches for rank in ranks),
            max_num_seqs=min(rank.max_num_seqs for rank in ranks),
            step_tokens_max=min(rank.step_tokens_max for rank in ranks),
            block_count=min(rank.block_count for rank in ranks),
            state_slot_count=min((rank.state_slot_count for rank in with_states), default=0),
            snapshot_slot_count=min((rank.snapshot_slot_count for rank in with_states), default=0),
            block_bytes=sum(rank.block_bytes for rank in ranks),
            step_weight_bytes=sum(rank.step_weight_bytes for rank in ranks),
            token_flops=sum(rank.token_flops for rank in ranks),
            attended_token_flops=sum(rank.attended_token_flops for rank in ranks),
        )

    async def _listen(self, setups: Sequence[RankSetup], scope: trio.CancelScope) -> None:
        with scope:
            async with trio.open_nursery() as nursery:
                for link, setup in zip(self._links, setups, strict=True):
                    link.send(encode(setup))
                    nursery.start_soon(link.run)
                nursery.start_soon(self.judge)
                nursery.start_soon(self.watch)

    def _close(self) -> None:
        self._is_closed = True
        if self.failure is None:  # Orders may still wait, because another task may be loading an adapter.
            self._fail_orders(RankLost("the ranks were stopped"))
        for link in self._links:
            link.close()


def _joined(names: Iterable[str]) -> str:
    """Join the different kernel names of all ranks. Names differ if the layers of a stage need other kernels."""
    return ", and ".join(dict.fromkeys(names))


@uninterrupted_context
async def open_ranks(
    setups: Sequence[RankSetup],
    make_links: Callable[[Callable[[int, Report], None], Callable[[int, str], None]], Sequence[RankLink]],
    *,
    answer_seconds_max: float | None = None,
    find_missing: FindMissing = lambda: (),
    wait_for_masks: WaitForMasks = _wait_in_thread,
    on_progress: OnProgress = lambda progress: None,
) -> AsyncIterator[RankGroup]:
    """Start a group that loads its model, and end all its processes at the end of the block.

    Args:
        setups: the setup of each rank, in order.
        make_links: starts the processes and returns their links, in order. Its arguments are on_report and on_end of
            RankLink.
        answer_seconds_max: see RankGroup.
        find_missing: see RankGroup.
        wait_for_masks: see RankGroup.
        on_progress: see RankGroup.
    """
    group = RankGroup(
        block_size=setups[0].settings.block_size,
        stage_size=setups[0].stage_size,
        answer_seconds_max=answer_seconds_max,
        find_missing=find_missing,
        wait_for_masks=wait_for_masks,
        on_progress=on_progress,
    )
    try:
        group._take_links(make_links(group._on_report, group._on_end))
        with errors_unwrapped():
            async with trio.open_nursery() as nursery:
                # A cancelled caller waits for the running step. So reports must be received until the step ends.
                listening = trio.CancelScope(shield=True)
                nursery.start_soon(group._listen, setups, listening)
                try:
                    yield group
                finally:
                    listening.cancel()
    finally:
        group._close()
