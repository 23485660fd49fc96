"""Where a prompt's images are: the text in which each is written out for the model, and its rows among the tokens.

As Idefics 3 and SmolVLM were trained: <image> stands once for each row of a tile, behind where the tile is from.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import msgspec

from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.images import ImageLimits, ImageProcessing
from trioserve.vision.chat_images import ImageSource, content_of
from trioserve.vision.image_file import why_no_images
from trioserve.vision.image_header import read_header
from trioserve.vision.tile_plan import TilePlan, plan_tiles

__all__ = ["IMAGE_SIGN", "ImageReader", "PromptImage", "ReadImage"]

IMAGE_SIGN = "<image>"
_AROUND = "<fake_token_around_image>"
_WHOLE = "<global-img>"
_DIGEST_BYTES = 16


class ReadImage(msgspec.Struct, frozen=True):
    """content: the file's bytes, whose header has been read. digest: names what the model makes of them."""

    place: str
    content: bytes
    digest: bytes
    plan: TilePlan


class PromptImage(msgspec.Struct, frozen=True):
    """runs: where its rows are among the prompt's tokens, each with its first position and its length."""

    image: ReadImage
    runs: tuple[tuple[int, int], ...]


class ImageReader:
    """For one model. Every method may be called from any thread, and is a function of values."""

    def __init__(self, processing: ImageProcessing, limits: ImageLimits) -> None:
        self.processing = processing
        self.limits = limits
        self._name = msgspec.json.encode(processing)

    def check_count(self, sources: Sequence[ImageSource]) -> None:
        """Raises InvalidRequest."""
        images_max = self.limits.images_max
        if len(sources) > images_max:
            place = sources[images_max].place
            raise InvalidRequest(
                f"the messages hold {len(sources)} images, and at most {images_max} are read of one prompt "
                "(--limit-mm-per-prompt): send fewer",
                param=place,
            )

    def read(self, sources: Sequence[ImageSource]) -> list[ReadImage]:
        """Raises InvalidRequest for what is no image, or too large; what is behind the header has not been read."""
        if sources and (reason := why_no_images()) is not None:
            raise InvalidRequest(f"this server reads no images: {reason}", param=sources[0].place)
        read = []
        for source in sources:
            content = content_of(source, self.limits)
            header = read_header(content, self.limits, source.place)
            digest = blake2b(content, digest_size=_DIGEST_BYTES, key=blake2b(self._name, digest_size=32).digest())
            plan = plan_tiles(*header.upright_size, self.processing)
            read.append(ReadImage(source.place, content, digest.digest(), plan))
        return read

    def written_out(self, text: str, images: Sequence[ReadImage]) -> str:
        """text: as a chat template wrote it, with a sign for each image. Raises InvalidRequest if there are others."""
        pieces = text.split(IMAGE_SIGN)
        if len(pieces) != len(images) + 1:
            raise InvalidRequest(
                f"the prompt has {len(images)} images and {len(pieces) - 1} times {IMAGE_SIGN}, which is how the model "
                "is shown where one is: leave it out of the texts",
                param="messages",
            )
        whole = [pieces[0]]
        for image, piece in zip(images, pieces[1:], strict=True):
            whole += (self._sign(image.plan), piece)
        return "".join(whole)

    def located(self, token_ids: Sequence[int], images: Sequence[ReadImage]) -> tuple[PromptImage, ...]:
        """token_ids: of the text that is written out. Raises InvalidRequest if its tokens are not what they were
        written for."""
        runs = _runs(token_ids, self.processing.image_token_id)
        located, first = [], 0
        for image in images:
            own = runs[first : first + image.plan.tile_count]
            first += image.plan.tile_count
            located.append(PromptImage(image, tuple(own)))
        if first != len(runs) or any(count != self.processing.tile_tokens for _, count in runs):
            raise InvalidRequest(
                f"the prompt's tokens have {len(runs)} places for tiles of images, and the images have {first}: leave "
                "the model's special tokens out of the texts",
                param="messages",
            )
        return tuple(located)

    def _sign(self, plan: TilePlan) -> str:
        rows = IMAGE_SIGN * self.processing.tile_tokens
        whole = f"{_AROUND}{_WHOLE}{rows}{_AROUND}"
        if not plan.rows:
            return whole
        lines = [
            "".join(f"{_AROUND}<row_{row + 1}_col_{column + 1}>{rows}" for column in range(plan.columns))
            for row in range(plan.rows)
        ]
        return "\n".join(lines) + f"\n\n{whole}"


def _runs(token_ids: Sequence[int], token_id: int) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for position, found in enumerate(token_ids):
        if found != token_id:
            continue
        if runs and sum(runs[-1]) == position:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((position, 1))
    return runs
