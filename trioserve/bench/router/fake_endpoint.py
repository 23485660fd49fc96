"""Fake endpoints in a separate process, to measure a router: `python -m trioserve.bench.router.fake_endpoint`.

Each endpoint implements the part of HTTP/1.1 and of OpenAI's API that a router uses, over plain sockets without a
library, so that its own cost is small. Without slots, it answers a completion at once, or streams an event in a
separate write every event_seconds, as an engine's steps would. With slots, a completion takes the service time and may
wait for a slot. /metrics has both numbers under vLLM's names. The code is only for measurements.

The process reads its settings as JSON from its first argument, prints its ports as JSON in one line, and ends at the
end of its input.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import math
import re
import selectors
import socket
import sys
import time
from collections import deque

import msgspec

__all__ = ["MODEL", "Depth", "DepthFigures", "FakeEndpointSettings", "FakeEndpoints", "Slots", "main"]

MODEL = "fake"
BACKLOG = 1024
ENDLESS_SLOTS = 10_000  # number of slots that an endpoint without slots reports, so that no router holds requests back
RECEIVE_BYTES = 65_536

_HEAD_END = b"\r\n\r\n"
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_TEXT = "three or four words"


class FakeEndpointSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the fake endpoints.

    Attributes:
        endpoints: number of endpoints, each with its own port.
        slots_max: slots of each endpoint. None: every request is answered at once.
        service_seconds: service time of a request in a slot.
        event_seconds: interval of streamed events.
        load_seconds: interval at which each endpoint sends its load by itself, as trioserve does. None: the router must
            ask for it.
    """

    endpoints: int = 1
    slots_max: int | None = None
    service_seconds: float = 0.0
    event_seconds: float = 0.01
    load_seconds: float | None = None


class DepthFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Queue of one endpoint since its last reset.

    Attributes:
        depth_max: maximum length of the queue.
        depth_mean: mean length of the queue.
        served: number of responses.
    """

    depth_max: int
    depth_mean: float
    served: int


class _Ask(msgspec.Struct):
    """The body of a completion request.

    Attributes:
        max_tokens: number of events of a streamed response.
        stream: True for a streamed response.
        at_once: True to send all events at once, each in a separate write.
    """

    max_tokens: int = 16
    stream: bool = False
    at_once: bool = False


def _whole(body: bytes, status: bytes = b"200 OK", kind: bytes = b"application/json") -> bytes:
    return b"HTTP/1.1 %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b" % (status, kind, len(body), body)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _completion(finish: str | None) -> dict[str, object]:
    return {
        "id": "cmpl-0",
        "object": "text_completion",
        "created": 1,
        "model": MODEL,
        "choices": [{"index": 0, "text": _TEXT, "logprobs": None, "finish_reason": finish}],
    }


_USAGE = {"prompt_tokens": 4, "completion_tokens": 4, "total_tokens": 8}
_RESPONSE = _whole(json.dumps({**_completion("length"), "usage": _USAGE}).encode())
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_DATA = b"data: " + json.dumps(_completion(None)).encode() + b"\n"
_LAST_DATA = b"data: " + json.dumps(_completion("length")).encode() + b"\n"
_ENDS = b"0\r\n\r\n"


class _Stream(msgspec.Struct, frozen=True):
    """The parts of a streamed response.

    Attributes:
        head: status line and headers.
        event: an event before the last one.
        end: the last event and the end.
    """

    head: bytes
    event: bytes
    end: bytes


_PLAIN = _Stream(_STREAM_HEAD, _chunk(_DATA + b"\n"), _chunk(_LAST_DATA + b"\n") + _chunk(b"data: [DONE]\n\n") + _ENDS)
# trioserve sends such a response to a router that can resume streams. The token has a usual length.
_RESUMABLE = _Stream(
    _STREAM_HEAD[:-2] + b'x-trioserve-resume: {"prompt_digest":"d","seed":7,"created":1}\r\n\r\n',
    _chunk(_DATA + b"id: 0:12345\n\n"),
    _chunk(_LAST_DATA + b"id: 0:12345!\n\n") + _chunk(b"data: [DONE]\nid: .\n\n") + _ENDS,
)
_RESUMABLE_HEADER = b"\r\nx-trioserve-resumable: 1"
_MODELS = _whole(json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model"}]}).encode())
_LOAD = _whole(json.dumps({"running": 0, "waiting": 0, "seats": ENDLESS_SLOTS}).encode())
_WELL = _whole(b"{}")
_UNKNOWN = _whole(b'{"error": {"message": "there is nothing here"}}', b"404 Not Found")


class _Client:
    """One connection.

    Attributes:
        stream: parts of the response that is being streamed.
        events_left: events that must still be sent.
    """

    def __init__(self, endpoint: _Endpoint, connection: socket.socket, key: int) -> None:
        self.endpoint = endpoint
        self.connection = connection
        self.key = key
        self.received = b""
        self.stream = _PLAIN
        self.events_left = 0

    def send(self, data: bytes) -> None:
        # This call does not block, since the data fits into the kernel's buffer, and the clients read quickly.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.sendall(data)


class _Endpoint:
    """One port. If its slots are None, every request is answered at once."""

    def __init__(self, listener: socket.socket, slots: Slots | None) -> None:
        self.listener = listener
        self.slots = slots
        self.served = 0


class FakeEndpoints:
    """All endpoints of the process, in one thread.

    Args:
        settings: settings of the endpoints.
    """

    def __init__(self, settings: FakeEndpointSettings) -> None:
        now = time.monotonic()
        self._settings = settings
        self._selector = selectors.DefaultSelector()
        self._clients: dict[int, _Client] = {}
        self._streaming: dict[int, _Client] = {}
        self._next_key = 0
        self._next_event_at = 0.0
        self._load_listeners: dict[int, _Client] = {}
        self._next_load_at = 0.0
        self._endpoints: list[_Endpoint] = []
        for _ in range(settings.endpoints):
            listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
            listener.setblocking(False)
            slots = None
            if settings.slots_max is not None:
                slots = Slots(settings.slots_max, settings.service_seconds, now)
            endpoint = _Endpoint(listener, slots)
            self._endpoints.append(endpoint)
            self._selector.register(listener, selectors.EVENT_READ, endpoint)

    @property
    def ports(self) -> list[int]:
        return [endpoint.listener.getsockname()[1] for endpoint in self._endpoints]

    def serve(self, ends: socket.socket | int) -> None:
        """Serve until there is something to read from `ends`, or until it is closed.

        Args:
            ends: a socket or file descriptor.
        """
        self._selector.register(ends, selectors.EVENT_READ, None)
        while True:
            for chosen, _ in self._selector.select(self._patience()):
                if chosen.data is None:
                    return
                if isinstance(chosen.data, _Endpoint):
                    self._accept(chosen.data)
                else:
                    self._read(chosen.data)
            now = time.monotonic()
            self._end_services(now)
            self._send_events(now)
            self._send_loads(now)

    def close(self) -> None:
        for client in list(self._clients.values()):
            self._forget(client)
        for endpoint in self._endpoints:
            endpoint.listener.close()
        self._selector.close()

    def _patience(self) -> float | None:
        moments = [endpoint.slots.next_end for endpoint in self._endpoints if endpoint.slots is not None]
        if self._streaming:
            moments.append(self._next_event_at)
        if self._load_listeners:
            moments.append(self._next_load_at)
        seconds = min(moments, default=float("inf")) - time.monotonic()
        return None if seconds == float("inf") else max(0.0, seconds)

    # --- Connections ---

    def _accept(self, endpoint: _Endpoint) -> None:
        try:
            connection, _ = endpoint.listener.accept()
        except OSError:
            return  # The client has already closed the connection.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._next_key += 1
        client = self._clients[self._next_key] = _Client(endpoint, connection, self._next_key)
        self._selector.register(connection, selectors.EVENT_READ, client)

    def _read(self, client: _Client) -> None:
        try:
            received = client.connection.recv(RECEIVE_BYTES)
        except ConnectionResetError:
            received = b""
        if not received:
            self._forget(client)
            return
        client.received += received
        while True:
            head_end = client.received.find(_HEAD_END)
            if head_end < 0:
                return
            length = _LENGTH.search(client.received, 0, head_end + 2)
            body_at = head_end + len(_HEAD_END)
            end = body_at + (int(length[1]) if length else 0)
            if len(client.received) < end:
                return
            head, body = client.received[:head_end], client.received[body_at:end]
            client.received = client.received[end:]
            method, target, _ = head.split(b"\r\n", 1)[0].split(b" ", 2)
            client.stream = _RESUMABLE if _RESUMABLE_HEADER in head.lower() else _PLAIN
            self._respond(client, method + b" " + target, body)

    def _forget(self, client: _Client) -> None:
        self._selector.unregister(client.connection)
        client.connection.close()
        del self._clients[client.key]
        self._streaming.pop(client.key, None)
        self._load_listeners.pop(client.key, None)
        if client.endpoint.slots is not None:
            client.endpoint.slots.leave(client.key, time.monotonic())

    # --- Responses ---

    def _respond(self, client: _Client, asked: bytes, body: bytes) -> None:
        endpoint = client.endpoint
        if asked == b"POST /v1/completions":
            self._complete(client, msgspec.json.decode(body, type=_Ask))
        elif asked in (b"GET /ready", b"GET /health"):
            client.send(_WELL)
        elif asked == b"GET /v1/models":
            client.send(_MODELS)
        elif asked == b"GET /load" and self._settings.load_seconds is not None:
            client.send(_whole(json.dumps(_load_report(0)).encode()))
        elif asked == b"GET /kv_events?load=only" and self._settings.load_seconds is not None:
            client.send(_STREAM_HEAD)
            self._load_listeners[client.key] = client
        elif asked == b"GET /load" and endpoint.slots is None:
            client.send(_LOAD)
        elif asked == b"GET /metrics":
            client.send(_whole(_metrics(endpoint), kind=b"text/plain; version=0.0.4"))
        elif asked == b"POST /measure-anew":
            now = time.monotonic()
            endpoint.served = 0
            if endpoint.slots is not None:
                endpoint.slots.measure_depth_again(now)
            client.send(_WELL)
        elif asked == b"GET /measured":
            client.send(_whole(msgspec.json.encode(_measured(endpoint, time.monotonic()))))
        else:
            client.send(_UNKNOWN)

    def _complete(self, client: _Client, ask: _Ask) -> None:
        slots = client.endpoint.slots
        if ask.stream:
            client.send(client.stream.head)
            if ask.at_once:
                client.endpoint.served += 1
                for _ in range(ask.max_tokens - 1):
                    client.send(client.stream.event)
                client.send(client.stream.end)
                return
            if not self._streaming:
                self._next_event_at = time.monotonic() + self._settings.event_seconds
            client.events_left = ask.max_tokens
            self._streaming[client.key] = client
        elif slots is None:
            client.endpoint.served += 1
            client.send(_RESPONSE)
        else:
            now = time.monotonic()
            self._end_services(now)
            slots.enter(client.key, now)

    def _end_services(self, now: float) -> None:
        for endpoint in self._endpoints:
            if endpoint.slots is not None:
                for key in endpoint.slots.ended(now):
                    endpoint.served += 1
                    self._clients[key].send(_RESPONSE)

    def _send_events(self, now: float) -> None:
        """Send one event to every client with a streamed response, as one step of an engine."""
        if not self._streaming or now < self._next_event_at:
            return
        self._next_event_at = now + self._settings.event_seconds
        for client in list(self._streaming.values()):
            client.events_left -= 1
            if client.events_left > 0:
                client.send(client.stream.event)
            else:
                client.send(client.stream.end)
                del self._streaming[client.key]
                client.endpoint.served += 1

    def _send_loads(self, now: float) -> None:
        """Send the load to all clients that listen. It differs each time, so that the router has to process it."""
        if not self._load_listeners or now < self._next_load_at:
            return
        assert self._settings.load_seconds is not None
        self._next_load_at = now + self._settings.load_seconds
        event = {"type": "load", "load": _load_report(int(now / self._settings.load_seconds) % 2)}
        chunk = _chunk(b"data: " + json.dumps(event).encode() + b"\n\n")
        for client in list(self._load_listeners.values()):
            client.send(chunk)


def _load_report(running: int) -> dict[str, object]:
    told_at = time.monotonic()
    return {"running": running, "waiting": 0, "seats": ENDLESS_SLOTS, "clock": "fake", "told_at": told_at}


def _measured(endpoint: _Endpoint, now: float) -> DepthFigures:
    depth = None if endpoint.slots is None else endpoint.slots.depth
    return DepthFigures(
        depth_max=0 if depth is None else depth.most,
        depth_mean=0.0 if depth is None else depth.mean(now),
        served=endpoint.served,
    )


def _metrics(endpoint: _Endpoint) -> bytes:
    running = 0 if endpoint.slots is None else endpoint.slots.running
    waiting = 0 if endpoint.slots is None else endpoint.slots.waiting
    return (
        f'vllm:num_requests_running{{model_name="{MODEL}"}} {running}.0\n'
        f'vllm:num_requests_waiting{{model_name="{MODEL}"}} {waiting}.0\n'
        f'vllm:kv_cache_usage_perc{{model_name="{MODEL}"}} 0.0\n'
    ).encode()


def main() -> int:
    endpoints = FakeEndpoints(msgspec.json.decode(sys.argv[1].encode(), type=FakeEndpointSettings))
    print(json.dumps(endpoints.ports), flush=True)
    try:
        endpoints.serve(sys.stdin.fileno())
    # If the user interrupts the measurement with Ctrl+C, the terminal also sends the signal to this process.
    except KeyboardInterrupt:
        pass
    finally:
        endpoints.close()
    return 0


class Depth:
    """Length of a queue over time: the maximum, and the mean weighted by time. Times are seconds and never decrease.

    Args:
        now: start time.
    """

    def __init__(self, now: float) -> None:
        self.most = 0
        self._began_at = self._changed_at = now
        self._count = 0
        self._area = 0.0  # integral of the length over time, in requests times seconds

    def note(self, count: int, now: float) -> None:
        """Note that the queue has a new length from now on.

        Args:
            count: the length.
            now: the time.
        """
        self._area += self._count * (now - self._changed_at)
        self._count = count
        self._changed_at = now
        self.most = max(self.most, count)

    def mean(self, now: float) -> float:
        seconds = now - self._began_at
        return (self._area + self._count * (now - self._changed_at)) / seconds if seconds > 0 else float(self._count)


class Slots:
    """Slots that requests use in order of arrival, each for `service_seconds`. Further requests wait.

    A slot is free from the moment at which its service ends, and the next waiting request has it from that moment, even
    if the end is processed later. So the capacity is slots_max / service_seconds.

    Args:
        slots_max: number of slots.
        service_seconds: service time of each request.
        now: start time.
    """

    def __init__(self, slots_max: int, service_seconds: float, now: float) -> None:
        self._slots_max = slots_max
        self._service_seconds = service_seconds
        self._waiting: deque[int] = deque()
        self._running: dict[int, float] = {}  # end of the service, by key of the request
        # heap of ends. Entries of requests whose client has disconnected are skipped.
        self._ends: list[tuple[float, int]] = []
        self.depth = Depth(now)

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def next_end(self) -> float:
        """Time at which the next service ends. math.inf if no request runs."""
        while self._ends and self._running.get(self._ends[0][1]) != self._ends[0][0]:
            heapq.heappop(self._ends)
        return self._ends[0][0] if self._ends else math.inf

    def enter(self, key: int, now: float) -> None:
        """Give a request a slot, or put it into the queue. Call `ended` with this time first.

        Args:
            key: number of the request.
            now: the time.
        """
        if self.running < self._slots_max:
            self._run(key, now)
        else:
            self._waiting.append(key)
            self.depth.note(self.waiting, now)

    def leave(self, key: int, now: float) -> None:
        """Remove a request whose client has left. Requests that have ended are ignored.

        Args:
            key: number of the request.
            now: the time.
        """
        if self._running.pop(key, None) is not None:
            self._start_next(now)
        elif key in self._waiting:
            self._waiting.remove(key)
            self.depth.note(self.waiting, now)

    def ended(self, now: float) -> list[int]:
        """Return the keys of the requests whose service has ended, in order. Waiting requests take their slots.

        Args:
            now: the time.
        """
        keys = []
        while self.next_end <= now:
            end, key = heapq.heappop(self._ends)
            del self._running[key]
            keys.append(key)
            self._start_next(end)
        return keys

    def measure_depth_again(self, now: float) -> None:
        self.depth = Depth(now)
        self.depth.note(self.waiting, now)

    def _start_next(self, now: float) -> None:
        if self._waiting:
            self._run(self._waiting.popleft(), now)
            self.depth.note(self.waiting, now)

    def _run(self, key: int, now: float) -> None:
        self._running[key] = now + self._service_seconds
        heapq.heappush(self._ends, (now + self._service_seconds, key))


if __name__ == "__main__":
    sys.exit(main())
