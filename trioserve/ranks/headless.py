"""Run the ranks of one machine whose server is on another machine.

For each rank, this process connects to the server, starts the rank's process on that connection, and connects again
when the process has ended. It serves and decides nothing. A server that needs new ranks listens again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import trio

from trioserve.ranks.door import connect_rank
from trioserve.ranks.host import cpu_shares
from trioserve.ranks.link import RankProcess
from trioserve.ranks.messages import RankPlace

__all__ = ["keep_ranks"]

logger = logging.getLogger(__name__)

RETRY_SECONDS = 1.0


async def keep_ranks(
    ranks: Sequence[int], *, path: Path, host: str, port: int, key: str, at_once: int | None = None
) -> None:
    """Run ranks until cancelled. All their processes have ended on return.

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
