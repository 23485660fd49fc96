"""Plans for a simulation of an engine with ranks: requests of clients, calls of operators, and faults of ranks.

A plan is drawn from a seed before the run. An injected fault (Harm) has no fixed time. It happens at a moment of a
rank's work, so that it hits every kind of work.
"""

from __future__ import annotations

from random import Random
from typing import Literal

import msgspec

from trioserve.core.settings import CoreSettings
from trioserve.model.settings import ModelSettings
from trioserve.ranks.messages import RankSetup
from trioserve.simulation.stack.forms import drawn_form
from trioserve.testing.byte_tokenizer import BYTE_VOCAB_SIZE

__all__ = [
    "Abort",
    "BLOCK_SIZE",
    "Client",
    "Harm",
    "HarmKind",
    "Load",
    "Moment",
    "Part",
    "RanksPlan",
    "RanksStage",
    "Swap",
    "Unload",
    "core_settings",
    "rank_setups",
    "drawn_ranks_plan",
]

GRID_SECONDS = 0.005
BLOCK_SIZE = 4

HarmKind = Literal["kill", "end", "break", "garble", "stop", "hang", "slow", "stray", "refuse"]
Moment = Literal[
    "setup", "allocate", "warm_up", "claim", "adapter", "step", "masks", "met", "answered", "look", "write"
]
LOADING: tuple[Moment, ...] = ("setup", "allocate", "warm_up")
WORKING: tuple[Moment, ...] = ("step", "step", "masks", "met", "met", "answered", "answered", "claim", "adapter")
REPLACING: tuple[Moment, ...] = ("look", "write", "write")
# A stage has swaps if its seed modulo this number is 1. All other stages draw no random number for swaps, so recorded
# seeds still give their histories.
SWAPS_IN_ONE_OF = 6
SUDDEN: tuple[HarmKind, ...] = ("kill", "kill", "end", "garble", "stop")


class RanksStage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="ranks"):
    """Settings of the engine, of its ranks, and of the order of tasks.

    `overlaps`, `draft_tokens`, `vocab_size` and `schedule_seed` are as in the Stage of the stack's plan.

    Attributes:
        far_count: number of ranks on another machine. These are the last ranks.
        step_seconds: durations of the steps, which are used in turn.
        mask_seconds: seconds to compute the token masks of a step.
        answer_seconds_max: the step timeout.
        restarts_max: how often the engine may restart.
        claim_count: how often a rank reports, while no step runs, that it can claim more memory.
        adapters_max: number of adapters that fit into the memory of a rank.
        pipe_bytes: capacity of a connection in bytes, from the server to a rank.
        piece_bytes: maximum number of bytes that the server reads from a rank at a time.
        notice_seconds: seconds after which the other ranks notice by themselves that a rank is gone, and fail. None:
            they never notice it.
        ending_seconds: seconds from a rank's end until its connection ends, and again from that time until its process
            ends.
        write_seconds: seconds to write new weights.
        leaves_at: time at which the server's scope is cancelled, or None.
    """

    schedule_seed: int
    rank_count: int = 2
    far_count: int = 0
    block_count: int = 16
    max_num_seqs: int = 2
    step_tokens_max: int = 8
    step_seconds: tuple[float, ...] = (0.01,)
    mask_seconds: float = 0.0
    overlaps: bool = False
    draft_tokens: int = 0
    vocab_size: int = BYTE_VOCAB_SIZE - 1
    answer_seconds_max: float = 4.0
    restarts_max: int = 1
    claim_count: int = 0
    adapters_max: int = 8
    pipe_bytes: int = 1 << 16
    piece_bytes: int = 1 << 16
    notice_seconds: float | None = None
    ending_seconds: float = 0.0
    write_seconds: float = 0.0
    leaves_at: float | None = None


class Client(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="client"):
    """A task with one request.

    `pause`, `leaves_after`, `patience`, `timeout` and `form` are as in the Client of the stack's plan.

    Attributes:
        logprobs: number of top log probabilities of each output token and each prompt token. None: they are not
            requested.
        adapter: name of the requested adapter, or "".
    """

    number: int
    at: float
    prompt: tuple[int, ...]
    output: int
    choices: int = 1
    temperature: float = 0.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    bias: int | None = None
    min_tokens: int = 0
    stops: tuple[int, ...] = ()
    logprobs: int | None = None
    form: tuple[str, ...] = ()
    adapter: str = ""
    pause: float = 0.0
    leaves_after: int | None = None
    patience: float | None = None
    timeout: float | None = None


class Abort(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="abort"):
    """The operator aborts this client's request."""

    number: int
    at: float


class Load(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="load"):
    """The operator loads an adapter. Every load of a plan has a different adapter name."""

    name: str
    at: float


class Unload(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="unload"):
    """The operator unloads an adapter, and waits until no request uses it."""

    name: str
    at: float


class Swap(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="swap"):
    """The operator replaces the weights.

    Different weights give the same tokens in this simulation, so the expected response does not depend on the time of
    the swap.

    Attributes:
        number: the number of the weights.
        refused_by: ranks that refuse the weights, because these do not fit.
        patience: seconds until the operator's scope is cancelled.
    """

    number: int
    at: float
    in_flight: Literal["keep", "recompute", "abort"] = "keep"
    refused_by: tuple[int, ...] = ()
    patience: float | None = None


class Harm(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="harm"):
    """Harm that a plan does to a rank.

    Kinds:

    - kill: the rank's process is killed.
    - end: the rank ends without a message.
    - break: the rank reports an error, and ends.
    - garble: the rank sends an invalid message.
    - stop: the rank stops working and answering, but its process and its connection stay.
    - hang: the rank stops working, but still answers pings.
    - slow: the rank takes `seconds` longer, which is allowed.
    - stray: the rank chooses other tokens than the other ranks.
    - refuse: the rank cannot load the model.

    Attributes:
        moment: point of the rank's work at which the fault happens.
        opening: index of the opening of the engine during which the fault happens.
        count: the fault happens when the rank has reached the moment this many times.
        after: seconds between the moment and the fault.
    """

    kind: HarmKind
    rank: int
    moment: Moment
    opening: int = 0
    count: int = 1
    after: float = 0.0
    seconds: float = 0.0


Part = Client | Abort | Load | Unload | Swap | Harm


class RanksPlan(msgspec.Struct, frozen=True):
    stage: RanksStage
    parts: tuple[Part, ...]


def drawn_ranks_plan(rng: Random, client_count: int) -> RanksPlan:
    """Draw a plan.

    Args:
        rng: source of random choices.
        client_count: number of clients.
    """
    stage = _drawn_stage(rng)
    draws = _Draws(rng, stage)
    names = tuple(f"a{number}" for number in range(rng.choice((0, 0, 1, 3))))
    parts: list[Part] = [draws.client(number, names) for number in range(client_count)]
    for name in names:
        at = draws.moment(draws.span / 2)
        parts.append(Load(name=name, at=at))
        if rng.random() < 0.5:
            parts.append(Unload(name=name, at=round(at + draws.moment(draws.span), 3)))
    parts += [
        Abort(number=rng.randrange(client_count), at=draws.moment(1.5 * draws.span))
        for _ in range(rng.choice((0, 0, 1, 3)))
    ]
    openings = rng.choice((0, 1, 1, 1, 2, 4))
    for opening in range(openings):
        count = rng.choice((1, 1, 1, 1, 2))
        harms = [draws.harm(opening, slow_share=0.8 / count) for _ in range(count)]
        parts += _slow_twice(harms[0], stage) if count == 1 and harms[0].kind == "slow" else harms
    if stage.schedule_seed % SWAPS_IN_ONE_OF == 1:
        swaps = Random(stage.schedule_seed)
        stage = msgspec.structs.replace(
            stage,
            write_seconds=swaps.choice((0.0, 0.01, 0.05)),
            # With 0 seconds, another rank would report the failure earlier than the failed rank, whose report waits
            # behind its results.
            notice_seconds=stage.notice_seconds or None,
        )
        parts += _Draws(swaps, stage).swaps()
    return RanksPlan(stage, tuple(parts))


def _slow_twice(harm: Harm, stage: RanksStage) -> list[Harm]:
    """Replace the slowing of one step by that of two consecutive steps in half of the stages, chosen by their seed.

    The two steps may overlap. Each step has its own timeout.
    """
    if stage.schedule_seed % 2:
        return [harm]
    once = msgspec.structs.replace(harm, moment="step", after=0.0, seconds=round(0.6 * stage.answer_seconds_max, 3))
    return [once, msgspec.structs.replace(once, count=once.count + 1)]


def _drawn_stage(rng: Random) -> RanksStage:
    rank_count = rng.choice((2, 2, 3, 4))
    max_num_seqs = rng.randint(1, 4)
    draft_tokens = rng.choice((0, 0, 0, 3))
    return RanksStage(
        schedule_seed=rng.getrandbits(32),
        rank_count=rank_count,
        far_count=rng.choice((0, 0, rank_count // 2)),
        block_count=rng.randint(8, 24),
        max_num_seqs=max_num_seqs,
        step_tokens_max=max_num_seqs + rng.choice((2, 6, 16)),
        step_seconds=tuple(rng.choice((0.0, 0.005, 0.01, 0.04)) for _ in range(5)),
        mask_seconds=rng.choice((0.0, 0.002, 0.02)),
        overlaps=draft_tokens == 0 and rng.random() < 0.6,
        draft_tokens=draft_tokens,
        vocab_size=rng.choice((1, 2)) if draft_tokens else BYTE_VOCAB_SIZE - 1,
        answer_seconds_max=rng.choice((0.5, 2.0, 10.0)),
        restarts_max=rng.choice((0, 1, 1, 3, 9)),
        claim_count=rng.choice((0, 3)),
        adapters_max=rng.choice((1, 8)),
        pipe_bytes=rng.choice((100, 1 << 16)),
        piece_bytes=rng.choice((7, 1 << 16)),
        notice_seconds=rng.choice((None, 0.0, 0.01)),
        ending_seconds=rng.choice((0.0, 0.0, 0.005)),
        leaves_at=round(rng.uniform(0, 0.5), 3) if rng.random() < 0.1 else None,
    )


class _Draws:
    """Draws of values that several parts of one plan use.

    Attributes:
        span: all parts of the plan begin within this many seconds.
    """

    def __init__(self, rng: Random, stage: RanksStage) -> None:
        self._rng = rng
        self._stage = stage
        self.span = rng.choice((0.05, 0.3))
        self._family = tuple(rng.randrange(256) for _ in range(12))

    def moment(self, seconds_max: float) -> float:
        return round(self._rng.randint(0, round(seconds_max / GRID_SECONDS)) * GRID_SECONDS, 3)

    def client(self, number: int, adapters: tuple[str, ...]) -> Client:
        rng = self._rng
        prompt = self._family[: rng.randint(0, 12)] + tuple(rng.randrange(256) for _ in range(rng.randint(1, 4)))
        form = drawn_form(rng, self._stage.vocab_size)
        output = 12 if form else rng.randint(1, 12)
        return Client(
            number=number,
            at=self.moment(self.span),
            prompt=prompt,
            output=output,
            choices=rng.choice((1, 1, 1, 2)),
            temperature=rng.choice((0.0, 0.7)),
            top_k=rng.choice((0, 0, 5)),
            repetition_penalty=rng.choice((1.0, 1.0, 1.0, 1.2)),
            presence_penalty=rng.choice((0.0, 0.0, 0.0, 0.5)),
            bias=rng.choice((None, None, 7)),
            min_tokens=rng.choice((0, 0, 1, output)),
            stops=rng.choice(((), (), tuple(range(0, 256, 5)))) if not form else (),
            logprobs=rng.choice((None, None, 2)),
            form=form,
            adapter=rng.choice(("", *adapters)),
            pause=rng.choice((0.0, 0.0, 0.05)),
            leaves_after=rng.randint(0, 4) if rng.random() < 0.15 else None,
            patience=round(self.moment(0.3) + GRID_SECONDS, 3) if rng.random() < 0.15 else None,
            timeout=round(self.moment(0.5) + GRID_SECONDS, 3) if rng.random() < 0.15 else None,
        )

    def swaps(self) -> list[Part]:
        """Draw some swaps, and harm that happens to ranks during these swaps."""
        rng, stage = self._rng, self._stage
        parts: list[Part] = [
            Swap(
                number=number,
                at=self.moment(self.span),
                in_flight=rng.choice(("keep", "keep", "recompute", "abort")),
                refused_by=tuple(rank for rank in range(stage.rank_count) if rng.random() < 0.15),
                patience=round(self.moment(0.1) + GRID_SECONDS, 3) if rng.random() < 0.15 else None,
            )
            for number in range(1, rng.choice((2, 3, 5)))
        ]
        if rng.random() < 0.6:
            kind: HarmKind = rng.choice((*SUDDEN, "break", "slow", "slow"))
            harm = Harm(
                kind=kind,
                rank=rng.randrange(stage.rank_count),
                moment=rng.choice(REPLACING),
                opening=rng.choice((0, 0, 1)),
                count=rng.choice((1, 1, 2)),
                after=rng.choice((0.0, 0.0, 0.003)) if kind != "slow" else 0.0,
                # The delay is longer than the step timeout, because reading weights has no time limit.
                seconds=round(1.5 * stage.answer_seconds_max, 3) if kind == "slow" else 0.0,
            )
            parts.append(harm)
        return parts

    def harm(self, opening: int, *, slow_share: float) -> Harm:
        """Draw one harm.

        Args:
            opening: index of the opening of the engine during which the fault happens.
            slow_share: fraction of the step timeout that a slow rank takes. Several slow ranks together must stay below
                the timeout.
        """
        rng, stage = self._rng, self._stage
        rank = rng.randrange(stage.rank_count)
        if rng.random() < 0.2:
            kind: HarmKind = rng.choice((*SUDDEN, "break", "refuse"))
            after = rng.choice((0.0, 0.01))
            return Harm(kind=kind, rank=rank, moment=rng.choice(LOADING), opening=opening, after=after)
        kind = rng.choice((*SUDDEN, "break", "hang", "hang", "slow", "slow", "stray"))
        if kind == "stray":
            # The output of rank 0 is the response, so no check could detect at that moment that rank 0 is the wrong
            # one.
            rank = max(1, rank)
        return Harm(
            kind=kind,
            rank=rank,
            moment=rng.choice(WORKING),
            opening=opening,
            count=rng.choice((1, 2, 3, 8)),
            after=rng.choice((0.0, 0.0, 0.003, 0.02, 1.5)),
            seconds=round(slow_share * stage.answer_seconds_max, 3) if kind == "slow" else 0.0,
        )


def rank_setups(stage: RanksStage) -> list[RankSetup]:
    return [
        RankSetup(
            rank=rank,
            size=stage.rank_count,
            path="/model",
            settings=ModelSettings(block_size=BLOCK_SIZE),
            context_tokens=None,
            uses_further_layers=False,
            expert_parallel=False,
        )
        for rank in range(stage.rank_count)
    ]


def core_settings(stage: RanksStage) -> CoreSettings:
    return CoreSettings(
        block_count=stage.block_count,
        block_size=BLOCK_SIZE,
        context_tokens_max=stage.block_count * BLOCK_SIZE,
        max_num_seqs=stage.max_num_seqs,
        step_tokens_max=stage.step_tokens_max,
        overlap_steps=stage.overlaps,
        draft_tokens_max=stage.draft_tokens,
    )
