"""Builds bodies of multipart/form-data, as clients write them."""

from __future__ import annotations

__all__ = ["multipart"]

BOUNDARY = "between"


def multipart(*parts: tuple[str, str | bytes, str] | tuple[str, str | bytes]) -> tuple[bytes, str]:
    """Return the body and its content type. A part is (name, content), or (name, content, filename) for a file."""
    written = []
    for name, content, *filename in parts:
        is_file = f'; filename="{filename[0]}"' if filename else ""
        data = content if isinstance(content, bytes) else content.encode()
        head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{is_file}\r\n\r\n'
        written.append(head.encode() + data + b"\r\n")
    return b"".join(written) + f"--{BOUNDARY}--\r\n".encode(), f"multipart/form-data; boundary={BOUNDARY}"
