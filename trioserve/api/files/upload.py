"""Parser of the form that uploads a file. For large bodies, callers run it in a thread."""

from __future__ import annotations

import msgspec

from trioserve.api.files.stored_files import PURPOSES
from trioserve.api.form import Form, parsed_form
from trioserve.contracts.errors import InvalidRequest

__all__ = ["EXPIRY_SECONDS_MAX", "EXPIRY_SECONDS_MIN", "Upload", "parsed_upload"]

FILENAME_CHARACTERS_MAX = 255
EXPIRY_SECONDS_MIN = 3600
EXPIRY_SECONDS_MAX = 30 * 86_400


class Upload(msgspec.Struct, frozen=True, kw_only=True):
    """An uploaded file.

    Attributes:
        content: bytes of the file.
        filename: name that the client gave.
        purpose: one of PURPOSES.
        seconds: time until the file expires. None: the store's default.
    """

    content: bytes
    filename: str
    purpose: str
    seconds: float | None


def parsed_upload(body: bytes, content_type: str | None) -> Upload:
    """Parse the form of an upload.

    Args:
        body: the request's body.
        content_type: value of the header Content-Type. None: not sent.

    Raises:
        InvalidRequest: a part is missing or has a bad value. The error names the part.
    """
    form = parsed_form(body, content_type, files=("file",))
    sent = form.files.get("file")
    if sent is None or sent.filename is None:
        raise InvalidRequest('the form has no file: send one as the part "file", with a filename', param="file")
    filename = sent.filename
    if len(filename) > FILENAME_CHARACTERS_MAX or not filename.isprintable():
        raise InvalidRequest(
            f"filename is {filename[:80]!r}, allowed are up to {FILENAME_CHARACTERS_MAX} printable characters",
            param="file",
        )
    purpose = form.texts.get("purpose")
    if purpose not in PURPOSES:
        what = "missing" if purpose is None else f"{purpose[:40]!r}"
        raise InvalidRequest(f"purpose is {what}, allowed are {', '.join(PURPOSES)}", param="purpose")
    return Upload(content=sent.content, filename=filename, purpose=purpose, seconds=_seconds(form))


def _seconds(form: Form) -> float | None:
    anchor = form.texts.get("expires_after[anchor]")
    seconds = form.texts.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise InvalidRequest('expires_after[anchor] must be "created_at"', param="expires_after[anchor]")
    is_number = seconds is not None and seconds.isascii() and seconds.isdigit() and len(seconds) < 10
    if seconds is None or not is_number or not EXPIRY_SECONDS_MIN <= int(seconds) <= EXPIRY_SECONDS_MAX:
        raise InvalidRequest(
            f"expires_after[seconds] is {'missing' if seconds is None else repr(seconds[:40])}, allowed is a number "
            f"from {EXPIRY_SECONDS_MIN} to {EXPIRY_SECONDS_MAX}",
            param="expires_after[seconds]",
        )
    return float(seconds)
