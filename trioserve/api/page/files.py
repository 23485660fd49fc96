"""Files of the live page, read when this module is imported, so that no request waits for a disk."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

import msgspec

from trioserve.api.error_responses import refusal
from trioserve.api.responder import Responder
from trioserve.api.route_table import Operation

__all__ = [
    "FILES",
    "OPERATIONS",
    "PAGE_PATH",
    "ROUTER_PATH",
    "UI_PATH",
    "is_of_page",
    "show_file",
    "show_image_page",
    "show_page",
]

PAGE_PATH = "/"
ROUTER_PATH = "/router"
UI_PATH = "/ui/"
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}
PAGE = "page.html"
IMAGE_PAGE = "images.html"
HEADERS = (
    (
        "content-security-policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    ("x-content-type-options", "nosniff"),
    ("referrer-policy", "no-referrer"),
    ("cache-control", "no-cache"),
)


class _File(msgspec.Struct, frozen=True):
    body: bytes
    media_type: str
    etag: str


def _read_all() -> dict[str, _File]:
    files = {}
    for path in sorted(Path(__file__).parent.iterdir()):
        media_type = MEDIA_TYPES.get(path.suffix)
        if media_type is not None:
            body = path.read_bytes()
            files[path.name] = _File(body, media_type, f'"{blake2b(body, digest_size=12).hexdigest()}"')
    return files


FILES = _read_all()
"""Files by name."""


def is_of_page(path: str) -> bool:
    """Return True if only the live page uses this path.

    Args:
        path: path of a request.
    """
    return path in (PAGE_PATH, ROUTER_PATH) or path.startswith(UI_PATH)


async def show_page(context: Responder) -> None:
    await _show(context, FILES[PAGE])


async def show_image_page(context: Responder) -> None:
    """Send the page of a server that generates images.

    Args:
        context: the request.
    """
    await _show(context, FILES[IMAGE_PAGE])


async def show_file(context: Responder) -> None:
    """Send a file of the page.

    Args:
        context: the request.

    Raises:
        Refusal: there is no such file (404).
    """
    name = context.exchange.path.removeprefix(UI_PATH)
    file = FILES.get(name)
    if file is None or name in (PAGE, IMAGE_PAGE):
        raise refusal("not_found", f"the page has no file {name!r}")
    await _show(context, file)


async def _show(context: Responder, file: _File) -> None:
    headers = (*HEADERS, ("etag", file.etag))
    asked = context.exchange.headers.get("if-none-match") or ""
    if file.etag in (part.strip().removeprefix("W/") for part in asked.split(",")):
        await context.respond_bytes(b"", file.media_type, status=304, headers=headers)
    else:
        await context.respond_bytes(file.body, file.media_type, headers=headers)


OPERATIONS: tuple[Operation[Responder], ...] = (
    Operation(
        method="GET",
        path=PAGE_PATH,
        handler=show_page,
        summary="Show the live page, unless the server was started with --no-ui",
        needs_key=False,
        response="text/html",
    ),
    Operation(
        method="GET",
        path=UI_PATH + "{file}",
        handler=show_file,
        summary="Read a file of the live page",
        needs_key=False,
        response="*/*",
        errors=(400, 404),
        path_parameter="the file's name",
    ),
)
