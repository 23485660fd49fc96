"""A body of multipart/form-data (RFC 7578), taken apart within bounds. Pure; runs in a thread for what is large."""

from __future__ import annotations

import re
from collections.abc import Collection

import msgspec
from multipart import MultipartError, MultipartSegment, PushMultipartParser, parse_options_header

from trioserve.contracts.errors import InvalidRequest

__all__ = ["INLINE_BYTES_MAX", "Form", "FormFile", "parsed_form"]

INLINE_BYTES_MAX = 65_536  # taking apart a form of this size costs less than going to a thread
PARTS_MAX = 64
FIELD_BYTES_MAX = 4096  # of any but a file, unless it is said otherwise
BOUNDARY = re.compile(r"[0-9a-zA-Z'()+_,\-./:=? ]{0,69}[0-9a-zA-Z'()+_,\-./:=?]")  # RFC 2046, 5.1.1


class FormFile(msgspec.Struct, frozen=True):
    """filename: as its client calls it; None: it says nothing."""

    content: bytes
    filename: str | None


class Form(msgspec.Struct, frozen=True):
    """What came, by the name of the part. Bytes of a text that are no UTF-8 are replaced."""

    texts: dict[str, str]
    files: dict[str, FormFile]


def parsed_form(
    body: bytes, content_type: str | None, *, files: Collection[str], field_bytes_max: int = FIELD_BYTES_MAX
) -> Form:
    """files: names of the parts that are files, and may be long. Raises InvalidRequest, naming the field."""
    form = Form({}, {})
    parser = PushMultipartParser(
        _boundary(content_type), content_length=len(body), max_segment_count=PARTS_MAX, strict=True
    )
    part: MultipartSegment | None = None
    pieces, byte_count = list[bytes](), 0
    try:
        with parser:
            for item in parser.parse(body):
                if isinstance(item, MultipartSegment):
                    part, pieces, byte_count = item, [], 0
                    if part.name in form.texts or part.name in form.files:
                        raise InvalidRequest(f"the form has the part {part.name[:40]!r} twice", param=part.name[:40])
                elif item is not None:
                    assert part is not None
                    byte_count += len(item)
                    if part.name not in files and byte_count > field_bytes_max:
                        raise InvalidRequest(
                            f"the part {part.name[:40]!r} has more than {field_bytes_max} bytes", param=part.name[:40]
                        )
                    pieces.append(bytes(item))
                else:
                    assert part is not None
                    content = pieces[0] if len(pieces) == 1 else b"".join(pieces)
                    if part.name in files:
                        form.files[part.name] = FormFile(content, part.filename)
                    else:
                        form.texts[part.name] = content.decode("utf-8", "replace")
    except (MultipartError, UnicodeError) as error:
        raise InvalidRequest(f"the body is no multipart form: {error}") from None
    return form


def _boundary(content_type: str | None) -> str:
    kind, options = parse_options_header(content_type or "")
    boundary = options.get("boundary", "")
    if kind != "multipart/form-data" or not BOUNDARY.fullmatch(boundary):
        raise InvalidRequest(
            f"content-type is {(content_type or '')[:80]!r}, and a file comes as multipart/form-data with a boundary",
            param="content-type",
        )
    return str(boundary)
