"""What is known of images before and behind the model that sees them: how they are cut, and what they become."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Protocol

import msgspec

from trioserve.contracts.errors import StartupError

__all__ = ["ImageEncoder", "ImageLimits", "ImageProcessing", "Tiles"]


class ImageProcessing(msgspec.Struct, frozen=True, kw_only=True):
    """How a model wants its images, as the files around its weights say it.

    longest_edge: pixels of an image's longer side, before it is cut. tile_size: pixels of either side of a tile.
    splits: an image is cut into tiles, and all of it is one more; otherwise it is one tile. resample: Pillow's number
    of the filter. mean, std, rescale_factor: a number becomes (number * rescale_factor - mean) / std of its colour.
    tile_tokens: rows that a tile is to the model. embedding_size: numbers of a row. image_token_id: the token that
    stands in the prompt for each of them.
    """

    longest_edge: int
    tile_size: int
    splits: bool
    resample: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    rescale_factor: float
    tile_tokens: int
    embedding_size: int
    image_token_id: int

    @property
    def tile_bytes(self) -> int:
        """What the rows of one tile take, in float32."""
        return 4 * self.tile_tokens * self.embedding_size


class ImageLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What is taken of clients.

    images_max: of one prompt. image_bytes_max: as it is sent, before it is decoded. pixels_max: width times height;
    it sets the memory limit of the processes that decode. side_max: pixels of either side. decode_seconds_max: of one
    image; the largest ones take about three seconds on a slow core. outputs_bytes_max: what the model has made of
    images, of all requests together; what nobody uses any more is kept as long as there is room. Raises StartupError.
    """

    images_max: int = 8
    image_bytes_max: int = 16 * 2**20
    pixels_max: int = 40_000_000
    side_max: int = 16_384
    decode_seconds_max: float = 15.0
    outputs_bytes_max: int = 256 * 2**20

    def __post_init__(self) -> None:
        if not 0 <= self.images_max <= 1000:
            raise StartupError(f"--limit-mm-per-prompt has image {self.images_max}, it may be 0 to 1000")
        for name in ("image_bytes_max", "pixels_max", "side_max", "outputs_bytes_max"):
            if getattr(self, name) < 1:
                raise StartupError(f"{name} is {getattr(self, name)}, it must be at least 1")
        if not self.decode_seconds_max > 0:
            raise StartupError(f"decode_seconds_max is {self.decode_seconds_max}, it must be above 0")


class Tiles(Protocol):
    """uint8 [count, tile_size, tile_size, 3]: an image's tiles row by row, and all of it behind them."""

    @property
    def shape(self) -> tuple[int, ...]: ...


class ImageEncoder(Protocol):
    """What makes rows of tiles, as seen from the event loop."""

    def encode(self, tiles: Tiles) -> Coroutine[Any, Any, object]:
        """float32 [count * tile_tokens, embedding_size], whatever has a buffer. Between two pieces of it, each of which
        takes about as long as a step, steps are computed; a cancelled caller leaves at once. Raises AlreadyEnded when
        the engine is closed or opened anew."""
        ...
