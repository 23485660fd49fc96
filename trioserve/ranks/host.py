"""Ranks that are child processes on this machine: their connections, their memory and their CPUs."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from trioserve.model.parallel.shared_memory import Arrivals, make_shared_memory
from trioserve.ranks.link import RankLink, RankProcess
from trioserve.ranks.messages import RankPlace, Report

__all__ = ["HostRanks", "cpu_shares", "host_ranks"]


class HostRanks:
    """memory: the descriptor of what they share. kv_memories: those of where each has its KV cache, for whoever reads
    it from here; empty: nobody does."""

    def __init__(self, size: int, memory: int, arrivals: Arrivals, kv_memories: Sequence[int]) -> None:
        self.size = size
        self._memory, self._kv_memories = memory, kv_memories
        self._cpus = cpu_shares(size)
        self.find_missing = arrivals.missing

    def make_links(
        self, on_report: Callable[[int, Report], None], on_end: Callable[[int, str], None]
    ) -> list[RankLink]:
        """Starts the processes. See open_ranks."""
        links: list[RankLink] = []
        try:
            for rank in range(self.size):
                ours, its = socket.socketpair()
                try:
                    process = RankProcess(its, self._place(rank))
                except BaseException:
                    ours.close()
                    raise
                links.append(RankLink(rank, ours, on_report, on_end, process))
        except BaseException:
            for link in links:
                link.close()
            raise
        return links

    def _place(self, rank: int) -> RankPlace:
        kv_memory = self._kv_memories[rank] if self._kv_memories else None
        return RankPlace(local_rank=rank, memory=self._memory, kv_memory=kv_memory, cpus=self._cpus[rank])


@contextmanager
def host_ranks(size: int, *, shows_kv: bool) -> Iterator[HostRanks]:
    """For a group that is opened and left inside of this. shows_kv: KV caches can be read from here."""
    descriptors: list[int] = []
    try:
        descriptors.append(make_shared_memory(size))
        for rank in range(size if shows_kv else 0):
            descriptors.append(os.memfd_create(f"trioserve-kv-{rank}"))
        arrivals = Arrivals(descriptors[0], size)
        try:
            yield HostRanks(size, descriptors[0], arrivals, descriptors[1:])
        finally:
            arrivals.close()
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def cpu_shares(size: int, root: Path = Path("/")) -> tuple[tuple[int, ...], ...]:
    """The CPUs that this process may use, dealt out to so many ranks, those of a core together: two ranks that wait for
    each other on one CPU wait for milliseconds. All are empty where there are fewer cores than ranks."""
    cores: dict[str, list[int]] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        cores.setdefault(_siblings(cpu, root), []).append(cpu)
    if len(cores) < size:
        return ((),) * size
    every = list(cores.values())
    firsts = [len(every) * rank // size for rank in range(size + 1)]
    return tuple(tuple(cpu for core in every[first:end] for cpu in core) for first, end in itertools.pairwise(firsts))


def _siblings(cpu: int, root: Path) -> str:
    try:
        return (root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text(encoding="ascii")
    except OSError:
        return str(cpu)
