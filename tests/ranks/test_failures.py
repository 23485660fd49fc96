"""Tests with real processes: a rank dies, hangs or fails in each phase.

The error of the group names that rank, and no process remains.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio

from trioserve.contracts.errors import ModelLoadError, RankLost
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.step import IsAbandoned, ScheduledChunk, StepPlan, never_abandoned
from trioserve.ranks.host import free_port
from trioserve.trio_tools.errors_unwrapped import errors_unwrapped

SECONDS_MAX = 60.0  # limit that ends a test that hangs; each test needs only a few seconds

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ranks are Linux's"),
]


def step(index: int = 0, *, count: int = 8, start: int = 0) -> StepPlan:
    """Return the plan of a prefill chunk, or of a decode if count is 1."""
    tokens = [3 + place % 50 for place in range(start + count)]
    request = EngineRequest(
        id="r",  # type: ignore[arg-type]
        prompt_token_ids=tuple(tokens),
        sampling=SamplingParams(temperature=0.0),
        output_tokens_max=9,
        stop_token_ids=frozenset(),
        seed=0,
    )
    table = list(range(-(-(start + count) // 4)))
    chunk = ScheduledChunk(request, tokens, start, count, table, True)  # type: ignore[arg-type]
    return StepPlan(index, (chunk,), count)


def kill(ranks: Any, rank: int, number: int = signal.SIGKILL) -> None:
    os.kill(ranks.group.pids[rank], number)


async def check_lost(ranks: Any, rank: int, how: str = "was killed by SIGKILL") -> None:
    with pytest.raises(RankLost, match=rf"rank {rank} \(process \d+\) {how}"):
        await ranks.group.guard()


@pytest.mark.parametrize("rank", [0, 1])
async def test_rank_killed_at_its_start_is_named(rank: int, tiny_model: Callable[[str], Path], real_ranks: Any) -> None:
    with trio.fail_after(SECONDS_MAX), errors_unwrapped():
        async with real_ranks(tiny_model("llama")) as ranks:
            kill(ranks, rank)
            with pytest.raises(RankLost, match=rf"rank {rank} \(process \d+\) was killed by SIGKILL"):
                await ranks.group.load()


@pytest.mark.parametrize("rank", [0, 1])
async def test_rank_killed_while_ranks_connect_is_named(
    rank: int, tiny_model: Callable[[str], Path], real_ranks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without native kernels, ranks connect through torch.distributed: rank 0 listens and waits for rank 1."""
    monkeypatch.setenv("TRIOSERVE_NATIVE", "0")
    port = free_port()
    with trio.fail_after(SECONDS_MAX), errors_unwrapped():
        async with real_ranks(tiny_model("llama"), meeting_port=port) as ranks:
            kill(ranks, 1, signal.SIGSTOP)
            while True:
                try:
                    await (await trio.open_tcp_stream("127.0.0.1", port)).aclose()
                    break
                except OSError:
                    await trio.lowlevel.checkpoint()
            kill(ranks, rank)
            with pytest.raises(RankLost, match=rf"rank {rank} \(process \d+\) was killed by SIGKILL"):
                await ranks.group.load()


@pytest.mark.parametrize("rank", [0, 1])
async def test_rank_killed_while_it_reads_weights_is_named(
    rank: int, tiny_model: Callable[[str], Path], real_ranks: Any
) -> None:
    with trio.fail_after(SECONDS_MAX), errors_unwrapped():
        async with real_ranks(tiny_model("llama")) as ranks:

            def kill_at_first_progress() -> None:
                if len(ranks.progress) == 1:
                    kill(ranks, rank)

            ranks.on_progress = kill_at_first_progress
            with pytest.raises(RankLost, match=rf"rank {rank} \(process \d+\) was killed by SIGKILL"):
                await ranks.group.load()
            assert ranks.progress


@pytest.mark.parametrize("rank", [0, 1])
async def test_rank_killed_while_it_warms_up_is_named(
    rank: int, tiny_model: Callable[[str], Path], real_ranks: Any
) -> None:
    with trio.fail_after(SECONDS_MAX), errors_unwrapped():
        async with real_ranks(tiny_model("llama")) as ranks, trio.open_nursery() as nursery:

            async def kill_when_loaded() -> None:
                while not ranks.group.ranks:
                    await trio.lowlevel.checkpoint()
                kill(ranks, rank)

            nursery.start_soon(kill_when_loaded)
            with pytest.raises(RankLost, match=rf"rank {rank} \(process \d+\) was killed by SIGKILL"):
                await ranks.group.load()


@pytest.mark.parametrize("rank", [0, 1])
async def test_rank_killed_while_idle_is_named(rank: int, tiny_model: Callable[[str], Path], real_ranks: Any) -> None:
    with trio.fail_after(SECONDS_MAX), errors_unwrapped():
        async with real_ranks(tiny_model("llama")) as ranks:
            await ranks.group.load()
            kill(ranks, rank)
            await check_lost(ranks, rank)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
async def test_rank_killed_in_a_step_is_named(
    rank: int, phase: str, tiny_model: Callable[[str], Path], real_ranks: Any
) -> None:
    with trio.fail_after(SECONDS_MAX), errors_unwrapped():
        async with real_ranks(tiny_model("llama")) as ranks:
            await ranks.group.load()
            if phase == "decode":
                assert (await ranks.group.run_step(step(), never_abandoned)) is not None
            os.kill(ranks.group.pids[rank], signal.SIGSTOP)  # A stopped rank cannot end the step.
            plan = step(1, count=1, start=8) if phase == "decode" else step()
            computed = ranks.group.run_step(plan, never_abandoned)
            behind = ranks.group.run_step(plan, never_abandoned)
            kill(ranks, rank)
            with pytest.raises(RankLost, match=rf"rank {rank} \(process \d+\) was killed by SIGKILL"):
                await computed
            assert await behind is None


@pytest.mark.parametrize("rank", [0, 1])
async def test_rank_that_hangs_in_a_step_is_named_and_ended(
    rank: int, tiny_model: Callable[[str], Path], real_ranks: Any
) -> None:
    with trio.fail_after(SECONDS_MAX), errors_unwrapped():
        async with real_ranks(tiny_model("llama"), answer_seconds_max=1.0) as ranks:
            await ranks.group.load()
            kill(ranks, rank, signal.SIGSTOP)
            with pytest.raises(RankLost, match=rf"^rank {rank} \(process \d+\) has not answered for"):
                await ranks.group.run_step(step(), never_abandoned)


async def test_rank_that_fails_reports_the_reason(tiny_model: Callable[[str], Path], real_ranks: Any) -> None:
    """The plan is inconsistent, as if the server had a bug. A rank ends on such a plan."""
    with trio.fail_after(SECONDS_MAX), errors_unwrapped():
        async with real_ranks(tiny_model("llama")) as ranks:
            await ranks.group.load()
            plan = step()
            (chunk,) = plan.chunks
            broken = StepPlan(0, (ScheduledChunk(chunk.request, [], 0, 8, chunk.block_table, True),), 8)
            with pytest.raises(RankLost, match=r"rank \d \(process \d+\) failed at work: \w+"):
                await ranks.group.run_step(broken, never_abandoned)


async def test_missing_model_raises_the_error_of_one_process(tmp_path: Path, real_ranks: Any) -> None:
    with trio.fail_after(SECONDS_MAX), errors_unwrapped():
        async with real_ranks(tmp_path / "nothing") as ranks:
            with pytest.raises(ModelLoadError, match="there is no such file or directory"):
                await ranks.group.load()


@pytest.mark.parametrize("phase", ["import", "step"])
async def test_cancelled_group_leaves_no_process(
    phase: str, tiny_model: Callable[[str], Path], real_ranks: Any
) -> None:
    with trio.fail_after(SECONDS_MAX), errors_unwrapped(), trio.CancelScope() as scope:
        async with real_ranks(tiny_model("llama")) as ranks:
            if phase == "step":
                await ranks.group.load()
                assert (await ranks.group.run_step(step(), never_abandoned)) is not None
            scope.cancel()
            await trio.lowlevel.checkpoint()


async def test_abandoned_step_ends_in_all_ranks_and_the_next_is_correct(
    tiny_model: Callable[[str], Path], real_ranks: Any
) -> None:
    with trio.fail_after(SECONDS_MAX), errors_unwrapped():
        async with real_ranks(tiny_model("llama")) as ranks:
            await ranks.group.load()
            expected = await ranks.group.run_step(step(), never_abandoned)
            for index in range(20):
                is_abandoned = IsAbandoned(1)
                computed = ranks.group.run_step(step(index), is_abandoned)
                for _ in range(index):
                    await trio.lowlevel.checkpoint()
                is_abandoned.leave()
                assert await computed in (None, expected)
            assert await ranks.group.run_step(step(), never_abandoned) == expected


SERVER = """
import signal, socket
from trioserve.ranks.link import RankProcess
from trioserve.ranks.messages import RankPlace
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores SIGHUP, which the rank would inherit
ours, its = socket.socketpair()
process = RankProcess(its, RankPlace(local_rank=0))
print(process.pid, flush=True)
ours.recv(1)
"""


def is_prepared(pid: int) -> bool:
    """Return whether a rank ignores SIGHUP. That is the last preparation before it reads from its server."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    ignored = next(line.split()[1] for line in status.splitlines() if line.startswith("SigIgn:"))
    return bool(int(ignored, 16) >> (signal.SIGHUP - 1) & 1)


@pytest.mark.parametrize("is_stopped", [False, True])
def test_no_rank_outlives_a_server_that_is_killed(is_stopped: bool) -> None:
    """A stopped rank cannot notice the end of its connection, so only the kernel can end it."""
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        pid = int(server.stdout.readline())
        exit_file = os.pidfd_open(pid)
        try:
            while not is_prepared(pid):
                os.sched_yield()
            if is_stopped:
                os.kill(pid, signal.SIGSTOP)
            server.kill()
            ended, _, _ = select.select([exit_file], [], [], SECONDS_MAX)
            assert ended, "the rank still runs"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.close(exit_file)
