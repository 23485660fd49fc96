"""The engine for asyncio programs. The engine runs on Trio, in a thread of its own.

Each name of this package is imported at its first use. See docs/guides/in-your-program.md for examples.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trioserve.assemble import open_asyncio_engine as open_engine
    from trioserve.assemble_engines import AsyncioEngines as Engines
    from trioserve.assemble_engines import open_asyncio_engines as open_engines
    from trioserve.assemble_images import open_asyncio_image_engine as open_image_engine
    from trioserve.asyncio.disconnect import cancel_on_disconnect
    from trioserve.asyncio.engine import Engine, ImageEngine, Session
    from trioserve.asyncio.streams import ImageStream, PoolingStream, RequestStream

__all__ = [
    "Engine",
    "Engines",
    "ImageEngine",
    "ImageStream",
    "PoolingStream",
    "RequestStream",
    "Session",
    "cancel_on_disconnect",
    "open_engine",
    "open_engines",
    "open_image_engine",
]

_LOCATIONS = {
    "Engine": ("trioserve.asyncio.engine", "Engine"),
    "Engines": ("trioserve.assemble_engines", "AsyncioEngines"),
    "ImageEngine": ("trioserve.asyncio.engine", "ImageEngine"),
    "ImageStream": ("trioserve.asyncio.streams", "ImageStream"),
    "PoolingStream": ("trioserve.asyncio.streams", "PoolingStream"),
    "RequestStream": ("trioserve.asyncio.streams", "RequestStream"),
    "Session": ("trioserve.asyncio.engine", "Session"),
    "cancel_on_disconnect": ("trioserve.asyncio.disconnect", "cancel_on_disconnect"),
    "open_engine": ("trioserve.assemble", "open_asyncio_engine"),
    "open_engines": ("trioserve.assemble_engines", "open_asyncio_engines"),
    "open_image_engine": ("trioserve.assemble_images", "open_asyncio_image_engine"),
}


def __getattr__(name: str) -> object:
    if name not in _LOCATIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _LOCATIONS[name]
    value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
