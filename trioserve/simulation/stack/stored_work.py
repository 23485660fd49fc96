"""Clients of the store in a simulation, and a disk that is full for some time.

Rules for batches, background responses and stored responses:

- Each of these objects reaches a final state. A full disk may delay a batch, but only until a fixed time after the disk
  has room again. A full disk delays neither a cancellation nor the end of a response.
- Every line of a batch has exactly one result, and the counts of the batch include it once.
- A final state does not change, even if the store writes it to the disk later.
- No request is refused for lack of room while the disk has room.

A plan is drawn from a seed before the run: streams, background responses and batches that continue after their client
has left. Its times are on a coarse grid, so that many events happen at the same time
and the order of tasks matters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import trio

from trioserve.simulation.stack.http_connection import Ask
from trioserve.simulation.stack.http_requests import expected_tokens
from trioserve.simulation.traced_run import TracedRun
from trioserve.testing.memory_client import MemoryClient
from trioserve.testing.memory_server import MemoryServer

__all__ = [
    "FINAL",
    "OWNERS",
    "Batch",
    "Disk",
    "End",
    "Keep",
    "Leave",
    "Snoop",
    "StoredPlan",
    "StoredWork",
    "Watch",
    "Work",
]


GRID_SECONDS = 0.01
OWNERS = ("a", "b")


class StoredStage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="lasting"):
    """Settings of the server, and the order of its tasks.

    Attributes:
        schedule_seed: seed of the order in which ready tasks run.
        seconds: how long a stream continues without a reader.
        bytes_max: maximum number of bytes of the events of one stream.
        streams_max: maximum number of streams of all owners.
        streams_of_one_max: maximum number of streams of one owner.
        responses_of_one_max: maximum number of background responses of one owner.
        batches_running_max: maximum number of batches that run at the same time.
    """

    schedule_seed: int
    block_count: int = 32
    max_num_seqs: int = 4
    step_seconds: float = 0.01
    seconds: float = 0.3
    bytes_max: int = 100_000
    streams_max: int = 8
    streams_of_one_max: int = 8
    responses_of_one_max: int = 8
    batches_running_max: int = 4


class Watch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="watch"):
    """A client that starts a stream and reads it, possibly with breaks.

    Attributes:
        stays: seconds for which the client first reads. None: it reads to the end.
        returns: for each return, the seconds for which the client is away, and the seconds for which it then reads. If
            the first number is negative, the client takes over the stream from its current reader.
    """

    number: int
    owner: str
    at: float
    output: int
    stays: float | None = None
    returns: tuple[tuple[float, float | None], ...] = ()


class Work(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="work"):
    """A background response of an owner.

    Attributes:
        cancels_after: seconds until the owner cancels the response, or None.
        looks: seconds between two polls of the response.
    """

    number: int
    owner: str
    at: float
    output: int
    cancels_after: float | None = None
    looks: tuple[float, ...] = ()


class End(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="end"):
    """The owner deletes the stream with this number."""

    number: int
    at: float


class Snoop(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="snoop"):
    """Another owner tries to read and to delete the stream with this number."""

    number: int
    at: float


class Leave(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="leave"):
    """The server begins to shut down."""

    at: float


class Batch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="batch"):
    """A batch, with its input file of requests.

    Attributes:
        lines: number of requests in the batch.
        output: number of tokens of each response.
        cancels_after: seconds until the owner cancels the batch. None: the owner waits for its end.
    """

    number: int
    owner: str
    at: float
    lines: int
    output: int
    cancels_after: float | None = None


class Keep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="keep"):
    """A response in the foreground that the store keeps."""

    number: int
    owner: str
    at: float
    output: int


class Disk(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="disk"):
    """The store's disk is full for some time.

    Attributes:
        at: time at which the disk becomes full.
        until: time at which the disk has room again. None: the disk stays full until the server has shut down. Then
            another server starts with the same store, and its disk has room.
    """

    at: float
    until: float | None


Part = Watch | Work | End | Snoop | Leave | Batch | Keep | Disk


class StoredPlan(msgspec.Struct, frozen=True):
    stage: StoredStage
    parts: tuple[Part, ...]


def drawn_stored_plan(rng: Random, client_count: int) -> StoredPlan:
    """Draw a plan.

    Args:
        rng: source of random choices.
        client_count: number of streams and background responses.
    """
    span = rng.choice((0.1, 0.5))

    def moment(seconds_max: float) -> float:
        return round(rng.randint(0, round(seconds_max / GRID_SECONDS)) * GRID_SECONDS, 3)

    def maybe(chance: float, seconds_max: float) -> float | None:
        return moment(seconds_max) if rng.random() < chance else None

    stage = StoredStage(
        schedule_seed=rng.getrandbits(32),
        block_count=rng.randint(32, 64),
        max_num_seqs=rng.randint(1, 4),
        step_seconds=rng.choice((0.0, 0.01, 0.01, 0.03)),
        seconds=rng.choice((0.05, 0.3, 0.3)),
        bytes_max=rng.choice((1_000, 1_500, 100_000)),
        streams_max=rng.choice((2, 8)),
        streams_of_one_max=rng.choice((1, 8)),
        responses_of_one_max=rng.choice((1, 8)),
    )
    parts: list[Part] = []
    for number in range(client_count):
        owner, at, output = rng.choice(OWNERS), moment(span), rng.randint(1, 60)
        if rng.random() < 0.3:
            looks = tuple(moment(0.1) for _ in range(rng.randint(0, 3)))
            cancels_after = maybe(0.5, 0.2)
            parts.append(
                Work(number=number, owner=owner, at=at, output=output, cancels_after=cancels_after, looks=looks)
            )
            continue
        returns = tuple((rng.choice((-0.01, 0.01, 0.04, 0.1, 0.4)), maybe(0.4, 0.1)) for _ in range(rng.randint(0, 3)))
        stays = maybe(0.8, 0.15)
        parts.append(Watch(number=number, owner=owner, at=at, output=output, stays=stays, returns=returns))
        if rng.random() < 0.2:
            parts.append(End(number=number, at=moment(2 * span)))
        if rng.random() < 0.4:
            parts.append(Snoop(number=number, at=moment(2 * span)))
    leaves = rng.random() < 0.2
    if leaves:
        parts.append(Leave(at=moment(span)))
    # A full disk is drawn last, so that a seed without a full disk gives the same plan as before.
    if rng.random() < 0.4:
        stage = msgspec.structs.replace(stage, batches_running_max=rng.randint(1, 4))
        for number in range(client_count, client_count + rng.randint(1, 5)):
            owner, at, output = rng.choice(OWNERS), moment(span), rng.randint(1, 60)
            if rng.random() < 0.4:
                parts.append(Keep(number=number, owner=owner, at=at, output=output))
                continue
            cancels_after = maybe(0.3, 4.0)
            parts.append(
                Batch(
                    number=number,
                    owner=owner,
                    at=at,
                    lines=rng.randint(1, 12),
                    output=output,
                    cancels_after=cancels_after,
                )
            )
        at = moment(2 * span)
        until = None if leaves and rng.random() < 0.5 else round(at + rng.choice((0.1, 1.0, 10.0)), 3)
        parts.append(Disk(at=at, until=until))
    return StoredPlan(stage, tuple(parts))


FINAL = ("completed", "incomplete", "failed", "cancelled")
# The store retries after 5 s, a batch after another 5 s. The rest is reserve.
RETRY_SECONDS = 12.0
LOOK_SECONDS = 0.25
# After a shutdown has begun, clients wait this long for batches.
LEAVE_SECONDS = 5.0
COMPLETIONS = "/v1/completions"


class StoredWork:
    """Expected stored objects of one plan.

    Args:
        run: the simulation, which receives counts and trace lines.
        client_of: opens a new connection of an owner to a server.
        left_at: returns the time at which the server began to shut down, or inf before that.

    Attributes:
        is_restarted: True if another server starts with the same store.
    """

    def __init__(
        self,
        run: TracedRun,
        plan: StoredPlan,
        client_of: Callable[[MemoryServer, str], MemoryClient],
        left_at: Callable[[], float],
    ) -> None:
        self._run = run
        self._client_of = client_of
        self._left_at = left_at
        self._batches: dict[str, Batch] = {}  # batches that the server has accepted, by path
        self._ends: dict[str, tuple[str, dict[str, Any]]] = {}  # owner and final state of each object, by path
        self._is_next_server = False
        self._room_at = -math.inf  # time since which the disk has room. inf: the disk is full.
        self.is_restarted = any(isinstance(part, Disk) and part.until is None for part in plan.parts)
        tokens = sum(
            part.output * (part.lines if isinstance(part, Batch) else 1)
            for part in plan.parts
            if isinstance(part, Batch | Keep | Watch | Work)
        )
        self._late_seconds = RETRY_SECONDS + 2 * tokens * plan.stage.step_seconds

    # --- Disk ---

    async def fill_disk(self, server: MemoryServer, part: Disk) -> None:
        """Make the disk full for some time.

        Args:
            server: server under test.
            part: the times of the full disk.
        """
        await trio.sleep(part.at)
        server.store.set_disk_full(True)
        self._room_at = math.inf
        self._run.log_line("disk is full")
        if part.until is None:
            return
        await trio.sleep(part.until - part.at)
        server.store.set_disk_full(False)
        self._room_at = trio.current_time()
        self._run.log_line("disk has room")

    def check_refusal(self, name: str, status: int, began_at: float) -> None:
        """Assert that the server had a reason to refuse a request: a full disk or its shutdown.

        Args:
            name: name of the request in error messages.
            status: the HTTP status.
            began_at: time at which the request began.
        """
        self._run.count(f"{name.split()[0]} refused: {status}")
        now = trio.current_time()
        assert self._left_at() <= now or (status == 507 and self._room_at >= began_at), f"{name} is refused: {status}"

    def check_wait(self, name: str, since: float) -> None:
        """Assert that a response or batch may still be unfinished.

        Args:
            name: name of the response or batch in error messages.
            since: time from which it could run.
        """
        now = trio.current_time()
        assert now <= since + self._late_seconds, f"{name} has no final state {now - since:.3f} s after {since:.3f}"

    def note_end(self, owner: str, path: str, found: dict[str, Any]) -> None:
        """Record an object of the store that has reached its final state. The object must not change any more.

        Args:
            owner: owner of the object.
            path: path of the object.
            found: the object.
        """
        self._ends[path] = owner, found

    # --- Clients ---

    async def run_batch(self, server: MemoryServer, part: Batch) -> None:
        """Upload a file, create a batch, and wait for the end of the batch.

        Args:
            server: server under test.
            part: the batch.
        """
        await trio.sleep(part.at)
        name, began_at, client = f"batch {part.number}", trio.current_time(), self._client_of(server, part.owner)
        self._run.count("batches")
        form = _form(b"".join(map(_line, [part] * part.lines, range(part.lines))))
        kind = {"content-type": "multipart/form-data; boundary=b"}
        answer = await client.post("/v1/files", form, headers=kind)
        if answer.status != 200:
            self.check_refusal(name, answer.status or 0, began_at)
            return
        file_id = msgspec.json.decode(answer.body)["id"]
        body = {"input_file_id": file_id, "endpoint": COMPLETIONS, "completion_window": "24h"}
        answer = await client.post("/v1/batches", body)
        if answer.status != 200:
            self.check_refusal(name, answer.status or 0, began_at)
            return
        path = f"/v1/batches/{msgspec.json.decode(answer.body)['id']}"
        self._batches[path] = part
        if part.cancels_after is not None:
            await trio.sleep(part.cancels_after)
            async with client.ask(f"{path}/cancel", method="POST") as response:
                found = await response.json()
            assert response.status == 200, f"cancelling {name} gives {response.status}"
            is_left = self._left_at() <= trio.current_time()
            assert found["status"] in FINAL or is_left, f"{name} was cancelled, and is {found['status']}"
        await self._wait_for_batch(server, path, part)

    async def _wait_for_batch(self, server: MemoryServer, path: str, part: Batch) -> None:
        client, began_at = self._client_of(server, part.owner), trio.current_time()
        while (found := await _get(client, path))["status"] not in FINAL:
            if not self._is_next_server and self._left_at() + LEAVE_SECONDS <= trio.current_time():
                return  # The next server finishes the batch.
            self.check_wait(f"batch {part.number}", max(began_at, self._room_at))
            await trio.sleep(LOOK_SECONDS)
        self._run.count(f"batch: {found['status']}")
        self._run.log_line(f"batch {part.number} is {found['status']}")
        await self._check_batch(server, client, part, found)
        self.note_end(part.owner, path, found)

    async def _check_batch(
        self, server: MemoryServer, client: MemoryClient, part: Batch, found: dict[str, Any]
    ) -> None:
        name, counts = f"batch {part.number}", found["request_counts"]
        may_be = {"completed"} if part.cancels_after is None else {"completed", "cancelled"}
        assert found["status"] in may_be, f"{name} is {found['status']}: {found['errors']}"
        assert not found["error_file_id"], f"{name} has lines that failed: {counts}"
        names = []
        if found["output_file_id"]:
            async with client.ask(f"/v1/files/{found['output_file_id']}/content") as response:
                content = await response.read()
            assert response.status == 200, f"{name}: its file was not found: {response.status}"
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
        assert is_whole or found["status"] == "cancelled", f"{name} is completed with the lines {names}"

    async def run_keeper(self, server: MemoryServer, part: Keep) -> None:
        """Wait for a response, and check that the store has it.

        Args:
            server: server under test.
            part: the response.
        """
        await trio.sleep(part.at)
        name, began_at, client = f"response {part.number}", trio.current_time(), self._client_of(server, part.owner)
        self._run.count("stored responses")
        body = {"model": "fake", "input": str(part.number), "max_output_tokens": part.output}
        answer = await client.post("/v1/responses", body)
        if answer.status != 200:
            # A stored response does not wait for the disk, so a full disk is no reason to refuse it.
            assert self._left_at() <= trio.current_time(), f"{name} is refused: {answer.status}"
            return
        found = msgspec.json.decode(answer.body)
        assert found["status"] in FINAL, f"{name} is {found['status']}"
        assert found["store"], f"{name} is not kept"
        self.check_wait(name, began_at)
        path = f"/v1/responses/{found['id']}"
        assert await _get(client, path) == found, f"{name} is not what its client got"
        self.note_end(part.owner, path, found)

    # --- End of the run ---

    async def check_end(self, server: MemoryServer) -> None:
        """Check that final states have not changed, and are written if the disk has room. All clients must have left.

        Args:
            server: server under test.
        """
        if math.isinf(self._room_at):
            await self._check_ends(server)
            return
        await trio.sleep(max(0.0, self._room_at + RETRY_SECONDS - trio.current_time()))
        await self._check_ends(server)
        usage = server.store.usage()
        assert usage.unwritten_bytes == 0, f"{usage.unwritten_bytes} bytes are not written, although the disk has room"
        assert usage.trouble is None, f"the disk has room, but the store reports: {usage.trouble}"

    async def check_restarted(self, server: MemoryServer) -> None:
        """Assert that a second server, whose disk has room, finishes the batches that the first server has left.

        Final states that the first server never wrote are lost with that server, so the second server may reach other
        final states.

        Args:
            server: the second server.
        """
        self._ends.clear()
        self._is_next_server = True
        self._room_at = trio.current_time()
        for path, part in self._batches.items():
            self._run.count("batches after a restart")
            await self._wait_for_batch(server, path, part)
        await self.check_end(server)

    async def _check_ends(self, server: MemoryServer) -> None:
        for path, (owner, found) in self._ends.items():
            now = await _get(self._client_of(server, owner), path)
            assert now == found, f"{path} changed after its end: {found} is {now} now"
            if path in self._batches:
                await self._check_batch(server, self._client_of(server, owner), self._batches[path], found)


async def _get(client: MemoryClient, path: str) -> dict[str, Any]:
    answer = await client.get(path)
    assert answer.status == 200, f"{path} was not found: {answer.status}"
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
