"""Tests of commands that call a server over a real socket. The server has scripted answers, or is the real server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import pytest
import trio

from trioserve import cli
from trioserve.api.page import change_between, snapshot_fields
from trioserve.commands.remote import FeedState, RemoteServer, states, view
from trioserve.contracts.page import BlockState, HistoryShown, PageSnapshot, ServerShown
from trioserve.testing.memory_server import open_memory_server

SNAPSHOT = {
    "now": 10.0,
    "server": {"kind": "engine", "model": "smollm2", "executor": "bfloat16 on cpu", "is_draining": False},
    "blocks": [[3, 0], [2, 2], [1, 1]],
    "requests": {"r1": {"state": "running", "phase": "decode", "entered_at": 4.0, "prompt_tokens": 7, "tenant": None}},
    "request_count": 1,
    "stats": {"running": 1, "waiting": 0},
    "history": {"series": {"tokens_per_second": [1.0, None]}},
    "endpoints": None,
}
CHANGE = {
    "now": 11.0,
    "blocks": [[3, 2, 0]],
    "requests": {
        "r1": {"outcome": "cancelled", "ended_at": 10.5, "freed": {"blocks": 2, "steps": 1, "seconds": 0.009}},
        "r2": {"state": "waiting", "entered_at": 10.9},
    },
    "history": {"at": 11.0, "points": {"tokens_per_second": [30.0, 31.0]}},
}


class Played:
    """Server with scripted answers.

    Attributes:
        answers: Status and body by method and path.
        asked: Received requests.
    """

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, bytes]] = {}
        self.asked: list[tuple[str, str | None, bytes]] = []
        played = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                name = f"{self.command} {self.path}"
                played.asked.append((name, self.headers.get("authorization"), body))
                status, text = played.answers.get(name, (404, b'{"error": {"message": "nothing here"}}'))
                self.send_response(status)
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = do_DELETE = answer

            def log_message(self, *_arguments: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def says(self, name: str, value: object, status: int = 200) -> None:
        self.answers[name] = (status, value if isinstance(value, bytes) else json.dumps(value).encode())


@pytest.fixture
def played(monkeypatch: Any) -> Iterator[Played]:
    monkeypatch.delenv("TRIOSERVE_URL", raising=False)
    monkeypatch.delenv("TRIOSERVE_API_KEY", raising=False)
    made = Played()
    thread = threading.Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


def events(*pairs: tuple[str, object]) -> bytes:
    return b":\n\n" + b"".join(f"event: {name}\ndata: {json.dumps(data)}\n\n".encode() for name, data in pairs)


def test_endpoints_are_listed_and_drained_with_the_key(played: Played, capsys: Any, monkeypatch: Any):
    endpoint = {"id": "a", "url": "http://x", "health": "healthy", "leases": 3, "moved_from": 2, "moved_to": 0}
    played.says("GET /endpoints", {"data": [endpoint]})
    played.says("POST /endpoints/a%2Fb/drain?move=true", {"id": "a/b"})
    assert cli.main(["endpoints", "--url", played.url, "--api-key", "k"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "id  url       health   leases  moved_from  moved_to",
        "a   http://x  healthy  3       2           0",
    ]
    monkeypatch.setenv("TRIOSERVE_URL", played.url)
    monkeypatch.setenv("TRIOSERVE_API_KEY", "k2,k3")
    assert cli.main(["drain", "a/b", "--move", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"id": "a/b"}
    assert [key for _, key, _ in played.asked] == ["Bearer k", "Bearer k2"]


def test_image_requests_are_listed_with_their_steps(played: Played, capsys: Any):
    view = {"id": "r", "state": "running", "age_seconds": 1.25, "pictures": 2, "steps_done": 3, "step_count": 8}
    played.says("GET /v1/requests", {"data": [view]})
    assert cli.main(["requests", "--url", played.url]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "id  state    age_seconds  pictures  steps_done  step_count",
        "r   running  1.2          2         3           8",
    ]


@pytest.mark.parametrize(
    ("status", "answer", "words"),
    [
        (401, {"error": {"message": "no key"}}, "answered 401, no key: set a key with --api-key or TRIOSERVE_API_KEY"),
        (500, b"<html>", "answered 500, Internal Server Error"),
        (200, b"<html>", "did not answer with JSON"),
    ],
)
def test_command_prints_the_refusal_of_a_server_as_one_sentence(
    status: int, answer: object, words: str, played: Played, capsys: Any
):
    played.says("GET /v1/requests", answer, status)
    assert cli.main(["requests", "--url", played.url]) == 1
    written = capsys.readouterr().err
    assert words in written
    assert written.count("\n") == 1


def test_command_reports_a_missing_server_or_url(capsys: Any):
    assert cli.main(["requests", "--url", "127.0.0.1:1"]) == 1
    assert "no server answers at http://127.0.0.1:1 (" in capsys.readouterr().err
    assert cli.main(["top", "ftp://x"]) == 1
    assert "is not the URL of a server" in capsys.readouterr().err


def test_state_of_a_watched_server_is_a_snapshot_plus_changes():
    state = FeedState()
    state.take_snapshot(SNAPSHOT)
    assert state.blocks == bytes([0, 0, 0, 2, 2, 1])
    state.take_change(CHANGE)
    assert state.blocks == bytes([0, 0, 0, 0, 0, 1])
    assert state.requests["r1"]["prompt_tokens"] == 7
    assert state.series == {"tokens_per_second": [1.0, None, 30.0, 31.0]}
    state.take_change({"requests": {"r1": None}})
    assert list(state.requests) == ["r2"]


@pytest.mark.parametrize("block_count", [4, 6, 9])
def test_watcher_applies_the_changes_of_a_real_server(block_count: int):
    def snapshot(blocks: bytes, number: int, **fields: Any) -> PageSnapshot:
        values = tuple(float(point) for point in range(number + 1))
        history = HistoryShown(interval_seconds=5, at=number * 5.0, number=number, series={"queue": values})
        server = ServerShown(kind="engine", model="m", version="1", block_count=len(blocks))
        return PageSnapshot(now=0.0, server=server, blocks=blocks, history=history, **fields)

    first = snapshot(bytes([0, 1, 2, 3, 0, 0]), 3, endpoints={"a": {"health": "healthy"}})
    second = snapshot(bytes([2] * block_count), 9)
    change = change_between(first, second)
    assert change is not None
    followed, anew = FeedState(), FeedState()
    followed.take_snapshot(msgspec.json.decode(msgspec.json.encode(snapshot_fields(first))))
    followed.take_change(msgspec.json.decode(msgspec.json.encode(change)))
    anew.take_snapshot(msgspec.json.decode(msgspec.json.encode(snapshot_fields(second))))
    for name in ("blocks", "requests", "endpoints", "series"):
        assert getattr(followed, name) == getattr(anew, name), name
    assert followed.fields["server"] == anew.fields["server"]


def test_top_shows_requests_blocks_and_freed_blocks(played: Played):
    rich_console = pytest.importorskip("rich.console")
    shrunk = ("change", {"blocks": [[4, 2, BlockState.RETIRED]]})
    played.says("GET /ui/events?interval=0.5", events(("snapshot", SNAPSHOT), ("change", CHANGE), shrunk))
    shown = []
    for state in states(RemoteServer(played.url), 0.5):
        console = rich_console.Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
        console.print(view(state, played.url))
        console.file.close()
        shown.append(console.export_text())
    first, second, third = shown
    assert "r1" in first
    assert "decode" in first
    assert "6.0 s" in first
    assert "2 used" in first
    assert "cancelled: 2 blocks free in 9 ms" in second
    assert "0 used" in second
    assert "retired" not in second
    assert "4 free" in third
    assert "2 retired" in third
    assert second.index("r2") < second.index("r1")  # The newest request comes first.


def test_top_prints_one_snapshot_for_scripts(played: Played, capsys: Any):
    played.says("GET /ui/events?interval=0.5", events(("snapshot", SNAPSHOT), ("change", CHANGE)))
    assert cli.main(["top", played.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == SNAPSHOT


async def test_running_request_is_listed_and_aborted_and_its_blocks_are_freed(capsys: Any):
    async with open_memory_server(paused=True) as server, trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        await nursery.start(server.server.serve, listeners)
        url = f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}"

        async def run(*arguments: str) -> int:
            return await trio.to_thread.run_sync(cli.main, [*arguments, "--url", url])

        assert await trio.to_thread.run_sync(cli.main, ["top", url, "--json"]) == 0
        state = FeedState()
        state.take_snapshot(json.loads(capsys.readouterr().out))
        assert state.blocks == bytes(state.fields["server"]["block_count"])
        assert state.requests == {}
        async with server.client().ask("/v1/completions", {"prompt": "x" * 40, "stream": True}) as response:
            async with server.engine.held_step():
                assert await run("requests", "--json") == 0
                [request] = json.loads(capsys.readouterr().out)["data"]
                assert await run("requests") == 0
                assert request["id"] in capsys.readouterr().out
                assert await run("abort", request["id"], "nobody") == 1
                assert "nobody: unknown" in capsys.readouterr().out
            await response.read()
        await server.assert_all_free()
        nursery.cancel_scope.cancel()
