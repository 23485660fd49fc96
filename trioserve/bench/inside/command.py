"""`python -m trioserve bench inside`: measurements of parts of this program in its own process.

Each module has add_arguments(parser) and run(arguments), which returns the exit code. Modules import the code that they
measure, some of them torch. So a module is only imported when it is used, also for its --help.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, cast

import msgspec

__all__ = ["PARTS", "print_figures", "run_inside"]

EXIT_NOTHING_NAMED = 1
PROGRAM = "python -m trioserve bench inside"


class Part(NamedTuple):
    meaning: str
    module: str


class _Module(Protocol):
    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, arguments: argparse.Namespace) -> int:
        """Run the measurement and return the exit code.

        Args:
            arguments: the parsed command line. `open_engine` and `open_image_engine` are the functions of the package
                trioserve, which this package must not import.
        """


PARTS = {
    "adapters": Part(
        "decode steps with and without LoRA adapters, in turns",
        "trioserve.bench.inside.adapter_bench",
    ),
    "agents": Part(
        "session retention against plain recency: sessions of agents and other traffic in the real core, in virtual "
        "time; no model",
        "trioserve.bench.inside.agent_replay",
    ),
    "calls": Part(
        "Python calls of four flows: prompt in, token out, disconnect to abort, relayed event; no model",
        "trioserve.bench.inside.call_counts",
    ),
    "core": Part(
        "the core's cost of a step and of an abort, for many running and waiting requests; no model",
        "trioserve.bench.inside.core_cost",
    ),
    "delivery": Part(
        "Python's cost of a step, from its plan until its readers have the text; no model",
        "trioserve.bench.inside.delivery_cost",
    ),
    "drafts": Part(
        "the speed with and without draft tokens, from the request's text or a draft model, in turns",
        "trioserve.bench.inside.draft_bench",
    ),
    "frontend": Part(
        "the front end's cost of a streamed event and of a small request; no model",
        "trioserve.bench.inside.frontend_cost",
    ),
    "gap": Part(
        "the time between two forward passes, with and without --overlap-steps", "trioserve.bench.inside.step_gap"
    ),
    "gpu": Part(
        "this program on a GPU: results of kernels, their times, whole steps, a server; in ten minutes",
        "trioserve.bench.inside.gpu.command",
    ),
    "images": Part(
        "how soon slots of an image model are free after clients leave, and the cost of different timesteps in a batch",
        "trioserve.bench.inside.image_bench",
    ),
    "router": Part(
        "the cost of a request in the router's core, for different numbers of endpoints; no sockets",
        "trioserve.bench.inside.router_cost",
    ),
    "routers": Part(
        "waits, fairness and exceeded limits of several routers with many endpoints, in simulated time, and cost of "
        "their decisions",
        "trioserve.bench.inside.router_scale",
    ),
    "served": Part("how much steps slow down while tokens are sent over HTTP", "trioserve.bench.inside.served_step"),
    "step": Part(
        "whole steps on a CPU, native kernels compared with plain torch or another checkout",
        "trioserve.bench.inside.step_bench",
    ),
    "tp": Part(
        "whole steps of one process and of several ranks in turns, and the share of the ranks' sums",
        "trioserve.bench.inside.tp_bench",
    ),
    "wide": Part(
        "the latency of streams during a prompt of many steps, with chunks chosen by time or by tokens",
        "trioserve.bench.inside.wide_prompt",
    ),
}


def run_inside(
    arguments: Sequence[str], *, open_engine: Callable[..., Any], open_image_engine: Callable[..., Any]
) -> int:
    """Run the measurement that the first argument names.

    Args:
        arguments: the command line after `bench inside`.
        open_engine: trioserve.open_engine.
        open_image_engine: trioserve.open_image_engine.

    Returns:
        Exit code.
    """
    names = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Measure parts of this program in one process.",
        epilog=f"'{PROGRAM} PART --help' shows the flags of one of them.",
    )
    subparsers = names.add_subparsers(dest="part", metavar="PART", required=True)
    for name, part in PARTS.items():
        subparsers.add_parser(name, help=part.meaning)
    if not arguments:
        names.print_help()
        return EXIT_NOTHING_NAMED
    chosen = PARTS[names.parse_args(arguments[:1]).part]
    module = cast(_Module, importlib.import_module(chosen.module))
    parser = argparse.ArgumentParser(
        prog=f"{PROGRAM} {arguments[0]}",
        description=f"Measure {chosen.meaning}.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    module.add_arguments(parser)
    parser.set_defaults(open_engine=open_engine, open_image_engine=open_image_engine)
    return module.run(parser.parse_args(arguments[1:]))


def print_figures(**figures: Any) -> None:
    """Print figures and the machine as one line of JSON.

    Args:
        **figures: structs, or lists of structs.
    """
    machine = f"{platform.machine()}, Python {platform.python_version()}"
    print(json.dumps({"machine": machine, **msgspec.to_builtins(figures)}))
