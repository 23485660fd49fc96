"""Removes unknown settings from the SETTINGS frames of an HTTP/2 peer (RFC 9113, 6.5).

h2 stores every identifier that a peer sends, and iterates over all of them for each later SETTINGS frame. So our
servers and clients first pass a peer's SETTINGS through `known_settings`.
"""

from __future__ import annotations

import struct

__all__ = ["HEADER_TABLE_BYTES_MAX", "known_settings"]

HEADER_TABLE_SIZE = 0x1
# These are the settings of RFC 9113, section 6.5.2, and SETTINGS_ENABLE_CONNECT_PROTOCOL (RFC 8441). A receiver ignores
# all other settings.
_KNOWN = frozenset({HEADER_TABLE_SIZE, 0x2, 0x3, 0x4, 0x5, 0x6, 0x8})
HEADER_TABLE_BYTES_MAX = 4096
"""Maximum size of the header table that our encoders use, in bytes: HTTP/2's default. The peer may offer any size.
hpack's encoder would fill a table of that size, and search all of it for each field.
"""
_SETTING = struct.Struct(">HI")


def known_settings(payload: bytes) -> bytes:
    """Return the payload of a SETTINGS frame without unknown identifiers. Each known identifier appears once, with its
    last value.

    Args:
        payload: Payload of a frame without the ACK flag. If its length is not a multiple of 6, it is returned
            unchanged, and h2 reports the error.

    Returns:
        The payload, with at most seven settings. SETTINGS_HEADER_TABLE_SIZE is reduced to HEADER_TABLE_BYTES_MAX.
    """
    if len(payload) % _SETTING.size:
        return payload
    kept: dict[int, int] = {}
    for identifier, value in _SETTING.iter_unpack(payload):
        if identifier in _KNOWN:
            kept[identifier] = value
    if HEADER_TABLE_SIZE in kept:
        kept[HEADER_TABLE_SIZE] = min(kept[HEADER_TABLE_SIZE], HEADER_TABLE_BYTES_MAX)
    return b"".join(_SETTING.pack(identifier, value) for identifier, value in kept.items())
