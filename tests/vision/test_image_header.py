"""Tests that reading the header of a hostile image file is cheap, and gives the right header or a refusal."""

from __future__ import annotations

import contextlib
import io
import struct
import sys
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from PIL import Image

from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.media import ImageLimits
from trioserve.vision import image_header
from trioserve.vision.image_file import pixels_of
from trioserve.vision.image_header import ImageHeader, read_header

LIMITS = ImageLimits()


def saved(format: str, size: tuple[int, int] = (16, 8), **options: Any) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, "red").save(file, format, **options)
    return file.getvalue()


def png_chunk(kind: bytes, data: bytes = b"") -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_with(*chunks: bytes) -> bytes:
    whole = saved("PNG")
    return whole[:33] + b"".join(chunks) + whole[33:]


def segment(marker: int, data: bytes = b"") -> bytes:
    return b"\xff" + bytes((marker,)) + struct.pack(">H", len(data) + 2) + data


def jpeg_with(*segments: bytes) -> bytes:
    """Return a JPEG with additional segments before its own segments."""
    whole = saved("JPEG")
    return whole[:2] + b"".join(segments) + whole[2:]


def jpeg_scans(scan_count: int) -> bytes:
    """Return a JPEG that repeats its first scan."""
    whole = saved("JPEG")
    start = whole.index(b"\xff\xda")
    return whole[:start] + whole[start:-2] * scan_count + b"\xff\xd9"


def gif_with(blocks: bytes) -> bytes:
    whole = saved("GIF")
    start = 13 + (3 << (whole[10] & 7) + 1 if whole[10] & 0x80 else 0)
    return whole[:start] + blocks + whole[start:]


def webp_with(chunks: bytes) -> bytes:
    canvas = b"VP8X" + struct.pack("<I", 10) + bytes(4) + (15).to_bytes(3, "little") + (7).to_bytes(3, "little")
    body = b"WEBP" + canvas + chunks + saved("WEBP")[12:]
    return b"RIFF" + struct.pack("<I", len(body)) + body


EXIF_APART = b"MM\0*" + struct.pack(">IH", 8, 1) + struct.pack(">HHIHH", 274, 3, 1, 6, 0)
COMMENT = b"\x21\xfe\x01a\0"


@pytest.mark.parametrize(
    "content, words",
    [
        (lambda count: png_with(png_chunk(b"prVt") * count), "16384 chunks"),
        (lambda count: jpeg_with(segment(0xFE) * count), "2048 segments"),
        (lambda count: jpeg_with(b"\xff\x01" * count), "2048 segments"),
        (jpeg_scans, "64 scans"),
        (lambda count: gif_with(COMMENT * count), "256 blocks"),
        (lambda count: gif_with(b"\x21\xfe" + b"\x01a" * count + b"\0"), "16384 sub-blocks"),
        (lambda count: webp_with((b"ANMF" + struct.pack("<I", 0)) * count), "4096 chunks"),
    ],
    ids=["png chunks", "jpeg comments", "jpeg markers", "jpeg scans", "gif comments", "gif pieces", "webp frames"],
)
def test_too_many_segments_chunks_or_blocks_are_refused_at_bounded_cost(
    content: Callable[[int], bytes], words: str
) -> None:
    def lines_run(count: int) -> int:
        lines = 0

        def trace(frame: Any, event: str, _argument: object) -> Any:
            nonlocal lines
            lines += event == "line" and frame.f_code.co_filename == image_header.__file__
            return trace

        file = content(count)
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            with pytest.raises(InvalidRequest, match=words) as refusal:
                read_header(file, LIMITS, "here")
        finally:
            sys.settrace(before)
        assert refusal.value.param == "here"
        return lines

    assert lines_run(20_000) == lines_run(40_000)


def test_files_with_a_realistic_number_of_segments_chunks_and_blocks_are_accepted() -> None:
    size = ImageHeader("PNG", 16, 8)
    assert read_header(png_with(png_chunk(b"prVt") * 1000), LIMITS, "x") == size
    assert read_header(jpeg_with(segment(0xE2, bytes(100)) * 512), LIMITS, "x") == size._replace(format="JPEG")
    assert read_header(jpeg_scans(12), LIMITS, "x") == size._replace(format="JPEG")
    assert read_header(gif_with(COMMENT * 20), LIMITS, "x") == size._replace(format="GIF")
    assert read_header(webp_with((b"ANMF" + struct.pack("<I", 0)) * 500), LIMITS, "x") == size._replace(format="WEBP")


@pytest.mark.parametrize("marker", [0xC3, 0xC5, 0xC9, 0xCA, 0xCF])
def test_jpeg_kinds_that_browsers_do_not_support_are_refused(marker: int) -> None:
    content = saved("JPEG").replace(b"\xff\xc0", bytes((0xFF, marker)), 1)
    with pytest.raises(InvalidRequest, match="an unsupported kind of JPEG"):
        read_header(content, LIMITS, "x")


def test_second_frame_of_a_jpeg_is_refused() -> None:
    frame = struct.pack(">BHHB", 8, 60_000, 60_000, 1) + b"\1\x11\0"
    with pytest.raises(InvalidRequest, match="second frame"):
        read_header(jpeg_with(segment(0xC0, frame)), LIMITS, "x")


def test_scans_after_the_end_of_a_jpeg_are_not_counted() -> None:
    assert read_header(saved("JPEG") + jpeg_scans(100), LIMITS, "x") == ImageHeader("JPEG", 16, 8)


def test_scans_of_a_preview_inside_of_a_jpeg_are_not_counted() -> None:
    preview = saved("JPEG", (4, 4))
    assert read_header(jpeg_with(segment(0xE1, preview)), LIMITS, "x") == ImageHeader("JPEG", 16, 8)


def test_size_of_a_gif_includes_its_first_frame() -> None:
    whole = saved("GIF")
    frame = whole.index(b"\x2c", 13)
    content = whole[: frame + 5] + struct.pack("<HH", 20_000, 20_000) + whole[frame + 9 :]
    with pytest.raises(InvalidRequest, match="20000 x 20000 pixels"):
        read_header(content, LIMITS, "x")


def test_too_large_webp_canvas_is_refused_before_decoding() -> None:
    content = webp_with(b"").replace((15).to_bytes(3, "little"), (16_383).to_bytes(3, "little"), 1)
    content = content.replace((7).to_bytes(3, "little"), (16_383).to_bytes(3, "little"), 1)
    with pytest.raises(InvalidRequest, match="16384 x 16384 pixels"):
        read_header(content, LIMITS, "x")


def test_image_size_that_differs_from_the_header_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trioserve.vision.image_file.scan_header", lambda content, place: ImageHeader("PNG", 5, 5))
    with pytest.raises(InvalidRequest, match="it has 16 x 8 pixels, but its header has 5 x 5"):
        pixels_of(saved("PNG"), "x")


@pytest.mark.parametrize(
    "content",
    [
        png_with(png_chunk(b"eXIf", EXIF_APART)),
        jpeg_with(segment(0xE1, b"Exif\0\0" + EXIF_APART)),
        webp_with(b"EXIF" + struct.pack("<I", len(EXIF_APART)) + EXIF_APART),
    ],
    ids=["png", "jpeg", "webp"],
)
def test_exif_orientation_is_read(content: bytes) -> None:
    header = read_header(content, LIMITS, "x")
    assert (header.orientation, header.upright_size) == (6, (8, 16))


def test_exif_directory_is_read_up_to_a_number_of_entries() -> None:
    """The directory has 65,535 entries, and each announces a value as long as the file."""
    entry = struct.pack(">HHII", 1, 2, 2**24, 8)
    content = png_with(png_chunk(b"eXIf", b"MM\0*" + struct.pack(">IH", 8, 65_535) + entry * 65_535))
    assert read_header(content, LIMITS, "x").orientation == 1


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF"])
def test_truncated_header_is_refused_but_truncated_pixels_are_not(format: str) -> None:
    content = saved(format)
    for end in range(len(content)):
        with contextlib.suppress(InvalidRequest):
            assert read_header(content[:end], LIMITS, "x") == ImageHeader(format, 16, 8)
