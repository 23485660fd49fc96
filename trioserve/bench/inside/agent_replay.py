"""Replays sessions of agents through the real core in virtual time, with KV pools of different sizes, with and without
session retention.

There is no model: steps take the time of a cost model. So the figures are the same on every machine. With --scale 0.05,
one token of the replay stands for 20: it takes the time of 20, and a block and a step have a 20th as many. So lengths
and times have the proportions of full-size sessions, and a replay takes seconds. With --scale 1 it takes a minute.

The tokens of a session are its number and zeros. So the prefix cache finds exactly what sessions really share.

With --prefetch, two more rows have a host store: it keeps the KV of all requests, and one load at a time takes
--load-us for each token. In both rows, the client tells after each turn when it returns. In the row `host`, a turn
loads what it lacks. In the row `prefetch`, the core loads it ahead of the turn.
"""

from __future__ import annotations

import argparse
import heapq
import math
from collections import Counter
from collections.abc import Sequence
from itertools import count

import msgspec

from trioserve.bench.agents.traces import TRAFFICS, Session, Shape, Traffic, Turn, draw_traffic
from trioserve.bench.inside.command import print_figures
from trioserve.bench.inside.wide_prompt import MACHINES, Machine
from trioserve.bench.report import percentile
from trioserve.bench.settings import at_least_one
from trioserve.connectors.host.block_files import BlockChain
from trioserve.contracts.errors import StartupError
from trioserve.contracts.events import FinishReason, RequestFinished, TokensReady
from trioserve.contracts.ids import BlockHash, BlockIndex, RequestId
from trioserve.contracts.kv_transfer import Loaded, LoadFailed, TransferEvent
from trioserve.contracts.request import EngineRequest, Retention
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.step import StepPlan, StepResult
from trioserve.core.engine import EngineCore
from trioserve.core.settings import CoreSettings
from trioserve.testing.scripted_connector import NoConnector
from trioserve.trio_tools.interpreter import prepare_interpreter

__all__ = ["Comparison", "ReplayFigures", "Scale", "add_arguments", "replay", "run"]

BLOCK_TOKENS = 320
BLOCK_SIZE_MIN = 4
STEP_TOKENS_MAX = 8_192
BATCH_MAX = 64
SCALE = 0.05
SHARES = (0.25, 0.5, 1.0)
WARM_SHARE = 4.0  # With this pool, nothing that is needed again is evicted.
SAMPLING = SamplingParams(temperature=0.0)
OUTPUT_TOKEN = 1
LOAD_US = 5.0  # Host memory at 25 GB/s, and 128 KB for each token of an 8B model with 8 KV heads.
CORE = CoreSettings(block_count=1, context_tokens_max=1)  # The defaults.
PREFIX_TOKENS = 2**24  # first token of the first prefix, above all numbers of sessions


class ReplayFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one replay.

    Attributes:
        traffic: name of the traffic.
        share: KV pool relative to the working set.
        has_retention: True if session retention is on.
        cold_turn_seconds: how long a cold turn waits at most.
        blocks: blocks of the pool.
        turns: number of requests.
        prompt_tokens: tokens of all prompts.
        computed_tokens: prompt tokens that were computed.
        computed_by_tenant: the same for each tenant.
        hit_rate: share of the prompt tokens that were found when their request first ran.
        ttft_ms_p50: median time to first token.
        ttft_ms_p99: 99th percentile of the time to first token.
        seconds: virtual time until the last response.
        preemptions: requests that lost their blocks.
        deferred: cold turns that waited for other sessions.
        loaded_tokens: prompt tokens that requests loaded from the host store.
        prefetched_tokens: tokens that prefetches loaded from the host store.
        prefetches: number of prefetches by result.
    """

    traffic: str
    share: float
    has_retention: bool
    cold_turn_seconds: float
    blocks: int
    turns: int
    prompt_tokens: int
    computed_tokens: int
    computed_by_tenant: dict[str, int]
    hit_rate: float
    ttft_ms_p50: float
    ttft_ms_p99: float
    seconds: float
    preemptions: int
    deferred: int
    loaded_tokens: int
    prefetched_tokens: int
    prefetches: dict[str, int]

    @property
    def turns_per_minute(self) -> float:
        return self.turns / self.seconds * 60


class _Client:
    """A client, and the position in its sessions.

    Args:
        sessions: its sessions in order.
    """

    def __init__(self, sessions: Sequence[Session]) -> None:
        self._rest = iter(sessions)
        self._session: Session | None = None
        self._turn_index = 0
        self._tokens: list[int] = []
        self.asked_at = 0.0
        self.has_first_token = False

    @property
    def session(self) -> Session:
        assert self._session is not None
        return self._session

    @property
    def turn(self) -> Turn:
        return self.session.turns[self._turn_index]

    @property
    def is_first_turn(self) -> bool:
        return self._turn_index == 0

    @property
    def is_last_turn(self) -> bool:
        return self._turn_index + 1 == len(self.session.turns)

    def advance(self) -> float | None:
        """Move to the next turn, and return the seconds until its request. None: there is none."""
        if self._session is not None and not self.is_last_turn:
            self._tokens += [OUTPUT_TOKEN] * self.turn.output_tokens
            pause = self.turn.pause_seconds
            self._turn_index += 1
            return pause
        session = self._session = next(self._rest, None)
        if session is None:
            return None
        self._turn_index = 0
        shared = [PREFIX_TOKENS + session.prefix, *[0] * (session.prefix_tokens - 1)] if session.prefix_tokens else []
        self._tokens = shared
        return session.wait_seconds

    def prompt(self) -> tuple[int, ...]:
        """Return the prompt of the current turn, and keep it as the beginning of the next one."""
        added = [0] * self.turn.input_tokens
        if self._turn_index == 0:
            added[0] = self.session.number
        self._tokens += added
        return tuple(self._tokens)


class _HostStore(NoConnector):
    """A connector in virtual time that keeps the blocks of all requests, and loads them one request at a time.

    Args:
        block_size: tokens of a block.
        seconds_per_token: time to load one token.

    Attributes:
        now: current time in seconds, which the owner sets.
    """

    def __init__(self, block_size: int, seconds_per_token: float) -> None:
        self._block_size = block_size
        self._seconds_per_token = seconds_per_token
        self._stored: set[BlockHash] = set()
        self._chains: dict[RequestId, BlockChain] = {}
        self._ends: dict[RequestId, tuple[float, int]] = {}  # The end of each load, and its tokens, in order.
        self._free_at = 0.0
        self.now = 0.0

    @property
    def next_end(self) -> float | None:
        return next(iter(self._ends.values()))[0] if self._ends else None

    def num_matched_tokens(self, request: EngineRequest, computed_count: int) -> int:
        end = first = computed_count // self._block_size
        tokens, chain = request.prompt_token_ids, self._chain(request)
        while (end + 1) * self._block_size < len(tokens) and chain.name(end, tokens) in self._stored:
            end += 1
        return (end - first) * self._block_size

    def start_load(
        self, request: EngineRequest, block_table: Sequence[BlockIndex], computed_count: int, token_count: int
    ) -> None:
        self._free_at = max(self.now, self._free_at) + token_count * self._seconds_per_token
        self._ends[request.id] = (self._free_at, token_count)

    def load_abandoned(self, request_id: RequestId) -> None:
        self._ends[request_id] = (self._ends[request_id][0], 0)

    def request_finished(
        self,
        request: EngineRequest,
        block_table: Sequence[BlockIndex],
        tokens: Sequence[int],
        reason: FinishReason,
    ) -> bool:
        chain = self._chain(request)
        del self._chains[request.id]
        self._stored.update(chain.name(index, tokens) for index in range(len(tokens) // self._block_size))
        return False

    def progress(self) -> list[TransferEvent]:
        ended = [name for name, (end, _) in self._ends.items() if end <= self.now]
        counts = [(name, self._ends.pop(name)[1]) for name in ended]
        return [Loaded(name, token_count) if token_count else LoadFailed(name) for name, token_count in counts]

    def _chain(self, request: EngineRequest) -> BlockChain:
        return self._chains.setdefault(request.id, BlockChain(None, self._block_size))


class _Replay:
    """One replay.

    Args:
        traffic: the clients.
        core: the core, without requests.
        machine: cost model of its steps.
        host: the core's connector. With a connector, clients tell when they return. None: it has none.
    """

    def __init__(self, traffic: Traffic, core: EngineCore, machine: Machine, host: _HostStore | None) -> None:
        self._core = core
        self._host = host
        self._machine = machine
        self._arrivals: list[tuple[float, int, _Client]] = []
        self._numbers = count()
        self._asking: dict[RequestId, _Client] = {}
        self.now = 0.0
        self.ttft_seconds: list[float] = []
        self.computed: Counter[str] = Counter()
        for sessions in traffic.clients:
            self._wait(_Client(sessions))

    def run(self) -> None:
        core, arrivals = self._core, self._arrivals
        while True:
            while arrivals and arrivals[0][0] <= self.now:
                self._ask(heapq.heappop(arrivals)[2])
            if self._host is not None:
                self._host.now = self.now
                core.progress(self.now)
                core.expire(self.now)
            plan = core.schedule(self.now)
            if plan is None:
                moments = [core.next_deadline(), arrivals[0][0] if arrivals else None]
                if self._host is not None:
                    moments.append(self._host.next_end)
                moment = min([moment for moment in moments if moment is not None], default=None)
                if moment is None:
                    return
                self.now = moment
                continue
            self._count(plan)
            self.now += self._machine.seconds(plan)
            result = StepResult(tuple(OUTPUT_TOKEN if chunk.samples else None for chunk in plan.chunks))
            for event in core.update_from_output(plan, result, self.now):
                if isinstance(event, TokensReady):
                    client = self._asking[event.request_id]
                    if not client.has_first_token:
                        client.has_first_token = True
                        self.ttft_seconds.append(self.now - client.asked_at)
                elif isinstance(event, RequestFinished):
                    self._leave(self._asking.pop(event.request_id))

    def _wait(self, client: _Client) -> None:
        seconds = client.advance()
        if seconds is not None:
            heapq.heappush(self._arrivals, (self.now + seconds, next(self._numbers), client))

    def _ask(self, client: _Client) -> None:
        request_id = RequestId(f"r{next(self._numbers)}")
        self._asking[request_id] = client
        client.asked_at, client.has_first_token = self.now, False
        session = client.session
        if session.has_id and client.is_first_turn:
            self._core.open_session(_session_id(session), Retention(tenant=session.tenant), self.now)
        self._core.add(
            EngineRequest(
                id=request_id,
                prompt_token_ids=client.prompt(),
                sampling=SAMPLING,
                output_tokens_max=client.turn.output_tokens,
                stop_token_ids=frozenset(),
                seed=0,
                session=_session_id(session) if session.has_id else None,
            )
        )

    def _leave(self, client: _Client) -> None:
        session = client.session
        if session.has_id and session.is_ended and client.is_last_turn:
            self._core.end_session(_session_id(session), self.now)
        elif session.has_id and self._host is not None and not client.is_last_turn:
            self._core.hint_session(_session_id(session), client.turn.pause_seconds, self.now)
        self._wait(client)

    def _count(self, plan: StepPlan) -> None:
        for chunk in plan.chunks:
            left = len(chunk.request.prompt_token_ids) - chunk.start
            if left > 0:
                self.computed[self._asking[chunk.request.id].session.tenant] += min(left, chunk.count)


def _session_id(session: Session) -> str:
    return f"s{session.number}"


class Scale(msgspec.Struct, frozen=True):
    """How many tokens one token of a replay stands for.

    Attributes:
        factor: tokens of the replay for each real token, above 0 and at most 1.
    """

    factor: float

    @property
    def shape(self) -> Shape:
        return Shape().scaled(self.factor)

    @property
    def block_size(self) -> int:
        return max(BLOCK_SIZE_MIN, round(BLOCK_TOKENS * self.factor))

    @property
    def step_tokens_max(self) -> int:
        return max(BATCH_MAX, round(STEP_TOKENS_MAX * self.factor))

    def machine(self, name: str) -> Machine:
        """Return a cost model in which each token takes the time of the tokens that it stands for.

        Args:
            name: a key of MACHINES.
        """
        one = MACHINES[name]
        longer = 1 / self.factor
        return Machine(
            step=one.step * longer,
            decode=one.decode * longer,
            floor=one.floor,
            token=one.token * longer,
            attended=one.attended * longer**2,
            read=one.read * longer,
        )

    def pool_blocks(self, traffic: Traffic, share: float) -> int:
        """Return the blocks of a pool. It holds at least the longest context.

        Args:
            traffic: determines the working set and the longest context.
            share: size relative to the working set.
        """
        tokens = max(share * traffic.working_set_tokens(), traffic.context_tokens_max)
        return math.ceil(tokens / self.block_size)


def replay(
    traffic: Traffic,
    share: float,
    machine: str,
    scale: Scale,
    *,
    has_retention: bool,
    cold_turn_seconds: float = 0.0,
    load_us: float | None = None,
    prefetches: bool = False,
) -> ReplayFigures:
    """Replay a traffic once.

    Args:
        traffic: the traffic, of the scale's shape.
        share: KV pool relative to the working set.
        machine: name of the cost model of a step.
        scale: how many tokens one token stands for.
        has_retention: True for session retention, False for plain recency.
        cold_turn_seconds: how long a cold turn waits at most.
        load_us: time to load a token from the host store, in microseconds. None: there is no host store.
        prefetches: True if lost blocks are loaded before the turn.
    """
    host = None if load_us is None else _HostStore(scale.block_size, load_us / 1e6 / scale.factor)
    blocks = scale.pool_blocks(traffic, share)
    core = EngineCore(
        CoreSettings(
            block_count=blocks,
            block_size=scale.block_size,
            context_tokens_max=traffic.context_tokens_max,
            max_num_seqs=BATCH_MAX,
            step_tokens_max=scale.step_tokens_max,
            session_retention=has_retention,
            cold_turn_seconds=cold_turn_seconds,
            session_prefetch=prefetches,
        ),
        connector=host,
    )
    run = _Replay(traffic, core, scale.machine(machine), host)
    run.run()
    stats = core.stats()
    ordered = sorted(run.ttft_seconds)
    return ReplayFigures(
        traffic=traffic.name,
        share=share,
        has_retention=has_retention,
        cold_turn_seconds=cold_turn_seconds,
        blocks=blocks,
        turns=len(ordered),
        prompt_tokens=traffic.prompt_tokens,
        computed_tokens=run.computed.total(),
        computed_by_tenant=dict(run.computed),
        hit_rate=stats.prefix_hit_tokens_total / stats.prefix_query_tokens_total,
        ttft_ms_p50=1e3 * percentile(ordered, 50),
        ttft_ms_p99=1e3 * percentile(ordered, 99),
        seconds=run.now,
        preemptions=stats.preemptions_total,
        deferred=stats.turns_deferred_total,
        loaded_tokens=stats.loaded_tokens_total,
        prefetched_tokens=stats.session_prefetched_tokens_total,
        prefetches={result.value: total for result, total in stats.session_prefetches_total.items()},
    )


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Both policies with one pool, beside a pool that evicts nothing that is needed again.

    Attributes:
        recency: figures of plain recency.
        retention: figures of session retention.
        warm: figures of the large pool.
        host: figures of session retention with a host store. None: not replayed.
        prefetch: the same with prefetches. None: not replayed.
    """

    recency: ReplayFigures
    retention: ReplayFigures
    warm: ReplayFigures
    host: ReplayFigures | None = None
    prefetch: ReplayFigures | None = None

    @property
    def gain(self) -> float:
        """Computed prompt tokens of plain recency, relative to session retention. Below 1, retention is worse."""
        return self.recency.computed_tokens / self.retention.computed_tokens

    @property
    def least_gain(self) -> float:
        """The gain of the tenant that gains least."""
        computed = self.retention.computed_by_tenant
        return min(self.recency.computed_by_tenant[tenant] / computed[tenant] for tenant in computed)

    def _with_host(self) -> tuple[tuple[ReplayFigures | None, str], ...]:
        return ((self.host, "host"), (self.prefetch, "prefetch"))

    def lines(self, scale: Scale) -> list[str]:
        """Return a line of the table for each policy.

        Args:
            scale: how many tokens one token stands for.
        """
        return [
            f"{one.traffic:<12}{one.share:>6.0%} {name:<9}{one.hit_rate:>7.1%}"
            f"{one.computed_tokens / scale.factor / 1e6:>10.2f}"
            f"{one.computed_tokens / self.warm.computed_tokens:>7.2f}{gain:>7.2f}{least:>7.2f}"
            f"{one.ttft_ms_p50:>9.0f}{one.ttft_ms_p50 / self.warm.ttft_ms_p50:>7.2f}{one.ttft_ms_p99:>9.0f}"
            f"{one.turns_per_minute:>7.1f}{one.preemptions:>6}"
            for one, name, gain, least in (
                (self.recency, "recency", 1.0, 1.0),
                (self.retention, "sessions", self.gain, self.least_gain),
                *((one, name, math.nan, math.nan) for one, name in self._with_host() if one is not None),
            )
        ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--traffic", choices=TRAFFICS, nargs="+", default=list(TRAFFICS), help="kinds of traffic")
    parser.add_argument(
        "--share",
        type=float,
        nargs="+",
        default=list(SHARES),
        metavar="X",
        help="KV pools, of the working set",
    )
    parser.add_argument("--clients", type=at_least_one, default=16, metavar="N", help="agents at the same time")
    parser.add_argument("--sessions", type=at_least_one, default=2, metavar="N", help="sessions of each agent")
    parser.add_argument("--scale", type=float, default=SCALE, metavar="X", help="tokens of the replay per real token")
    parser.add_argument("--machine", choices=MACHINES, default="gpu", help="cost model of a step")
    parser.add_argument(
        "--cold-turn",
        type=float,
        default=CORE.cold_turn_seconds,
        metavar="SECONDS",
        help="how long a cold turn waits at most",
    )
    parser.add_argument(
        "--prefetch", action="store_true", help="add rows with a host store, without and with prefetches"
    )
    parser.add_argument(
        "--load-us", type=float, default=LOAD_US, metavar="X", help="microseconds to load a token from the host store"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the sessions")


def run(arguments: argparse.Namespace) -> int:
    """Replay, print a table row by row, and then all figures as one line of JSON.

    Args:
        arguments: the parsed command line.

    Returns:
        Exit code.
    """
    prepare_interpreter()
    if not 0 < arguments.scale <= 1:
        raise StartupError(f"--scale is {arguments.scale}, allowed is above 0 and up to 1")
    scale = Scale(arguments.scale)
    comparisons: list[Comparison] = []
    print(
        f"{'traffic':<12}{'pool':>6} {'':<9}{'hits':>7}{'computed':>10}{'':>7}{'gain':>7}{'least':>7}"
        f"{'TTFT':>9}{'of':>7}{'TTFT':>9}{'turns':>7}{'pre-':>6}"
    )
    print(
        f"{'':<28}{'':>7}{'M tokens':>10}{'x':>7}{'':>7}{'gain':>7}{'p50 ms':>9}{'warm':>7}{'p99 ms':>9}{'/min':>7}"
        f"{'empt':>6}"
    )
    for name in arguments.traffic:
        traffic = draw_traffic(
            name, scale.shape, clients=arguments.clients, rounds=arguments.sessions, seed=arguments.seed
        )
        warm = replay(traffic, WARM_SHARE, arguments.machine, scale, has_retention=False)
        for share in arguments.share:
            recency, retention = (
                replay(
                    traffic, share, arguments.machine, scale, has_retention=has, cold_turn_seconds=arguments.cold_turn
                )
                for has in (False, True)
            )
            host, prefetch = (
                replay(
                    traffic,
                    share,
                    arguments.machine,
                    scale,
                    has_retention=True,
                    cold_turn_seconds=arguments.cold_turn,
                    load_us=arguments.load_us,
                    prefetches=prefetches,
                )
                if arguments.prefetch
                else None
                for prefetches in (False, True)
            )
            comparisons.append(
                Comparison(recency=recency, retention=retention, warm=warm, host=host, prefetch=prefetch)
            )
            print(*comparisons[-1].lines(scale), sep="\n", flush=True)
    print_figures(comparisons=comparisons)
    return 0
