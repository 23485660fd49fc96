"""Plans for a simulation of streams, background responses and batches that continue after their client has left.

A plan is drawn from a seed before the run. Its times are on a coarse grid, so that many events happen at the same time
and the order of tasks matters.
"""

from __future__ import annotations

from random import Random

import msgspec

__all__ = [
    "OWNERS",
    "Batch",
    "Disk",
    "End",
    "Keep",
    "Leave",
    "Part",
    "Snoop",
    "StoredPlan",
    "StoredStage",
    "Watch",
    "Work",
    "drawn_stored_plan",
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
