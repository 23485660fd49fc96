"""What the model makes of a prompt's images, before its request joins the core. One image at a time is decoded and
encoded, between the steps; a request that leaves meanwhile leaves at once, and gives its room back in the same call.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from hashlib import blake2b

import trio

from trioserve.admission.text_threads import TextThreads
from trioserve.contracts.errors import AlreadyEnded, InvalidRequest, RequestFailed
from trioserve.contracts.given_rows import GivenRows
from trioserve.contracts.images import ImageEncoder, ImageLimits, ImageProcessing, Tiles
from trioserve.core.encoder_outputs import EncoderOutputs
from trioserve.engine.open_request import OpenRequest
from trioserve.metrics.registry import Metrics
from trioserve.vision.image_prompt import PromptImage, ReadImage
from trioserve.vision.tiles import tiles_of

__all__ = ["ImageEncoding"]

logger = logging.getLogger(__name__)

DECODE_CHARACTERS = 150_000  # what a decode counts for (TextRunner): a tenth of a second


class ImageEncoding:
    """wait_until_open: returns when the engine computes, and raises what refuses a request when it does not any more.
    encoder: set by the engine, whenever it is opened."""

    def __init__(
        self,
        processing: ImageProcessing,
        limits: ImageLimits,
        threads: TextThreads,
        metrics: Metrics,
        wait_until_open: Callable[[], Awaitable[None]],
    ) -> None:
        self.outputs = EncoderOutputs(limits.outputs_bytes_max)
        self.encoder: ImageEncoder | None = None
        self._processing = processing
        self._threads = threads
        self._metrics = metrics
        self._wait_until_open = wait_until_open
        self._turn = trio.Lock()  # decoding takes memory, and encoding the processors
        self._seen = (0, 0)
        metrics.on_scrape(self._show)

    async def prepare(self, request: OpenRequest) -> None:
        """Have its rows given. Its claim is released by `release`, however this ends. Raises InvalidRequest."""
        if request.is_finished:
            return
        granted = trio.Event()
        claim = self.outputs.claim(self._sizes(request.images), granted.set)
        request.output_claim = claim
        if not claim.is_granted:
            await granted.wait()
        for image in {one.image.digest: one.image for one in request.images}.values():
            await self._have_encoded(image)
        if request.output_claim is claim:  # otherwise it was ended meanwhile
            request.given = tuple(rows for image in request.images for rows in self._rows(image))
            request.forget_files()

    def release(self, request: OpenRequest) -> None:
        """Synchronous, at any moment, any number of times: what it claimed is given back once."""
        claim, request.output_claim = request.output_claim, None
        if claim is not None:
            request.given = ()
            self.outputs.release(claim)

    def _sizes(self, images: tuple[PromptImage, ...]) -> dict[bytes, int]:
        return {one.image.digest: one.image.plan.tile_count * self._processing.tile_bytes for one in images}

    async def _have_encoded(self, image: ReadImage) -> None:
        """Whoever comes first does it; one that leaves halfway leaves it to the next."""
        if self.outputs.values(image.digest) is not None:
            return
        async with self._turn:
            if self.outputs.values(image.digest) is not None:
                return
            tiles = await self._threads.run(
                lambda: tiles_of(image.content, self._processing, image.place), size=DECODE_CHARACTERS
            )
            began_at = trio.current_time()
            values = await self._encoded(tiles)
            self._metrics.image_encoding_seconds.observe(trio.current_time() - began_at)
            self.outputs.put(image.digest, values)

    async def _encoded(self, tiles: Tiles) -> object:
        while True:
            await self._wait_until_open()
            encoder = self.encoder
            if encoder is None:
                raise InvalidRequest("this engine encodes no images: it was opened anew without them", param="messages")
            try:
                return await encoder.encode(tiles)
            except AlreadyEnded:
                if encoder is self.encoder:  # it is closed, and will not be opened anew
                    await self._wait_until_open()
                    raise
            except Exception as error:  # of what computes: its memory may not do, say
                logger.exception("an image could not be encoded")
                raise RequestFailed(f"the image could not be encoded: {type(error).__name__}: {error}") from error

    def _rows(self, image: PromptImage) -> list[GivenRows]:
        """Of each tile, a part of the whole."""
        values = self.outputs.values(image.image.digest)
        assert values is not None, "it is claimed, and was encoded"
        whole = memoryview(values).cast("B")  # type: ignore[arg-type]  # it has a buffer
        row_bytes = 4 * self._processing.embedding_size
        rows, first = [], 0
        for tile, (start, count) in enumerate(image.runs):
            part = whole[first * row_bytes : (first + count) * row_bytes]
            first += count
            rows.append(GivenRows(start, count, _name_of_tile(image.image.digest, tile), part))
        return rows

    def _show(self) -> None:
        outputs, metrics = self.outputs, self._metrics
        metrics.image_output_bytes.labels("used").set(outputs.claimed_bytes)
        metrics.image_output_bytes.labels("cached").set(outputs.cached_bytes)
        seen = outputs.query_count, outputs.hit_count
        metrics.image_queries_total.inc(seen[0] - self._seen[0])
        metrics.image_hits_total.inc(seen[1] - self._seen[1])
        self._seen = seen


def _name_of_tile(digest: bytes, tile: int) -> bytes:
    return blake2b(digest + tile.to_bytes(4, "little"), digest_size=len(digest)).digest()
