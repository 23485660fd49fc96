"""Clients of what the store keeps, and a disk that is full for a time.

Rules, for batches, background responses and stored responses:

- Each reaches a final state. A full disk delays a batch until a bounded time after there is room again. It delays
  neither a cancellation nor the end of a response.
- Every line of a batch is accounted for exactly once, with its own result.
- A final state does not change, also not when the store writes it later.
- Nothing is refused for lack of room while the disk has room.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import trio

from trioserve.simulation.lasting.plan import Batch, Disk, Keep, LastingPlan, Watch, Work
from trioserve.simulation.stack.http_plan import Ask
from trioserve.simulation.stack.http_requests import expected_tokens
from trioserve.simulation.traced_run import TracedRun
from trioserve.testing.memory_client import MemoryClient
from trioserve.testing.memory_server import MemoryServer

__all__ = ["FINAL", "StoredWork"]

FINAL = ("completed", "incomplete", "failed", "cancelled")
RETRY_SECONDS = 12.0  # two waits of 5 s, of the store and of a batch, and some
LOOK_SECONDS = 0.25
LEAVE_SECONDS = 5.0  # after which clients do not wait for the batches of a server that leaves
COMPLETIONS = "/v1/completions"


class StoredWork:
    """The books of one plan.

    Args:
        run: counts and traces what happens.
        client_of: a new connection of an owner to a server.
        left_at: when the server began to leave; inf before that.
    """

    def __init__(
        self,
        run: TracedRun,
        plan: LastingPlan,
        client_of: Callable[[MemoryServer, str], MemoryClient],
        left_at: Callable[[], float],
    ) -> None:
        self._run = run
        self._client_of = client_of
        self._left_at = left_at
        self._batches: dict[str, Batch] = {}  # by path, taken by the server
        self._ends: dict[str, tuple[str, dict[str, Any]]] = {}  # by path: owner, and the object with its final state
        self._is_next_server = False
        self._room_at = -math.inf  # since when the disk has room; inf while it is full
        self.is_restarted = any(isinstance(part, Disk) and part.until is None for part in plan.parts)
        tokens = sum(
            part.output * (part.lines if isinstance(part, Batch) else 1)
            for part in plan.parts
            if isinstance(part, Batch | Keep | Watch | Work)
        )
        self._late_seconds = RETRY_SECONDS + 2 * tokens * plan.stage.step_seconds

    # --- the disk ---

    async def be_disk(self, server: MemoryServer, part: Disk) -> None:
        """Make the disk full for a time."""
        await trio.sleep(part.at)
        server.store.set_disk_full(True)
        self._room_at = math.inf
        self._run.tell("disk is full")
        if part.until is None:
            return
        await trio.sleep(part.until - part.at)
        server.store.set_disk_full(False)
        self._room_at = trio.current_time()
        self._run.tell("disk has room")

    def judge_refusal(self, name: str, status: int, began_at: float) -> None:
        """Assert that a request that began then may be refused for lack of room, or since the server leaves."""
        self._run.count(f"{name.split()[0]} refused: {status}")
        now = trio.current_time()
        assert self._left_at() <= now or (status == 507 and self._room_at >= began_at), f"{name} is refused: {status}"

    def judge_wait(self, name: str, since: float) -> None:
        """Assert that what has waited since then need not have ended before now."""
        now = trio.current_time()
        assert now <= since + self._late_seconds, f"{name} has no final state {now - since:.3f} s after {since:.3f}"

    def note_end(self, owner: str, path: str, told: dict[str, Any]) -> None:
        """The object at this path has a final state, which must not change."""
        self._ends[path] = owner, told

    # --- clients ---

    async def be_batch(self, server: MemoryServer, part: Batch) -> None:
        """Send a file and a batch, and wait for its end."""
        await trio.sleep(part.at)
        name, began_at, client = f"batch {part.number}", trio.current_time(), self._client_of(server, part.owner)
        self._run.count("batches")
        form = _form(b"".join(map(_line, [part] * part.lines, range(part.lines))))
        kind = {"content-type": "multipart/form-data; boundary=b"}
        answer = await client.post("/v1/files", form, headers=kind)
        if answer.status != 200:
            self.judge_refusal(name, answer.status or 0, began_at)
            return
        file_id = msgspec.json.decode(answer.body)["id"]
        body = {"input_file_id": file_id, "endpoint": COMPLETIONS, "completion_window": "24h"}
        answer = await client.post("/v1/batches", body)
        if answer.status != 200:
            self.judge_refusal(name, answer.status or 0, began_at)
            return
        path = f"/v1/batches/{msgspec.json.decode(answer.body)['id']}"
        self._batches[path] = part
        if part.cancels_after is not None:
            await trio.sleep(part.cancels_after)
            async with client.ask(f"{path}/cancel", method="POST") as response:
                told = await response.json()
            assert response.status == 200, f"cancelling {name} gives {response.status}"
            is_left = self._left_at() <= trio.current_time()
            assert told["status"] in FINAL or is_left, f"{name} was cancelled, and is {told['status']}"
        await self._wait_for_batch(server, path, part)

    async def _wait_for_batch(self, server: MemoryServer, path: str, part: Batch) -> None:
        client, began_at = self._client_of(server, part.owner), trio.current_time()
        while (told := await _get(client, path))["status"] not in FINAL:
            if not self._is_next_server and self._left_at() + LEAVE_SECONDS <= trio.current_time():
                return  # it is left to the next server
            self.judge_wait(f"batch {part.number}", max(began_at, self._room_at))
            await trio.sleep(LOOK_SECONDS)
        self._run.count(f"batch: {told['status']}")
        self._run.tell(f"batch {part.number} is {told['status']}")
        await self._judge_batch(server, client, part, told)
        self.note_end(part.owner, path, told)

    async def _judge_batch(self, server: MemoryServer, client: MemoryClient, part: Batch, told: dict[str, Any]) -> None:
        name, counts = f"batch {part.number}", told["request_counts"]
        may_be = {"completed"} if part.cancels_after is None else {"completed", "cancelled"}
        assert told["status"] in may_be, f"{name} is {told['status']}: {told['errors']}"
        assert not told["error_file_id"], f"{name} has lines that failed: {counts}"
        names = []
        if told["output_file_id"]:
            async with client.ask(f"/v1/files/{told['output_file_id']}/content") as response:
                content = await response.read()
            assert response.status == 200, f"{name}: its file is not to be found: {response.status}"
            for line in content.splitlines():
                done = msgspec.json.decode(line)
                names.append(done["custom_id"])
                prompts = (_prompt(part, int(names[-1])),)
                ask = Ask(number=part.number, connection=0, prompts=prompts, output=part.output)
                [expected] = expected_tokens(ask, server.engine.executor.model)
                [choice] = done["response"]["body"]["choices"]
                assert tuple(choice["token_ids"]) == expected, f"{name}: line {names[-1]} has another result"
        assert len(names) == len(set(names)) == counts["completed"], f"{name}: {counts}, and its file has {names}"
        is_whole = sorted(map(int, names)) == list(range(part.lines))
        assert is_whole or told["status"] == "cancelled", f"{name} is completed with the lines {names}"

    async def be_keeper(self, server: MemoryServer, part: Keep) -> None:
        """Wait for a response that is to be kept, and look for it."""
        await trio.sleep(part.at)
        name, began_at, client = f"response {part.number}", trio.current_time(), self._client_of(server, part.owner)
        self._run.count("stored responses")
        body = {"model": "fake", "input": str(part.number), "max_output_tokens": part.output}
        answer = await client.post("/v1/responses", body)
        if answer.status != 200:
            # It waits for no disk, so it is not refused for lack of room.
            assert self._left_at() <= trio.current_time(), f"{name} is refused: {answer.status}"
            return
        told = msgspec.json.decode(answer.body)
        assert told["status"] in FINAL, f"{name} is {told['status']}"
        assert told["store"], f"{name} is not kept"
        self.judge_wait(name, began_at)
        path = f"/v1/responses/{told['id']}"
        assert await _get(client, path) == told, f"{name} is not what its client got"
        self.note_end(part.owner, path, told)

    # --- the end ---

    async def check_end(self, server: MemoryServer) -> None:
        """When every client has left: what was final is as it was, and written if the disk has room."""
        if math.isinf(self._room_at):
            await self._check_ends(server)
            return
        await trio.sleep(max(0.0, self._room_at + RETRY_SECONDS - trio.current_time()))
        await self._check_ends(server)
        usage = server.store.usage()
        assert usage.unwritten_bytes == 0, f"{usage.unwritten_bytes} bytes are not written, and the disk has room"
        assert usage.trouble is None, f"the disk has room, and the store says: {usage.trouble}"

    async def check_restarted(self, server: MemoryServer) -> None:
        """Assert that another server, whose disk has room, ends the batches that the first one has left in the store.

        Final states that were never written are lost with the first server, so they are judged anew.
        """
        self._ends.clear()
        self._is_next_server = True
        self._room_at = trio.current_time()
        for path, part in self._batches.items():
            self._run.count("batches after a restart")
            await self._wait_for_batch(server, path, part)
        await self.check_end(server)

    async def _check_ends(self, server: MemoryServer) -> None:
        for path, (owner, told) in self._ends.items():
            now = await _get(self._client_of(server, owner), path)
            assert now == told, f"{path} changed after its end: {told} is {now} now"
            if path in self._batches:
                await self._judge_batch(server, self._client_of(server, owner), self._batches[path], told)


async def _get(client: MemoryClient, path: str) -> dict[str, Any]:
    answer = await client.get(path)
    assert answer.status == 200, f"{path} is not to be found: {answer.status}"
    found: dict[str, Any] = msgspec.json.decode(answer.body)
    return found


def _prompt(part: Batch, index: int) -> tuple[int, ...]:
    return (part.number % 256, index, 3)


def _line(part: Batch, index: int) -> bytes:
    body = {
        "prompt": _prompt(part, index),
        "max_tokens": part.output,
        "seed": part.number,
        "temperature": 0.0,
        "return_token_ids": True,
    }
    return msgspec.json.encode({"custom_id": str(index), "method": "POST", "url": COMPLETIONS, "body": body}) + b"\n"


def _form(content: bytes) -> bytes:
    head = (
        '--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        '--b\r\ncontent-disposition: form-data; name="file"; filename="lines.jsonl"\r\n\r\n'
    )
    return head.encode() + content + b"\r\n--b--\r\n"
