"""`serve --headless`: runs the ranks of one machine for a server on another machine."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable

import trio

from trioserve.commands.serving import run_until_signal
from trioserve.config import Config
from trioserve.model.loading.default_model import DOWNLOAD_THREAD, resolve_model
from trioserve.ranks.host import keep_ranks
from trioserve.trio_tools.worker_thread import call_abandonable

__all__ = ["run_headless"]


def run_headless(config: Config) -> int:
    """Run ranks until Ctrl-C or SIGTERM. A signal ends the ranks at once. To drain them, stop their server first.

    Args:
        config: options of the server. All machines must have the same options.

    Returns:
        Exit code of the program.

    Raises:
        StartupError: an option is wrong, or the ranks cannot start.
        ModelLoadError: the model cannot be found.
    """

    async def serve(orders: trio.MemoryReceiveChannel[object], announce: Callable[[list[str]], None]) -> None:
        resolve = functools.partial(resolve_model, revision=config.revision)
        path = await call_abandonable(resolve, config.model, thread_name=DOWNLOAD_THREAD)
        ranks_here = config.rank_count // config.nnodes
        ranks = range(config.node_rank * ranks_here, (config.node_rank + 1) * ranks_here)
        assert config.ranks_key is not None, "checked by Config"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                functools.partial(
                    keep_ranks,
                    ranks,
                    path=path,
                    host=config.master_addr,
                    port=config.master_port,
                    key=config.ranks_key,
                    at_once=config.ranks_at_once,
                )
            )
            announce([])
            while await orders.receive() == signal.SIGHUP:
                pass  # SIGHUP reloads certificates, and this process has no certificates.
            nursery.cancel_scope.cancel()

    return run_until_signal(config, serve, what=f"ranks of {config.model}")
