"""A whole server in memory whose model can repeat the prompt, and a client for its responses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from trioserve.testing.memory_server import MemoryServer, open_memory_server

PATH = "/v1/responses"


class Asker:
    """Client of the Responses API. `key` is its API key."""

    def __init__(self, server: MemoryServer, key: str | None = None) -> None:
        self.server = server
        self.headers = {} if key is None else {"authorization": f"Bearer {key}"}

    def client(self) -> Any:
        return self.server.client(http=2, headers=self.headers)

    async def ask(self, *, status: int = 200, **body: Any) -> Any:
        """Send a request, and return the whole response object or the error."""
        response = await self.client().post(PATH, {"model": "fake", **body})
        value = await response.json()
        assert response.status == status, value
        return value if status == 200 else value["error"]

    async def stream(self, **body: Any) -> list[dict[str, Any]]:
        async with self.client().ask(PATH, {"model": "fake", "stream": True, **body}) as response:
            return [event async for event in response]

    async def call(self, path: str, *, method: str = "GET", status: int = 200) -> Any:
        async with self.client().ask(f"{PATH}/{path}", method=method) as response:
            value = await response.json()
        assert response.status == status, value
        return value if status == 200 else value["error"]

    async def events(self, path: str) -> list[dict[str, Any]]:
        async with self.client().ask(f"{PATH}/{path}") as response:
            assert await response.head() == 200, await response.read()
            return [event async for event in response]


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] for part in item["content"])


@pytest.fixture
def opened() -> Any:
    @asynccontextmanager
    async def open_server(*, keys: tuple[str, ...] = (), **options: Any) -> AsyncIterator[Any]:
        options = {"response": "Hello!", "max_model_len": 2048, "block_count": 1024, **options}
        async with open_memory_server(api_keys=keys, **options) as server:
            yield [Asker(server, key) for key in keys] if keys else Asker(server)
            await server.assert_all_free()
            assert server.app.background.live_count == 0

    return open_server
