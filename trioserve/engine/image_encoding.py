"""Computes the embeddings of a prompt's images before its request joins the core.

Other processes decode a few images at a time. The model encodes one image at a time, between steps. If a request is
cancelled meanwhile, it ends at once, and its claim on memory is released in the same call.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from hashlib import blake2b

import trio

from trioserve.admission.image_decoder import ImageDecoder
from trioserve.contracts.errors import AlreadyEnded, InvalidRequest, RequestFailed
from trioserve.contracts.images import GivenRows, ImageEncoder, ImagePlan, Tiles
from trioserve.core.encoder_outputs import EncoderOutputs
from trioserve.engine.open_request import OpenRequest
from trioserve.metrics.registry import Metrics
from trioserve.vision.families.registry import ImageProcessing
from trioserve.vision.image_prompt import PromptImage, ReadImage

__all__ = ["ImageEncoding", "output_name"]

logger = logging.getLogger(__name__)


class ImageEncoding:
    """Encodes the images of requests.

    Args:
        processing: how images are prepared for the model.
        decoder: decodes image files.
        metrics: receive times and cache counts.
        wait_until_open: waits until the engine computes. Raises the refusal if the engine is closed.

    Attributes:
        outputs: cache of embeddings, with a limit on memory.
        encoder: computes embeddings. The engine sets it whenever it is opened.
    """

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
        self._encoder_turn = trio.Lock()  # The model encodes one image at a time, because encoding uses all processors.
        # The event of an image is set when its encoding has ended or failed.
        self._under_way: dict[bytes, trio.Event] = {}
        self._seen = (0, 0)
        metrics.on_scrape(self._show)

    async def prepare(self, request: OpenRequest) -> None:
        """Encode the images of a request. The caller must call `release` at the end, also after an error.

        Args:
            request: a request whose prompt is tokenized.

        Raises:
            InvalidRequest: an image cannot be decoded.
            RequestFailed: an image cannot be encoded.
        """
        if request.is_finished:
            return
        granted = trio.Event()
        claim = self.outputs.claim(self._sizes(request), granted.set)
        request.output_claim = claim
        if not claim.is_granted:
            await granted.wait()
        for image in {one.image.digest: one.image for one in request.images}.values():
            await self._have_encoded(image, output_name(image.digest, request.cache_salt), request.tenant)
        if request.output_claim is claim:  # If the image has another claim now, the request was ended meanwhile.
            request.given = tuple(rows for image in request.images for rows in self._rows(image, request.cache_salt))
            request.forget_files()

    def release(self, request: OpenRequest) -> None:
        """Release the claim of a request. May be called at any time, and more than once.

        Args:
            request: the request.
        """
        claim, request.output_claim = request.output_claim, None
        if claim is not None:
            request.given = ()
            self.outputs.release(claim)

    def _sizes(self, request: OpenRequest) -> dict[bytes, int]:
        return {
            output_name(one.image.digest, request.cache_salt): one.image.plan.row_count * self._processing.row_bytes
            for one in request.images
        }

    async def _have_encoded(self, image: ReadImage, name: bytes, tenant: str) -> None:
        """Encode an image unless it is cached. Other requests with the same image wait for the first request. If the
        first request is cancelled, another one encodes the image.
        """
        while self.outputs.values(name) is None:
            if (other := self._under_way.get(name)) is not None:
                await other.wait()
                continue
            is_over = self._under_way[name] = trio.Event()
            try:
                # Keep the decoder slot until the tiles are encoded. This bounds how many decoded images wait in memory.
                async with self._decoder.turn(tenant):
                    tiles = await self._decoder.tiles(image.content, self._processing, image.plan, image.place)
                    async with self._encoder_turn:
                        began_at = trio.current_time()
                        values = await self._encoded(tiles, image.plan)
                self._metrics.image_encoding_seconds.observe(trio.current_time() - began_at)
                self.outputs.put(name, values)
            finally:
                del self._under_way[name]
                is_over.set()

    async def _encoded(self, tiles: Tiles, plan: ImagePlan) -> object:
        while True:
            await self._wait_until_open()
            encoder = self.encoder
            if encoder is None:
                raise InvalidRequest("this engine encodes no images: it was reopened without them", param="messages")
            try:
                return await encoder.encode(tiles, plan)
            except AlreadyEnded:
                # The encoder was not replaced, so the engine is closed and will not be reopened.
                if encoder is self.encoder:
                    await self._wait_until_open()
                    raise
            except Exception as error:  # The encoder failed, for example because there is too little memory.
                logger.exception("an image could not be encoded")
                raise RequestFailed(f"the image could not be encoded: {type(error).__name__}: {error}") from error

    def _rows(self, image: PromptImage, cache_salt: str | None) -> list[GivenRows]:
        """Return the embeddings of each run of an image's tokens."""
        values = self.outputs.values(output_name(image.image.digest, cache_salt))
        assert values is not None, "the claim keeps the encoded image"
        whole = memoryview(values).cast("B")  # type: ignore[arg-type]  # it has a buffer
        row_bytes = self._processing.row_bytes
        rows, first = [], 0
        for run, (start, count) in enumerate(image.runs):
            part = whole[first * row_bytes : (first + count) * row_bytes]
            first += count
            rows.append(GivenRows(start, count, _name_of_run(image.image.digest, run), part, image.image.plan.grid))
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
    """Return the cache name of an image's embeddings.

    The name depends on the salt, so that the response time does not reveal whether another user has sent the image.

    Args:
        digest: digest of the image.
        cache_salt: separates caches of different users. None: shared.
    """
    if cache_salt is None:
        return digest
    key = blake2b(cache_salt.encode("utf-8", "surrogatepass"), digest_size=32).digest()
    return blake2b(digest, digest_size=len(digest), key=key).digest()


def _name_of_run(digest: bytes, run: int) -> bytes:
    return blake2b(digest + run.to_bytes(4, "little"), digest_size=len(digest)).digest()
