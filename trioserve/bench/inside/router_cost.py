"""Measures the cost of a request in the router's core, from entering to leaving, for different numbers of endpoints.

The claim is that the cost is equal for ten endpoints and for ten thousand, with every policy. The measurement uses no
sockets. Each round measures all fleets, one after the other. Each figure is compared with the figure of the smallest
fleet in the same run, so that other work on the machine affects all figures. The garbage collector does not search the
objects from before a measurement again (gc.freeze).
"""

from __future__ import annotations

import argparse
import gc
import random
from collections import deque
from collections.abc import Sequence
from statistics import median, quantiles
from time import perf_counter_ns

import msgspec

from trioserve.bench.inside.command import print_figures
from trioserve.bench.settings import at_least_one
from trioserve.contracts.endpoint import EndpointId, EndpointLoad, RoutedRequest
from trioserve.contracts.ids import BlockHash
from trioserve.router.core import RouterCore
from trioserve.router.policies import POLICIES
from trioserve.router.settings import RouterSettings
from trioserve.router.ticket import Ticket
from trioserve.trio_tools.interpreter import prepare_interpreter
from trioserve.trio_tools.progress import with_progress

__all__ = ["RouterCost", "add_arguments", "router_costs", "run"]

ENDPOINT_COUNTS = (10, 100, 1_000, 10_000)
ROUNDS = 30
REQUESTS_PER_ROUND = 50
LEASES_MAX = 4
BUSY_SHARE = 0.5  # fraction of all leases that are granted during the measurement
PROMPTS = 64  # number of different prompts with a common beginning. Requests repeat these prompts.
PROMPT_BLOCKS = 8
BLOCK_SIZE = 16
SECONDS_BETWEEN = 1e-4


class RouterCost(msgspec.Struct, frozen=True, kw_only=True):
    """One figure, in microseconds per request.

    Attributes:
        policy: routing policy.
        endpoint_count: endpoints of the fleet.
        median_us: median.
        low_us: 10th percentile.
        high_us: 90th percentile.
        ratio: median relative to that of the smallest fleet.
        sample_count: number of requests.
    """

    policy: str
    endpoint_count: int
    median_us: float
    low_us: float
    high_us: float
    ratio: float
    sample_count: int


class Fleet:
    """A router core with endpoints that have reported their load. Half of their leases are granted.

    Args:
        policy: routing policy.
        endpoint_count: number of endpoints.
        seed: seed of all random choices.
    """

    def __init__(self, policy: str, endpoint_count: int, *, seed: int = 0) -> None:
        self._rng = random.Random(seed)
        self.now = 1000.0
        self.core = RouterCore(
            RouterSettings(leases_max=LEASES_MAX, slow_start_seconds=0),
            POLICIES[policy],
            on_change=lambda ticket: None,
            rng=random.Random(seed),
        )
        self._ids = [EndpointId(f"http://10.0.{index // 256}.{index % 256}:8000") for index in range(endpoint_count)]
        self._common = BlockHash(b"what every prompt begins with")
        for index, id in enumerate(self._ids):
            self.core.add_endpoint(id, ["m"], self.now)
            self.core.note_health(id, True, self.now)
            self.core.policy.note_resident(id, BLOCK_SIZE, self._blocks(index % PROMPTS))
        self._running: deque[Ticket] = deque()
        for _ in range(int(endpoint_count * LEASES_MAX * BUSY_SHARE)):
            self._begin()
        for id in self._ids:
            self._report(id)

    def request_ns(self) -> int:
        """Return the nanoseconds of one request: it enters, is sent, gets its first token, and another request leaves.

        Then one endpoint reports its load, which is not measured.
        """
        self.now += SECONDS_BETWEEN
        request = self._request()
        began = perf_counter_ns()
        ticket = self.core.enter(request, self.now)
        self.core.sent(ticket)
        self.core.first_token(ticket, self.now)
        self.core.leave(self._running.popleft(), self.now)
        self.core.next_tick(self.now)
        took = perf_counter_ns() - began
        self._running.append(ticket)
        self._report(self._ids[self._rng.randrange(len(self._ids))])
        return took

    def _begin(self) -> None:
        ticket = self.core.enter(self._request(), self.now)
        self.core.sent(ticket)
        self.core.first_token(ticket, self.now)
        self._running.append(ticket)

    def _report(self, id: EndpointId) -> None:
        state = self.core.endpoints[id]
        load = EndpointLoad(running=state.in_flight, waiting=0, max_num_seqs=LEASES_MAX)
        self.core.note_load(id, load, self.now, sent_when_asked=self.core.sent_total)

    def _request(self) -> RoutedRequest:
        number = self._rng.randrange(PROMPTS)
        names = self._blocks(number)
        return RoutedRequest(
            model="m", session=f"session {number}", prefix=names, blocks={BLOCK_SIZE: names}, prompt_tokens=500
        )

    def _blocks(self, number: int) -> tuple[BlockHash, ...]:
        own = (BlockHash(b"block %d of %d" % (index, number)) for index in range(1, PROMPT_BLOCKS))
        return (self._common, *own)


def router_costs(policy: str, endpoint_counts: Sequence[int], *, rounds: int) -> list[RouterCost]:
    """Measure all fleets in each round. The first round of each fleet is not counted.

    Args:
        policy: routing policy.
        endpoint_counts: number of endpoints of each fleet, the smallest first.
        rounds: number of counted rounds.
    """
    fleets = {count: Fleet(policy, count) for count in endpoint_counts}
    samples: dict[int, list[int]] = {count: [] for count in endpoint_counts}
    gc.collect()
    gc.freeze()
    try:
        for round_index in with_progress(range(rounds + 1), f"measuring {policy}", unit="rounds"):
            for count, fleet in fleets.items():
                taken = [fleet.request_ns() for _ in range(REQUESTS_PER_ROUND)]
                if round_index > 0:
                    samples[count].extend(taken)
    finally:
        gc.unfreeze()
    base = median(samples[endpoint_counts[0]])
    costs = []
    for count, taken in samples.items():
        deciles = quantiles(taken, n=10)
        costs.append(
            RouterCost(
                policy=policy,
                endpoint_count=count,
                median_us=median(taken) / 1e3,
                low_us=deciles[0] / 1e3,
                high_us=deciles[-1] / 1e3,
                ratio=median(taken) / base,
                sample_count=len(taken),
            )
        )
    return costs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--endpoints",
        type=at_least_one,
        nargs="+",
        default=list(ENDPOINT_COUNTS),
        metavar="N",
        help="endpoints of each fleet",
    )
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=list(POLICIES))
    parser.add_argument(
        "--rounds", type=at_least_one, default=ROUNDS, metavar="N", help="rounds of each fleet, in turns"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure, print a table row by row, and then all figures as one line of JSON. Return the exit code.

    Args:
        arguments: the parsed command line.
    """
    prepare_interpreter()
    print(f"{'':<14}{'endpoints':>10}{'median us':>11}{'10 %':>9}{'90 %':>9}{'ratio':>8}")
    costs = []
    for policy in arguments.policies:
        for cost in router_costs(policy, arguments.endpoints, rounds=arguments.rounds):
            print(
                f"{cost.policy:<14}{cost.endpoint_count:>10,}{cost.median_us:>11.1f}{cost.low_us:>9.1f}"
                f"{cost.high_us:>9.1f}{cost.ratio:>8.2f}",
                flush=True,
            )
            costs.append(cost)
    print_figures(costs=costs)
    return 0
