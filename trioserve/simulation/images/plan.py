"""Plans for a simulation of an image engine: when clients send requests and disconnect, and when operators intervene.

A plan is drawn from a seed before the run, so the order in which tasks run does not change the plan.

    images slots=2 kept=1 work=4 waiting_max=4 step_seconds=[0.01] schedule_seed=1
    client number=0 id="r0" at=0.0 pictures=2 steps=3
    pause at=0.01
    resume at=0.04
    order at=0.02 ids=["r0"]
"""

from __future__ import annotations

from random import Random

import msgspec

from trioserve.simulation.stack.pause_plan import Halt, Moments, Order, Sleep, drawn_halts

__all__ = [
    "Client",
    "Fail",
    "ImagesPlan",
    "ImagesStage",
    "Part",
    "drawn_images_plan",
]

STEPS_MAX = 6


class ImagesStage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="images"):
    """Settings of the engine, and the order of its tasks.

    Attributes:
        schedule_seed: seed of the order in which ready tasks run.
        slots: number of slots for running requests.
        kept: number of slots for latents that are kept for preempted requests.
        work: maximum work of one step.
        waiting_max: maximum number of requests in the queue.
        step_seconds: durations of the steps, which are used in turn.
        faults: indexes of the steps that break the engine, counted over all restarts.
        restarts: how often the engine may restart.
        opening_seconds: duration of a restart.
    """

    schedule_seed: int
    slots: int = 1
    kept: int = 0
    work: int = 4
    waiting_max: int = 4
    step_seconds: tuple[float, ...] = (0.01,)
    faults: tuple[int, ...] = ()
    restarts: int = 0
    opening_seconds: float = 0.0


class Client(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="client"):
    """A task with one request.

    Attributes:
        number: number of the client, which no other client has.
        id: id of the request. Several clients may use the same id.
        pictures: number of requested images.
        size: size of an image: work of one step without guidance.
        partials: number of requested partial images per image.
        pause: seconds between two reads.
        leaves_after: number of deltas after which the client disconnects. None: it reads to the end.
        patience: seconds until the client's scope is cancelled. None: it is not cancelled.
        timeout: the request's own deadline in seconds, or None.
        queue_timeout: the request's own queue deadline in seconds, or None.
    """

    number: int
    id: str
    at: float = 0.0
    pictures: int = 1
    steps: int = 1
    size: int = 1
    guided: bool = False
    priority: int = 0
    partials: int = 0
    pause: float = 0.0
    leaves_after: int | None = None
    patience: float | None = None
    timeout: float | None = None
    queue_timeout: float | None = None


class Fail(msgspec.Struct, frozen=True, kw_only=True, tag="fail"):
    """Make every live request with this id fail in the next step that computes it."""

    at: float
    id: str


Part = Client | Order | Fail | Halt


class ImagesPlan(msgspec.Struct, frozen=True):
    stage: ImagesStage
    parts: tuple[Part, ...]


def drawn_images_plan(rng: Random, client_count: int) -> ImagesPlan:
    draws = _Draws(rng, client_count, span=rng.choice((0.05, 0.2, 0.5)))
    restarts = rng.choice((0, 0, 0, 2))
    stage = ImagesStage(
        schedule_seed=rng.getrandbits(32),
        slots=rng.randint(1, 4),
        kept=rng.choice((0, 1, 2, 4)),
        work=rng.randint(2, 9),
        waiting_max=rng.choice((2, 40)),
        step_seconds=tuple(rng.choice((0.0, 0.005, 0.01, 0.04)) for _ in range(5)),
        faults=draws.faults(0.3 if restarts else 0.1),
        restarts=restarts,
        opening_seconds=rng.choice((0.0, 0.01, 0.1)),
    )
    parts: list[Part] = [draws.client(number, work_max=stage.work) for number in range(client_count)]
    parts += [draws.order() for _ in range(rng.randint(0, client_count // 2))]
    parts += [draws.fail() for _ in range(rng.choice((0, 0, 1, 3)))]
    if not stage.restarts:  # A pause or a sleep during a restart is not simulated.
        parts += map(_of_any_level, drawn_halts(rng, draws.moment, draws.span, levels=(2,)))
    parts += draws.drains(0.2)
    return ImagesPlan(stage, tuple(parts))


def _of_any_level(halt: Halt) -> Halt:
    """Change the level of some sleeps to 1."""
    return msgspec.structs.replace(halt, level=Random(f"{halt.at}").randint(1, 2)) if isinstance(halt, Sleep) else halt


class _Draws(Moments):
    """Draws of values that several parts of one plan use."""

    def __init__(self, rng: Random, client_count: int, *, span: float) -> None:
        super().__init__(rng, span=span)
        self._client_count = client_count
        self._priorities = rng.choice(((0,), (0, 0, 0, -1), (-1, 0, 1)))

    def client(self, number: int, *, work_max: int) -> Client:
        rng = self._rng
        size = rng.choice([size for size in (1, 1, 1, 2, 4) if size <= work_max])
        steps = rng.randint(1, STEPS_MAX)
        return Client(
            number=number,
            id=self._name(),
            at=self.moment(self.span),
            pictures=rng.choice((1, 1, 1, 2, 3)),
            steps=steps,
            size=size,
            guided=2 * size <= work_max and rng.random() < 0.5,
            priority=rng.choice(self._priorities),
            partials=rng.choice((0, 0, 1, 2, 6)),
            pause=rng.choice((0.0, 0.0, 0.005, 0.05)),
            leaves_after=rng.randint(0, 4) if rng.random() < 0.2 else None,
            patience=self.maybe(0.25),
            timeout=self.maybe(0.15),
            queue_timeout=self.maybe(0.1),
        )

    def order(self) -> Order:
        return Order(at=self.moment(self.span), ids=(self._name(beyond=1), self._name(beyond=1)))

    def fail(self) -> Fail:
        return Fail(at=self.moment(self.span), id=self._name())

    def faults(self, chance: float) -> tuple[int, ...]:
        rng = self._rng
        if rng.random() >= chance:
            return ()
        return tuple(sorted({rng.randint(0, 20) for _ in range(rng.choice((1, 1, 2, 3)))}))

    def _name(self, *, beyond: int = 0) -> str:
        """Return the id of a random client.

        Args:
            beyond: number of unknown ids that may be drawn too.
        """
        return f"r{self._rng.randrange(self._client_count + beyond)}"
