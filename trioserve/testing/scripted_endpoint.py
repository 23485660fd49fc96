"""A server in memory that does what a test says: a prefill or a decode endpoint as a router sees it.

It answers by itself what a router asks of a server (health, models, load). Every other request is an Ask, which waits
for the test: it is answered, refused, broken off or left alone, and knows whether its client has left.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import trio

from trioserve.contracts.kv_transfer import EngineRole
from trioserve.testing.memory_stream import MemoryEnd, memory_connection

__all__ = ["Ask", "ScriptedEndpoint"]

RECEIVE_BYTES = 65_536
VLLM_METRICS = 'vllm:num_requests_running{model_name="fake"} 0.0\nvllm:num_requests_waiting{model_name="fake"} 0.0\n'
HAND_OVER_SUFFIX = "/hand-over"


class Ask:
    """One request. headers: names in lower case. body: as parsed. is_gone: its client has closed the connection before
    the response was over. is_over: the response is, or cannot be any more. is_held: blocks are kept for it."""

    def __init__(self, endpoint: ScriptedEndpoint, end: MemoryEnd, path: str, headers: dict[str, str], body: Any):
        self.endpoint = endpoint
        self.path = path
        self.headers = headers
        self.body = body
        self.is_gone = False
        self.is_over = False
        self.is_held = False
        self._end = end
        self._is_begun = False

    def respond(self, content: object, *, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """The whole response: a text as it is, anything else as JSON."""
        body = (content if isinstance(content, str) else json.dumps(content)).encode()
        fields = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        fields += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self._say(f"HTTP/1.1 {status} Said\r\n{fields}\r\n".encode() + body)
        self.is_over = True

    def refuse(self, status: int, code: str = "said_so", *, headers: Mapping[str, str] | None = None) -> None:
        error = {"message": "no", "type": "server_error", "param": None, "code": code}
        self.respond({"error": error}, status=status, headers=headers)

    def begin(self, headers: Mapping[str, str] | None = None, *, content_type: str = "text/event-stream") -> None:
        """The head of a stream of events."""
        self._is_begun = True
        fields = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        fields += f"content-type: {content_type}\r\ntransfer-encoding: chunked\r\n"
        self._say(f"HTTP/1.1 200 OK\r\n{fields}\r\n".encode())

    def begin_resumable(self, *, fingerprint: str = "same+exact", **told: object) -> None:
        """The same of an endpoint that tells how to go on elsewhere."""
        told = {"prompt_digest": "d", "seed": 7, **told}
        self.begin({"x-trioserve-resume": json.dumps(told), "x-trioserve-fingerprint": fingerprint})

    def group(self, id: str, text: str | None = None) -> None:
        """Of such a one: an event, and what the client has with it."""
        choice = {"index": int(id.split(":")[0]), "text": f" {id}" if text is None else text, "finish_reason": None}
        self.say(f"id: {id}\ndata: {json.dumps({'id': 'cmpl-0', 'choices': [choice]})}\n\n")

    def finish_resumable(self) -> None:
        self.say("id: .\ndata: [DONE]\n\n")
        self.end()

    def fail(self, code: str) -> None:
        """An event with an error, and the end."""
        self.event(error={"message": "said so", "type": "server_error", "param": None, "code": code})
        self.end()

    def say(self, text: str) -> None:
        """A piece of the stream, which has to be several events, or a part of one."""
        if not self._is_begun:
            self.begin()
        data = text.encode()
        self._say(b"%x\r\n%b\r\n" % (len(data), data))

    def event(self, **fields: object) -> None:
        self.say(f"data: {json.dumps(fields)}\n\n")

    def token(self, text: str = "x", *, finish_reason: str | None = None, **fields: object) -> None:
        """An event with a token."""
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
        self.event(id="cmpl-0", object="text_completion", choices=[choice], **fields)

    def finish(self) -> None:
        """The last event and the end; nothing is kept for it any more."""
        self.say("data: [DONE]\n\n")
        self.end()

    def end(self) -> None:
        """The end, without the event that says so."""
        self._say(b"0\r\n\r\n")
        self.is_over, self.is_held = True, False

    def hold(self, **params: object) -> None:
        """The one token of a prefill, whose blocks are kept from now on, as one of our servers answers that."""
        self.is_held = True
        self.token(finish_reason="length", kv_transfer_params={**self.endpoint.params, **params})

    def hang_up(self) -> None:
        """Close the connection in the middle."""
        self._end.close()
        self.is_over, self.is_held = True, False

    def leave(self) -> None:
        """The client has closed the connection."""
        if not self.is_over:
            self.is_gone = True
        self.is_over, self.is_held = True, False

    def _say(self, data: bytes) -> None:
        if not self.is_over:
            self._end.send_nowait(data)


class ScriptedEndpoint:
    """role: what it says it is meant for; None: nothing, as servers of others do. load: beside that. asks: all that
    came, oldest first. is_reachable, is_well, unready_reason, is_silent, gives_away: until told otherwise; the last:
    its streams, when it is asked to, which servers of others do not know. is_vllm: it tells its load as vLLM does.
    params: kv_transfer_params of what it holds."""

    def __init__(self, nursery: trio.Nursery, *, role: EngineRole | None = None, model: str = "fake") -> None:
        self.role = role
        self.model = model
        self.load: dict[str, object] = {"running": 0, "waiting": 0, "seats": 64}
        self.asks: list[Ask] = []
        self.is_reachable = True
        self.is_well = True
        self.is_silent = False
        self.unready_reason: str | None = None
        self.gives_away = False
        self.is_vllm = False
        self.params: dict[str, object] = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": "engine",
            "remote_block_ids": [3, 1, 4],
            "remote_host": "10.0.0.9",
            "remote_port": 9999,
            "something_else": {"kept": "as it came"},
        }
        self._nursery = nursery

    @property
    def open(self) -> list[Ask]:
        """Those whose response is not over."""
        return [ask for ask in self.asks if not ask.is_over]

    @property
    def held_count(self) -> int:
        return sum(ask.is_held for ask in self.asks)

    async def connect(self) -> MemoryEnd:
        if not self.is_reachable:
            raise ConnectionRefusedError(111, "Connection refused")
        client, end = memory_connection()
        self._nursery.start_soon(self._serve, end)
        return client

    async def _serve(self, end: MemoryEnd) -> None:
        received = b""
        ask: Ask | None = None
        try:
            while data := await end.receive_some(RECEIVE_BYTES):
                received += data
                while (parsed := _parsed(received)) is not None:
                    (method, path, headers, body), received = parsed
                    if method == "POST" and path.endswith(HAND_OVER_SUFFIX):
                        self._give_away(Ask(self, end, path, headers, None))
                    elif method == "POST":
                        ask = Ask(self, end, path, headers, json.loads(body))
                        self.asks.append(ask)
                    elif not self.is_reachable:
                        return  # as one that stops closes what is idle
                    elif not self.is_silent:
                        is_ready = self.unready_reason is None or path != "/ready"
                        status = 200 if self.is_well and is_ready else 503
                        said = self._said(path) if is_ready else {"ready": False, "reason": self.unready_reason}
                        Ask(self, end, path, headers, None).respond(said, status=status)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        finally:
            if ask is not None:
                ask.leave()
            end.close()

    def _give_away(self, asked: Ask) -> None:
        if self.is_silent:
            return
        id = asked.path.removesuffix(HAND_OVER_SUFFIX).rsplit("/", 1)[1]
        found = [ask for ask in self.open if ask.headers["x-request-id"] == id]
        if not (
            self.gives_away and found and asked.headers.get("authorization") == found[0].headers.get("authorization")
        ):
            asked.refuse(404)
            return
        asked.respond({"id": id})
        said = {"object": "hand_over", "kv_transfer_params": self.params}
        found[0].say(f"data: {json.dumps(said)}\nid: >\n\n")
        found[0].end()

    def _said(self, path: str) -> object:
        if self.is_vllm and path in ("/load", "/metrics"):
            return {"server_load": 0} if path == "/load" else VLLM_METRICS
        if path == "/load":
            return {**self.load, **({} if self.role is None else {"role": self.role})}
        return {"object": "list", "data": [{"id": self.model, "object": "model"}]} if path == "/v1/models" else {}


def _parsed(received: bytes) -> tuple[tuple[str, str, dict[str, str], bytes], bytes] | None:
    """The first request, and what is behind it; None if it is not whole."""
    head, found, rest = received.partition(b"\r\n\r\n")
    if not found:
        return None
    line, *fields = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (field.partition(":") for field in fields)}
    length = int(headers.get("content-length", "0"))
    if len(rest) < length:
        return None
    method, path, _ = line.split(" ", 2)
    return (method, path, headers, rest[:length]), rest[length:]
