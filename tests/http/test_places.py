"""Tests Unix domain sockets, and the removal of a path prefix that a proxy has not removed."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import trio

from trioserve.contracts.errors import StartupError
from trioserve.http.handler_call import RootPath, checked_root_path
from trioserve.http.listener import addresses, open_unix_listener


async def test_socket_file_is_replaced_only_if_its_server_has_ended(tmp_path: Path):
    path = tmp_path / "s"
    listener = await open_unix_listener(path)
    assert addresses([listener]) == [str(path)]
    with pytest.raises(StartupError, match="is in use by another program: stop it, or name another file"):
        await open_unix_listener(path)
    listener.socket.close()
    listener = await open_unix_listener(path)
    async with await trio.open_unix_socket(path):
        pass
    listener.socket.close()


async def test_file_at_the_socket_path_that_is_no_socket_is_not_replaced(tmp_path: Path):
    path = tmp_path / "s"
    path.write_text("mine")
    with pytest.raises(StartupError, match="cannot be listened on"):
        await open_unix_listener(path)
    assert path.read_text() == "mine"
    with pytest.raises(StartupError, match=r"cannot be listened on .*: name a new file"):
        await open_unix_listener(tmp_path / "none" / "s")


@pytest.mark.parametrize(
    ("path", "expect"),
    [("/llm/v1/models", "/v1/models"), ("/v1/models", "/v1/models"), ("/llm", "/"), ("/llms/v1", "/llms/v1")],
)
async def test_path_prefix_is_removed_from_paths_that_have_it(path: str, expect: str):
    seen: list[str] = []

    async def handler(exchange: Any) -> None:
        seen.append(exchange.path)

    await RootPath(handler, checked_root_path("/llm/"))(types.SimpleNamespace(path=path))  # type: ignore[arg-type]
    assert seen == [expect]


def test_invalid_path_prefix_is_refused():
    with pytest.raises(StartupError, match="--root-path is 'llm': it must begin with /"):
        checked_root_path("llm")
