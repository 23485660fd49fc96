"""A prefix that a proxy in front leaves before the paths of requests."""

from __future__ import annotations

from trioserve.contracts.errors import StartupError
from trioserve.http.exchange import Exchange, Handler

__all__ = ["RootPath", "checked_root_path"]


def checked_root_path(path: str) -> str:
    """Without a slash at its end. Raises StartupError."""
    if path and (not path.startswith("/") or any(mark in path for mark in "?# ")):
        raise StartupError(f"--root-path is {path!r}, it must begin with / and hold neither ? nor #, such as /llm")
    return path.rstrip("/")


class RootPath:
    """The handler sees paths without the prefix. A path that has none is left as it is: the proxy took it off."""

    def __init__(self, handler: Handler, prefix: str) -> None:
        self._handler = handler
        self._prefix = prefix

    async def __call__(self, exchange: Exchange) -> None:
        if exchange.path == self._prefix:
            exchange.path = "/"
        elif exchange.path.startswith(self._prefix + "/"):
            exchange.path = exchange.path[len(self._prefix) :]
        await self._handler(exchange)
