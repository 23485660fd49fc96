"""What a client that broke HTTP/2's rules is told (RFC 9113, 7), and how that is counted."""

from __future__ import annotations

import h2.exceptions
import hpack
from h2.errors import ErrorCodes

from trioserve.http.counters import ConnectionRefusal
from trioserve.http.http2.frames import Flood

__all__ = ["error_code_of", "refusal_of"]


def error_code_of(error: h2.exceptions.ProtocolError) -> ErrorCodes:
    """h2 knows no code of its own for header blocks that cannot be unpacked."""
    if isinstance(error.__cause__, hpack.HPACKError) and not isinstance(error, h2.exceptions.DenialOfServiceError):
        return ErrorCodes.COMPRESSION_ERROR
    return ErrorCodes(error.error_code)


def refusal_of(error: h2.exceptions.ProtocolError) -> ConnectionRefusal:
    if isinstance(error, Flood):
        return error.reason
    if isinstance(error, h2.exceptions.DenialOfServiceError):
        return ConnectionRefusal.HEAD_TOO_LARGE  # unpacked; h2 raises it for nothing else
    if isinstance(error, h2.exceptions.FrameTooLargeError):
        return ConnectionRefusal.FRAME_TOO_LARGE
    return ConnectionRefusal.MALFORMED
