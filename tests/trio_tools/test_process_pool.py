"""Tests that processes that run jobs are reused, killed, and shared by owners. No process outlives its pool."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.contracts.errors import AlreadyEnded
from trioserve.trio_tools.process_pool import JobTooLong, ProcessLost, ProcessPool

CHILD = """
import os, signal, socket, struct, sys
connection = socket.socket(fileno=int(sys.argv[1])).makefile("rwb")
last_job = False
while head := connection.read(8):
    if last_job: os._exit(3)
    first, second = struct.unpack("<II", head)
    job, content = connection.read(first), connection.read(second)
    if job == b"stay": signal.pause()
    if job == b"end": os._exit(3)
    if job == b"crash": os.kill(os.getpid(), signal.SIGSEGV)
    if job == b"echo, then end with the next job": last_job = True
    if job == b"environment": content = repr(dict(os.environ)).encode()
    connection.write(struct.pack("<II", len(job), len(content)) + job + content)
    connection.flush()
"""
MINUTE = 60.0


def command(file: int) -> Sequence[str]:
    return [sys.executable, "-c", CHILD, str(file)]


@contextmanager
def pool_of(processes_max: int = 3, command: Callable[[int], Sequence[str]] = command) -> Iterator[ProcessPool]:
    """Yield a pool, and check after the test that no process and no open file remains."""
    files_before = set(os.listdir("/proc/self/fd"))
    with closing(ProcessPool(command, processes_max=processes_max)) as pool:
        yield pool
        ids = pool.process_ids
    assert not any(is_alive(process_id) for process_id in ids)
    assert set(os.listdir("/proc/self/fd")) <= files_before


def wait_for_end(process_id: int) -> None:
    """Wait until a process has ended, reaped or not. This hangs if the process was not killed."""
    with suppress(ChildProcessError):
        os.waitid(os.P_PID, process_id, os.WEXITED | os.WNOWAIT)


def is_alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


async def ask(pool: ProcessPool, job: bytes, content: bytes = b"", seconds: float = MINUTE) -> bytes:
    async with pool.turn("owner"):
        head, reply = await pool.ask(job, content, seconds_max=seconds, reply_bytes_max=2_000_000)
    assert head == job
    return bytes(reply)


async def test_process_starts_with_the_first_job_and_is_reused() -> None:
    with pool_of() as pool:
        assert pool.process_ids == []
        content = os.urandom(1_500_000)
        assert await ask(pool, b"echo", content) == content
        [process_id] = pool.process_ids
        assert await ask(pool, b"echo", b"again") == b"again"
        assert pool.process_ids == [process_id]
        assert pool.started_total == 1


async def test_process_of_a_slow_job_is_killed_and_the_next_job_runs() -> None:
    with pool_of() as pool:
        await ask(pool, b"echo")
        [process_id] = pool.process_ids
        with pytest.raises(JobTooLong):
            await ask(pool, b"stay", seconds=0.01)
        assert pool.process_ids == []
        assert await ask(pool, b"echo", b"x") == b"x"
        wait_for_end(process_id)


async def test_process_of_a_cancelled_caller_is_killed() -> None:
    with pool_of() as pool:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, pool, b"stay")
            await wait_all_tasks_blocked()
            [process_id] = pool.process_ids
            nursery.cancel_scope.cancel()
        assert pool.process_ids == []
        assert await ask(pool, b"echo", b"x") == b"x"
        wait_for_end(process_id)


@pytest.mark.parametrize("job, words", [(b"end", "ended with code 3"), (b"crash", "killed by SIGSEGV")])
async def test_process_that_ends_fails_only_its_own_job(job: bytes, words: str) -> None:
    with pool_of() as pool:
        with pytest.raises(ProcessLost, match=words):
            await ask(pool, job)
        assert await ask(pool, b"echo", b"x") == b"x"


async def test_reply_above_the_limit_is_not_read() -> None:
    with pool_of() as pool:
        with pytest.raises(ProcessLost, match="at most 2000000 are allowed"):
            await ask(pool, b"echo", bytes(2_000_001))
        assert pool.process_ids == []


async def test_ended_idle_process_is_replaced() -> None:
    with pool_of() as pool:
        await ask(pool, b"echo")
        [process_id] = pool.process_ids
        os.kill(process_id, 9)
        wait_for_end(process_id)
        assert await ask(pool, b"echo", b"x") == b"x"


async def test_job_runs_again_if_its_idle_process_had_ended() -> None:
    with pool_of() as pool:
        await ask(pool, b"echo, then end with the next job")
        assert await ask(pool, b"echo", b"content") == b"content"
        assert pool.started_total == 2
        with pytest.raises(ProcessLost):
            await ask(pool, b"crash")  # This job crashes the reused process, and then a new process.
        assert pool.started_total == 3


async def test_process_pool_with_a_missing_program_raises_oserror() -> None:
    with pool_of(command=lambda file: ["/no/such/program", str(file)]) as pool, pytest.raises(OSError, match="No such"):
        await ask(pool, b"echo")


async def test_process_does_not_get_api_keys_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIOSERVE_API_KEY", "secret")
    with pool_of() as pool:
        environment = await ask(pool, b"environment")
    assert b"PATH" in environment
    assert b"secret" not in environment


async def test_closing_the_pool_kills_a_busy_process() -> None:
    async def ask_without_answer() -> None:
        with pytest.raises(AlreadyEnded):
            await ask(pool, b"stay")

    with pool_of() as pool:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask_without_answer)
            await wait_all_tasks_blocked()
            [process_id] = pool.process_ids
            pool.close()
            assert not is_alive(process_id)
        await ask_without_answer()


class Turns:
    """Records in which order tasks get their turns."""

    def __init__(self, pool: ProcessPool, nursery: trio.Nursery) -> None:
        self.pool, self.nursery = pool, nursery
        self.held: list[str] = []
        self.scopes: dict[str, trio.CancelScope] = {}

    async def take(self, name: str) -> None:
        """Wait for a turn, and keep it until released. The first letter of the name is the owner."""
        self.nursery.start_soon(self._hold, name)
        await wait_all_tasks_blocked()

    async def leave(self, name: str) -> None:
        self.scopes[name].cancel()
        await wait_all_tasks_blocked()

    async def _hold(self, name: str) -> None:
        with trio.CancelScope() as self.scopes[name]:
            async with self.pool.turn(name[0]):
                self.held.append(name)
                try:
                    await trio.sleep_forever()
                finally:
                    self.held.remove(name)


async def test_no_owner_uses_all_child_processes_and_owners_take_turns() -> None:
    with pool_of(3) as pool:
        async with trio.open_nursery() as nursery:
            turns = Turns(pool, nursery)
            for name in ("a1", "a2", "a3", "a4"):
                await turns.take(name)
            assert turns.held == ["a1", "a2"]
            for name in ("b1", "b2", "c1"):
                await turns.take(name)
            assert turns.held == ["a1", "a2", "b1"]
            await turns.leave("a1")
            assert turns.held == ["a2", "b1", "a3"], "a waited longest"
            await turns.leave("a2")
            assert turns.held == ["b1", "a3", "b2"], "a has had its turn"
            await turns.leave("a3")
            assert turns.held == ["b1", "b2", "c1"]
            await turns.leave("a4")
            await turns.leave("b1")
            assert turns.held == ["b2", "c1"]
            nursery.cancel_scope.cancel()
        async with pool.turn("d"):
            pass  # All turns have ended.
