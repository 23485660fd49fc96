"""SETTINGS of an HTTP/2 peer (RFC 9113, 6.5), cut down to what the h2 library may keep of them.

h2 keeps every identifier that a peer sends, and walks all of them for each later SETTINGS frame. Both sides of ours,
servers and clients, pass a peer's SETTINGS through `known_settings` first.
"""

from __future__ import annotations

import struct

__all__ = ["HEADER_TABLE_BYTES_MAX", "known_settings"]

HEADER_TABLE_SIZE = 0x1
# RFC 9113, 6.5.2, and SETTINGS_ENABLE_CONNECT_PROTOCOL (RFC 8441). A receiver ignores all others (RFC 9113, 6.5.2).
_KNOWN = frozenset({HEADER_TABLE_SIZE, 0x2, 0x3, 0x4, 0x5, 0x6, 0x8})
HEADER_TABLE_BYTES_MAX = 4096
"""What our encoders use of the table that a peer offers: HTTP/2's default. The peer chooses the number, and an encoder
of hpack's keeps so much, and searches all of it for each field."""
_SETTING = struct.Struct(">HI")


def known_settings(payload: bytes) -> bytes:
    """The payload of a SETTINGS frame without unknown identifiers, each known one once, with its last value.

    Args:
        payload: of a frame without the ACK flag. A length that is no multiple of 6 is an error, which h2 reports: such
            a payload is returned as it is.

    Returns:
        At most seven settings. SETTINGS_HEADER_TABLE_SIZE is at most HEADER_TABLE_BYTES_MAX.
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
