"""Tests of encoding generated images, and of decoding the images and masks of edits."""

from __future__ import annotations

import io
from typing import Any

import pytest
from PIL import Image

from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.image_generation import RGBImage
from trioserve.contracts.media import ImageLimits
from trioserve.vision.image_file import (
    IMAGE_FORMATS,
    ImageFormat,
    decoded_image,
    decoded_mask,
    encoded_image,
)

pytestmark = pytest.mark.slow

LIMITS = ImageLimits(pixels_max=4096, side_max=1024, image_bytes_max=100_000)
SIZE = (8, 4)


def gradient() -> RGBImage:
    """Return an image that is wider than high, so that a test detects exchanged width and height."""
    width, height = SIZE
    rgb = bytes(value for y in range(height) for x in range(width) for value in (x * 30, y * 60, 128))
    return RGBImage(width, height, rgb)


def saved(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def bright(mask: RGBImage) -> list[list[bool]]:
    """Return True for each bright pixel of a mask, row by row."""
    values = mask.rgb[::3]
    return [[value >= 128 for value in values[y * mask.width : (y + 1) * mask.width]] for y in range(mask.height)]


@pytest.mark.parametrize("kind", IMAGE_FORMATS)
def test_image_is_encoded_in_each_format(kind: Any) -> None:
    content = encoded_image(gradient(), ImageFormat(kind))
    image = Image.open(io.BytesIO(content))
    assert (image.format, image.size) == (kind.upper(), SIZE)


@pytest.mark.parametrize("kind", IMAGE_FORMATS)
def test_colours_survive_encoding_and_decoding(kind: Any) -> None:
    colour = (200, 40, 90)
    picture = RGBImage(*SIZE, bytes(colour) * (SIZE[0] * SIZE[1]))
    again = decoded_image(encoded_image(picture, ImageFormat(kind)), LIMITS, "image")
    # JPEG and WebP round values when they convert to another colour space.
    assert max(abs(one - other) for one, other in zip(again.rgb, picture.rgb, strict=True)) <= (
        0 if kind == "png" else 4
    )


def test_png_is_lossless_and_lower_quality_makes_smaller_files() -> None:
    assert decoded_image(encoded_image(gradient(), ImageFormat("png")), LIMITS, "image") == gradient()
    for kind in ("jpeg", "webp"):
        sizes = [len(encoded_image(gradient(), ImageFormat(kind, quality))) for quality in (100, 5)]
        assert sizes[1] < sizes[0]


def test_transparent_pixels_of_a_mask_file_are_bright() -> None:
    image = Image.new("RGBA", SIZE, (9, 9, 9, 255))
    image.paste((9, 9, 9, 0), (0, 0, 3, 4))
    expect = [[x < 3 for x in range(8)] for _ in range(4)]
    assert bright(decoded_mask(saved(image), LIMITS, "mask")) == expect
    assert bright(decoded_mask(saved(image, "WEBP", lossless=True), LIMITS, "mask")) == expect


def test_mask_file_without_transparency_is_used_unchanged() -> None:
    image = Image.new("L", SIZE, 0)
    image.paste(255, (5, 0, 8, 4))
    expect = [[x >= 5 for x in range(8)] for _ in range(4)]
    assert bright(decoded_mask(saved(image), LIMITS, "mask")) == expect
    assert bright(decoded_mask(saved(image.convert("RGBA")), LIMITS, "mask")) == expect


def test_mask_is_rotated_by_its_exif_orientation() -> None:
    image = Image.new("RGBA", SIZE, (9, 9, 9, 255))
    image.putpixel((0, 0), (0, 0, 0, 0))
    exif = Image.Exif()
    exif[274] = 6  # A rotation to the right moves the top left pixel to the top right.
    mask = decoded_mask(saved(image, exif=exif), LIMITS, "mask")
    assert (mask.width, mask.height) == (4, 8)
    assert [(x, y) for y, row in enumerate(bright(mask)) for x, is_bright in enumerate(row) if is_bright] == [(3, 0)]


@pytest.mark.parametrize("decode", [decoded_image, decoded_mask])
@pytest.mark.parametrize(
    ("content", "says"),
    [
        pytest.param(b"GIF89a no", "mask", id="no image"),
        pytest.param(saved(Image.new("RGBA", (100, 100))), "100 x 100 pixels; allowed are 4096 in all", id="too large"),
        pytest.param(saved(Image.new("RGBA", (60, 60), (1, 2, 3, 4)))[:80], "damaged", id="cut off"),
    ],
)
def test_unreadable_image_or_mask_is_an_invalid_request(decode: Any, content: bytes, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as refused:
        decode(content, LIMITS, "mask")
    assert refused.value.param == "mask"
