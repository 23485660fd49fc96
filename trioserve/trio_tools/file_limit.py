"""The limit of open files (RLIMIT_NOFILE): raised as far as it goes, and what of it is left for connections."""

from __future__ import annotations

import functools
import logging
import resource

__all__ = ["connections_within", "raise_file_limit"]

logger = logging.getLogger(__name__)

OWN_FILES = 192
"""Kept for the process itself: the store, KV connections (64 readers and 64 greetings), ranks, logs, fetched media."""


def raise_file_limit() -> int:
    """Raise the soft limit of open files to the hard one. The usual soft limit is 1,024, which is for programs that use
    select(2); nothing here does.

    Returns:
        The soft limit from now on.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):  # macOS has an unlimited hard limit, and a lower one that is meant
        return soft
    return hard


@functools.cache  # so the warning comes once
def connections_within(asked: int, file_limit: int, *, files_each: int = 1) -> int:
    """How many client connections the limit of open files allows.

    Args:
        asked: by --max-connections.
        file_limit: the soft limit.
        files_each: files for one client, its connection included; a router opens another one to an endpoint.

    Returns:
        `asked` or less, and at least 1. Less is a warning in the log.
    """
    if file_limit == resource.RLIM_INFINITY:
        return asked
    reserve = min(OWN_FILES, file_limit // 2)
    allowed = max(1, (file_limit - reserve) // files_each)
    if asked <= allowed:
        return asked
    logger.warning(
        "--max-connections is %d, and the limit of open files (%d, of which %d are kept for the process itself) allows "
        "%d: so many are served at a time. Raise the limit (ulimit -n, LimitNOFILE=) or ask for fewer",
        asked,
        file_limit,
        reserve,
        allowed,
    )
    return allowed
