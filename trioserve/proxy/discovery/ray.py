"""Endpoints from Ray: the engines of a group that `trioserve ray up` has placed.

A separate process (trioserve/commands/ray_watch.py) asks Ray and writes the endpoints as lines of JSON. There are two
reasons. First, Ray's client ends its own process when the cluster's head has been gone for a minute. Second, the calls
of Ray's client block threads that cannot be cancelled. If the process ends, the router keeps the known endpoints and
starts the process again.
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
from trioserve.contracts.extras import install_command
from trioserve.proxy.discovery.source import EndpointReceiver, EndpointTemplate, report_endpoints

__all__ = ["SIGN_SECONDS", "GroupReport", "RaySource", "check_ray_is_installed"]

logger = logging.getLogger(__name__)

SIGN_SECONDS = 2.0  # The process writes a line at least this often, even if nothing has changed.
# The first line may take this long, because importing Ray and finding the cluster is slow on a busy machine.
FIRST_SECONDS_MAX = 60.0
SILENCE_SECONDS_MAX = 15.0  # A longer silence means that the process hangs in a call of Ray.
FAILED_SECONDS_MIN, FAILED_SECONDS_MAX = 1.0, 30.0
LINE_BYTES_MAX = 4 * 1024 * 1024
RECEIVE_BYTES = 65536
REMARK_BYTES_MAX = 2000  # When the process ends, this many bytes from the end of Ray's messages are kept.
REMARK_SECONDS_MAX = 1.0


class GroupReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the process that asks Ray.

    Attributes:
        urls: Addresses of all engines of the group.
        failure: Reason why the addresses are unknown. None if they are known.
    """

    urls: tuple[str, ...] = ()
    failure: str | None = None


class RaySource:
    """Source of the engines of one group.

    Args:
        group: Name of the group.
        address: Address of the cluster, as for ray.init. None: the value of RAY_ADDRESS, or the cluster of this
            machine.
        template: Makes the configuration of an endpoint from its URL.
        command: Command that writes the lines, for tests. None: the real process.
    """

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
        self._reported: tuple[str, ...] | None = None

    async def run(self, fleet: EndpointReceiver) -> None:
        failed_seconds = FAILED_SECONDS_MIN
        while True:
            line_count, why = await self._follow(fleet)
            if line_count:
                failed_seconds = FAILED_SECONDS_MIN
            logger.warning("endpoints kept source=%s: %s", self.name, why)
            await trio.sleep(failed_seconds)
            failed_seconds = min(FAILED_SECONDS_MAX, 2 * failed_seconds)

    async def _follow(self, fleet: EndpointReceiver) -> tuple[int, str]:
        """Forward the reports of one process to the fleet until the process ends or is silent.

        Returns:
            Number of valid lines, and the reason for the end.
        """
        remark = bytearray()
        has_ended = trio.Event()

        async def keep_remark(output: trio.abc.ReceiveStream) -> None:
            async for data in output:
                remark[:] = (remark + data)[-REMARK_BYTES_MAX:]
            has_ended.set()

        async with trio.open_nursery() as nursery:
            process: trio.Process = await nursery.start(
                partial(
                    trio.run_process,
                    self._command,
                    stdin=subprocess.PIPE,  # The process ends when its stdin is closed, even if the router was killed.
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    check=False,
                    deliver_cancel=_kill,
                    start_new_session=True,  # In a new session, Ctrl-C in a terminal reaches only the router.
                )
            )
            assert process.stdout is not None
            assert process.stderr is not None
            nursery.start_soon(keep_remark, process.stderr)
            line_count, why = await self._read(process.stdout, fleet)
            if why is None:
                with trio.move_on_after(REMARK_SECONDS_MAX):
                    await has_ended.wait()
                said = remark.decode(errors="replace").strip().rpartition("\n")[2]
                why = f"the process that asks Ray has ended: {said}"
            nursery.cancel_scope.cancel()
        return line_count, why

    async def _read(self, output: trio.abc.ReceiveStream, fleet: EndpointReceiver) -> tuple[int, str | None]:
        """Read the lines of the process.

        Returns:
            Number of valid lines, and the reason to stop. The reason is None at the end of the output.
        """
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
                    report = msgspec.json.decode(line, type=GroupReport)
                    if report.failure is not None:
                        return line_count, report.failure
                    self._report(fleet, report.urls)
                    line_count += 1
            except msgspec.DecodeError as error:
                return line_count, f"the output of the process that asks Ray is invalid: {error}"

    def _report(self, fleet: EndpointReceiver, urls: tuple[str, ...]) -> None:
        # Report only changes. Otherwise an endpoint that an operator drains would be added again although the group is
        # unchanged.
        if urls != self._reported:
            self._reported = urls
            report_endpoints(fleet, self.name, [self._template(url) for url in urls])


async def _kill(process: trio.Process) -> None:
    process.kill()


def check_ray_is_installed() -> None:
    """Check that Ray is installed, without importing it, which takes a second.

    Raises:
        StartupError: Ray is not installed. The message says how to install it.
    """
    if importlib.util.find_spec("ray") is None:
        raise StartupError(f"Ray is not installed: {install_command('ray')}")
