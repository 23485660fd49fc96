"""A TCP relay between a router and an endpoint that imitates a failing network."""

from __future__ import annotations

import enum

import trio

from trioserve.trio_tools.tcp_stream import connect_tcp

__all__ = ["Cable", "Relay"]

CHUNK_BYTES = 65_536


class Cable(enum.Enum):
    WHOLE = "whole"
    CUT = "cut"  # connections break, and new ones fail
    SILENT = "silent"  # connections stay open and new ones succeed, but no byte arrives


class Relay:
    """Accepts connections at `port` of 127.0.0.1 and forwards their bytes to and from another port there.

    Args:
        target_port: port of the endpoint.
    """

    def __init__(self, target_port: int) -> None:
        self.port = 0
        self._target_port = target_port
        self._cable = Cable.WHOLE
        self._passes = trio.Event()
        self._passes.set()
        self._scopes: set[trio.CancelScope] = set()

    def set_cable(self, cable: Cable) -> None:
        if self._cable is Cable.SILENT:
            self._passes.set()
        if cable is Cable.SILENT:
            self._passes = trio.Event()
        self._cable = cable
        if cable is Cable.CUT:
            for scope in self._scopes:
                scope.cancel()

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until cancelled. Cancellation breaks every connection.

        Args:
            task_status: started when the relay listens.
        """
        [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
        self.port = listener.socket.getsockname()[1]
        await trio.serve_listeners(self._connect, [listener], task_status=_Started(task_status))

    async def _connect(self, near: trio.SocketStream) -> None:
        with trio.CancelScope() as scope:
            self._scopes.add(scope)
            far: trio.SocketStream | None = None
            try:
                if self._cable is Cable.CUT:
                    return
                await self._passes.wait()
                far = await connect_tcp("127.0.0.1", self._target_port)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._pass_on, near, far, nursery.cancel_scope)
                    nursery.start_soon(self._pass_on, far, near, nursery.cancel_scope)
            except OSError:
                pass  # the endpoint is down: the router's connection ends
            finally:
                self._scopes.discard(scope)
                for stream in (near, far):
                    if stream is not None:
                        stream.socket.close()  # immediate, also when cancelled

    async def _pass_on(self, source: trio.SocketStream, to: trio.SocketStream, both: trio.CancelScope) -> None:
        try:
            while data := await source.receive_some(CHUNK_BYTES):
                await self._passes.wait()
                await to.send_all(data)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        both.cancel()


class _Started:
    """A task status that drops the listeners that serve_listeners reports."""

    def __init__(self, task_status: trio.TaskStatus[None]) -> None:
        self._task_status = task_status

    def started(self, value: object = None) -> None:
        self._task_status.started()
