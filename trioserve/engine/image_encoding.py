"""Computes embeddings of a prompt's images or sounds, or the rows of its encoder, before its request joins the core.

Other processes decode a few files at a time. The model encodes one input at a time, between steps. If a request is
cancelled meanwhile, it ends at once, and its claim on memory is released in the same call.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from functools import partial
from hashlib import blake2b

import trio

from trioserve.admission.file_decoders import AudioDecoder, ImageDecoder
from trioserve.contracts.errors import AlreadyEnded, InvalidRequest, RequestFailed
from trioserve.contracts.media import GivenRows, ImageEncoder, ImagePlan, SoundPlan, SoundProcessing
from trioserve.contracts.prompt import EncoderInput, InputEncoder, Processing
from trioserve.core.encoder_outputs import EncoderOutputs
from trioserve.engine.open_request import OpenRequest
from trioserve.metrics.registry import Metrics
from trioserve.vision.families.registry import ImageProcessing
from trioserve.vision.image_prompt import PromptImage, ReadImage

__all__ = ["ImageEncoding", "InputEncoding", "RowEncoding", "SoundEncoding", "output_name"]

logger = logging.getLogger(__name__)

ROWS_BYTES_MAX = 256 * 2**20  # Rows of 33 windows of the largest Whisper.


class InputEncoding(ABC):
    """Encodes the images, sound or texts of requests, one input at a time, because encoding uses all processors.

    Args:
        bytes_max: limit of the memory for outputs.
        metrics: receive times and cache counts.
        wait_until_open: waits until the engine computes. Raises the refusal if the engine is closed.

    Attributes:
        outputs: cache of embeddings, with a limit on memory.
        encoder: computes embeddings. The engine sets it whenever it is opened.
    """

    _what: str  # Name of an input in errors.

    def __init__(self, bytes_max: int, metrics: Metrics, wait_until_open: Callable[[], Awaitable[None]]) -> None:
        self.outputs = EncoderOutputs(bytes_max)
        self.encoder: ImageEncoder | InputEncoder | None = None
        self._wait_until_open = wait_until_open
        self._encoder_turn = trio.Lock()
        # The event of an input is set when its encoding has ended or failed.
        self._under_way: dict[bytes, trio.Event] = {}
        self._metrics = metrics
        self._seen = (0, 0)
        metrics.on_scrape(self._show)

    async def prepare(self, request: OpenRequest) -> None:
        """Encode the inputs of a request. The caller must call `release` at the end, also after an error.

        Args:
            request: a request whose prompt is tokenized.

        Raises:
            InvalidRequest: an image cannot be decoded.
            RequestFailed: an input cannot be encoded.
        """
        if request.is_finished:
            return
        granted = trio.Event()
        claim = self.outputs.claim(self._sizes(request), granted.set)
        request.output_claim = claim
        if not claim.is_granted:
            await granted.wait()
        await self._encode_all(request)
        if request.output_claim is claim:  # If the input has another claim now, the request was ended meanwhile.
            request.given = self._given(request)
            request.forget_files()

    def release(self, request: OpenRequest) -> None:
        """Release the claim of a request. May be called at any time, and more than once."""
        claim, request.output_claim = request.output_claim, None
        if claim is not None:
            request.given = ()
            self.outputs.release(claim)

    @abstractmethod
    def _sizes(self, request: OpenRequest) -> dict[bytes, int]:
        """Return the size of each output in bytes, by its name."""

    @abstractmethod
    async def _encode_all(self, request: OpenRequest) -> None:
        """Encode each input that is not cached."""

    @abstractmethod
    def _given(self, request: OpenRequest) -> tuple[GivenRows, ...]:
        """Return the embeddings of all inputs."""

    async def _have_encoded(self, name: bytes, encode: Callable[[], Awaitable[object]]) -> None:
        """Encode an input unless its output is cached. Other requests with the same input wait for the first request.
        If the first request is cancelled, another one encodes the input.
        """
        while self.outputs.values(name) is None:
            if (other := self._under_way.get(name)) is not None:
                await other.wait()
                continue
            is_over = self._under_way[name] = trio.Event()
            try:
                self.outputs.put(name, await encode())
            finally:
                del self._under_way[name]
                is_over.set()

    async def _encoded(self, *inputs: object) -> object:
        """Return the output of the encoder."""
        async with self._encoder_turn:
            began_at = trio.current_time()
            values = await self._encoded_in_turn(*inputs)
        self._metrics.image_encoding_seconds.observe(trio.current_time() - began_at)
        return values

    async def _encoded_in_turn(self, *inputs: object) -> object:
        while True:
            await self._wait_until_open()
            encoder = self.encoder
            if encoder is None:
                raise InvalidRequest(
                    f"this engine encodes no {self._what}: it was reopened without an encoder", param="messages"
                )
            try:
                return await encoder.encode(*inputs)  # type: ignore[arg-type]  # a subclass knows its encoder
            except AlreadyEnded:
                # The encoder was not replaced, so the engine is closed and will not be reopened.
                if encoder is self.encoder:
                    await self._wait_until_open()
                    raise
            except Exception as error:  # The encoder failed, for example because there is too little memory.
                logger.exception("an input could not be encoded kind=%s", self._what)
                raise RequestFailed(
                    f"the {self._what} could not be encoded: {type(error).__name__}: {error}"
                ) from error

    def _show(self) -> None:
        outputs, metrics = self.outputs, self._metrics
        metrics.image_output_bytes.labels("used").set(outputs.claimed_bytes)
        metrics.image_output_bytes.labels("cached").set(outputs.cached_bytes)
        seen = outputs.query_count, outputs.hit_count
        metrics.image_queries_total.inc(seen[0] - self._seen[0])
        metrics.image_hits_total.inc(seen[1] - self._seen[1])
        self._seen = seen


class RowEncoding(InputEncoding):
    """Encodes the sound or the texts of requests to rows that the decoder attends to.

    Args:
        processing: how sound or text is prepared for the encoder.
        metrics: see InputEncoding.
        wait_until_open: see InputEncoding.
    """

    _what = "prompt"

    def __init__(
        self, processing: Processing, metrics: Metrics, wait_until_open: Callable[[], Awaitable[None]]
    ) -> None:
        super().__init__(ROWS_BYTES_MAX, metrics, wait_until_open)
        self._row_bytes = 4 * processing.embedding_size

    def _sizes(self, request: OpenRequest) -> dict[bytes, int]:
        read = _encoder_input(request)
        return {output_name(read.digest, request.cache_salt): read.row_count * self._row_bytes}

    async def _encode_all(self, request: OpenRequest) -> None:
        read = _encoder_input(request)
        await self._have_encoded(output_name(read.digest, request.cache_salt), partial(self._encoded, read.content))

    def _given(self, request: OpenRequest) -> tuple[GivenRows, ...]:
        read = _encoder_input(request)
        values = self.outputs.values(output_name(read.digest, request.cache_salt))
        assert values is not None, "the claim keeps the rows"
        return (GivenRows(0, read.row_count, read.digest, values),)


def _encoder_input(request: OpenRequest) -> EncoderInput:
    assert request.encoder_input is not None, "prepare of a request without input for the encoder"
    return request.encoder_input


class MediaEncoding(InputEncoding):
    """Encodes the images or sounds of requests.

    Args:
        bytes_max: see InputEncoding.
        row_bytes: bytes of an embedding row.
        is_bidirectional: the rows of one run attend to each other.
        metrics: see InputEncoding.
        wait_until_open: see InputEncoding.
    """

    def __init__(
        self,
        bytes_max: int,
        row_bytes: int,
        metrics: Metrics,
        wait_until_open: Callable[[], Awaitable[None]],
        *,
        is_bidirectional: bool = False,
    ) -> None:
        super().__init__(bytes_max, metrics, wait_until_open)
        self._row_bytes = row_bytes
        self._is_bidirectional = is_bidirectional

    def _sizes(self, request: OpenRequest) -> dict[bytes, int]:
        return {
            output_name(one.image.digest, request.cache_salt): one.image.plan.row_count * self._row_bytes
            for one in request.images
        }

    async def _encode_all(self, request: OpenRequest) -> None:
        for image in {one.image.digest: one.image for one in request.images}.values():
            name = output_name(image.digest, request.cache_salt)
            await self._have_encoded(name, partial(self._decoded_and_encoded, image, request.tenant))

    @abstractmethod
    async def _decoded_and_encoded(self, image: ReadImage, tenant: str) -> object:
        """Decode the file of an image or sound, and return the output of the encoder."""

    def _given(self, request: OpenRequest) -> tuple[GivenRows, ...]:
        return tuple(rows for image in request.images for rows in self._rows(image, request.cache_salt))

    def _rows(self, image: PromptImage, cache_salt: str | None) -> list[GivenRows]:
        """Return the embeddings of each run of an image's tokens."""
        values = self.outputs.values(output_name(image.image.digest, cache_salt))
        assert values is not None, "the claim keeps the encoded image"
        whole = memoryview(values).cast("B")  # type: ignore[arg-type]  # it has a buffer
        row_bytes, is_bidirectional = self._row_bytes, self._is_bidirectional
        rows, first = [], 0
        for run, (start, count) in enumerate(image.runs):
            part = whole[first * row_bytes : (first + count) * row_bytes]
            first += count
            name = _name_of_run(image.image.digest, run)
            grid = image.image.plan.grid
            rows.append(GivenRows(start, count, name, part, grid, is_bidirectional=is_bidirectional))
        return rows


class ImageEncoding(MediaEncoding):
    """Encodes the images of requests.

    Args:
        processing: how images are prepared for the model.
        decoder: decodes image files.
        metrics: see InputEncoding.
        wait_until_open: see InputEncoding.
    """

    _what = "image"

    def __init__(
        self,
        processing: ImageProcessing,
        decoder: ImageDecoder,
        metrics: Metrics,
        wait_until_open: Callable[[], Awaitable[None]],
    ) -> None:
        # Every image that the model reads must fit, or no client could send it.
        bytes_max = max(decoder.limits.outputs_bytes_max, processing.image_bytes_max)
        is_bidirectional = processing.is_bidirectional
        super().__init__(bytes_max, processing.row_bytes, metrics, wait_until_open, is_bidirectional=is_bidirectional)
        self._processing = processing
        self._decoder = decoder

    async def _decoded_and_encoded(self, image: ReadImage, tenant: str) -> object:
        assert isinstance(image.plan, ImagePlan), "the plan of a sound"
        # Keep the decoder slot until the tiles are encoded. This bounds how many decoded images wait in memory.
        async with self._decoder.turn(tenant):
            tiles = await self._decoder.tiles(image.content, self._processing, image.plan, image.place)
            return await self._encoded(tiles, image.plan)


class SoundEncoding(MediaEncoding):
    """Encodes the sounds of requests.

    Args:
        processing: how the model hears sounds.
        decoder: decodes audio files.
        metrics: see InputEncoding.
        wait_until_open: see InputEncoding.
    """

    _what = "sound"

    def __init__(
        self,
        processing: SoundProcessing,
        decoder: AudioDecoder,
        metrics: Metrics,
        wait_until_open: Callable[[], Awaitable[None]],
    ) -> None:
        longest = int(decoder.limits.seconds_max) // processing.window_seconds + 1
        window_bytes = processing.frame_count // 4 * processing.row_bytes
        bytes_max = max(ROWS_BYTES_MAX, min(longest, processing.windows_max) * window_bytes)
        super().__init__(bytes_max, processing.row_bytes, metrics, wait_until_open)
        self._processing = processing
        self._decoder = decoder

    async def _decoded_and_encoded(self, image: ReadImage, tenant: str) -> object:
        assert isinstance(image.plan, SoundPlan), "the plan of an image"
        async with self._decoder.recording(image.content, self._processing, image.place, tenant=tenant) as recording:
            seconds = self._processing.window_seconds
            windows = [recording.window(index * seconds)[0] for index in range(len(image.plan.frame_counts))]
            return await self._encoded(windows, image.plan)


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
