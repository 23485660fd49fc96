"""Fields of multipart/form-data bodies (RFC 7578), with bounds, and of the queries of URLs.

Callers run the parser of bodies in a thread for large bodies.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs

import msgspec
from multipart import MultipartError, MultipartSegment, PushMultipartParser, parse_options_header

from trioserve.contracts.errors import InvalidRequest

__all__ = [
    "INLINE_BYTES_MAX",
    "LIST_FIELDS",
    "Form",
    "FormFile",
    "FormPart",
    "Query",
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
        lists: text fields that may be repeated.
    """

    texts: dict[str, str]
    files: dict[str, FormFile]
    lists: dict[str, list[str]]


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
    body: bytes,
    content_type: str | None,
    *,
    files: Collection[str],
    lists: Collection[str] = (),
    field_bytes_max: int = FIELD_BYTES_MAX,
) -> Form:
    """Parse a whole form.

    Args:
        body: the request's body.
        content_type: value of the header Content-Type. None: not sent.
        files: names of the parts that are files, and may be long.
        lists: names of the parts that may be repeated.
        field_bytes_max: limit of each text field.

    Raises:
        InvalidRequest: the body is not a form, or a part is repeated or too long. The error names the part.
    """
    form = Form({}, {}, {})
    for part in form_parts(body, form_boundary(content_type)):
        if part.name in lists:
            form.lists.setdefault(part.name, []).append(text_of(part, field_bytes_max))
        elif part.name in form.texts or part.name in form.files:
            raise twice(part.name)
        elif part.name in files:
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


FIELDS_MAX = 64
NUMBER_DIGITS_MAX = 16
FLAGS = {"true": True, "1": True, "false": False, "0": False}

LIST_FIELDS: dict[str, tuple[str, dict[str, Any]]] = {
    "after": ("id of the last object of the page before", {"type": "string"}),
    "order": ("order by creation time", {"type": "string", "enum": ["asc", "desc"]}),
}
"""Query fields of every list except `limit`, for the OpenAPI document."""


class Query:
    """Parsed query of a URL. If a field is repeated, its last value counts.

    All methods raise InvalidRequest, which names the field, for a value that is not allowed.

    Args:
        text: query without the question mark.
        defaults: values of fields that the query lacks.

    Raises:
        InvalidRequest: the query has too many fields.
    """

    def __init__(self, text: str, defaults: Mapping[str, str] = {}) -> None:
        try:
            values = parse_qs(text, keep_blank_values=True, max_num_fields=FIELDS_MAX)
        except ValueError:
            raise InvalidRequest(f"the query has more than {FIELDS_MAX} fields") from None
        self._values = {**defaults, **{name: given[-1] for name, given in values.items()}}

    def text(self, name: str) -> str | None:
        return self._values.get(name)

    def choice(self, name: str, allowed: Sequence[str], default: str) -> str:
        value = self._values.get(name, default)
        if value not in allowed:
            raise InvalidRequest(f"{name} is {value[:40]!r}, allowed are {', '.join(allowed)}", param=name)
        return value

    def seconds(self, name: str, default: float, *, low: float, high: float) -> float:
        text = self._values.get(name)
        if text is None:
            return default
        try:
            value = float(text) if len(text) <= NUMBER_DIGITS_MAX else math.nan
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            raise InvalidRequest(f"{name} is {text[:40]!r}, allowed are {low:g} to {high:g} seconds", param=name)
        return value

    def flag(self, name: str, default: bool) -> bool:
        text = self._values.get(name)
        if text is None:
            return default
        if text.lower() not in FLAGS:
            raise InvalidRequest(f"{name} is {text[:40]!r}, allowed are true and false", param=name)
        return FLAGS[text.lower()]

    def number(self, name: str, default: int, *, low: int, high: int) -> int:
        text = self._values.get(name)
        if text is None:
            return default
        is_number = text.isascii() and text.isdigit() and len(text) <= NUMBER_DIGITS_MAX
        if not is_number or not low <= int(text) <= high:
            raise InvalidRequest(f"{name} is {text[:40]!r}, allowed is a number from {low} to {high}", param=name)
        return int(text)
