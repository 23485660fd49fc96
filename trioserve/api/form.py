"""A body of multipart/form-data (RFC 7578), taken apart within bounds. Pure; runs in a thread for what is large."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

import msgspec
from multipart import MultipartError, MultipartSegment, PushMultipartParser, parse_options_header

from trioserve.contracts.errors import InvalidRequest

__all__ = [
    "INLINE_BYTES_MAX",
    "Form",
    "FormFile",
    "FormPart",
    "form_boundary",
    "form_parts",
    "parsed_form",
    "text_of",
    "twice",
]

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


class FormPart(msgspec.Struct, frozen=True):
    """One part of a body. begin: where the line of its boundary begins there; end: where the next one does."""

    name: str
    filename: str | None
    content: bytes
    begin: int
    end: int


def parsed_form(
    body: bytes, content_type: str | None, *, files: Collection[str], field_bytes_max: int = FIELD_BYTES_MAX
) -> Form:
    """files: names of the parts that are files, and may be long. Raises InvalidRequest, naming the field."""
    form = Form({}, {})
    for part in form_parts(body, form_boundary(content_type)):
        if part.name in form.texts or part.name in form.files:
            raise twice(part.name)
        if part.name in files:
            form.files[part.name] = FormFile(part.content, part.filename)
        else:
            form.texts[part.name] = text_of(part, field_bytes_max)
    return form


def text_of(part: FormPart, bytes_max: int) -> str:
    """Raises InvalidRequest if it is longer."""
    if len(part.content) > bytes_max:
        raise InvalidRequest(f"the part {part.name[:40]!r} has more than {bytes_max} bytes", param=part.name[:40])
    return part.content.decode("utf-8", "replace")


def twice(name: str) -> InvalidRequest:
    return InvalidRequest(f"the form has the part {name[:40]!r} twice", param=name[:40])


def form_parts(body: bytes, boundary: str) -> Iterator[FormPart]:
    """All parts, in their order. Raises InvalidRequest where they are none."""
    parser = PushMultipartParser(boundary, content_length=len(body), max_segment_count=PARTS_MAX, strict=True)
    begin = body.find(b"--" + boundary.encode())
    part: MultipartSegment | None = None
    content = b""
    try:
        with parser:
            for item in parser.parse(body):
                if isinstance(item, MultipartSegment):
                    part, content = item, b""
                elif item is not None:
                    content = bytes(item)  # of a body that is here it is one piece
                else:
                    assert part is not None
                    end = body.index(b"\r\n\r\n", begin) + 4 + len(content) + 2
                    assert part.name is not None, "the parser refuses a part without a name"
                    yield FormPart(part.name, part.filename, content, begin, end)
                    begin = end
    except (MultipartError, UnicodeError) as error:
        raise InvalidRequest(f"the body is no multipart form: {error}") from None


def form_boundary(content_type: str | None) -> str:
    """Raises InvalidRequest for what is no form."""
    kind, options = parse_options_header(content_type or "")
    boundary = options.get("boundary", "")
    if kind != "multipart/form-data" or not BOUNDARY.fullmatch(boundary):
        raise InvalidRequest(
            f"content-type is {(content_type or '')[:80]!r}, and a file comes as multipart/form-data with a boundary",
            param="content-type",
        )
    return str(boundary)
