"""Reads the header of a client's image file with bounded work, before a decoder gets the file.

The scanner visits the segments, chunks or blocks of a file without decoding them. It counts everything on which a
decoder would spend time: scans of a progressive JPEG, segments, chunks, animation frames, comments. A file that exceeds
a limit is refused.

Cost: milliseconds. The scanner blocks other threads for at most SEARCH_BYTES at a time.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from typing import NamedTuple

from trioserve.contracts.errors import InvalidRequest
from trioserve.contracts.media import ImageLimits

__all__ = ["ImageHeader", "read_header", "scan_header"]

# Each limit is several times higher than real files need. A decoder takes about 1 microsecond per segment, chunk or
# block.
JPEG_SCANS_MAX = 64  # Encoders write 1 to 12 scans. One scan of 40 million pixels takes up to 0.1 s.
JPEG_SEGMENTS_MAX = 2048  # An ICC profile of 16 MB has 256 segments, and so has XMP metadata of 16 MB.
PNG_CHUNKS_MAX = 16_384  # These are 16 MB in IDAT chunks of 1 KB. Encoders write chunks of 4 to 64 KB.
WEBP_CHUNKS_MAX = 4096  # Each frame of an animation is one chunk. Only the first frame is decoded.
GIF_BLOCKS_MAX = 256  # Maximum number of blocks before the first frame. Later frames are not decoded.
GIF_SUBBLOCKS_MAX = 16_384  # Maximum number of subblocks in all blocks before the first frame. Together they have 4 MB.
EXIF_ENTRIES_MAX = 512  # Cameras write about 20 entries to the first directory.

SEARCH_BYTES = 262_144
# This matches all JPEG markers except fill bytes, escaped bytes and restart markers.
_JPEG_MARKER = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")
_JPEG_FRAMES = (0xC0, 0xC1, 0xC2)  # Browsers decode these frames: baseline, extended and progressive.
# These frames are arithmetic, lossless or hierarchical.
_JPEG_OTHER_FRAMES = (0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF)
_ORIENTATION = 274  # The EXIF tag of the orientation.
_TURNED = (5, 6, 7, 8)  # Orientations that exchange width and height.


class ImageHeader(NamedTuple):
    """The header of an image file.

    Attributes:
        format: Pillow's name of the file format.
        width, height: size of the stored image in pixels, before it is rotated.
        orientation: 1 to 8, as in EXIF. 1 is upright.
    """

    format: str
    width: int
    height: int
    orientation: int = 1

    @property
    def upright_size(self) -> tuple[int, int]:
        """Width and height of the upright image."""
        return (self.height, self.width) if self.orientation in _TURNED else (self.width, self.height)


class _TooCostly(Exception):
    """A file has too many scans, segments, chunks or blocks. The message completes the sentence "the image has ..."."""


class _Damaged(Exception):
    """A file is damaged. The message names the damage."""


def read_header(content: bytes, limits: ImageLimits, place: str) -> ImageHeader:
    """Read the header of an image file and check it against the limits.

    Args:
        content: bytes of the file.
        limits: limits on the size of the file and of the image.
        place: name of the image in error messages, such as messages[0].content[1].

    Raises:
        InvalidRequest: the file is not an image, is damaged, is too large, or has too many scans, segments, chunks or
            blocks.
    """
    if len(content) > limits.image_bytes_max:
        raise InvalidRequest(
            f"{place} has {len(content)} bytes, an image may have {limits.image_bytes_max}: send a smaller one",
            param=place,
        )
    header = scan_header(content, place)
    width, height = header.width, header.height
    if max(width, height) > limits.side_max or width * height > limits.pixels_max or min(width, height) < 1:
        raise InvalidRequest(
            f"{place} is {width} x {height} pixels; allowed are {limits.pixels_max} in all, and {limits.side_max} on "
            "either side: send a smaller one",
            param=place,
        )
    return header


def scan_header(content: bytes, place: str) -> ImageHeader:
    """Read the header of an image file without a limit on the size of the image.

    Args:
        content: bytes of the file.
        place: name of the image in error messages.

    Raises:
        InvalidRequest: the file is not an image, is damaged, or has too many scans, segments, chunks or blocks.
    """
    scan = _scanner_of(content)
    if scan is None:
        raise InvalidRequest(f"{place} is not an image of a supported format: send PNG, JPEG, WebP or GIF", param=place)
    try:
        return scan(content)
    except _TooCostly as error:
        raise InvalidRequest(f"{place} has {error}: save it again with a common program", param=place) from None
    except _Damaged as error:
        raise _damaged(place, str(error)) from None
    except (struct.error, IndexError):
        raise _damaged(place, "it ends inside its header") from None


def _damaged(place: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{place} cannot be decoded ({reason}): it is damaged or incomplete", param=place)


def _scanner_of(content: bytes) -> Callable[[bytes], ImageHeader] | None:
    if content.startswith(b"\x89PNG\r\n\x1a\n"):
        return _scan_png
    if content.startswith(b"\xff\xd8\xff"):
        return _scan_jpeg
    if content.startswith((b"GIF87a", b"GIF89a")):
        return _scan_gif
    if content[:4] == b"RIFF" and content[8:12] == b"WEBP":
        return _scan_webp
    return None


def _scan_png(content: bytes) -> ImageHeader:
    if content[12:16] != b"IHDR":
        raise _Damaged("its first chunk is not IHDR")
    width, height = struct.unpack_from(">II", content, 16)
    orientation, position, chunk_count, has_pixels = 1, 8, 0, False
    while position + 8 <= len(content):
        length, kind = struct.unpack_from(">I4s", content, position)
        chunk_count += 1
        if chunk_count > PNG_CHUNKS_MAX:
            raise _TooCostly(f"more than {PNG_CHUNKS_MAX} chunks, which is the limit")
        has_pixels = has_pixels or kind == b"IDAT"
        if kind == b"eXIf" and not has_pixels:  # Decoders ignore an orientation after the pixels.
            orientation = _orientation(content[position + 8 : position + 8 + length])
        if kind == b"IEND":
            break
        position += 12 + length
    return ImageHeader("PNG", width, height, orientation)


def _scan_jpeg(content: bytes) -> ImageHeader:
    size: tuple[int, int] | None = None
    orientation: int | None = None
    position, segment_count, scan_count = 2, 0, 0
    while (position := _next_marker(content, position)) >= 0:
        marker = content[position + 1]
        if marker == 0xD9:  # The image has ended. Decoders ignore later bytes.
            break
        position += 2
        segment_count += 1
        if segment_count > JPEG_SEGMENTS_MAX:
            raise _TooCostly(f"more than {JPEG_SEGMENTS_MAX} segments, which is the limit")
        if marker in (0x01, 0xD8):  # These markers have no length.
            continue
        if position + 2 > len(content):
            break
        (length,) = struct.unpack_from(">H", content, position)
        if marker in _JPEG_OTHER_FRAMES:
            raise _TooCostly("an unsupported kind of JPEG; supported are baseline and progressive with Huffman coding")
        if marker in _JPEG_FRAMES:
            if size is not None:
                raise _Damaged("it has a second frame")
            height, width = struct.unpack_from(">HH", content, position + 3)
            size = width, height
        elif marker == 0xDA:
            scan_count += 1
            if scan_count > JPEG_SCANS_MAX:
                raise _TooCostly(f"more than {JPEG_SCANS_MAX} scans, which is the limit")
        elif marker == 0xE1 and orientation is None and content.startswith(b"Exif\0\0", position + 2):
            orientation = _orientation(content[position + 2 : position + length])
        position += max(length, 2)
    if size is None:
        raise _Damaged("it has no frame")
    return ImageHeader("JPEG", *size, orientation or 1)


def _next_marker(content: bytes, position: int) -> int:
    """Return the position of the next marker, or -1 if there is none."""
    while position < len(content) - 1:
        # Search piece by piece, because a search blocks other threads. A marker may cross the end of a piece.
        found = _JPEG_MARKER.search(content, position, position + SEARCH_BYTES + 1)
        if found is not None:
            return found.start()
        position += SEARCH_BYTES
    return -1


def _scan_gif(content: bytes) -> ImageHeader:
    width, height, flags = struct.unpack_from("<HHB", content, 6)
    position = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0)
    subblock_count = 0
    for _ in range(GIF_BLOCKS_MAX):
        kind = content[position]
        if kind == 0x2C:
            left, top, own_width, own_height = struct.unpack_from("<HHHH", content, position + 1)
            # A decoder makes the canvas at least as large as the first frame.
            return ImageHeader("GIF", max(width, left + own_width), max(height, top + own_height))
        if kind != 0x21:
            raise _Damaged("it has no frame")
        position += 2
        while length := content[position]:
            position += length + 1
            subblock_count += 1
            if subblock_count > GIF_SUBBLOCKS_MAX:
                raise _TooCostly(
                    f"more than {GIF_SUBBLOCKS_MAX} sub-blocks before its first frame, such as parts of comments"
                )
        position += 1
    raise _TooCostly(f"more than {GIF_BLOCKS_MAX} blocks before its first frame, such as comments")


def _scan_webp(content: bytes) -> ImageHeader:
    size: tuple[int, int] | None = None
    orientation, position = 1, 12
    for _ in range(WEBP_CHUNKS_MAX):
        if position + 8 > len(content):
            break
        kind, length = struct.unpack_from("<4sI", content, position)
        start = position + 8
        if size is None:
            size = _webp_size(content, kind, start)
        elif kind == b"EXIF" and orientation == 1:
            orientation = _orientation(content[start : start + length])
        position = start + length + length % 2
    else:
        raise _TooCostly(f"more than {WEBP_CHUNKS_MAX} chunks, which is the limit")
    if size is None:
        raise _Damaged("it has no frame")
    return ImageHeader("WEBP", *size, orientation)


def _webp_size(content: bytes, kind: bytes, start: int) -> tuple[int, int]:
    if kind == b"VP8X":
        width, height = (int.from_bytes(content[start + place : start + place + 3], "little") for place in (4, 7))
        return width + 1, height + 1
    if kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", content, start + 1)
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8 ":
        width, height = struct.unpack_from("<HH", content, start + 6)
        return width & 0x3FFF, height & 0x3FFF
    raise _Damaged("its first chunk has no image")


def _orientation(exif: bytes) -> int:
    """Return the orientation from the first directory of EXIF. If EXIF is damaged, return 1, because the pixels may be
    intact.
    """
    exif = exif.removeprefix(b"Exif\0\0")
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(exif[:4])
    if order is None:
        return 1
    try:
        (start,) = struct.unpack_from(f"{order}I", exif, 4)
        (entry_count,) = struct.unpack_from(f"{order}H", exif, start)
        for entry in range(min(entry_count, EXIF_ENTRIES_MAX)):
            tag, kind, count = struct.unpack_from(f"{order}HHI", exif, start + 2 + 12 * entry)
            if tag == _ORIENTATION and (kind, count) == (3, 1):
                (orientation,) = struct.unpack_from(f"{order}H", exif, start + 10 + 12 * entry)
                return orientation if orientation in range(1, 9) else 1
    except struct.error:
        pass
    return 1
