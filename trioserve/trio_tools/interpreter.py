"""Settings of the Python interpreter and of the process for a server: thread switches, garbage collection, open files.

Benchmarks use the same settings, to measure real conditions.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import logging
import resource
import sys

import trio

__all__ = ["freeze_loaded_objects", "prepare_interpreter", "connections_within", "raise_file_limit", "return_memory"]


SWITCH_INTERVAL_SECONDS = 0.001  # time after which a thread must release the GIL if another thread waits
YOUNG_OBJECTS_MAX = 20_000
"""Number of new objects after which the garbage collector runs. With Python's default of 700, it would run several
times in a step with many requests. Reference counting frees nearly all objects before a step ends, so later runs find
fewer objects.
"""


def prepare_interpreter() -> None:
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
    gc.set_threshold(YOUNG_OBJECTS_MAX)
    raise_file_limit()


def freeze_loaded_objects() -> None:
    """Exclude all current objects from later garbage collections.

    Without this call, each collection would scan the modules, the model and the tokenizer, which takes about 35 ms.
    """
    gc.collect()
    gc.freeze()


async def return_memory() -> None:
    """Return the memory of an engine that has ended to the system, in a process that continues.

    Parts of an engine refer to each other in cycles, and the C library keeps freed memory. Cost: the collection stops
    all threads of Python, for about 0.1 s if `freeze_loaded_objects` was called before the engine was opened.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # Only glibc has it.
    if trim is not None:
        await trio.to_thread.run_sync(trim, 0)


logger = logging.getLogger(__name__)

OWN_FILES = 192
"""Files reserved for the process itself: the store, KV connections (64 readers and 64 handshakes), ranks, logs,
fetched media.
"""


def raise_file_limit() -> int:
    """Raise the soft limit of open files to the hard limit.

    The usual soft limit of 1,024 protects programs that use select(2). This program does not use select.

    Returns:
        The new soft limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):  # macOS reports an unlimited hard limit, but enforces a lower limit.
        return soft
    return hard


@functools.cache  # The cache makes the function log its warning only once.
def connections_within(asked: int, file_limit: int, *, files_each: int = 1) -> int:
    """Return how many client connections the limit of open files allows. Log a warning if this is less than requested.

    Args:
        asked: Value of --max-connections.
        file_limit: The soft limit.
        files_each: Open files for each client: its connection, and at a router also the connection to an endpoint.

    Returns:
        The number of connections, from 1 to `asked`.
    """
    if file_limit == resource.RLIM_INFINITY:
        return asked
    reserve = min(OWN_FILES, file_limit // 2)
    allowed = max(1, (file_limit - reserve) // files_each)
    if asked <= allowed:
        return asked
    logger.warning(
        "--max-connections is %d, and the limit of open files (%d, of which %d are reserved for the process itself) "
        "allows %d: the server uses this lower number. Raise the limit (ulimit -n, LimitNOFILE=) or lower the option",
        asked,
        file_limit,
        reserve,
        allowed,
    )
    return allowed
