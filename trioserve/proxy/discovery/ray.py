"""Endpoints from Ray: the engines of a group that `trioserve ray up` had placed there.

Who asks Ray is a process of its own, trioserve/commands/ray_watch.py, which tells in lines of JSON what there is. Ray's
client ends the process that it is in, when the cluster's head has been gone for a minute; and its calls wait in threads
that nobody can cancel. The router goes on, with the endpoints that it knows, and asks anew.
"""

from __future__ import annotations

import importlib.util
import logging
import subprocess
import sys
from collections.abc import Sequence
from functools import partial

import msgspec
import trio

from trioserve.contracts.errors import StartupError
from trioserve.proxy.discovery.source import EndpointTemplate, Told, tell

__all__ = ["RAY_MISSING", "SIGN_SECONDS", "GroupTold", "RaySource", "check_ray_is_installed"]

logger = logging.getLogger(__name__)

RAY_MISSING = 'Ray is not installed: python -m pip install "trioserve[ray]"'
SIGN_SECONDS = 2.0  # between two lines at most, whatever has changed
FIRST_SECONDS_MAX = 60.0  # until the first line: for importing Ray, and finding the cluster, on a busy machine
SILENCE_SECONDS_MAX = 15.0  # beyond that: a process that hangs in a call of Ray's
FAILED_SECONDS_MIN, FAILED_SECONDS_MAX = 1.0, 30.0
LINE_BYTES_MAX = 4 * 1024 * 1024
RECEIVE_BYTES = 65536
REMARK_BYTES_MAX = 2000  # of what Ray says as its process ends
REMARK_SECONDS_MAX = 1.0


class GroupTold(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line. urls: where the engines of the group serve, all of them; or failure: why that cannot be found out."""

    urls: tuple[str, ...] = ()
    failure: str | None = None


class RaySource:
    """group: its name. address: of the cluster, as ray.init takes it; None: what RAY_ADDRESS says, or this machine's.
    command: what writes the lines, for tests."""

    def __init__(
        self,
        group: str,
        *,
        address: str | None = None,
        template: EndpointTemplate,
        command: Sequence[str] | None = None,
    ) -> None:
        self.name = f"ray:{group}"
        self._template = template
        self._command = command or [sys.executable, "-m", "trioserve.commands.ray_watch", group, address or ""]
        self._told: tuple[str, ...] | None = None

    async def run(self, fleet: Told) -> None:
        failed_seconds = FAILED_SECONDS_MIN
        while True:
            line_count, why = await self._follow(fleet)
            if line_count:
                failed_seconds = FAILED_SECONDS_MIN
            logger.warning("endpoints kept source=%s: %s", self.name, why)
            await trio.sleep(failed_seconds)
            failed_seconds = min(FAILED_SECONDS_MAX, 2 * failed_seconds)

    async def _follow(self, fleet: Told) -> tuple[int, str]:
        """Tell what a process tells, until it ends or is silent. How many lines were of use, and what is wrong."""
        remark = bytearray()
        has_said_all = trio.Event()

        async def keep_remark(output: trio.abc.ReceiveStream) -> None:
            async for data in output:
                remark[:] = (remark + data)[-REMARK_BYTES_MAX:]
            has_said_all.set()

        async with trio.open_nursery() as nursery:
            process: trio.Process = await nursery.start(
                partial(
                    trio.run_process,
                    self._command,
                    stdin=subprocess.PIPE,  # it ends when this is closed, by whatever ends this process
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    check=False,
                    deliver_cancel=_kill,
                    start_new_session=True,  # Ctrl-C in a terminal is for the router
                )
            )
            assert process.stdout is not None
            assert process.stderr is not None
            nursery.start_soon(keep_remark, process.stderr)
            line_count, why = await self._read(process.stdout, fleet)
            if why is None:
                with trio.move_on_after(REMARK_SECONDS_MAX):
                    await has_said_all.wait()
                said = remark.decode(errors="replace").strip().rpartition("\n")[2]
                why = f"the process that asks Ray has ended: {said}"
            nursery.cancel_scope.cancel()
        return line_count, why

    async def _read(self, output: trio.abc.ReceiveStream, fleet: Told) -> tuple[int, str | None]:
        """The same; None: there are no more lines."""
        held = bytearray()
        line_count = 0
        while True:
            with trio.move_on_after(SILENCE_SECONDS_MAX if line_count else FIRST_SECONDS_MAX) as silence:
                data = await output.receive_some(RECEIVE_BYTES)
            if silence.cancelled_caught:
                return line_count, "Ray does not answer"
            if not data:
                return line_count, None
            *lines, rest = (held + data).split(b"\n")
            held = bytearray(rest)
            try:
                if len(held) > LINE_BYTES_MAX:
                    raise msgspec.DecodeError(f"a line has more than {LINE_BYTES_MAX} bytes")
                for line in lines:
                    told = msgspec.json.decode(line, type=GroupTold)
                    if told.failure is not None:
                        return line_count, told.failure
                    self._tell(fleet, told.urls)
                    line_count += 1
            except msgspec.DecodeError as error:
                return line_count, f"what the process that asks Ray says cannot be read: {error}"

    def _tell(self, fleet: Told, urls: tuple[str, ...]) -> None:
        # Only what is new: an endpoint that somebody drains by hand is to stay so while nothing changes.
        if urls != self._told:
            self._told = urls
            tell(fleet, self.name, [self._template(url) for url in urls])


async def _kill(process: trio.Process) -> None:
    process.kill()


def check_ray_is_installed() -> None:
    """Raises StartupError that says what to install. Does not load it, which takes a second."""
    if importlib.util.find_spec("ray") is None:
        raise StartupError(RAY_MISSING)
