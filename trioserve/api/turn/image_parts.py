"""Images in messages of OpenAI's chat shape, whichever API they came by. What is in them is looked at later."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trioserve.contracts.errors import InvalidRequest

__all__ = ["Piece", "check_image_part", "image_part", "joined_content", "pieces_of"]

Piece = str | dict[str, Any]
"""A text, or a part that is an image."""


def image_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def check_image_part(part: dict[str, Any], path: str) -> None:
    """Raises InvalidRequest, naming the field, if it has no URL."""
    url = part.get("image_url")
    if isinstance(url, dict):
        path, url = f"{path}.image_url.url", url.get("url")
    else:
        path = f"{path}.image_url"
    if not isinstance(url, str) or not url:
        raise InvalidRequest(f'{path} must be a string: "data:image/png;base64,..."', param=path)


def joined_content(pieces: Iterable[Piece], between: str) -> str | list[dict[str, Any]]:
    """A message's content of these, without empty texts; those that follow each other become one, with `between` in
    the middle. A text if there are no images."""
    parts: list[dict[str, Any]] = []
    for piece in pieces:
        if isinstance(piece, dict):
            parts.append(piece)
        elif not piece:
            continue
        elif parts and parts[-1]["type"] == "text":
            parts[-1]["text"] += between + piece
        else:
            parts.append({"type": "text", "text": piece})
    if not parts:
        return ""
    if len(parts) == 1 and parts[0]["type"] == "text":
        text: str = parts[0]["text"]
        return text
    return parts


def pieces_of(content: str | list[dict[str, Any]]) -> list[Piece]:
    """Of a content that joined_content gave."""
    if isinstance(content, str):
        return [content]
    return [part["text"] if part["type"] == "text" else part for part in content]
