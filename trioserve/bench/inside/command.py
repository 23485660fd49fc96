"""`python -m trioserve bench inside`: what measures parts of this program in its own process.

Each of these files holds add_arguments(parser) and run(arguments), which returns the exit code. They import what they
measure, some of them torch, so a file is loaded when it is asked for, and for its own --help.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, cast

__all__ = ["PARTS", "run_inside"]

EXIT_NOTHING_NAMED = 1
PROGRAM = "python -m trioserve bench inside"


class Part(NamedTuple):
    meaning: str
    module: str


class _Module(Protocol):
    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, arguments: argparse.Namespace) -> int:
        """arguments.open_engine is trioserve.open_engine, which a room does not know; so with open_image_engine."""


PARTS = {
    "adapters": Part(
        "decode steps with LoRA adapters, each stream its own, beside the same without, in turns",
        "trioserve.bench.inside.adapter_bench",
    ),
    "calls": Part(
        "Python calls of four flows: prompt in, token out, disconnect to abort, relayed event; no model",
        "trioserve.bench.inside.call_counts",
    ),
    "core": Part(
        "what the core costs a step and an abort, however many requests run and wait; no model",
        "trioserve.bench.inside.core_cost",
    ),
    "delivery": Part(
        "what Python costs a step, from its plan to the text in its readers' hands; no model",
        "trioserve.bench.inside.delivery_cost",
    ),
    "drafts": Part(
        "what drafts bring, of a request's own text or by a draft model, with and without them in turns",
        "trioserve.bench.inside.draft_bench",
    ),
    "frontend": Part(
        "what the front end costs a streamed event and a small request; no model",
        "trioserve.bench.inside.frontend_cost",
    ),
    "gap": Part(
        "the time between two forward passes, with --overlap-steps and without", "trioserve.bench.inside.step_gap"
    ),
    "gpu": Part("whole decode steps on a GPU, beside what its memory allows", "trioserve.bench.inside.gpu_bench"),
    "images": Part(
        "how soon slots are back when clients leave a model of pictures, and what different timesteps in a batch cost",
        "trioserve.bench.inside.images.image_bench",
    ),
    "router": Part(
        "what the router's core costs a request, however many endpoints there are; no sockets",
        "trioserve.bench.inside.router_cost",
    ),
    "routers": Part(
        "waits, fairness and overshot limits of several routers before many endpoints, in simulated time, and what "
        "their decisions cost",
        "trioserve.bench.inside.router_scale",
    ),
    "served": Part("what a step loses while its tokens go out over HTTP", "trioserve.bench.inside.served_step"),
    "step": Part(
        "whole steps on a CPU, native kernels beside plain torch or another checkout",
        "trioserve.bench.inside.step_bench",
    ),
    "tp": Part(
        "whole steps of one process and of several ranks in turns, and what the ranks' sums take of them",
        "trioserve.bench.inside.tp_bench",
    ),
    "wide": Part(
        "what streams feel of a prompt that takes many steps, with chunks chosen by time and by tokens",
        "trioserve.bench.inside.wide_prompt",
    ),
}


def run_inside(
    arguments: Sequence[str], *, open_engine: Callable[..., Any], open_image_engine: Callable[..., Any]
) -> int:
    """Measure the part that the first argument names; returns the exit code."""
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
