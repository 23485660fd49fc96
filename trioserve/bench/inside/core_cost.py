"""Measures the cost of the core for a step without a forward pass, and for an abort, with many requests that run and
wait.

The claim is that the cost of a step depends only on its own requests, and the cost of an abort only on the blocks of
the aborted request, however many requests wait. Queue lengths are measured in turns, round by round. Each figure is
compared with the figure of the shortest queue in the same run, so that other work on the machine affects all figures.
The garbage collector runs as in the server, but does not search the objects from before a measurement again
(gc.freeze).
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from statistics import median, quantiles
from time import perf_counter_ns
from typing import TYPE_CHECKING

import msgspec

from trioserve.bench.inside.command import print_figures
from trioserve.bench.settings import at_least_one
from trioserve.contracts.ids import RequestId
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.contracts.step import StepResult
from trioserve.core.engine import EngineCore
from trioserve.core.settings import CoreSettings
from trioserve.trio_tools.interpreter import prepare_interpreter
from trioserve.trio_tools.progress import with_progress

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Cost", "add_arguments", "block_costs", "queue_costs", "run"]

RUNNING_COUNTS = (1, 16, 64, 256)
QUEUED_COUNTS = (10, 100, 1_000, 10_000, 100_000)
HELD_COUNTS = (1, 10, 100, 1_000)
ROUNDS = 30
STEPS_PER_ROUND = 8
ABORTS_PER_ROUND = 4  # number of aborts of each kind in a round
BLOCK_SIZE = 16
OUTPUT_TOKENS_MAX = 1_024  # more tokens than a measurement needs, so that no request finishes during the measurement
SAMPLING = SamplingParams(temperature=0.0)
FILL = (0,) * (1_000 * BLOCK_SIZE)


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """One figure, in microseconds per call.

    Attributes:
        what: description of the measured call.
        running_count: requests that run.
        queued_count: requests that wait.
        held_count: number of blocks of the aborted request. None: this row does not vary the number.
        median_us: median.
        low_us: 10th percentile.
        high_us: 90th percentile.
        ratio: ratio to the median of the shortest queue, or to the median of the fewest blocks.
        sample_count: number of calls.
    """

    what: str
    running_count: int
    queued_count: int
    held_count: int | None = None
    median_us: float
    low_us: float
    high_us: float
    ratio: float
    sample_count: int


class Crowd:
    """A core with requests that decode and requests that wait to run. All prompts differ.

    Args:
        running_count: requests that decode.
        queued_count: requests that wait.
        prompt_blocks: full blocks of each prompt.
    """

    def __init__(self, running_count: int, queued_count: int, *, prompt_blocks: int = 2) -> None:
        context_tokens_max = (prompt_blocks + 1) * BLOCK_SIZE + OUTPUT_TOKENS_MAX
        self.core = EngineCore(
            CoreSettings(
                block_count=(running_count + 1) * context_tokens_max // BLOCK_SIZE,
                block_size=BLOCK_SIZE,
                context_tokens_max=context_tokens_max,
                max_num_seqs=running_count,
                step_tokens_max=running_count * context_tokens_max,
            )
        )
        self._prompt_blocks = prompt_blocks
        self._arrivals_total = 0
        self.running_ids = [self.add() for _ in range(running_count)]
        self.step_ns()
        self.queued_ids = [self.add() for _ in range(queued_count)]

    def add(self) -> RequestId:
        number = self._arrivals_total
        self._arrivals_total += 1
        # Prompts have different lengths, so that requests do not all need their next block in the same step.
        prompt_count = self._prompt_blocks * BLOCK_SIZE + number % BLOCK_SIZE
        request_id = RequestId(f"r{number}")
        self.core.add(
            EngineRequest(
                id=request_id,
                prompt_token_ids=(number, *FILL[: prompt_count - 1]),
                sampling=SAMPLING,
                output_tokens_max=OUTPUT_TOKENS_MAX,
                stop_token_ids=frozenset(),
                seed=0,
            )
        )
        return request_id

    def step_ns(self) -> int:
        """Run one step, and return the nanoseconds of schedule and update together."""
        started = perf_counter_ns()
        plan = self.core.schedule(0.0)
        scheduled = perf_counter_ns()
        assert plan is not None
        result = StepResult((1,) * len(plan.chunks))
        computed = perf_counter_ns()
        self.core.update_from_output(plan, result, 0.0)
        return scheduled - started + perf_counter_ns() - computed

    def abort_queued_ns(self, place: int) -> int:
        """Abort a waiting request, and return the nanoseconds. Then add another request to the end of the queue.

        Args:
            place: position in the queue.
        """
        took = self._abort_ns(self.queued_ids.pop(place))
        self.queued_ids.append(self.add())
        return took

    def abort_running_ns(self) -> int:
        """Abort the request that has run for the longest time, and return the nanoseconds.

        Then the first waiting request runs.
        """
        took = self._abort_ns(self.running_ids.pop(0))
        self.running_ids.append(self.queued_ids.pop(0))
        self.queued_ids.append(self.add())
        self.step_ns()
        return took

    def _abort_ns(self, request_id: RequestId) -> int:
        ids = [request_id]
        started = perf_counter_ns()
        self.core.abort(ids, now=0.0)
        return perf_counter_ns() - started


ACTIONS: dict[str, tuple[int, Callable[[Crowd], int]]] = {
    "step": (STEPS_PER_ROUND, Crowd.step_ns),
    "abort head": (ABORTS_PER_ROUND, lambda crowd: crowd.abort_queued_ns(0)),
    "abort middle": (ABORTS_PER_ROUND, lambda crowd: crowd.abort_queued_ns(len(crowd.queued_ids) // 2)),
    "abort tail": (ABORTS_PER_ROUND, lambda crowd: crowd.abort_queued_ns(-1)),
    "abort running": (ABORTS_PER_ROUND, Crowd.abort_running_ns),
}


def queue_costs(running_count: int, queued_counts: Sequence[int], *, rounds: int = ROUNDS) -> list[Cost]:
    """Measure a step, and aborts of a running request and at the head, middle and tail of the queue, for each queue
    length.

    Args:
        running_count: requests that run.
        queued_counts: lengths of the queue, the shortest first.
        rounds: number of counted rounds.
    """
    crowds = {queued_count: Crowd(running_count, queued_count) for queued_count in queued_counts}
    samples: dict[tuple[str, int], list[int]] = {}
    with _frozen_objects():
        for round_index in with_progress(range(rounds + 1), f"measuring with {running_count} running", unit="rounds"):
            for queued_count, crowd in crowds.items():
                for what, (repeats, action) in ACTIONS.items():
                    taken = [action(crowd) for _ in range(repeats)]
                    if round_index > 0:  # The first round is a warm-up.
                        samples.setdefault((what, queued_count), []).extend(taken)
    costs = []
    for what in ACTIONS:
        base = median(samples[what, queued_counts[0]])
        for queued_count in queued_counts:
            costs.append(_cost(what, running_count, queued_count, None, samples[what, queued_count], base))
    return costs


def block_costs(held_counts: Sequence[int] = HELD_COUNTS, *, rounds: int = ROUNDS) -> list[Cost]:
    """Measure the abort of a running request, for different numbers of its blocks.

    Args:
        held_counts: numbers of full blocks, the smallest first. Each request also has a partial block.
        rounds: number of counted rounds.
    """
    crowds = {held_count: Crowd(1, 2, prompt_blocks=held_count) for held_count in held_counts}
    samples: dict[int, list[int]] = {held_count: [] for held_count in held_counts}
    with _frozen_objects():
        for round_index in with_progress(range(rounds + 1), "measuring aborts", unit="rounds"):
            for held_count, crowd in crowds.items():
                taken = [crowd.abort_running_ns() for _ in range(ABORTS_PER_ROUND)]
                if round_index > 0:
                    samples[held_count].extend(taken)
    base = median(samples[held_counts[0]])
    return [_cost("abort running", 1, 2, held_count, samples[held_count], base) for held_count in held_counts]


@contextmanager
def _frozen_objects() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _cost(
    what: str, running_count: int, queued_count: int, held_count: int | None, taken_ns: list[int], base_ns: float
) -> Cost:
    deciles = quantiles(taken_ns, n=10)
    return Cost(
        what=what,
        running_count=running_count,
        queued_count=queued_count,
        held_count=held_count,
        median_us=median(taken_ns) / 1e3,
        low_us=deciles[0] / 1e3,
        high_us=deciles[-1] / 1e3,
        ratio=median(taken_ns) / base_ns,
        sample_count=len(taken_ns),
    )


def _print_table(costs: Sequence[Cost]) -> None:
    for cost in costs:
        held = "" if cost.held_count is None else f"{cost.held_count:,}"
        print(
            f"{cost.what:<14}{cost.running_count:>8}{cost.queued_count:>9,}{held:>8}{cost.median_us:>11.2f}"
            f"{cost.low_us:>10.2f}{cost.high_us:>10.2f}{cost.ratio:>8.2f}",
            flush=True,
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for flag, default, meaning in (
        ("--running", RUNNING_COUNTS, "requests that run"),
        ("--queued", QUEUED_COUNTS, "requests that wait"),
    ):
        parser.add_argument(flag, type=at_least_one, nargs="+", default=list(default), metavar="N", help=meaning)
    parser.add_argument(
        "--rounds", type=at_least_one, default=ROUNDS, metavar="N", help="rounds of each shape, in turns"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure, print a table row by row, and then all figures as one line of JSON. The defaults take half a minute.

    Args:
        arguments: the parsed command line.

    Returns:
        Exit code.
    """
    prepare_interpreter()
    print(f"{'':<14}{'running':>8}{'queued':>9}{'blocks':>8}{'median us':>11}{'10 %':>10}{'90 %':>10}{'ratio':>8}")
    costs = block_costs(rounds=arguments.rounds)
    _print_table(costs)
    for running_count in arguments.running:
        more = queue_costs(running_count, arguments.queued, rounds=arguments.rounds)
        _print_table(more)
        costs += more
    print_figures(costs=costs)
    return 0
