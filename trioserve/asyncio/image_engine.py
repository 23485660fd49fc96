"""The image engine for asyncio programs."""

from __future__ import annotations

from trioserve.asyncio.image_stream import ImageStream
from trioserve.asyncio.threaded_engine import ThreadedEngine, awaited, called, made
from trioserve.contracts.image_generation import ImageModelDescription, ImageRequestLimits
from trioserve.engine.images.image_engine import ImageEngine as TrioImageEngine

__all__ = ["ImageEngine"]


class ImageEngine(ThreadedEngine[TrioImageEngine]):
    """An image engine, created by trioserve.asyncio.open_image_engine. See ThreadedEngine."""

    generate_image = made(TrioImageEngine.generate_image, ImageStream)
    abort = called(TrioImageEngine.abort)
    abort_all = called(TrioImageEngine.abort_all)
    live_requests = called(TrioImageEngine.live_requests)
    stats = called(TrioImageEngine.stats)
    load = called(TrioImageEngine.load)
    sleep = awaited(TrioImageEngine.sleep)
    wake_up = awaited(TrioImageEngine.wake_up)
    drain = called(TrioImageEngine.drain)
    pause_generation = awaited(TrioImageEngine.pause_generation)
    resume_generation = called(TrioImageEngine.resume_generation)
    wait_until_idle = awaited(TrioImageEngine.wait_until_idle)
    wait_all_free = awaited(TrioImageEngine.wait_all_free)

    @property
    def model(self) -> ImageModelDescription:
        """The model that is served."""
        return self.on_trio.model

    @property
    def limits(self) -> ImageRequestLimits:
        """Limits on requests, in addition to the limits of the model."""
        return self.on_trio.limits
