"""Descriptions of the paths of files, for the OpenAPI document."""

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
    """Parts of the form. The part with a filename is the file."""

    file: Annotated[str, msgspec.Meta(extra_json_schema={"format": "binary"})]
    purpose: Purpose


_PATH = "the file's id"
_LIST: dict[str, tuple[str, dict[str, Any]]] = {
    **LIST_FIELDS,
    "limit": (
        "length of the page, which has at most 100 files",
        {"type": "integer", "minimum": 1, "maximum": FILE_LIST_MAX},
    ),
    "purpose": ("list only files with this purpose", {"type": "string", "enum": list(SHOWN_PURPOSES)}),
}

OPERATIONS: dict[tuple[str, str], DescribedOperation] = {
    ("POST", "/v1/files"): DescribedOperation(
        summary="Store a file",
        description="For batches. The file expires after the store's time to live, or after expires_after[seconds] "
        "with expires_after[anchor]=created_at.",
        body=FileForm,
        body_media="multipart/form-data",
        response=File,
        errors=(*READS_BODY, 507),
    ),
    ("GET", "/v1/files"): DescribedOperation(summary="List files", query=_LIST, response=Files, errors=(400, 503)),
    ("GET", "/v1/files/{file}"): DescribedOperation(
        summary="Read a file's name, size and dates", response=File, errors=(400, 404, 503), path_parameter=_PATH
    ),
    ("GET", "/v1/files/{file}/content"): DescribedOperation(
        summary="Read a file's content",
        response="application/octet-stream",
        errors=(400, 404, 503),
        path_parameter=_PATH,
    ),
    ("DELETE", "/v1/files/{file}"): DescribedOperation(
        summary="Delete a file",
        description="Refused with 409 while a running batch uses the file.",
        response=FileDeletion,
        errors=(400, 404, 409, 503),
        path_parameter=_PATH,
    ),
}
