"""Start the ranks of this machine as child processes, with their connections, shared memory and CPUs.

The server of the ranks is this process (`HostRanks`) or a process on another machine (`keep_ranks`).
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import trio

from trioserve.ranks.link import RankLink, RankProcess, SocketConnection, connect_rank
from trioserve.ranks.messages import RankPlace, Report

__all__ = ["HostRanks", "cpu_shares", "free_port", "host_ranks", "keep_ranks"]

logger = logging.getLogger(__name__)


class HostRanks:
    """Starts the ranks of this machine, and finds ranks that other ranks wait for. Created by host_ranks.

    Args:
        size: number of ranks on this machine, which are the first ranks of the group.
        stage_size: ranks of each stage.
        memories: for each stage, the descriptor of the memory that its ranks share. Only stages that are complete on
            this machine are included.
        kv_memories: for each rank, the descriptor of its KV cache. Empty if this process reads no KV cache.
        elsewhere: connections of the ranks on other machines, by rank.
        at_once: number of ranks that compute at the same time and share the CPUs.
    """

    def __init__(
        self,
        size: int,
        stage_size: int,
        memories: Sequence[int],
        kv_memories: Sequence[int],
        elsewhere: Mapping[int, socket.socket],
        at_once: int,
    ) -> None:
        self.size = size
        self.kv_memories = kv_memories
        self._stage_size = stage_size
        self._memories, self._elsewhere = memories, elsewhere
        self._cpus = cpu_shares(at_once)
        from trioserve.model.parallel.collectives import Arrivals  # host_ranks says why this import is late.

        self._arrivals = [Arrivals(memory, stage_size) for memory in memories]

    def make_links(
        self, on_report: Callable[[int, Report], None], on_end: Callable[[int, str], None]
    ) -> list[RankLink]:
        """Start the processes and return a link to each rank, in the order of the ranks.

        Args:
            on_report: see RankLink.
            on_end: see RankLink.
        """
        links: list[RankLink] = []
        # Each rank and its peer in the next stage get one socket pair.
        between = [socket.socketpair() for _ in range(max(0, self.size - self._stage_size))]
        try:
            for rank in range(self.size):
                ours, its = socket.socketpair()
                try:
                    process = RankProcess(its, self._place(rank, between))
                except BaseException:
                    ours.close()
                    raise
                links.append(RankLink(rank, SocketConnection(ours), on_report, on_end, process))
            for rank, connection in sorted(self._elsewhere.items()):
                links.append(RankLink(rank, SocketConnection(connection), on_report, on_end))
        except BaseException:
            for link in links:
                link.close()
            raise
        finally:
            for pair in between:
                for end in pair:
                    end.close()
        return links

    def _place(self, rank: int, between: Sequence[tuple[socket.socket, socket.socket]]) -> RankPlace:
        size = self._stage_size
        return RankPlace(
            local_rank=rank,
            memory=self._memories[rank // size] if self._memories else None,
            before=between[rank - size][1].fileno() if rank >= size else None,
            behind=between[rank][0].fileno() if rank < len(between) else None,
            kv_memory=self.kv_memories[rank] if self.kv_memories else None,
            cpus=self._cpus[rank % len(self._cpus)],
        )

    def find_missing(self) -> Sequence[int]:
        """Return the ranks that other ranks wait for in shared memory. Empty if ranks share no memory."""
        return [
            stage * self._stage_size + missing
            for stage, arrivals in enumerate(self._arrivals)
            for missing in arrivals.missing()
        ]

    def close(self) -> None:
        for arrivals in self._arrivals:
            arrivals.close()


@contextmanager
def host_ranks(
    size: int,
    *,
    elsewhere: Mapping[int, socket.socket],
    shows_kv: bool,
    stage_count: int = 1,
    at_once: int | None = None,
) -> Iterator[HostRanks]:
    """Allocate the shared memory of a group, and free it at the end of the block. The group must end inside the block.

    Args:
        size: number of ranks on this machine.
        elsewhere: connections of the ranks on other machines, by rank.
        shows_kv: True if this process reads the KV caches. Ignored if some ranks are on other machines.
        stage_count: see RankSetup.
        at_once: number of ranks that compute at the same time and share the CPUs. None means all ranks.
    """
    # This import is late because it loads the kernels. A process without ranks loads the kernels in parallel to other
    # work.
    from trioserve.model.parallel.collectives import make_shared_memory

    stage_size = (size + len(elsewhere)) // stage_count
    stages_here = size // stage_size  # A stage that is divided between machines shares no memory.
    descriptors: list[int] = []
    try:
        for _ in range(stages_here):
            descriptors.append(make_shared_memory(stage_size))
        for rank in range(size if shows_kv and not elsewhere else 0):
            descriptors.append(os.memfd_create(f"trioserve-kv-{rank}"))
        ranks = HostRanks(
            size, stage_size, descriptors[:stages_here], descriptors[stages_here:], elsewhere, at_once or size
        )
        try:
            yield ranks
        finally:
            ranks.close()
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def cpu_shares(size: int, root: Path = Path("/")) -> tuple[tuple[int, ...], ...]:
    """Divide the CPUs of this process among ranks, whole cores at a time.

    Two ranks that wait for each other on one core lose milliseconds per step.

    Args:
        size: number of ranks.
        root: directory that contains `sys`, for tests.

    Returns:
        CPUs of each rank. All tuples are empty if there are fewer cores than ranks.
    """
    cores: dict[str, list[int]] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        cores.setdefault(_siblings(cpu, root), []).append(cpu)
    if not 0 < size <= len(cores):
        return ((),) * size
    every = list(cores.values())
    firsts = [len(every) * rank // size for rank in range(size + 1)]
    return tuple(tuple(cpu for core in every[first:end] for cpu in core) for first, end in itertools.pairwise(firsts))


def free_port(host: str = "127.0.0.1") -> int:
    """Return a TCP port that is free now. Another process may take it before it is used.

    Args:
        host: an address of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        return int(listener.getsockname()[1])


def _siblings(cpu: int, root: Path) -> str:
    try:
        return (root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text(encoding="ascii")
    except OSError:
        return str(cpu)


RETRY_SECONDS = 1.0


async def keep_ranks(
    ranks: Sequence[int], *, path: Path, host: str, port: int, key: str, at_once: int | None = None
) -> None:
    """Run ranks whose server is on another machine, until cancelled. All their processes have ended on return.

    For each rank, this process connects to the server, starts the rank's process on that connection, and connects again
    when the process has ended. It serves and decides nothing. A server that needs new ranks listens again.

    Args:
        ranks: numbers of this machine's ranks.
        path: the model's directory on this machine.
        host: address of the server, `--master-addr`.
        port: port of the server, `--master-port`.
        key: the shared key, `--ranks-key`.
        at_once: number of ranks that compute at the same time and share the CPUs. None means all ranks.

    Raises:
        StartupError: the server refuses a rank, or does not know the key.
    """
    shares = cpu_shares(at_once or len(ranks))
    async with trio.open_nursery() as nursery:
        for local_rank, rank in enumerate(ranks):
            place = RankPlace(local_rank=local_rank, path=str(path), cpus=shares[local_rank % len(shares)])
            nursery.start_soon(_keep_rank, rank, place, host, port, key)


async def _keep_rank(rank: int, place: RankPlace, host: str, port: int, key: str) -> None:
    is_logged = False
    while True:
        try:
            connection = await connect_rank(host, port, rank, key)
        except OSError as error:
            if not is_logged:
                logger.info("the rank waits for its server rank=%d server=%s:%d error=%s", rank, host, port, error)
            is_logged = True
            await trio.sleep(RETRY_SECONDS)
            continue
        is_logged = False
        process = RankProcess(connection, place)
        try:
            logger.info("the rank runs rank=%d pid=%d", rank, process.pid)
            await process.exited()
            logger.info("the rank has ended rank=%d how=%s", rank, process.how_ended())
        finally:
            process.close()
