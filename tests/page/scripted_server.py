"""Serves the files of the page, and events that a test scripts.

So the page shows states that a real server rarely has: many blocks, faults, routers, restarts.
"""

from __future__ import annotations

import json
import queue
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

__all__ = ["POLICY", "ScriptedServer", "scripted_request", "scripted_snapshot"]

FILES = Path(__file__).resolve().parents[2] / "trioserve" / "api" / "page"
KINDS = {".html": "text/html; charset=utf-8", ".css": "text/css", ".js": "text/javascript"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content security policy of the real server. A test of tests/page compares both."""

Event = tuple[str, dict[str, Any]]


class ScriptedServer:
    """Serves inside of a `with` block.

    Attributes:
        snapshot: first event that each reader gets.
        key: API key that readers must send, or None if no key is needed.
        asked: DELETE and POST requests that the server got so far, as "METHOD PATH".
    """

    def __init__(self, snapshot: dict[str, Any]) -> None:
        self.snapshot = snapshot
        self.key: str | None = None
        self.asked: list[str] = []
        self._readers: list[queue.Queue[Event | None]] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> ScriptedServer:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.hang_up()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def change(self, **fields: Any) -> None:
        for reader in self._readers:
            reader.put(("change", fields))

    def hang_up(self) -> None:
        """End all streams of events."""
        for reader in self._readers:
            reader.put(None)
        self._readers.clear()

    def _handler(script) -> type[BaseHTTPRequestHandler]:  # The nested class uses the name self.
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                if self.path == "/ui/events":
                    self.send_events()
                elif self.path == "/v1/models":
                    self.respond(200, b'{"data": [{"id": "scripted"}]}')
                else:
                    name = "page.html" if self.path in ("/", "/router") else self.path.removeprefix("/ui/")
                    file = FILES / Path(name).name
                    if file.exists():
                        self.respond(200, file.read_bytes(), KINDS[file.suffix])
                    else:
                        self.respond(404, b"{}")

            def do_DELETE(self) -> None:
                script.asked.append(f"DELETE {self.path}")
                self.respond(200, b"{}")

            def do_POST(self) -> None:
                script.asked.append(f"POST {self.path}")
                self.rfile.read(int(self.headers.get("content-length", 0)))
                self.respond(200, b"{}")

            def send_events(self) -> None:
                if script.key and self.headers.get("authorization") != f"Bearer {script.key}":
                    self.respond(401, b'{"error": {"message": "this API key is not known"}}')
                    return
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.send_header("connection", "close")
                self.end_headers()
                reader: queue.Queue[Event | None] = queue.Queue()
                reader.put(("snapshot", script.snapshot))
                script._readers.append(reader)
                while (event := reader.get()) is not None:
                    self.wfile.write(f"event: {event[0]}\ndata: {json.dumps(event[1])}\n\n".encode())
                self.close_connection = True

            def respond(self, status: int, body: bytes, kind: str = "application/json") -> None:
                self.send_response(status)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(body)))
                self.send_header("content-security-policy", POLICY)
                self.send_header("cache-control", "no-cache")
                self.end_headers()
                self.wfile.write(body)

        return Handler


def scripted_snapshot(*, block_count: int = 64, **fields: Any) -> dict[str, Any]:
    """Return a snapshot of an idle engine.

    Args:
        block_count: number of KV blocks, all free unless `fields` has "blocks".
        fields: fields of the snapshot to replace.
    """
    states = ("free", "cached", "used", "held", "retired")
    runs = fields.setdefault("blocks", [[block_count, 0]]) or []
    counts = {f"blocks_{name}": sum(n for n, kind in runs if kind == number) for number, name in enumerate(states)}
    snapshot: dict[str, Any] = {
        "now": 1000.0,
        "server": {
            "kind": "engine",
            "model": "scripted",
            "version": "0",
            "block_count": block_count,
            "block_size": 16,
            "max_num_seqs": 8,
            "sees": "all",
            "restarts": 0,
            "started_at": 1.0,
        },
        "requests": {},
        "request_count": 0,
        "stats": {"running": 0, "waiting": 0, "generation_tokens_total": 0, **counts},
        "steps": None,
        "history": None,
        "transfers": None,
        "endpoints": None,
        "models": None,
    }
    return {**snapshot, **fields}


def scripted_request(id: str, **fields: Any) -> dict[str, Any]:
    request: dict[str, Any] = {
        "id": id,
        "state": "running",
        "phase": "decode",
        "entered_at": 990.0,
        "running_at": 991.0,
        "first_token_at": 993.0,
        "ended_at": None,
        "outcome": None,
        "prompt_tokens": 64,
        "completion_tokens": 20,
        "cached_tokens": 0,
        "deadline_at": None,
        "tenant": None,
        "priority": 0,
        "choices": 1,
        "blocks": [],
        "held_until": None,
        "endpoint": None,
        "freed": None,
    }
    return {**request, **fields}
