"""Test kit for programs that use trioserve.

The kit has engines and servers without weights, control over when a step runs, and a check that every resource was
released. Each name is imported when it is first used. docs/guides/testing.md has examples.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trioserve.testing.accounting import assert_all_free
    from trioserve.testing.fake_engine import FakeEngine, open_fake_engine
    from trioserve.testing.fake_image_engine import FakeImageEngine, open_fake_image_engine
    from trioserve.testing.httpx_transport import MemoryTransport
    from trioserve.testing.inline_work import seeded_schedule
    from trioserve.testing.memory_client import (
        ConnectionLost,
        MemoryClient,
        MemoryEnd,
        MemoryResponse,
        memory_connection,
    )
    from trioserve.testing.memory_server import MemoryServer, open_memory_server
    from trioserve.testing.scripted_connector import ScriptedConnector
    from trioserve.testing.stepped_by_hand import InjectedFault

_MODULE_OF = {
    "ConnectionLost": "memory_client",
    "FakeEngine": "fake_engine",
    "FakeImageEngine": "fake_image_engine",
    "InjectedFault": "stepped_by_hand",
    "MemoryResponse": "memory_client",
    "MemoryClient": "memory_client",
    "MemoryEnd": "memory_client",
    "MemoryServer": "memory_server",
    "MemoryTransport": "httpx_transport",
    "assert_all_free": "accounting",
    "memory_connection": "memory_client",
    "ScriptedConnector": "scripted_connector",
    "open_fake_engine": "fake_engine",
    "open_fake_image_engine": "fake_image_engine",
    "open_memory_server": "memory_server",
    "seeded_schedule": "inline_work",
}

__all__ = [
    "ConnectionLost",
    "FakeEngine",
    "FakeImageEngine",
    "InjectedFault",
    "MemoryResponse",
    "MemoryClient",
    "MemoryEnd",
    "MemoryServer",
    "MemoryTransport",
    "ScriptedConnector",
    "assert_all_free",
    "memory_connection",
    "open_fake_engine",
    "open_fake_image_engine",
    "open_memory_server",
    "seeded_schedule",
]


_FORMER_NAMES = {"MemoryAnswer": "MemoryResponse"}


def __getattr__(name: str) -> object:
    name = _FORMER_NAMES.get(name, name)
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"trioserve.testing.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value
