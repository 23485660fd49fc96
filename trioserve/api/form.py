"""Parser of multipart/form-data bodies (RFC 7578), with bounds. Callers run the parser in a thread for large bodies."""

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

# A body up to this size is parsed on the event loop, because a switch to a thread would cost more.
INLINE_BYTES_MAX = 65_536
PARTS_MAX = 64
FIELD_BYTES_MAX = 4096  # The default limit for the size of a text field.
# The characters of a boundary are defined in RFC 2046, 5.1.1.
BOUNDARY = re.compile(r"[0-9a-zA-Z'()+_,\-./:=? ]{0,69}[0-9a-zA-Z'()+_,\-./:=?]")


class FormFile(msgspec.Struct, frozen=True):
    """A file in a form.

    Attributes:
        content: bytes of the file.
        filename: name that the client gives. None: no name.
    """

    content: bytes
    filename: str | None


class Form(msgspec.Struct, frozen=True):
    """Parts of a form, by name.

    Attributes:
        texts: text fields. Bytes that are not UTF-8 are replaced.
        files: files.
    """

    texts: dict[str, str]
    files: dict[str, FormFile]


class FormPart(msgspec.Struct, frozen=True):
    """One part of a body.

    Attributes:
        name: name of the part.
        filename: name of its file. None: no name.
        content: bytes of the part.
        begin: offset in the body of the part's boundary line.
        end: offset in the body of the next boundary line.
    """

    name: str
    filename: str | None
    content: bytes
    begin: int
    end: int


def parsed_form(
    body: bytes, content_type: str | None, *, files: Collection[str], field_bytes_max: int = FIELD_BYTES_MAX
) -> Form:
    """Parse a whole form.

    Args:
        body: the request's body.
        content_type: value of the header Content-Type. None: not sent.
        files: names of the parts that are files, and may be long.
        field_bytes_max: limit of each text field.

    Raises:
        InvalidRequest: the body is not a form, or a part is repeated or too long. The error names the part.
    """
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
    """Decode a text field.

    Args:
        part: part of the form.
        bytes_max: limit of its length.

    Raises:
        InvalidRequest: the part is longer.
    """
    if len(part.content) > bytes_max:
        raise InvalidRequest(f"the part {part.name[:40]!r} has more than {bytes_max} bytes", param=part.name[:40])
    return part.content.decode("utf-8", "replace")


def twice(name: str) -> InvalidRequest:
    return InvalidRequest(f"the form has the part {name[:40]!r} twice", param=name[:40])


def form_parts(body: bytes, boundary: str) -> Iterator[FormPart]:
    """Yield all parts, in order.

    Args:
        body: the request's body.
        boundary: boundary from the header Content-Type.

    Raises:
        InvalidRequest: the body is not a form.
    """
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
                    content = bytes(item)  # The event has the whole content, because the parser got the whole body.
                else:
                    assert part is not None
                    end = body.index(b"\r\n\r\n", begin) + 4 + len(content) + 2
                    assert part.name is not None, "the parser refuses a part without a name"
                    yield FormPart(part.name, part.filename, content, begin, end)
                    begin = end
    except (MultipartError, UnicodeError) as error:
        raise InvalidRequest(f"the body is not a multipart form: {error}") from None


def form_boundary(content_type: str | None) -> str:
    """Return the boundary of a form.

    Args:
        content_type: value of the header Content-Type. None: not sent.

    Raises:
        InvalidRequest: the header names no form, or no valid boundary.
    """
    kind, options = parse_options_header(content_type or "")
    boundary = options.get("boundary", "")
    if kind != "multipart/form-data" or not BOUNDARY.fullmatch(boundary):
        raise InvalidRequest(
            f"content-type is {(content_type or '')[:80]!r}, allowed is multipart/form-data with a boundary",
            param="content-type",
        )
    return str(boundary)
