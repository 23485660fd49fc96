"""Tests of decoding clients' image files, and of refusing invalid files before and during decoding."""

from __future__ import annotations

import contextlib
import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.media import ImageLimits
from trioserve.vision.image_file import pixels_of
from trioserve.vision.image_header import read_header

LIMITS = ImageLimits(pixels_max=1_000_000, side_max=4096, image_bytes_max=200_000)


def saved(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def halves(mode: str = "RGB") -> Image.Image:
    """Return an image of 12 x 8 pixels: red on the left, blue on the right."""
    image = Image.new("RGB", (12, 8), (255, 0, 0))
    image.paste((0, 0, 255), (6, 0, 12, 8))
    return image.convert(mode)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_of(width: int, height: int, rows: bytes = b"") -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def first_pixel(content: bytes) -> tuple[int, ...]:
    read_header(content, LIMITS, "x")
    image = pixels_of(content, "x")
    assert image.mode == "RGB"
    return tuple(int(value) for value in np.asarray(image)[0, 0])


@pytest.mark.parametrize(
    "content",
    [
        saved(halves()),
        saved(halves("P")),
        saved(halves("RGBA")),
        saved(halves("CMYK"), "JPEG", quality=100),
        saved(halves(), "JPEG", quality=100),
        saved(halves(), "WEBP", lossless=True),
        saved(halves(), "GIF"),
        saved(halves(), "GIF", save_all=True, append_images=[Image.new("RGB", (12, 8), (0, 255, 0))]),
        saved(halves(), "WEBP", lossless=True, save_all=True, append_images=[Image.new("RGB", (12, 8), (0, 255, 0))]),
    ],
)
def test_images_of_supported_formats_are_decoded(content: bytes) -> None:
    assert read_header(content, LIMITS, "x").upright_size == (12, 8)
    red, green, blue = first_pixel(content)
    assert red > 240
    assert max(green, blue) < 15


def test_transparent_pixels_of_an_image_become_white() -> None:
    assert first_pixel(saved(Image.new("RGBA", (4, 4), (0, 0, 0, 0)))) == (255, 255, 255)
    assert first_pixel(saved(Image.new("LA", (4, 4), (0, 0)))) == (255, 255, 255)
    palette = Image.new("P", (4, 4), 0)
    assert first_pixel(saved(palette, transparency=0)) == (255, 255, 255)


def test_16_bit_samples_keep_their_upper_bits() -> None:
    values = np.full((4, 4), 0x8012, dtype=np.uint16)
    assert first_pixel(saved(Image.fromarray(values))) == (0x80, 0x80, 0x80)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_image_is_rotated_by_its_exif_orientation(orientation: int) -> None:
    from PIL import ImageOps

    exif = Image.Exif()
    exif[274] = orientation
    for format in ("JPEG", "PNG", "WEBP"):
        options = {"quality": 100} if format == "JPEG" else {"lossless": True} if format == "WEBP" else {}
        content = saved(halves(), format, exif=exif, **options)
        expected = ImageOps.exif_transpose(Image.open(io.BytesIO(content))).convert("RGB")
        assert read_header(content, LIMITS, "x").upright_size == expected.size
        assert np.array_equal(np.asarray(pixels_of(content, "x")), np.asarray(expected))


def test_damaged_exif_orientation_is_ignored() -> None:
    content = saved(halves(), exif=b"Exif\x00\x00MM\x00*\xff\xff\xff\xff")
    assert read_header(content, LIMITS, "x").upright_size == (12, 8)


@pytest.mark.parametrize(
    "content, sentence",
    [
        (b"", "not an image of a supported format"),
        (b"<svg/>", "not an image of a supported format"),
        (saved(halves(), "BMP"), "not an image of a supported format"),
        (saved(halves(), "TIFF"), "not an image of a supported format"),
        (png_of(100_000, 100_000), "pixels"),
        (png_of(2_000_000_000, 1), "pixels"),
        (png_of(1001, 1000), "1001 x 1000 pixels"),
        (png_of(5000, 1), "5000 x 1 pixels"),
        (png_of(0, 5), "."),
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 20, "."),
        (saved(halves()) + bytes(200_000), "an image may have 200000"),
    ],
)
def test_invalid_image_file_is_refused_by_its_header(content: bytes, sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence) as refusal:
        read_header(content, LIMITS, "here")
    assert refusal.value.param == "here"


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF"])
def test_truncated_image_file_is_refused(format: str) -> None:
    noise = np.random.default_rng(0).integers(0, 255, (40, 40, 3), dtype=np.uint8)
    content = saved(Image.fromarray(noise), format)
    refused = 0
    for end in range(0, len(content) - 20, len(content) // 40):
        try:
            read_header(content[:end], LIMITS, "x")
            pixels_of(content[:end], "x")
        except InvalidRequest:
            refused += 1
    assert refused >= 39


def test_damaged_file_is_decoded_or_refused_with_a_printable_message() -> None:
    rng = np.random.default_rng(1)
    sentences = []
    for format in ("PNG", "JPEG", "WEBP", "GIF"):
        whole = saved(halves(), format)
        for _ in range(60):
            content = bytearray(whole)
            for place in rng.integers(0, len(content), 4):
                content[place] = rng.integers(256)
            try:
                read_header(bytes(content), LIMITS, "x")
                pixels_of(bytes(content), "x")
            except InvalidRequest as error:
                sentences.append(str(error))
    assert len(sentences) > 60
    assert all(map(str.isprintable, sentences))


def test_rows_beyond_the_announced_size_are_ignored() -> None:
    with contextlib.suppress(InvalidRequest):
        assert pixels_of(png_of(10, 10, bytes(50_000_000)), "x").size == (10, 10)
