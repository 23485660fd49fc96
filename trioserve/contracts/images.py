"""Images as model input: plans, limits, the encoder interface, and the embeddings that a prompt gets."""

from __future__ import annotations

import struct
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, Protocol

import msgspec

from trioserve.contracts.errors import StartupError

__all__ = ["GivenRows", "ImageEncoder", "ImageLimits", "ImagePlan", "Tiles", "rows_material"]


class GivenRows(msgspec.Struct, frozen=True):
    """Embeddings of the prompt positions start .. start + count - 1, regardless of the tokens at these positions.

    Attributes:
        start: First position.
        count: Number of positions.
        content: 16 bytes that identify the embeddings. Two contents are equal only if all numbers are equal, also
            across machines.
        values: Buffer of float32 [count, hidden_size]. Its numbers must not change. The buffer is kept as long as a
            request uses it.
        grid: Rows and columns of the image's tokens, for a model with positions in a grid (see RotaryConfig.axes).
            Their product is count. None: the tokens have positions like tokens of a text.
        is_bidirectional: True if these positions also attend to each other's later positions. A step that computes one
            of them then computes all later ones, too.
    """

    start: int
    count: int
    content: bytes
    values: object
    grid: tuple[int, int] | None = None
    is_bidirectional: bool = False

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def rotary_count(self) -> int:
        """Return how far the rotary position advances from the first token to the token after the last."""
        return self.count if self.grid is None else max(self.grid)


def rows_material(given: Sequence[GivenRows], start: int, end: int) -> bytes:
    """Return the bytes that a block's hash depends on in addition to its tokens (contracts/block_hash.py).

    Args:
        given: Given rows, ordered by position.
        start: First position of the block.
        end: Position after the block.

    Returns:
        Bytes for with_material, or b"" if all embeddings of the block are looked up by token.
    """
    return b"".join(_overlaps(given, start, end))


def _overlaps(given: Iterable[GivenRows], start: int, end: int) -> Iterable[bytes]:
    for rows in given:
        if rows.start < end and rows.end > start:
            yield rows.content + struct.pack("<q", rows.start - start)
            if rows.grid is not None:
                yield struct.pack("<qq", *rows.grid)


class ImagePlan(msgspec.Struct, frozen=True, kw_only=True):
    """The tiles of one image, and its rows in the prompt. Follows from the size of the image.

    Attributes:
        width: Pixels of the upright image's width.
        height: Pixels of the upright image's height.
        tile_width: Pixels of each tile's width. All tiles of an image have the same size.
        tile_height: Pixels of each tile's height.
        rows: Rows of tiles into which the image is cut. 0 if the whole image is the only tile.
        columns: Tiles of one such row.
        tile_count: Number of tiles, including a tile of the whole image.
        runs: Number of embedding rows in each run of image tokens, in the order of the prompt.
        grid: Rows and columns of the image's only run, for a model with positions in a grid. See GivenRows.
    """

    width: int
    height: int
    tile_width: int
    tile_height: int
    rows: int = 0
    columns: int = 0
    tile_count: int = 1
    runs: tuple[int, ...]
    grid: tuple[int, int] | None = None

    @property
    def row_count(self) -> int:
        """Return the number of embedding rows."""
        return sum(self.runs)

    @property
    def pixel_bytes(self) -> int:
        """Return the bytes of the tiles' pixels."""
        return self.tile_count * self.tile_width * self.tile_height * 3


class ImageLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits for images that clients send.

    Attributes:
        images_max: Images of one prompt, 0 to 1000.
        image_bytes_max: Bytes of an encoded image.
        pixels_max: Largest width times height. This limit determines the memory limit of the decoder processes.
        side_max: Pixels of each side.
        decode_seconds_max: Time for one image. The largest images take about three seconds on a slow core.
        outputs_bytes_max: Bytes of encoder output kept for all requests together. Output that no request uses is kept
            until its memory is needed.

    Raises:
        StartupError: a limit is out of range.
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
    """The tiles of an image, in the order of its family. uint8 [count, tile_height, tile_width, 3]."""

    @property
    def shape(self) -> tuple[int, ...]: ...


class ImageEncoder(Protocol):
    """Turns tiles into embedding rows. Its methods are called from the event loop."""

    def encode(self, tiles: Tiles, plan: ImagePlan) -> Coroutine[Any, Any, object]:
        """Compute the embeddings of an image's tiles.

        The work is split into pieces that take about as long as a step. The engine runs steps between two pieces. A
        cancelled caller returns at once.

        Args:
            tiles: Tiles of one image.
            plan: Plan of the tiles.

        Returns:
            Buffer of float32 [plan.row_count, embedding_size].

        Raises:
            AlreadyEnded: the engine was closed or restarted.
        """
        ...
