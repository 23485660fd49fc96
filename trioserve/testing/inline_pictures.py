"""Images that are written and decoded in the event loop, when a test lets it: threads and processes take no virtual
time, and end in any order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import trio

from trioserve.admission.image_decoder import ImageDecoder
from trioserve.api.images.picture_threads import PictureThreads
from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.images import ImageLimits
from trioserve.metrics.registry import Metrics
from trioserve.vision.decoding_process import DecodeJob, DecodeReply, decode

__all__ = ["InlineDecoder", "InlinePictures", "JobGate"]

T = TypeVar("T")


class JobGate:
    """held_count: jobs that wait inside of `held`. run_count: jobs that were done."""

    def __init__(self) -> None:
        self.run_count = 0
        self.held_count = 0
        self._opened: trio.Event | None = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, no job begins: whoever asks for one waits until the end, or leaves."""
        self._opened = trio.Event()
        try:
            yield
        finally:
            self._opened.set()
            self._opened = None

    async def enter(self) -> None:
        """After every other task has had its turn."""
        self.held_count += 1
        try:
            await trio.lowlevel.checkpoint()
            if self._opened is not None:
                await self._opened.wait()
        finally:
            self.held_count -= 1
        self.run_count += 1


class InlinePictures(PictureThreads):
    """Writes images in the event loop."""

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
