"""What the model makes of a prompt's images, before its request joins the core. A few images are decoded at a time, in
processes, and one is encoded, between the steps. A request that leaves meanwhile leaves at once, and gives its room
back in the same call.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from hashlib import blake2b

import trio

from trioserve.admission.image_decoder import ImageDecoder
from trioserve.contracts.errors import AlreadyEnded, InvalidRequest, RequestFailed
from trioserve.contracts.given_rows import GivenRows
from trioserve.contracts.images import ImageEncoder, ImageProcessing, Tiles
from trioserve.core.encoder_outputs import EncoderOutputs
from trioserve.engine.open_request import OpenRequest
from trioserve.metrics.registry import Metrics
from trioserve.vision.image_prompt import PromptImage, ReadImage

__all__ = ["ImageEncoding", "output_name"]

logger = logging.getLogger(__name__)


class ImageEncoding:
    """wait_until_open: returns when the engine computes, and raises what refuses a request when it does not any more.
    encoder: set by the engine, whenever it is opened."""

    def __init__(
        self,
        processing: ImageProcessing,
        decoder: ImageDecoder,
        metrics: Metrics,
        wait_until_open: Callable[[], Awaitable[None]],
    ) -> None:
        self.outputs = EncoderOutputs(decoder.limits.outputs_bytes_max)
        self.encoder: ImageEncoder | None = None
        self._processing = processing
        self._decoder = decoder
        self._metrics = metrics
        self._wait_until_open = wait_until_open
        self._encoder_turn = trio.Lock()  # it takes the processors
        self._under_way: dict[bytes, trio.Event] = {}  # set when its image is encoded, or is not after all
        self._seen = (0, 0)
        metrics.on_scrape(self._show)

    async def prepare(self, request: OpenRequest) -> None:
        """Have its rows given. Its claim is released by `release`, however this ends. Raises InvalidRequest."""
        if request.is_finished:
            return
        granted = trio.Event()
        claim = self.outputs.claim(self._sizes(request), granted.set)
        request.output_claim = claim
        if not claim.is_granted:
            await granted.wait()
        for image in {one.image.digest: one.image for one in request.images}.values():
            await self._have_encoded(image, output_name(image.digest, request.cache_salt), request.tenant)
        if request.output_claim is claim:  # otherwise it was ended meanwhile
            request.given = tuple(rows for image in request.images for rows in self._rows(image, request.cache_salt))
            request.forget_files()

    def release(self, request: OpenRequest) -> None:
        """Synchronous, at any moment, any number of times: what it claimed is given back once."""
        claim, request.output_claim = request.output_claim, None
        if claim is not None:
            request.given = ()
            self.outputs.release(claim)

    def _sizes(self, request: OpenRequest) -> dict[bytes, int]:
        return {
            output_name(one.image.digest, request.cache_salt): one.image.plan.tile_count * self._processing.tile_bytes
            for one in request.images
        }

    async def _have_encoded(self, image: ReadImage, name: bytes, tenant: str) -> None:
        """Whoever comes first does it; one that leaves halfway leaves it to the next."""
        while self.outputs.values(name) is None:
            if (other := self._under_way.get(name)) is not None:
                await other.wait()
                continue
            is_over = self._under_way[name] = trio.Event()
            try:
                # The place is kept until the tiles are encoded, which bounds how many wait for that in memory.
                async with self._decoder.turn(tenant):
                    tiles = await self._decoder.tiles(image.content, self._processing, image.place)
                    async with self._encoder_turn:
                        began_at = trio.current_time()
                        values = await self._encoded(tiles)
                self._metrics.image_encoding_seconds.observe(trio.current_time() - began_at)
                self.outputs.put(name, values)
            finally:
                del self._under_way[name]
                is_over.set()

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

    def _rows(self, image: PromptImage, cache_salt: str | None) -> list[GivenRows]:
        """Of each tile, a part of the whole."""
        values = self.outputs.values(output_name(image.image.digest, cache_salt))
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


def output_name(digest: bytes, cache_salt: str | None) -> bytes:
    """The name of what the model makes of an image: another one for each salt, so that the time of a request does not
    show whether another key has sent the image."""
    if cache_salt is None:
        return digest
    key = blake2b(cache_salt.encode("utf-8", "surrogatepass"), digest_size=32).digest()
    return blake2b(digest, digest_size=len(digest), key=key).digest()


def _name_of_tile(digest: bytes, tile: int) -> bytes:
    return blake2b(digest + tile.to_bytes(4, "little"), digest_size=len(digest)).digest()
