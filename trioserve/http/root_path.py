"""Removal of a path prefix that a reverse proxy leaves in the paths of requests."""

from __future__ import annotations

from trioserve.contracts.errors import StartupError
from trioserve.http.exchange import Exchange, Handler

__all__ = ["RootPath", "checked_root_path"]


def checked_root_path(path: str) -> str:
    """Check a path prefix, and remove its last slash.

    Args:
        path: the value of --root-path. It is empty if there is no prefix.

    Returns:
        The prefix without a slash at its end.

    Raises:
        StartupError: the prefix cannot be the start of a path.
    """
    if path and (not path.startswith("/") or any(mark in path for mark in "?# ")):
        raise StartupError(
            f"--root-path is {path!r}: it must begin with / and contain no question mark, # or blank, such as /llm"
        )
    return path.rstrip("/")


class RootPath:
    """A handler that removes a prefix from the path and calls another handler.

    A path without the prefix is not changed, because the proxy has already removed the prefix.

    Args:
        handler: called for each request.
        prefix: the prefix that checked_root_path returned.
    """

    def __init__(self, handler: Handler, prefix: str) -> None:
        self._handler = handler
        self._prefix = prefix

    async def __call__(self, exchange: Exchange) -> None:
        if exchange.path == self._prefix:
            exchange.path = "/"
        elif exchange.path.startswith(self._prefix + "/"):
            exchange.path = exchange.path[len(self._prefix) :]
        await self._handler(exchange)
