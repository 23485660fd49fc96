"""HTTP/2 error codes (RFC 9113, 7) and counters for clients that break the protocol."""

from __future__ import annotations

import h2.exceptions
import hpack
from h2.errors import ErrorCodes

from trioserve.http.counters import ConnectionRefusal
from trioserve.http.http2.frames import Flood

__all__ = ["error_code_of", "refusal_of"]


def error_code_of(error: h2.exceptions.ProtocolError) -> ErrorCodes:
    """Return the error code of the GOAWAY for a protocol error.

    h2 gives no error code for header blocks that cannot be decoded, so this error is recognised by its cause.

    Args:
        error: the error that h2 or FrameGate raised.
    """
    if isinstance(error.__cause__, hpack.HPACKError) and not isinstance(error, h2.exceptions.DenialOfServiceError):
        return ErrorCodes.COMPRESSION_ERROR
    return ErrorCodes(error.error_code)


def refusal_of(error: h2.exceptions.ProtocolError) -> ConnectionRefusal:
    if isinstance(error, Flood):
        return error.reason
    if isinstance(error, h2.exceptions.DenialOfServiceError):
        return ConnectionRefusal.HEAD_TOO_LARGE  # h2 raises this error only for a decoded head that is too large
    if isinstance(error, h2.exceptions.FrameTooLargeError):
        return ConnectionRefusal.FRAME_TOO_LARGE
    return ConnectionRefusal.MALFORMED
