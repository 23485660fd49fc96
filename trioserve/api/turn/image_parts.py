"""Images in chat messages in OpenAI's shape, for all APIs. Later code decodes the images."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trioserve.contracts.errors import InvalidRequest

__all__ = ["Piece", "check_image_part", "image_part", "joined_content", "pieces_of"]

Piece = str | dict[str, Any]
"""A text, or an image part."""


def image_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def check_image_part(part: dict[str, Any], path: str) -> None:
    """Check that an image part has a URL.

    Args:
        part: Content part of the type "image_url".
        path: Field name of the part, for the error.

    Raises:
        InvalidRequest: The URL is missing, empty or not a string. The error names the field.
    """
    url = part.get("image_url")
    if isinstance(url, dict):
        path, url = f"{path}.image_url.url", url.get("url")
    else:
        path = f"{path}.image_url"
    if not isinstance(url, str) or not url:
        raise InvalidRequest(f'{path} must be a string: "data:image/png;base64,..."', param=path)


def joined_content(pieces: Iterable[Piece], between: str) -> str | list[dict[str, Any]]:
    """Return a message content made of these pieces.

    Args:
        pieces: Texts and image parts. Empty texts are left out.
        between: Separator between adjacent texts, which become one text part.

    Returns:
        A string if there are no images, otherwise a list of content parts.
    """
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
    """Return the pieces of a content that joined_content made.

    Args:
        content: A string or a list of text and image parts.
    """
    if isinstance(content, str):
        return [content]
    return [part["text"] if part["type"] == "text" else part for part in content]
