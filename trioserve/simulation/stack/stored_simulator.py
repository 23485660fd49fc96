"""Runs streams, background responses and batches that continue after their client has left, in virtual time.

Only the model, the network and the clock are fakes. Readers of streams disconnect and come back, responses run in the
background, callers try to read the streams of other owners, and the server shuts down. A _Book records the received
events of each stream by number, and the time at which the stream was last read. From these records follows which
streams may exist, and that each reader receives each event once. stored_work.py checks the content of the store.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import trio
from trio.testing import MockClock

from trioserve.api.error_responses import Refusal
from trioserve.api.limits import BackgroundSettings, BatchSettings, DetachSettings
from trioserve.api.streams.detached_stream import DetachedStream
from trioserve.contracts.step import IsAbandoned, StepPlan, StepResult, never_abandoned
from trioserve.simulation.stack.http_connection import Ask
from trioserve.simulation.stack.http_requests import expected_tokens
from trioserve.simulation.stack.stored_work import (
    FINAL,
    OWNERS,
    Batch,
    Disk,
    End,
    Keep,
    Leave,
    Snoop,
    StoredPlan,
    StoredWork,
    Watch,
    Work,
)
from trioserve.simulation.traced_run import TracedRun, without_log_lines
from trioserve.testing.inline_work import seeded_schedule
from trioserve.testing.invariants import check_core
from trioserve.testing.memory_client import MemoryClient, MemoryResponse
from trioserve.testing.memory_server import MemoryServer, open_memory_server

__all__ = ["StoredSimulation"]

# Limit in virtual seconds. A task that has not ended by then waits for an event that never comes.
SECONDS_MAX = 1_000.0
MOMENT_SECONDS = 0.001  # After this time, every task has done all work that needs no waiting.
# maximum number of bytes of the events that report the end of a stream. The limit of a stream never rejects them.
END_BYTES_MAX = 1_000
RANKS = {"queued": 0, "in_progress": 1}


class _Book:
    """Expected state of one stream.

    Attributes:
        events: received events, by number.
        read_until: time at which the last reader disconnected. inf: there is a reader. None: the stream has not begun.
        ended_at: time at which the owner deleted the stream. inf: the owner has not deleted it.
    """

    def __init__(self, watch: Watch, expected: tuple[int, ...]) -> None:
        self.watch = watch
        self.expected = expected
        self.events: dict[int, bytes] = {}
        self.reader_count = 0
        self.read_until: float | None = None
        self.has_begun = False
        self.was_away = False
        self.is_refused = False
        self.ended_at = math.inf
        self.end: str | None = None

    @property
    def last(self) -> int:
        return max(self.events, default=0)


class StoredSimulation(TracedRun):
    """Runs one plan.

    Args:
        trace: called with a line for each effect.
    """

    def __init__(self, plan: StoredPlan, *, trace: Callable[[str], None] | None = None) -> None:
        super().__init__(trace)
        self.plan = plan
        self._books: dict[int, _Book] = {}
        # request ids, each with the time from which no new step may compute the request
        self._must_not_run: dict[str, float] = {}
        self._left_at = math.inf
        self._stored = StoredWork(self, plan, client_of=_client, left_at=lambda: self._left_at)

    def run(self) -> None:
        """Run the plan.

        Raises:
            AssertionError: a rule is broken. Exceptions of the server pass through too.
        """
        with seeded_schedule(self.plan.stage.schedule_seed), without_log_lines("trioserve.store"):
            trio.run(self._main, clock=MockClock(autojump_threshold=0))

    async def _main(self) -> None:
        stage = self.plan.stage
        detaching = DetachSettings(
            seconds_max=stage.seconds,
            streams_max=stage.streams_max,
            streams_of_one_max=stage.streams_of_one_max,
            bytes_max=stage.bytes_max,
        )
        # The store is in memory, unless a second server must start with it.
        new_directory = TemporaryDirectory() if self._stored.is_restarted else nullcontext()
        with trio.fail_after(SECONDS_MAX), new_directory as directory:

            def open_server() -> AbstractAsyncContextManager[MemoryServer]:
                return open_memory_server(
                    api_keys=OWNERS,
                    detaching=detaching,
                    background=BackgroundSettings(responses_of_one_max=stage.responses_of_one_max),
                    batches=BatchSettings(running_max=stage.batches_running_max),
                    store_directory=None if directory is None else Path(directory),
                    block_count=stage.block_count,
                    max_model_len=128,
                    max_num_seqs=stage.max_num_seqs,
                    step_seconds=stage.step_seconds,
                )

            async with open_server() as server:
                server.engine.steps.executor = _WatchedSteps(self, server)
                await self._live(server)
            if self._stored.is_restarted:
                async with open_server() as server:
                    await self._stored.check_restarted(server)

    async def _live(self, server: MemoryServer) -> None:
        async with trio.open_nursery() as nursery:
            for part in self.plan.parts:
                if isinstance(part, Watch):
                    nursery.start_soon(self._be_watcher, server, part)
                elif isinstance(part, Work):
                    nursery.start_soon(self._be_worker, server, part)
                elif isinstance(part, End):
                    nursery.start_soon(self._be_ender, server, part)
                elif isinstance(part, Snoop):
                    nursery.start_soon(self._be_snooper, server, part)
                elif isinstance(part, Batch):
                    nursery.start_soon(self._stored.run_batch, server, part)
                elif isinstance(part, Keep):
                    nursery.start_soon(self._stored.run_keeper, server, part)
                elif isinstance(part, Disk):
                    nursery.start_soon(self._stored.fill_disk, server, part)
                else:
                    nursery.start_soon(self._be_operator, server, part)
        await trio.sleep(self.plan.stage.seconds + 2 * self.plan.stage.step_seconds + MOMENT_SECONDS)
        await self._stored.check_end(server)
        await server.assert_all_free()
        detached = server.app.detached
        assert detached.kept_count == 0, f"{detached.kept_count} streams are kept beyond their time"
        await server.app.wait_until_idle()

    # --- Streams ---

    async def _be_watcher(self, server: MemoryServer, watch: Watch) -> None:
        await trio.sleep(watch.at)
        self.count("requests")
        ask = Ask(number=watch.number, connection=0, prompts=(_prompt(watch.number),), output=watch.output)
        [expected] = expected_tokens(ask, server.engine.executor.model)
        book = self._books[watch.number] = _Book(watch, expected)
        body = {
            "prompt": _prompt(watch.number),
            "max_tokens": watch.output,
            "seed": watch.number,
            "temperature": 0.0,
            "stream": True,
            "return_token_ids": True,
        }
        headers = {
            "x-session-id": _session(watch.number),
            "x-detach-timeout": f"{self.plan.stage.seconds:g}",
            "x-request-id": f"w{watch.number}",
        }
        client = _client(server, watch.owner)
        async with trio.open_nursery() as nursery:
            with trio.move_on_after(math.inf if watch.stays is None else watch.stays):
                async with client.ask("/v1/completions", body, headers=headers) as response:
                    status = await response.head()
                    if status == 200:
                        book.has_begun = True
                        for away, stays in watch.returns:
                            if away < 0:
                                nursery.start_soon(self._come_back, server, book, -away, stays)
                        await self._read(book, response, after=0)
                    else:
                        book.is_refused = True
                        self._check_refusal(server, book, status, response)
            client.close()
            await self._note_left(server, book)
            for away, stays in watch.returns:
                if away >= 0 and book.end is None and not book.is_refused:
                    await self._come_back(server, book, away, stays)

    async def _come_back(self, server: MemoryServer, book: _Book, away: float, stays: float | None) -> None:
        await trio.sleep(away)
        book.was_away = True
        after = book.last
        client = _client(server, book.watch.owner)
        with trio.move_on_after(math.inf if stays is None else stays):
            path = f"/v1/streams/{_session(book.watch.number)}?after={after}"
            async with client.ask(path) as response:
                status = await response.head()
                self.count(f"returns: {status}")
                if status == 200:
                    await self._read(book, response, after=after)
                else:
                    self._check_absence(book, status)
        client.close()
        await self._note_left(server, book)

    async def _read(self, book: _Book, response: MemoryResponse, *, after: int) -> None:
        name = f"stream {book.watch.number}"
        book.reader_count += 1
        book.read_until = math.inf
        expected_number, block_count = after + 1, 0
        try:
            async with aclosing(response.pieces()) as pieces:
                async for _piece in pieces:
                    *blocks, _rest = response.body.split(b"\n\n")
                    for block in blocks[block_count:]:
                        block_count += 1
                        if block.startswith(b":"):
                            continue
                        line, _, event = block.partition(b"\n")
                        if not line.startswith(b"id: "):  # Only the event for a reader that was replaced has no number.
                            assert b"stream_taken_over" in line, f"{name}: {block!r} has no number"
                            return
                        number = int(line.removeprefix(b"id: "))
                        assert number == expected_number, f"{name}: event {number} comes instead of {expected_number}"
                        expected_number += 1
                        known = book.events.setdefault(number, event)
                        assert known == event, f"{name}: event {number} is {event!r}, and was {known!r}"
                        self.log_line(f"{name}: {number}")
                        self._check_events(book)
            is_gapless = len(book.events) == book.last
            assert book.end is not None or not is_gapless, f"{name} has ended, and no event reports how"
        finally:
            book.reader_count -= 1
            if not book.reader_count:
                book.read_until = trio.current_time()

    def _check_events(self, book: _Book) -> None:
        name = f"stream {book.watch.number}"
        tokens: list[int] = []
        for number in range(1, book.last + 1):
            if number not in book.events:
                # This event was missed by a reader that another reader replaced, so the tokens cannot be compared.
                return
            assert book.end is None or number <= book.last
            value = book.events[number].removeprefix(b"data: ")
            if value == b"[DONE]":
                book.end = "complete"
                assert tuple(tokens) == book.expected, f"{name} is complete with {tokens} of {book.expected}"
                continue
            event = msgspec.json.decode(value)
            if "error" in event:
                book.end = event["error"]["code"]
                self.count(f"ends: {book.end}")
                self._check_end_reason(book)
            else:
                tokens += [token for choice in event["choices"] for token in choice.get("token_ids", ())]
        assert tuple(tokens) == book.expected[: len(tokens)], f"{name}: {tokens} of {book.expected}"

    def _check_end_reason(self, book: _Book) -> None:
        now = trio.current_time()
        reasons = {
            "stream_buffer_full": book.was_away,
            "stream_ended": book.ended_at <= now or self._left_at <= now or book.was_away,
        }
        assert reasons.get(str(book.end), False), f"stream {book.watch.number} ended with {book.end} without a reason"

    def _check_refusal(self, server: MemoryServer, book: _Book, status: int, response: MemoryResponse) -> None:
        stage, now = self.plan.stage, trio.current_time()
        others = len(self._books) - 1
        reasons = {
            429: others >= min(stage.streams_max, stage.streams_of_one_max),
            503: self._left_at <= now or book.ended_at <= now or server.engine.draining,
        }
        assert reasons.get(status, False), f"stream {book.watch.number} is refused with {status}: {response.headers}"
        self.count(f"refusals: {status}")

    def _check_absence(self, book: _Book, status: int) -> None:
        """Assert that the server had a reason to report a stream as missing."""
        now, seconds = trio.current_time(), self.plan.stage.seconds
        left_at = book.read_until
        is_over = left_at is None or (left_at < math.inf and left_at + seconds <= now + MOMENT_SECONDS)
        ended = book.ended_at <= now or self._left_at <= now
        complete = b"data: [DONE]" in book.events.values()
        reasons = {
            404: is_over or ended or complete or not book.has_begun,
            409: not book.has_begun,
            410: self.plan.stage.bytes_max < 100_000,
            400: False,
        }
        others = len(self._books) > min(self.plan.stage.streams_max, self.plan.stage.streams_of_one_max)
        assert reasons.get(status, False) or (status == 404 and others), (
            f"stream {book.watch.number} is missing ({status}), {now - (left_at or now):.3f} s after its reader left"
        )

    async def _note_left(self, server: MemoryServer, book: _Book) -> None:
        """Record that a reader has disconnected. The stream may have begun although the reader received no event."""
        left_at = trio.current_time()
        await trio.sleep(MOMENT_SECONDS)
        stream = _stream_of(server, book.watch)
        if stream is not None and stream.head is not None and not book.has_begun:
            book.has_begun = True
            book.read_until = left_at
        if not book.has_begun:
            self._must_not_run.setdefault(f"w{book.watch.number}", trio.current_time())

    async def _be_ender(self, server: MemoryServer, part: End) -> None:
        await trio.sleep(part.at)
        book = self._books.get(part.number)
        if book is None:
            return
        book.ended_at = trio.current_time()
        async with _client(server, book.watch.owner).ask(
            f"/v1/streams/{_session(part.number)}", method="DELETE"
        ) as response:
            status = await response.head()
        self.count(f"deletes: {status}")
        if status == 200:
            self._must_not_run.setdefault(f"w{part.number}", trio.current_time())

    async def _be_snooper(self, server: MemoryServer, part: Snoop) -> None:
        await trio.sleep(part.at)
        watch = next((one for one in self.plan.parts if isinstance(one, Watch) and one.number == part.number), None)
        if watch is None:
            return
        [other] = [owner for owner in OWNERS if owner != watch.owner]
        for method in ("GET", "DELETE"):
            async with _client(server, other).ask(f"/v1/streams/{_session(part.number)}", method=method) as response:
                status = await response.head()
            assert status == 404, f"the caller {other} gets {status} for the stream of {watch.owner}"
            self.count("snoopers sent away")

    # --- Background responses ---

    async def _be_worker(self, server: MemoryServer, work: Work) -> None:
        await trio.sleep(work.at)
        self.count("requests")
        client, began_at = _client(server, work.owner), trio.current_time()
        body = {"model": "fake", "input": str(work.number), "background": True, "max_output_tokens": work.output}
        response = await client.post("/v1/responses", body, headers={"x-request-id": f"b{work.number}"})
        if response.status != 200:
            now = trio.current_time()
            is_full = response.status == 429 and sum(isinstance(part, Work) for part in self.plan.parts) > 1
            if not is_full and self._left_at > now:
                self._stored.check_refusal(f"background {work.number}", response.status or 0, began_at)
            return
        seen = msgspec.json.decode(response.body)
        path = f"/v1/responses/{seen['id']}"
        for seconds in work.looks:
            await trio.sleep(seconds)
            seen = await self._look(client, path, work, seen)
        if work.cancels_after is not None:
            await trio.sleep(work.cancels_after)
            async with client.ask(f"{path}/cancel", method="POST") as response:
                cancelled = await response.json()
            assert response.status == 200, f"cancelling background {work.number} gives {response.status}"
            assert cancelled["status"] in FINAL, f"background {work.number} was cancelled, and is {cancelled['status']}"
            self._check_moves(work, seen, cancelled)
            self._must_not_run.setdefault(f"b{work.number}", trio.current_time())
            seen = cancelled
        else:
            while seen["status"] not in FINAL:
                self._stored.check_wait(f"background {work.number}", began_at)
                await trio.sleep(0.05)
                seen = await self._look(client, path, work, seen)
        self.count(f"background: {seen['status']}")
        if seen["status"] == "cancelled":
            assert work.cancels_after is not None or self._left_at <= trio.current_time()
        assert await self._look(client, path, work, seen) == seen, f"background {work.number} changed after its end"
        self._stored.note_end(work.owner, path, seen)
        client.close()

    async def _look(self, client: MemoryClient, path: str, work: Work, before: dict[str, Any]) -> dict[str, Any]:
        response = await client.get(path)
        assert response.status == 200, f"background {work.number} was not found: {response.status}"
        seen: dict[str, Any] = msgspec.json.decode(response.body)
        self._check_moves(work, before, seen)
        return seen

    def _check_moves(self, work: Work, before: dict[str, Any], seen: dict[str, Any]) -> None:
        old, new = before["status"], seen["status"]
        assert RANKS.get(old, 2) <= RANKS.get(new, 2), f"background {work.number} was {old}, and is {new}"
        assert new != "failed" or self._left_at <= trio.current_time(), f"background {work.number}: {seen['error']}"

    async def _be_operator(self, server: MemoryServer, part: Leave) -> None:
        await trio.sleep(part.at)
        self._left_at = min(self._left_at, trio.current_time())
        server.engine.drain()
        server.app.drain()
        self.log_line("leave")

    # --- Rules ---

    def check(self, server: MemoryServer) -> None:
        """Check the rules that must hold at any time.

        Args:
            server: server under test.
        """
        check_core(server.engine.core)
        stage = self.plan.stage
        detached = server.app.detached
        assert detached.kept_count <= stage.streams_max, (
            f"{detached.kept_count} streams, at most {stage.streams_max} may exist"
        )
        bytes_max = detached.kept_count * (stage.bytes_max + END_BYTES_MAX)
        assert detached.kept_bytes <= bytes_max, f"{detached.kept_bytes} bytes of events are kept"

    def check_step(self, server: MemoryServer, request_ids: set[str], planned_at: float) -> None:
        """Check that a step computes no request that should have ended.

        Args:
            server: server under test.
            request_ids: requests of the step.
            planned_at: time at which the step was planned.
        """
        for request_id in request_ids:
            let_go_at = self._must_not_run.get(request_id, math.inf)
            assert planned_at <= let_go_at + MOMENT_SECONDS, f"{request_id} was ended at {let_go_at}, and continues"
            if not request_id.startswith("w"):
                continue
            left_at = self._books[int(request_id[1:])].read_until
            is_old = left_at is not None and planned_at > left_at + self.plan.stage.seconds + 2 * MOMENT_SECONDS
            assert not is_old, f"{request_id} continues, {planned_at - (left_at or 0):.3f} s after its last reader left"
            is_left = left_at is not None and planned_at > max(left_at, self._left_at) + MOMENT_SECONDS
            assert not is_left, f"{request_id} continues without a reader while the server shuts down"
        self.check(server)

    def count(self, what: str) -> None:
        super().count(what)
        self.log_line(what)


class _WatchedSteps:
    """An executor that reports each step to the simulation before it computes the step."""

    def __init__(self, simulation: StoredSimulation, server: MemoryServer) -> None:
        self._simulation = simulation
        self._server = server
        self._executor = server.engine.executor

    def execute(self, plan: StepPlan, is_abandoned: IsAbandoned = never_abandoned) -> StepResult | None:
        engine = self._server.engine
        ids = {chunk.request.id.split("/")[1] for chunk in plan.chunks}
        self._simulation.check_step(self._server, ids, engine.steps.handed_over_at)
        self._simulation.count("steps")
        return self._executor.execute(plan, is_abandoned)


def _stream_of(server: MemoryServer, watch: Watch) -> DetachedStream | None:
    try:  # An owner with an API key is identified by the digest of the key.
        return server.app.detached.find(_session(watch.number), sha256(watch.owner.encode()).hexdigest())
    except Refusal:
        return None


def _session(number: int) -> str:
    return f"s{number}"


def _prompt(number: int) -> tuple[int, ...]:
    return (number % 256, 7, 3)


def _client(server: MemoryServer, owner: str) -> MemoryClient:
    return server.client(http=2, headers={"authorization": f"Bearer {owner}"})
