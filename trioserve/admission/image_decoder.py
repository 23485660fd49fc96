"""Decodes clients' images in separate processes (ProcessPool), which can be killed.

Image decoders are C code that reads untrusted bytes. A running decoder cannot be interrupted, and the header of an
image does not predict how much time and memory the decoding needs. So each image has a time limit and a memory limit.
An image that exceeds a limit fails only its own request.
"""

from __future__ import annotations

import sys
from contextlib import AbstractAsyncContextManager

import msgspec

from trioserve.contracts.errors import InvalidRequest, Overloaded
from trioserve.contracts.image_generation import RGBImage
from trioserve.contracts.images import ImageLimits, ImagePlan, Tiles
from trioserve.metrics.registry import Metrics
from trioserve.trio_tools.process_pool import JobTooLong, ProcessLost, ProcessPool
from trioserve.vision.decoding_process import DecodeJob, DecodeReply, memory_bytes_max
from trioserve.vision.families.registry import ImageProcessing, tiles_from
from trioserve.vision.image_header import read_header

__all__ = ["ImageDecoder"]

# One tenant uses at most two processes, so that the third is free for other tenants. An idle process needs about 50 MB.
PROCESSES_MAX = 3
RETRY_SECONDS = 5.0


class ImageDecoder:
    """A pool of decoder processes: `async with decoder.turn(tenant): await decoder.tiles(...)`.

    The processes are started for the first image. `close` ends them.

    Args:
        limits: Limits of images. The largest allowed image sets the memory limit.
        metrics: Counts killed processes.
    """

    def __init__(self, limits: ImageLimits, metrics: Metrics) -> None:
        self.limits = limits
        self._killed_total = metrics.image_decoders_killed_total
        memory = str(memory_bytes_max(limits))
        self._pool = ProcessPool(
            lambda file: [sys.executable, "-m", "trioserve.vision.decoding_process", str(file), memory],
            processes_max=PROCESSES_MAX,
        )

    def turn(self, tenant: str) -> AbstractAsyncContextManager[None]:
        """Return a scope that reserves one process of the pool. Tenants take turns, and no tenant can reserve all
        processes.

        Args:
            tenant: Owner of the image.
        """
        return self._pool.turn(tenant)

    async def tiles(self, content: bytes, processing: ImageProcessing, plan: ImagePlan, place: str) -> Tiles:
        """Decode an image and cut it into the model's tiles.

        Args:
            content: The encoded image.
            processing: Preprocessing of the model.
            plan: Plan of the image.
            place: Name of the image in error messages.

        Raises:
            InvalidRequest: the image is damaged, or takes too much time or memory.
            Overloaded: no process can be started.
        """
        _, pixels = await self._decoded(
            DecodeJob(kind="tiles", place=place, limits=self.limits, processing=processing), content, plan.pixel_bytes
        )
        return tiles_from(pixels, plan)

    async def image(self, content: bytes, place: str) -> RGBImage:
        """Decode an image to upright RGB, with transparent parts on white.

        Args:
            content: The encoded image.
            place: Name of the image in error messages.

        Raises:
            InvalidRequest: see `tiles`.
            Overloaded: see `tiles`.
        """
        return await self._image(DecodeJob(kind="picture", place=place, limits=self.limits), content)

    async def mask(self, content: bytes, place: str) -> RGBImage:
        """Decode a mask, see image_file.decoded_mask.

        Args:
            content: The encoded mask.
            place: Name of the mask in error messages.

        Raises:
            InvalidRequest: see `tiles`.
            Overloaded: see `tiles`.
        """
        return await self._image(DecodeJob(kind="mask", place=place, limits=self.limits), content)

    async def _image(self, job: DecodeJob, content: bytes) -> RGBImage:
        header = read_header(content, self.limits, job.place)
        reply, pixels = await self._decoded(job, content, 3 * header.width * header.height)
        return RGBImage(reply.width, reply.height, bytes(pixels))

    async def _decoded(
        self, job: DecodeJob, content: bytes, size: int
    ) -> tuple[DecodeReply, bytes | bytearray | memoryview]:
        seconds, place = self.limits.decode_seconds_max, job.place
        try:
            head, pixels = await self._pool.ask(
                msgspec.msgpack.encode(job), content, seconds_max=seconds, reply_bytes_max=size
            )
        except JobTooLong:
            self._killed_total.labels("timeout").inc()
            raise InvalidRequest(
                f"{place} was not decoded within {seconds:g} s (--image-decode-timeout): send a smaller image, or save "
                "it again with a common image program",
                param=place,
            ) from None
        except ProcessLost as error:
            self._killed_total.labels("lost").inc()
            raise InvalidRequest(
                f"{place} cannot be decoded: the process that decoded it ended ({error}): save it again with a "
                "common image program",
                param=place,
            ) from error
        except OSError as error:
            raise Overloaded(
                f"{place} cannot be decoded now: no process could be started ({error.strerror}): try again in "
                f"{RETRY_SECONDS:.0f} s",
                reason="no_decoding_process",
                retry_after_seconds=RETRY_SECONDS,
            ) from error
        reply = msgspec.msgpack.decode(head, type=DecodeReply)
        if reply.error is not None:
            raise InvalidRequest(reply.error, param=place)
        return reply, pixels

    def close(self) -> None:
        """End all processes at once, without waiting."""
        self._pool.close()
