"""Tests the parsing of the form that uploads a file, and its size limits."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from trioserve.api.batches.files import parsed_upload
from trioserve.api.form import FIELD_BYTES_MAX, PARTS_MAX
from trioserve.contracts.errors import InvalidRequest

CONTENT = b'{"custom_id": "a"}\r\n--not the boundary\r\n'


def form(**fields: Any) -> tuple[bytes, str]:
    """Return a form as a client writes it. `file` has the name and the bytes of the file."""
    files = {"file": fields.pop("file")} if "file" in fields else {"file": ("lines.jsonl", CONTENT)}
    request = httpx.Request("POST", "http://x", data={"purpose": "batch", **fields}, files=files)
    return request.read(), request.headers["content-type"]


def test_upload_form_is_parsed_into_fields_and_file() -> None:
    upload = parsed_upload(*form())
    assert (upload.content, upload.filename, upload.purpose) == (CONTENT, "lines.jsonl", "batch")
    assert upload.seconds is None


def test_large_and_empty_uploaded_files_are_parsed() -> None:
    large = bytes(range(256)) * 10_000
    assert parsed_upload(*form(file=("a", large))).content == large
    assert parsed_upload(*form(file=("a", b""))).content == b""


def test_form_fields_for_expires_after_are_parsed() -> None:
    fields = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    assert parsed_upload(*form(**fields)).seconds == 3600


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"purpose": "x"}, "purpose"),
        ({"purpose": "p" * (FIELD_BYTES_MAX + 1)}, "purpose"),
        ({"file": ("n" * 256, b"")}, "file"),
        ({"expires_after[seconds]": "3600"}, "expires_after[anchor]"),
        ({"expires_after[anchor]": "created_at"}, "expires_after[seconds]"),
        ({"expires_after[anchor]": "created_at", "expires_after[seconds]": "3599"}, "expires_after[seconds]"),
        ({"expires_after[anchor]": "created_at", "expires_after[seconds]": "2592001"}, "expires_after[seconds]"),
        ({"expires_after[anchor]": "created_at", "expires_after[seconds]": "-1"}, "expires_after[seconds]"),
    ],
)
def test_error_of_an_invalid_upload_names_the_field(fields: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parsed_upload(*form(**fields))
    assert caught.value.param == param


@pytest.mark.parametrize(
    "content_type", [None, "", "application/json", "multipart/form-data", 'multipart/form-data; boundary="a\nb"']
)
def test_upload_body_that_is_not_a_form_is_refused(content_type: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parsed_upload(form()[0], content_type)
    assert caught.value.param == "content-type"


@pytest.mark.parametrize("cut", [0, 1, 40, 100, -3, -5, -60])
def test_incomplete_upload_form_is_refused(cut: int) -> None:
    body, content_type = form()
    with pytest.raises(InvalidRequest):
        parsed_upload(body[:cut], content_type)


def part(name: str, content: str = "x", more: str = "") -> str:
    return f'--b\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n{content}\r\n'


@pytest.mark.parametrize(
    "parts",
    [
        part("purpose") * 2,
        "".join(part(f"p{index}") for index in range(PARTS_MAX + 1)),
        part("purpose", "batch") + part("file"),  # A part without a filename is a text field, so the form has no file.
        part("purpose", "batch"),
        "--b\r\nX: y\r\n\r\nx\r\n",
        "--b\r\n" + "".join(f"X-{index}: y\r\n" for index in range(20)) + "\r\nx\r\n",
        "--b\r\nX: " + "y" * 10_000 + "\r\n\r\nx\r\n",
    ],
)
def test_malformed_upload_forms_are_refused(parts: str) -> None:
    with pytest.raises(InvalidRequest):
        parsed_upload((parts + "--b--\r\n").encode(), "multipart/form-data; boundary=b")
