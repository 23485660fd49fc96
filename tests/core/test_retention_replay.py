"""Tests that replay traffic of agents and of others, and compare the tokens computed with and without retention.

An agent is a closed loop: it sends its whole context, waits for the response, then for its tool, and sends the longer
context. An agent that has finished is replaced by a new one, so the number of agents stays the same. Times and tokens
are drawn from a seed. A step takes a fixed time, plus a time per token, so an engine that computes contexts again gets
slower, and its queue grows.
"""

from __future__ import annotations

import heapq
import itertools
import math
from dataclasses import dataclass, field
from random import Random

import pytest

from trioserve.contracts.events import RequestFinished
from trioserve.contracts.ids import RequestId
from trioserve.contracts.request import EngineRequest, Retention
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.step import StepResult
from trioserve.core.engine import EngineCore
from trioserve.core.settings import CoreSettings

BLOCK_SIZE = 16
STEP_SECONDS = 0.005
TOKEN_SECONDS = 0.00002
MAX_NUM_SEQS = 16
SAMPLING = SamplingParams()


@dataclass(frozen=True, kw_only=True)
class Clients:
    """Clients of one kind, each of which repeats conversations.

    Args:
        count: number of clients at a time.
        turns: median number of turns of a conversation. 1: every conversation has exactly one turn.
        shared: tokens at the beginning of every conversation, which all clients of this kind have in common.
        first: mean number of further tokens in the first turn.
        more: mean number of tokens that each further turn adds.
        output: tokens of each response.
        pause: median seconds between two turns of a conversation.
        pause_spread: standard deviation of the pause's logarithm.
        has_session: True if a conversation has a session.
        ends: True if a client ends its session.
        tenant: tenant of the sessions.
        weight: weight of the sessions.
    """

    count: int
    turns: int = 12
    shared: int = 160
    first: int = 320
    more: int = 96
    output: int = 6
    pause: float = 3.5
    pause_spread: float = 1.2
    has_session: bool = True
    ends: bool = True
    tenant: str | None = None
    weight: float = 1.0


@dataclass(eq=False)
class Conversation:
    kind: Clients
    client: int
    round: int
    name: str
    rng: Random
    tokens: list[int]
    turns_left: int


@dataclass
class Replay:
    """One run of a core. After `run`, the counts are known.

    Args:
        kinds: the clients.
        block_count: blocks of the pool.
        seed: seed of the traffic.
        retention: False to evict by recency.
        turns: number of turns after which the replay ends.

    Attributes:
        computed_by: tokens that the core computed for each kind of clients.
        context_tokens: tokens of all prompts.
    """

    kinds: tuple[Clients, ...]
    block_count: int
    seed: int = 0
    retention: bool = True
    turns: int = 600
    computed_by: dict[Clients, int] = field(default_factory=dict)
    context_tokens: int = 0

    def run(self) -> Replay:
        rng = Random(self.seed)
        core = EngineCore(
            CoreSettings(
                block_count=self.block_count,
                block_size=BLOCK_SIZE,
                context_tokens_max=self.block_count * BLOCK_SIZE,
                max_num_seqs=MAX_NUM_SEQS,
                step_tokens_max=512,
                session_retention=self.retention,
            )
        )
        now, turns_done = 0.0, 0
        self.computed_by = dict.fromkeys(self.kinds, 0)
        waiting: list[tuple[float, int, Conversation]] = []
        live: dict[RequestId, Conversation] = {}
        serials = itertools.count()

        def begin(kind: Clients, client: int, number: int = 0) -> Conversation:
            name = f"{self.kinds.index(kind)} {client} {number}"
            # Each conversation has a generator of its own, so that both orders see the same conversations.
            own = Random(f"{self.seed} {name}")
            shared = [hash((self.kinds.index(kind), position)) % 50_000 for position in range(kind.shared)]
            first_count = min(1 + int(own.expovariate(1 / kind.first)), 3 * kind.first)
            first = [own.randrange(50_000) for _ in range(first_count)]
            turns = 1 if kind.turns == 1 else max(2, round(kind.turns * math.exp(own.gauss(0, 0.6))))
            if kind.has_session:
                core.open_session(name, Retention(tenant=kind.tenant, weight=kind.weight), now)
            return Conversation(kind, client, number, name, own, shared + first, turns)

        for kind in self.kinds:
            for client in range(kind.count):
                heapq.heappush(waiting, (rng.random() * kind.pause * 4, next(serials), begin(kind, client)))
        while turns_done < self.turns:
            while waiting and waiting[0][0] <= now:
                _time, serial, conversation = heapq.heappop(waiting)
                name = RequestId(f"r{serial}")
                live[name] = conversation
                self.context_tokens += len(conversation.tokens)
                core.add(
                    EngineRequest(
                        id=name,
                        prompt_token_ids=tuple(conversation.tokens),
                        sampling=SAMPLING,
                        output_tokens_max=conversation.kind.output,
                        stop_token_ids=frozenset(),
                        seed=0,
                        session=conversation.name if conversation.kind.has_session else None,
                    )
                )
            plan = core.schedule(now)
            if plan is None:
                now = waiting[0][0]
                continue
            now += STEP_SECONDS + TOKEN_SECONDS * plan.token_count
            for chunk in plan.chunks:
                self.computed_by[live[chunk.request.id].kind] += chunk.count
            tokens = tuple(chunk.start % 50_000 if chunk.samples else None for chunk in plan.chunks)
            for event in core.update_from_output(plan, StepResult(tokens), now):
                if not isinstance(event, RequestFinished):
                    continue
                turns_done += 1
                conversation = live.pop(event.request_id)
                kind, own = conversation.kind, conversation.rng
                conversation.turns_left -= 1
                more = 1 + int(own.expovariate(1 / kind.more))
                conversation.tokens += [own.randrange(50_000) for _ in range(kind.output + more)]
                pause = min(60.0, max(0.2, kind.pause * math.exp(own.gauss(0, kind.pause_spread))))
                is_full = len(conversation.tokens) + kind.output > self.block_count * BLOCK_SIZE // 3
                if conversation.turns_left == 0 or is_full:
                    if kind.has_session and kind.ends:
                        core.end_session(conversation.name, now)
                    conversation = begin(kind, conversation.client, conversation.round + 1)
                heapq.heappush(waiting, (now + pause, next(serials), conversation))
        return self

    @property
    def computed_share(self) -> float:
        """Fraction of all prompt tokens that the core computed. Output tokens count as computed, too."""
        return sum(self.computed_by.values()) / self.context_tokens


AGENTS = Clients(count=12)
SCAN = Clients(count=12, turns=1, shared=0, first=600, pause=0.5, has_session=False)
SHORT_CHATS = Clients(count=12, turns=1, shared=480, first=100, pause=0.5, has_session=False)
LONG_SYSTEM_PROMPT = Clients(count=3, turns=1, shared=1600, first=100, pause=5.0, has_session=False)
CHATS = Clients(count=12, has_session=False)
NEVER_RETURN = Clients(count=12, turns=1, shared=0, first=600, pause=0.5, ends=False, tenant="other", weight=4.0)
ONE_TURN = Clients(count=12, turns=1, shared=0, first=600, pause=0.5)
WORKING_SET = 780  # Blocks of the contexts of 12 agents, in the mean.


@pytest.mark.parametrize(("share", "factor"), [(0.5, 1.5), (1.0, 3.0)])
def test_agents_beside_a_flood_of_single_requests_compute_fewer_tokens(share, factor):
    kinds, blocks = (AGENTS, SCAN), int(share * WORKING_SET)
    recency = Replay(kinds, blocks, turns=500, retention=False).run()
    retained = Replay(kinds, blocks, turns=500).run()
    assert recency.computed_by[AGENTS] > factor * retained.computed_by[AGENTS]


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
@pytest.mark.parametrize(
    "kinds",
    [
        (AGENTS,),
        (AGENTS, SCAN),
        (AGENTS, SHORT_CHATS),
        (AGENTS, LONG_SYSTEM_PROMPT),
        (AGENTS, CHATS),
        (CHATS, NEVER_RETURN),
        (AGENTS, NEVER_RETURN),
        (AGENTS, ONE_TURN),
    ],
    ids=[
        "agents",
        "scan",
        "short chats",
        "long system prompt",
        "chats",
        "adversary",
        "agents and adversary",
        "one turn",
    ],
)
def test_retention_computes_at_most_2_percent_more_than_recency(kinds, share):
    means = []
    for retention in (True, False):
        runs = [Replay(kinds, int(share * WORKING_SET), seed, retention, turns=700).run() for seed in range(2)]
        means.append(sum(run.computed_share for run in runs) / len(runs))
    assert means[0] <= 1.02 * means[1], f"{means[0]:.4f} with retention, {means[1]:.4f} without"
