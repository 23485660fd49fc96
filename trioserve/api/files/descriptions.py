"""What each path of files does and may answer: for the API's own description."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from trioserve.api.described_operation import READS_BODY, DescribedOperation
from trioserve.api.files.files import FILE_LIST_MAX, SHOWN_PURPOSES
from trioserve.api.query import LIST_FIELDS

__all__ = ["OPERATIONS", "File", "FileDeletion", "FileForm", "Files"]

Purpose = Literal["assistants", "batch", "evals", "fine-tune", "user_data", "vision"]


class File(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Purpose | Literal["batch_output"]
    status: Literal["processed"]
    status_details: None


class Files(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    object: Literal["list"]
    data: list[File]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeletion(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    id: str
    object: Literal["file"]
    deleted: bool


class FileForm(msgspec.Struct, kw_only=True):
    """The parts of the form. The file is one with a filename."""

    file: Annotated[str, msgspec.Meta(extra_json_schema={"format": "binary"})]
    purpose: Purpose


_PATH = "the file's id"
_LIST: dict[str, tuple[str, dict[str, Any]]] = {
    **LIST_FIELDS,
    "limit": ("a page has 100 at most", {"type": "integer", "minimum": 1, "maximum": FILE_LIST_MAX}),
    "purpose": ("only files with this one", {"type": "string", "enum": list(SHOWN_PURPOSES)}),
}

OPERATIONS: dict[tuple[str, str], DescribedOperation] = {
    ("POST", "/v1/files"): DescribedOperation(
        summary="Keep a file",
        description="For batches. It expires when the store's time to live is over, or after expires_after[seconds] "
        "with expires_after[anchor]=created_at.",
        body=FileForm,
        body_media="multipart/form-data",
        response=File,
        errors=(*READS_BODY, 507),
    ),
    ("GET", "/v1/files"): DescribedOperation(summary="List files", query=_LIST, response=Files, errors=(400, 503)),
    ("GET", "/v1/files/{file}"): DescribedOperation(
        summary="Read what is known of a file", response=File, errors=(400, 404, 503), path_parameter=_PATH
    ),
    ("GET", "/v1/files/{file}/content"): DescribedOperation(
        summary="Read a file",
        response="application/octet-stream",
        errors=(400, 404, 503),
        path_parameter=_PATH,
    ),
    ("DELETE", "/v1/files/{file}"): DescribedOperation(
        summary="Delete a file",
        description="Refused with 409 while a batch that has not ended uses it.",
        response=FileDeletion,
        errors=(400, 404, 409, 503),
        path_parameter=_PATH,
    ),
}
