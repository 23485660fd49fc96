"""A server in memory, and helpers to create and read its files and batches."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import trio

from trioserve.testing.memory_server import MemoryServer

COMPLETIONS = "/v1/completions"


def line(custom_id: str, prompt: str = "Hi", *, url: str = COMPLETIONS, **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **fields}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def jsonl(*lines: Any) -> bytes:
    return b"".join((value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n" for value in lines)


def form(content: bytes, purpose: str = "batch", filename: str = "lines.jsonl", more: str = "") -> bytes:
    head = f'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\n{purpose}\r\n{more}'
    head += f'--b\r\ncontent-disposition: form-data; name="file"; filename="{filename}"\r\n\r\n'
    return head.encode() + content + b"\r\n--b--\r\n"


class Owner:
    """A client with one key. Each call has its own connection."""

    def __init__(self, server: MemoryServer, key: str | None = None) -> None:
        self.server = server
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}

    async def ask(self, path: str, body: Any = None, *, method: str | None = None, **headers: str) -> tuple[int, Any]:
        named = {**self._headers, **{name.replace("_", "-"): value for name, value in headers.items()}}
        client = self.server.client()
        async with client.ask(path, body, method=method, headers=named) as response:
            data = await response.read()
            assert response.status is not None
            is_json = response.headers["content-type"] == "application/json"
            result = response.status, json.loads(data) if is_json else data
        client.close()
        return result

    async def ok(self, path: str, body: Any = None, **options: Any) -> Any:
        status, said = await self.ask(path, body, **options)
        assert status == 200, said
        return said

    async def upload(self, *lines: Any, **options: Any) -> str:
        said = await self.ok(
            "/v1/files", form(jsonl(*lines), **options), content_type="multipart/form-data; boundary=b"
        )
        return said["id"]

    async def batch(self, *lines: Any, **fields: Any) -> dict[str, Any]:
        """Create a batch with these lines, and return the batch object."""
        body = {"input_file_id": "", "endpoint": COMPLETIONS, "completion_window": "24h", **fields}
        body["input_file_id"] = body["input_file_id"] or await self.upload(*lines)
        return await self.ok("/v1/batches", body)

    async def state(self, batch_id: str) -> dict[str, Any]:
        return await self.ok(f"/v1/batches/{batch_id}")

    async def ended(self, batch_id: str) -> dict[str, Any]:
        """Wait until a batch has ended, and return the batch object. Time is virtual."""
        while True:
            batch = await self.state(batch_id)
            if batch["status"] in ("completed", "failed", "expired", "cancelled"):
                return batch
            await trio.sleep(0.5)

    async def lines_of(self, file_id: str | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        content = await self.ok(f"/v1/files/{file_id}/content")
        return [json.loads(text) for text in content.decode().splitlines()]


@pytest.fixture(scope="session")
def owner_of() -> Callable[..., Owner]:
    return Owner


@pytest.fixture(scope="session")
def batch_line() -> Callable[..., dict[str, Any]]:
    return line
