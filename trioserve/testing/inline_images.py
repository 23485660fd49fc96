"""Image encoding and decoding in the event loop. A test can hold it back. Real threads and processes would take no
virtual time and would end in random order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import trio

from trioserve.admission.image_decoder import ImageDecoder
from trioserve.api.images.encoding_threads import EncodingThreads
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.images import ImageLimits
from trioserve.metrics.registry import Metrics
from trioserve.vision.decoding_process import DecodeJob, DecodeReply, decode

__all__ = ["InlineDecoder", "InlineImages", "JobGate"]

T = TypeVar("T")


class JobGate:
    """Gate that each job passes before it runs. A test can close it.

    Attributes:
        run_count: jobs that have passed the gate.
        held_count: jobs that wait at the gate.
    """

    def __init__(self) -> None:
        self.run_count = 0
        self.held_count = 0
        self._opened: trio.Event | None = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Close the gate inside of the context. Jobs wait until the context ends, or until they are cancelled."""
        self._opened = trio.Event()
        try:
            yield
        finally:
            self._opened.set()
            self._opened = None

    async def enter(self) -> None:
        """Give every other task a turn, then wait until the gate is open."""
        self.held_count += 1
        try:
            await trio.lowlevel.checkpoint()
            if self._opened is not None:
                await self._opened.wait()
        finally:
            self.held_count -= 1
        self.run_count += 1


class InlineImages(EncodingThreads):
    """Encodes images in the event loop."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = JobGate()

    async def run(self, function: Callable[[], T], *, tenant: str) -> T:
        await self.gate.enter()
        return function()


class InlineDecoder(ImageDecoder):
    """Decodes images in the event loop, and starts no process."""

    def __init__(self, limits: ImageLimits, metrics: Metrics) -> None:
        super().__init__(limits, metrics)
        self.gate = JobGate()

    async def _decoded(self, job: DecodeJob, content: bytes, size: int) -> tuple[DecodeReply, bytes | memoryview]:
        await self.gate.enter()
        reply, pixels = decode(job, content)
        if reply.error is not None:
            raise InvalidRequest(reply.error, param=job.place)
        return reply, pixels
