"""The simulated ranks of one opening of the engine, their injected faults, and checks of how their group reacts.

The engine of an opening gets its steps, masks and adapters from here, too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, NamedTuple

import trio

from trioserve.contracts.errors import ModelLoadError, RankLost
from trioserve.contracts.guide import GuidedRows, TokenMasks
from trioserve.contracts.step import IsAbandoned, StepPlan, StepResult
from trioserve.engine.lifecycle.engine_loop import StepRunner
from trioserve.engine.structured_output import MaskBuffers, MaskRows
from trioserve.ranks.link import RankLink
from trioserve.ranks.messages import Report
from trioserve.simulation.ranks.plan import LOADING, REPLACING, Harm, Moment, RanksStage
from trioserve.simulation.ranks.played_rank import CAUSE, END_CODE, CameApart, PlayedRank, Refused
from trioserve.testing.byte_tokenizer import BYTE_VOCAB_SIZE
from trioserve.testing.fake_engine import fake_adapter_digest
from trioserve.trio_tools.errors_unwrapped import errors_unwrapped

__all__ = ["PlayedOpening", "CheckedSteps", "LateMasks", "read_adapter"]

# Time limits of the group. SIGNS_SECONDS: from the first sign of a rank's end until the group judges it. EXIT_SECONDS:
# the wait for the process after its connection has ended. HANG_SECONDS: from the step timeout until the group names a
# hanging rank. START_SECONDS is the minimum timeout for a rank that loads.
SIGNS_SECONDS, EXIT_SECONDS, HANG_SECONDS, START_SECONDS = 0.02, 0.05, 1.0, 60.0
MOMENT_SECONDS = 1e-6
PIDS_OF_ONE = 100
ADAPTER_SECONDS = 0.01


class _Harmed:
    """Harm that ends the group.

    Attributes:
        by: time by which the engine must have noticed the fault.
    """

    def __init__(self, harm: Harm, rank: PlayedRank, stage: RanksStage) -> None:
        self.harm = harm
        self.rank = rank
        self.at = trio.current_time()
        patience = stage.answer_seconds_max
        if harm.moment in LOADING:
            patience = max(patience, START_SECONDS)
        seconds = {
            "kill": 2 * stage.ending_seconds + SIGNS_SECONDS,
            "end": 2 * stage.ending_seconds + SIGNS_SECONDS,
            "break": SIGNS_SECONDS,
            "refuse": SIGNS_SECONDS,
            "garble": EXIT_SECONDS + SIGNS_SECONDS,
            "stop": patience + HANG_SECONDS,
            "hang": patience + HANG_SECONDS,
            "stray": 0.0,
        }
        self.by = self.at + seconds[harm.kind] + MOMENT_SECONDS

    def __str__(self) -> str:
        return f"{self.harm.kind} of {self.rank.name} at {self.at:.3f}"


class PlayedOpening:
    """The group of simulated ranks during one opening of the engine. It implements PlayedGroup.

    Args:
        index: the index of the opening.
        stage: settings of the engine and the ranks.
        harms: faults that the plan injects during this opening.
        refused_by: ranks that refuse weights, by the path of the weights.
        nursery: nursery in which the ranks run until harm, the server or the simulation ends them.
        log_line: receives trace lines of the simulation.
        count: counts occurrences in the simulation.
        check: checks the rules of the simulation that must hold at any time.
        noting: returns a context manager that records failed checks.

    Attributes:
        is_open: True if an engine uses the ranks.
        failure: the error that the group has reported.
        failed_at: time at which the group reported the error.
        closed_at: time at which the engine closed the group.
    """

    def __init__(
        self,
        index: int,
        stage: RanksStage,
        harms: Sequence[Harm],
        refused_by: Mapping[str, Sequence[int]],
        nursery: trio.Nursery,
        *,
        log_line: Callable[[str], None],
        count: Callable[[str], None],
        check: Callable[[], None],
        noting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.index = index
        self.stage = stage
        self.ranks: list[PlayedRank] = []
        self.step_count = 0
        self.is_open = False
        self.failed_at = self.closed_at = math.inf
        self.failure: Exception | None = None
        self.harmed: list[_Harmed] = []
        self._harms = harms
        self._nursery = nursery
        self._log_line, self._count, self._check, self._noting = log_line, count, check, noting
        self._come: Counter[tuple[int, Moment]] = Counter()
        self._pending: dict[int, list[Harm]] = {}
        self._arrivals: Counter[int] = Counter()
        # for each step, by its serial: for each rank, whether it knew that the step is abandoned
        self._views: dict[int, dict[int, bool]] = {}
        # For each abandoned step, by its serial: the time at which it was abandoned, and the ranks that were notified.
        self._abandoned: dict[int, tuple[float, set[int]]] = {}
        self._step_weights: dict[int, str | None] = {}  # for each step, by its serial: the path of the weights
        self._refused_by = refused_by
        self._digests: dict[int, dict[int, int]] = {}  # for each step, by its serial: the digest of each rank's tokens
        self._strayed: dict[int, Harm] = {}
        self._has_come_apart = False
        self._changed = trio.Event()

    # --- Interface for the RankGroup ---

    def make_links(
        self, on_report: Callable[[int, Report], None], on_end: Callable[[int, str], None]
    ) -> list[RankLink]:
        stage = self.stage
        links = []
        for number in range(stage.rank_count):
            is_far = number >= stage.rank_count - stage.far_count
            pid = None if is_far else PIDS_OF_ONE * (self.index + 1) + number
            rank = PlayedRank(self, number, pid)
            self.ranks.append(rank)
            links.append(RankLink(number, rank.connection, on_report, on_end, rank.process))
            self._nursery.start_soon(self._play, rank)
        return links

    async def _play(self, rank: PlayedRank) -> None:
        with self._noting(), errors_unwrapped():
            await rank.run()

    def find_missing(self) -> Sequence[int]:
        """Return the ranks that have not arrived at the latest step, as a real group reads them from shared memory.

        Ranks on several machines have no shared memory, so the result is empty.
        """
        if self.stage.far_count:
            return ()
        most = max(self._arrivals.values(), default=0)
        return [rank.number for rank in self.ranks if self._arrivals[rank.number] < most]

    # --- Interface for the ranks ---

    async def reach(self, rank: PlayedRank, moment: Moment) -> None:
        self._come[rank.number, moment] += 1
        # Reading weights has no time limit, so the group would notice a pending fault too late. That fault waits for
        # another moment.
        due = [] if moment in REPLACING else self._pending.pop(rank.number, [])
        for harm in self._harms:
            if (harm.rank, harm.moment, harm.count) != (rank.number, moment, self._come[rank.number, moment]):
                continue
            if harm.after:
                self._nursery.start_soon(self._harm_later, harm, rank)
            else:
                due.append(harm)
        for harm in due:
            if not self._strike(harm, rank):
                await self._hold_up(harm, rank)
        await trio.lowlevel.checkpoint()

    async def wait_for_step(self, rank: PlayedRank, serial: int, view: bool) -> bool:
        views = self._views.setdefault(serial, {})
        assert rank.number not in views, f"rank {rank.number} comes twice to the sum of step {serial}"
        views[rank.number] = view
        weights = self._step_weights.setdefault(serial, rank.weights)
        assert weights == rank.weights, f"step {serial} is computed with {weights} and, in {rank.name}, {rank.weights}"
        self._arrivals[rank.number] += 1
        self._note()
        while len(views) < len(self.ranks):
            if self._has_come_apart:
                raise CameApart("Connection closed by peer")
            await self._changed.wait()
        return any(views.values())

    def record_step(self, rank: PlayedRank, plan: StepPlan) -> None:
        if rank.number == 0:
            self.step_count += 1
            self._count("steps planned ahead" if plan.is_ahead else "steps")
            chunks = " ".join(f"{chunk.request.id}[{chunk.start}:{chunk.start + chunk.count}]" for chunk in plan.chunks)
            self._log_line(f"step {plan.step_index}: {chunks}")

    def note_abandoned(self, rank: PlayedRank, serial: int) -> None:
        _since, ranks = self._abandoned.setdefault(serial, (trio.current_time(), set()))
        assert rank.number not in ranks, f"rank {rank.number} is notified twice that step {serial} is abandoned"
        ranks.add(rank.number)

    def record_digest(self, rank: PlayedRank, serial: int, digest: int | None) -> None:
        if digest is None:
            return
        digests = self._digests.setdefault(serial, {})
        digests[rank.number] = digest
        strayed = self._strayed.get(serial)
        if rank.stray is not None:
            strayed = self._strayed[serial] = rank.stray
            rank.stray = None
        # Two different digests have been sent, so the group can notice the difference.
        if strayed is not None and len(set(digests.values())) > 1:
            del self._strayed[serial]
            self._note_harmed(strayed, self.ranks[strayed.rank])

    def refusal(self, rank: PlayedRank, path: str) -> str | None:
        return f"weights {path} do not fit rank {rank.number}" if rank.number in self._refused_by[path] else None

    def record_weights(self, rank: PlayedRank, path: str) -> None:
        assert not self._refused_by[path], f"{rank.name} writes {path}, which another rank has refused"
        self._log_line(f"{rank.name} writes {path}")

    def note_end(self) -> None:
        """Record that a rank has ended. After `notice_seconds`, the other ranks notice it."""
        seconds = self.stage.notice_seconds
        if seconds is not None:
            self._nursery.start_soon(self._come_apart, seconds)

    def check(self) -> None:
        self._check()

    # --- Injected faults ---

    async def _harm_later(self, harm: Harm, rank: PlayedRank) -> None:
        await trio.sleep(harm.after)
        if not self._strike(harm, rank):
            self._pending.setdefault(rank.number, []).append(harm)

    def _strike(self, harm: Harm, rank: PlayedRank) -> bool:
        """Inject a fault that may happen at any time.

        Returns:
            False if this kind of fault must wait until the rank reaches the next moment of its work.
        """
        if rank.is_over:
            return True
        kind = harm.kind
        if kind in ("kill", "end"):
            rank.stop()
            self._note_harmed(harm, rank)
            self._nursery.start_soon(rank.end, None if kind == "kill" else f"ended with code {END_CODE}")
        elif kind == "garble":
            self._note_harmed(harm, rank)
            rank.garble()
        elif kind == "stop":
            rank.stop()
            self._note_harmed(harm, rank)
        elif kind == "stray":
            rank.stray = harm
        else:
            return False
        return True

    async def _hold_up(self, harm: Harm, rank: PlayedRank) -> None:
        if harm.kind == "slow":
            self._log_line(f"{rank.name} is slow")
            self._count("harm: slow")
            await trio.sleep(harm.seconds)
            return
        self._note_harmed(harm, rank)
        if harm.kind == "hang":
            await trio.sleep_forever()
        elif harm.kind == "refuse" and rank.doing != "at work":
            raise Refused(CAUSE)
        raise RuntimeError(CAUSE)

    def _note_harmed(self, harm: Harm, rank: PlayedRank) -> None:
        harmed = _Harmed(harm, rank, self.stage)
        self.harmed.append(harmed)
        self._log_line(f"{harmed}, {harm.moment}")
        self._count(f"harm: {harm.kind}, {'while loading' if harm.moment in LOADING else harm.moment}")

    async def _come_apart(self, seconds: float) -> None:
        await trio.sleep(seconds)
        self._has_come_apart = True
        self._note()

    def _note(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    # --- Rules ---

    def note_failure(self, error: Exception) -> None:
        self.failure, self.failed_at = error, trio.current_time()
        self._log_line(f"opening {self.index} failed: {error}")
        assert self.harmed, f"the group reports an error, but nothing has happened to its ranks: {error}"
        assert any(self._is_right(harmed, error) for harmed in self.harmed), (
            f"the group reports: {error}, but this happened: {', '.join(map(str, self.harmed))}"
        )

    def _is_right(self, harmed: _Harmed, error: Exception) -> bool:
        harm, name, message = harmed.harm, harmed.rank.name, str(error)
        if harm.kind == "refuse" and isinstance(error, ModelLoadError):
            return message == CAUSE
        if not isinstance(error, RankLost):
            return False
        if harm.kind == "stray":
            return "have chosen different tokens" in message and str(harm.rank) in message.partition(" have ")[0]
        # The error may name several ranks, because across machines the group cannot see which rank waits for which.
        if harm.kind in ("hang", "stop") and (self.stage.far_count or len(self.harmed) > 1):
            return name in message and "has not answered for" in message
        is_gone = harmed.rank.process is None
        how = {
            "kill": ("has closed its connection", "cannot be reached any more")
            if is_gone
            else ("was killed by SIGKILL",),
            "end": ("has closed its connection", "cannot be reached any more") if is_gone else ("ended with code 3",),
            "garble": ("sent an invalid message",),
        }.get(harm.kind, ("has not answered for",) if harm.kind in ("stop", "hang") else ("failed ",))
        return message.startswith(tuple(f"{name} {one}" for one in how))

    def check_reported(self, *, is_engine_over: bool) -> None:
        """Check that the group noticed all faults in time, and notified all ranks of each abandoned step.

        Args:
            is_engine_over: True if the engine has ended.
        """
        now = trio.current_time()
        if self.failure is None and self.closed_at == math.inf:
            for harmed in self.harmed:
                assert now <= harmed.by, f"{harmed} is not reported at {now:.3f}"
        assert now <= self.failed_at + MOMENT_SECONDS or self.closed_at < math.inf or is_engine_over, (
            f"the ranks were lost at {self.failed_at:.3f}, but the engine still uses them at {now:.3f}"
        )
        if self.harmed:
            return
        for serial, (since, ranks) in self._abandoned.items():
            assert now == since or len(ranks) == len(self.ranks), (
                f"step {serial} is abandoned since {since:.3f}, but only ranks {sorted(ranks)} were notified"
            )

    def check_closed(self) -> None:
        """Check that a closed group has left no open connection and no process."""
        self.closed_at = trio.current_time()
        for rank in self.ranks:
            assert rank.connection.is_closed, f"the group of {rank.name} is closed, but its connection is open"
            is_gone = rank.process is None or rank.process.how_ended() is not None
            assert is_gone, f"the group of {rank.name} is closed, but its process runs"


class CheckedSteps:
    """A StepRunner that checks the contract of step runners.

    A result may be missing only for a reason, and no step may be computed after a failed step.

    Args:
        steps: the real StepRunner.
        violate: called with each violation. If the violation were raised, the engine would treat it as a fault of a
            step.
    """

    def __init__(self, steps: StepRunner, violate: Callable[[str], None]) -> None:
        self._steps = steps
        self._violate = violate
        self._has_raised = False

    def run_step(self, plan: StepPlan, is_abandoned: IsAbandoned) -> Coroutine[Any, Any, StepResult | None]:
        return self._judged(self._steps.run_step(plan, is_abandoned), plan.step_index, is_abandoned)

    async def _judged(
        self, computed: Coroutine[Any, Any, StepResult | None], index: int, is_abandoned: IsAbandoned
    ) -> StepResult | None:
        try:
            result = await computed
        except RankLost as error:
            if self._has_raised:
                self._violate(f"step {index} raises after another step did: {error}")
            self._has_raised = True
            raise
        if result is not None and self._has_raised:
            self._violate(f"step {index} is computed after a step that failed")
        if result is None and not (self._has_raised or is_abandoned()):
            self._violate(f"step {index} was not computed, but a request waits for it")
        return result


class LateMasks:
    """A MaskMaker that needs virtual time to fill masks."""

    def __init__(self, seconds: float, nursery: trio.Nursery) -> None:
        self._buffers = MaskBuffers(BYTE_VOCAB_SIZE)
        self._seconds = seconds
        self._nursery = nursery
        self._filled = trio.Event()

    def begin(self, guided: Sequence[GuidedRows], row_count: int) -> TokenMasks:
        rows = self._buffers.take(guided, row_count)
        if self._seconds:
            self._nursery.start_soon(self._fill_later, rows)
        else:
            rows.fill()
        return rows

    async def _fill_later(self, rows: MaskRows) -> None:
        await trio.sleep(self._seconds)
        rows.fill()
        self._filled.set()
        self._filled = trio.Event()

    def end(self, masks: TokenMasks) -> None:
        assert isinstance(masks, MaskRows)
        self._buffers.release_rows(masks)

    async def wait(self, masks: TokenMasks) -> None:
        assert isinstance(masks, MaskRows)
        while not masks.is_filled:
            await self._filled.wait()


class _Bytes(NamedTuple):
    content: bytes

    def tobytes(self) -> bytes:
        return self.content

    @property
    def shape(self) -> tuple[int, int]:
        return (1, len(self.content))


class _Matrix(NamedTuple):
    a: _Bytes
    b: _Bytes


class _AdapterContent(NamedTuple):
    digest: str
    dtype: str = "float32"
    rank_max: int = 1
    byte_count: int = 1024

    @property
    def matrices(self) -> MappingProxyType[str, _Matrix]:
        content = self.digest.encode()
        return MappingProxyType({"layers.0.q_proj": _Matrix(_Bytes(content), _Bytes(content[::-1]))})


async def read_adapter(path: str, is_checked: bool) -> _AdapterContent:
    """Read an adapter in virtual time. The path determines its content.

    Args:
        path: path of the adapter.
        is_checked: unused.
    """
    await trio.sleep(ADAPTER_SECONDS)
    return _AdapterContent(fake_adapter_digest(path))
