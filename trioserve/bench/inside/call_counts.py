"""Counts the Python calls of this program in four flows: prompt in, token out, disconnect, and relayed event.

The server, the router and the endpoint run in memory, in one thread, on a virtual clock. So the counts are the same in
every run. Calls of libraries, of the fake engine and of the client do not count. A coroutine that is resumed counts
again, because each frame from the event loop down to its wait is entered again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import msgspec
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from trioserve.core.engine import EngineCore
from trioserve.testing.inline_work import seeded_schedule
from trioserve.testing.memory_client import MemoryEnd
from trioserve.testing.memory_router import open_scripted_endpoints
from trioserve.testing.memory_server import MemoryServer, open_memory_server

__all__ = ["FLOWS", "CallCounts", "add_arguments", "counted", "run"]

PRODUCT = Path(__file__).parents[2]
LEFT_OUT = tuple(str(PRODUCT / name) for name in ("testing", "simulation", "bench"))
PRETEND = tuple(str(PRODUCT / "testing" / name) for name in ("fake_executor.py", "fake_drafts.py", "scripted_model.py"))
"""Files that stand for a model. A real one would not make their calls."""
WARM_EVENTS = 5  # The first events of a stream are not counted, since they include calls that open the stream.
COUNTED_EVENTS = 10


class CallCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of one flow.

    Attributes:
        flow: name of the flow.
        calls: number of entered frames. In a flow with several events, the number per event.
        resumed: number of entered frames that had been entered before, per event.
        functions: number of distinct functions.
        files: number of distinct files.
        packages: number of distinct packages below `trioserve`.
        longest: the ten functions with the most calls, with their numbers of calls in the whole flow.
    """

    flow: str
    calls: float
    resumed: float
    functions: int
    files: int
    packages: int
    longest: tuple[tuple[str, int], ...]


class _Counter:
    """Counts calls between `start` and `stop`, by sys.setprofile.

    Args:
        last: code that ends the counting when it is called.
    """

    def __init__(self, last: CodeType | None = None) -> None:
        self._last = last
        self._calls: Counter[CodeType] = Counter()
        self._resumed = 0

    def start(self) -> None:
        sys.setprofile(self._note)

    def stop(self) -> None:
        sys.setprofile(None)

    def counts(self, flow: str, event_count: int = 1) -> CallCounts:
        """Summarize the counted calls.

        Args:
            flow: name of the flow.
            event_count: events in the counted time.
        """
        files = {code.co_filename for code in self._calls}
        packages = {Path(file).relative_to(PRODUCT).parts[0] for file in files}
        named = ((f"{Path(code.co_filename).stem}.{code.co_qualname}", count) for code, count in self._calls.items())
        return CallCounts(
            flow=flow,
            calls=self._calls.total() / event_count,
            resumed=self._resumed / event_count,
            functions=len(self._calls),
            files=len(files),
            packages=len(packages),
            longest=tuple(sorted(named, key=lambda pair: (-pair[1], pair[0]))[:10]),
        )

    def _note(self, frame: FrameType, event: str, _argument: object) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code is self._last:
            self.stop()
        elif _is_counted(code.co_filename) and not _is_pretended(frame):
            self._calls[code] += 1
            # The instruction is RESUME. Its argument is 0 where a function begins, and the kind of wait otherwise.
            self._resumed += code.co_code[frame.f_lasti + 1] != 0


def _is_counted(file: str) -> bool:
    return file.startswith(str(PRODUCT)) and not file.startswith(LEFT_OUT)


def _is_pretended(frame: FrameType) -> bool:
    caller = frame.f_back
    while caller is not None and _is_counted(caller.f_code.co_filename):
        caller = caller.f_back
    return caller is not None and caller.f_code.co_filename.startswith(PRETEND)


def _request(max_tokens: int) -> bytes:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": max_tokens, "stream": True, "model": "fake"}
    content = json.dumps(body).encode()
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    )
    return head % len(content) + content


def _group(token_id: int) -> str:
    """Return an event of a resumable stream, as a server writes it."""
    choice = {"index": 0, "delta": {"content": " a"}, "finish_reason": None}
    return f"data: {json.dumps({'id': 'chatcmpl-0', 'choices': [choice]})}\nid: 0:{token_id}\n\n"


async def _read_events(end: MemoryEnd, count: int) -> None:
    """Read `count` events or more from a connection."""
    received = 0
    while received < count:
        data = await end.receive_some()
        assert data, "the response broke off"
        received += data.count(b"data: ")


async def _prompt_in(server: MemoryServer) -> CallCounts:
    """Count the calls from the first byte of a chat request until the core gets its sequence."""
    counter = _Counter(last=EngineCore.add.__code__)
    end = server.connect()
    await wait_all_tasks_blocked()
    counter.start()
    end.send_nowait(_request(max_tokens=2))
    await _read_events(end, 2)
    counter.stop()
    await end.aclose()
    return counter.counts("prompt in")


async def _token_out(server: MemoryServer) -> CallCounts:
    """Count the calls from one streamed token to the next, including the step of the engine."""
    counter = _Counter()
    end = server.connect()
    end.send_nowait(_request(max_tokens=40))
    await _read_events(end, WARM_EVENTS)
    counter.start()
    await _read_events(end, COUNTED_EVENTS)
    counter.stop()
    await end.aclose()
    return counter.counts("token out", COUNTED_EVENTS)


async def _disconnect(server: MemoryServer) -> CallCounts:
    """Count the calls from the close of a client's connection until the core must abort the sequence."""
    counter = _Counter(last=EngineCore.abort.__code__)
    end = server.connect()
    end.send_nowait(_request(max_tokens=40))
    await _read_events(end, WARM_EVENTS)
    await wait_all_tasks_blocked()
    counter.start()
    end.close()
    await server.engine.wait_all_free()
    counter.stop()
    return counter.counts("disconnect")


async def _relayed_event() -> CallCounts:
    """Count the calls from an event that an endpoint sends until the router's client can read the event."""
    counter = _Counter()
    async with open_scripted_endpoints("b") as scripted:
        end = scripted.router.connect()
        end.send_nowait(_request(max_tokens=40))
        asked = await scripted.ask_of("b")
        asked.begin_resumable()
        for index in range(WARM_EVENTS):
            asked.say(_group(index + 1))
            await _read_events(end, 1)
        await wait_all_tasks_blocked()
        counter.start()
        for index in range(COUNTED_EVENTS):
            asked.say(_group(WARM_EVENTS + index + 1))
            await _read_events(end, 1)
        counter.stop()
        await end.aclose()
        await wait_all_tasks_blocked()
    return counter.counts("relayed event", COUNTED_EVENTS)


async def _of_server(flow: Callable[[MemoryServer], Any]) -> CallCounts:
    async with open_memory_server(step_seconds=0.01, next_token=lambda _ids: ord("a")) as server:
        for _ in range(2):  # Two runs fill all caches. For example, a template is cached on its second use.
            end = server.connect()
            end.send_nowait(_request(max_tokens=2))
            await _read_events(end, 2)
            await end.aclose()
            await server.engine.wait_all_free()
        counts: CallCounts = await flow(server)
        await wait_all_tasks_blocked()
        return counts


FLOWS: dict[str, Callable[[], Any]] = {
    "prompt in": partial(_of_server, _prompt_in),
    "token out": partial(_of_server, _token_out),
    "disconnect": partial(_of_server, _disconnect),
    "relayed event": _relayed_event,
}


@contextmanager
def _no_other_profile() -> Iterator[None]:
    before = sys.getprofile()
    try:
        yield
    finally:
        sys.setprofile(before)


def counted(flow: str) -> CallCounts:
    """Count the calls of one flow.

    Args:
        flow: a name in `FLOWS`.
    """
    with _no_other_profile(), seeded_schedule(0):
        found: CallCounts = trio.run(FLOWS[flow], clock=MockClock(autojump_threshold=0))
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--functions", action="store_true", help="also show the functions that are called most")


def run(arguments: argparse.Namespace) -> int:
    """Print a line per flow, and all counts as JSON.

    Args:
        arguments: `functions`.

    Returns:
        Exit code.
    """
    found = [counted(flow) for flow in FLOWS]
    print(f"{'flow':14} {'calls':>7} {'resumed':>8} {'functions':>10} {'files':>6} {'packages':>9}")
    for counts in found:
        print(
            f"{counts.flow:14} {counts.calls:7.1f} {counts.resumed:8.1f} {counts.functions:10} {counts.files:6} "
            f"{counts.packages:9}"
        )
        if arguments.functions:
            for name, count in counts.longest:
                print(f"    {count:5} {name}")
    print(json.dumps({"flows": [msgspec.to_builtins(counts) for counts in found]}))
    return 0
