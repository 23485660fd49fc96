"""The ranks of one machine whose server is on another: each comes to it, is started, and comes again when it has ended.

Nothing is served here, and nothing is decided: a rank ends with its connection, and the server says when there is to be
a new one by listening again.
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
    """Until it is cancelled; every process is gone then. ranks: those of this machine. path: where the model lies here.
    at_once: how many of them compute at the same time; None: all. Raises StartupError if the server does not take them.
    """
    shares = cpu_shares(at_once or len(ranks))
    async with trio.open_nursery() as nursery:
        for local_rank, rank in enumerate(ranks):
            place = RankPlace(local_rank=local_rank, path=str(path), cpus=shares[local_rank % len(shares)])
            nursery.start_soon(_keep_rank, rank, place, host, port, key)


async def _keep_rank(rank: int, place: RankPlace, host: str, port: int, key: str) -> None:
    is_told = False
    while True:
        try:
            connection = await connect_rank(host, port, rank, key)
        except OSError as error:
            if not is_told:
                logger.info("waits for its server rank=%d server=%s:%d error=%s", rank, host, port, error)
            is_told = True
            await trio.sleep(RETRY_SECONDS)
            continue
        is_told = False
        process = RankProcess(connection, place)
        try:
            logger.info("the rank runs rank=%d pid=%d", rank, process.pid)
            await process.exited()
            logger.info("the rank has ended rank=%d how=%s", rank, process.how_ended())
        finally:
            process.close()
