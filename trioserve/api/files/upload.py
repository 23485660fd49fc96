"""The form with which a file comes: multipart/form-data (RFC 7578), taken apart within bounds. Pure; runs in a thread
for what is large."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec
from multipart import MultipartError, MultipartSegment, PushMultipartParser, parse_options_header

from trioserve.api.files.stored_files import PURPOSES
from trioserve.contracts.errors import InvalidRequest

__all__ = ["EXPIRY_SECONDS_MAX", "EXPIRY_SECONDS_MIN", "Upload", "parsed_upload"]

FIELDS_MAX = 32
FIELD_BYTES_MAX = 4096  # of any but the file
FILENAME_CHARACTERS_MAX = 255
EXPIRY_SECONDS_MIN = 3600
EXPIRY_SECONDS_MAX = 30 * 86_400
BOUNDARY = re.compile(r"[0-9a-zA-Z'()+_,\-./:=? ]{0,69}[0-9a-zA-Z'()+_,\-./:=?]")  # RFC 2046, 5.1.1


class Upload(msgspec.Struct, frozen=True, kw_only=True):
    """seconds: for which it is to be kept; None: as long as the store keeps things."""

    content: bytes
    filename: str
    purpose: str
    seconds: float | None


def parsed_upload(body: bytes, content_type: str | None) -> Upload:
    """Raises InvalidRequest, naming the field."""
    fields, filename = _fields(body, _boundary(content_type))
    content = fields.pop("file", None)
    if content is None or filename is None:
        raise InvalidRequest('the form has no file: send one as the part "file", with a filename', param="file")
    if len(filename) > FILENAME_CHARACTERS_MAX or not filename.isprintable():
        raise InvalidRequest(
            f"filename is {filename[:80]!r}, allowed are up to {FILENAME_CHARACTERS_MAX} printable characters",
            param="file",
        )
    purpose = _text(fields, "purpose")
    if purpose not in PURPOSES:
        what = "missing" if purpose is None else f"{purpose[:40]!r}"
        raise InvalidRequest(f"purpose is {what}, allowed are {', '.join(PURPOSES)}", param="purpose")
    return Upload(content=content, filename=filename, purpose=purpose, seconds=_seconds(fields))


def _boundary(content_type: str | None) -> str:
    kind, options = parse_options_header(content_type or "")
    boundary = options.get("boundary", "")
    if kind != "multipart/form-data" or not BOUNDARY.fullmatch(boundary):
        raise InvalidRequest(
            f"content-type is {(content_type or '')[:80]!r}, and a file comes as multipart/form-data with a boundary",
            param="content-type",
        )
    return str(boundary)


def _fields(body: bytes, boundary: str) -> tuple[dict[str, bytes], str | None]:
    """The parts by name, and the file's own name."""
    fields: dict[str, bytes] = {}
    filename: str | None = None
    parser = PushMultipartParser(boundary, content_length=len(body), max_segment_count=FIELDS_MAX, strict=True)
    name, pieces, byte_count = "", list[bytes](), 0
    try:
        with parser:
            for item in parser.parse(body):
                if isinstance(item, MultipartSegment):
                    name, pieces, byte_count = item.name, [], 0
                    if name in fields:
                        raise InvalidRequest(f"the form has the part {name[:40]!r} twice", param=name[:40])
                    if name == "file":
                        filename = item.filename
                elif item is not None:
                    byte_count += len(item)
                    if name != "file" and byte_count > FIELD_BYTES_MAX:
                        raise InvalidRequest(
                            f"the part {name[:40]!r} has more than {FIELD_BYTES_MAX} bytes", param=name[:40]
                        )
                    pieces.append(bytes(item))
                else:
                    fields[name] = pieces[0] if len(pieces) == 1 else b"".join(pieces)
    except (MultipartError, UnicodeError) as error:
        raise InvalidRequest(f"the body is no multipart form: {error}") from None
    return fields, filename


def _seconds(fields: Mapping[str, bytes]) -> float | None:
    anchor = _text(fields, "expires_after[anchor]")
    seconds = _text(fields, "expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise InvalidRequest('expires_after[anchor] has to be "created_at"', param="expires_after[anchor]")
    is_number = seconds is not None and seconds.isascii() and seconds.isdigit() and len(seconds) < 10
    if seconds is None or not is_number or not EXPIRY_SECONDS_MIN <= int(seconds) <= EXPIRY_SECONDS_MAX:
        raise InvalidRequest(
            f"expires_after[seconds] is {'missing' if seconds is None else repr(seconds[:40])}, allowed is a number "
            f"from {EXPIRY_SECONDS_MIN} to {EXPIRY_SECONDS_MAX}",
            param="expires_after[seconds]",
        )
    return float(seconds)


def _text(fields: Mapping[str, bytes], name: str) -> str | None:
    return fields[name].decode("utf-8", "replace") if name in fields else None
