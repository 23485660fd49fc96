"""Who asks an engine in ranks for what, and what happens to which rank when: drawn from a seed beforehand. Harm is not
tied to times but to what a rank is doing, so that all that it does is hit."""

from __future__ import annotations

from random import Random
from typing import Literal

import msgspec

from trioserve.contracts.errors import InvalidRequest
from trioserve.simulation.script import line_of, parts_of
from trioserve.simulation.stack.forms import drawn_form
from trioserve.testing.byte_tokenizer import BYTE_VOCAB_SIZE

__all__ = [
    "BLOCK_SIZE",
    "Abort",
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
    "drawn_ranks_plan",
    "ranks_plan_of",
    "script_of",
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
SWAPS_IN_ONE_OF = 6  # stages: those whose seed leaves a rest of 1, so that what is drawn for others stays as it is
SUDDEN: tuple[HarmKind, ...] = ("kill", "kill", "end", "garble", "stop")


class RanksStage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="ranks"):
    """The engine and its ranks. far_count: of the ranks, the last ones, on another machine. step_seconds: how long the
    steps take, in turn. mask_seconds: how long masks take. answer_seconds_max: the step timeout. claim_count: how often
    there is memory to be claimed while nothing is computed. adapters_max: for how many a rank has room. pipe_bytes:
    that are on their way to a rank at a time. piece_bytes: that are read of what it says at a time. notice_seconds:
    after which the other ranks notice by themselves that one has gone, and break; None: never. ending_seconds: from a
    rank's end until its connection is seen to end, and once more until its process is. write_seconds: that new weights
    take. leaves_at: then everything is cancelled. overlaps, draft_tokens, vocab_size, schedule_seed: see the stack's
    stage."""

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
    """A task with a request. pause, leaves_after, patience, timeout, form: see the stack's. logprobs: of so many
    others, and of the prompt's tokens, too. adapter: the name of the one that it asks for; "": none."""

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
    """The operator loads an adapter, whose name no other has."""

    name: str
    at: float


class Unload(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="unload"):
    """The operator takes the name away, and waits until nothing of it is there."""

    name: str
    at: float


class Swap(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="swap"):
    """The operator replaces the weights, by those of this number, which no others have, and which say the same: what is
    right does not depend on when they come. refused_by: ranks that they do not fit. patience: see Client."""

    number: int
    at: float
    in_flight: Literal["keep", "recompute", "abort"] = "keep"
    refused_by: tuple[int, ...] = ()
    patience: float | None = None


class Harm(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="harm"):
    """What happens to a rank. opening: of the engine, which one. moment: what the rank has come to, count: for the
    how-manieth time, and after: seconds later.

    kill: its process is killed. end: it ends without a word. break: it says what is wrong, and ends. garble: it says
    what nobody understands. stop: it does nothing any more, and is not gone. hang: the same, but it answers pings.
    slow: it takes so many seconds longer, which it may. stray: it has chosen something else. refuse: it cannot load.
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


def script_of(plan: RanksPlan) -> str:
    return "\n".join(line_of(part) for part in (plan.stage, *plan.parts)) + "\n"


def ranks_plan_of(script: str) -> RanksPlan:
    """Read what script_of writes, comments apart. Raises InvalidRequest."""
    stage, *parts = parts_of(script, RanksStage | Part) or [None]
    if not isinstance(stage, RanksStage) or any(isinstance(part, RanksStage) for part in parts):
        raise InvalidRequest("a plan begins with its stage, and has one: put 'ranks schedule_seed=1 ...' first, once")
    return RanksPlan(stage, tuple(parts))


def drawn_ranks_plan(rng: Random, client_count: int) -> RanksPlan:
    """So many clients, and others who meddle."""
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
            # What a rank says of another one would come before that one's own word, behind all that it has found.
            notice_seconds=stage.notice_seconds or None,
        )
        parts += _Draws(swaps, stage).swaps()
    return RanksPlan(stage, tuple(parts))


def _slow_twice(harm: Harm, stage: RanksStage) -> list[Harm]:
    """In two steps that follow each other, and may overlap: each has its own time. Of every other stage, drawn from its
    seed as everything else."""
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
    """What the parts of one plan have in common. span: seconds in which everything begins."""

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
        """Some, and what may happen to ranks meanwhile."""
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
                # More than a step may take: there is no time for what is read.
                seconds=round(1.5 * stage.answer_seconds_max, 3) if kind == "slow" else 0.0,
            )
            parts.append(harm)
        return parts

    def harm(self, opening: int, *, slow_share: float) -> Harm:
        """slow_share: of the step timeout, which several may not use up together."""
        rng, stage = self._rng, self._stage
        rank = rng.randrange(stage.rank_count)
        if rng.random() < 0.2:
            kind: HarmKind = rng.choice((*SUDDEN, "break", "refuse"))
            after = rng.choice((0.0, 0.01))
            return Harm(kind=kind, rank=rank, moment=rng.choice(LOADING), opening=opening, after=after)
        kind = rng.choice((*SUDDEN, "break", "hang", "hang", "slow", "slow", "stray"))
        if kind == "stray":
            rank = max(1, rank)  # what rank 0 says is the response, and nobody can know better at that moment
        return Harm(
            kind=kind,
            rank=rank,
            moment=rng.choice(WORKING),
            opening=opening,
            count=rng.choice((1, 2, 3, 8)),
            after=rng.choice((0.0, 0.0, 0.003, 0.02, 1.5)),
            seconds=round(slow_share * stage.answer_seconds_max, 3) if kind == "slow" else 0.0,
        )
