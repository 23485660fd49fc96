"""Measures this program on a GPU: `python -m trioserve bench inside gpu`.

    python -m trioserve bench inside gpu --out build/gpu-bench        all parts, in ten minutes
    python -m trioserve bench inside gpu --parts decodes --shape qwen3-8b --batch 1 64 --context 4096 --transformers
    python -m trioserve bench inside gpu --device cpu --shape tiny    a test of this program

Each part runs in a process of its own with a time limit of its own, so that a crash or a slow part does not take the
figures of the others. The first part compares the kernels' results with the reference.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from trioserve.bench.inside.gpu.machine import Part
from trioserve.bench.settings import at_least_one
from trioserve.model.device import DeviceType
from trioserve.model.random_checkpoint import checkpoint_bytes
from trioserve.model.real_shapes import SHAPES, TINY

__all__ = ["PARTS_SECONDS", "add_arguments", "run"]

# Seconds that each part may take of TOTAL_SECONDS, in the order of their measurement.
PARTS_SECONDS = {
    "machine": 45.0,
    "checks": 80.0,
    "decodes": 120.0,
    "prefill": 45.0,
    "attention": 70.0,
    "kernels": 50.0,
    "profile": 40.0,
    "served": 120.0,
}
WAYS: dict[DeviceType, tuple[str, ...]] = {"cuda": ("torch", "triton", "graphs"), "cpu": ("torch", "static")}
DEFAULT_SHAPES = ["llama-3.1-8b", "llama-3.2-1b", "qwen3-30b-a3b"]
CASES = ((1, 1_024), (16, 1_024), (64, 1_024), (64, 4_096), (256, 1_024), (1, 16_384), (1, 131_072))
CASES_CPU = ((1, 50), (3, 50))
TOTAL_SECONDS = 590.0  # A machine may be lent for ten minutes.
END_SECONDS = 6.0  # time for the end of a process, after its part begins no further case
EXIT_WRONG, EXIT_CANNOT_MEASURE, EXIT_CUT_OFF = 1, 2, 3
OUTCOMES = {0: "complete", EXIT_CUT_OFF: "cut off: the time was over"}
RESULTS_NAME, LOG_NAME = "results.jsonl", "log.txt"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=PARTS_SECONDS,
        default=list(PARTS_SECONDS),
        metavar="PART",
        help="parts to measure",
    )
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=DEFAULT_SHAPES, help="real shapes to measure")
    parser.add_argument("--device", choices=WAYS, default="cuda", help="cpu is only for a test of this program")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help=f"folder for {RESULTS_NAME}, {LOG_NAME} and the server's log"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=TOTAL_SECONDS,
        metavar="X",
        help="time limit of all parts, of which each has a share",
    )
    decodes = parser.add_argument_group("decodes", "decode steps; without --batch and --context, a selection of both")
    decodes.add_argument("--batch", nargs="+", type=at_least_one, metavar="N", help="numbers of sequences")
    decodes.add_argument("--context", nargs="+", type=at_least_one, metavar="TOKENS", help="tokens of each sequence")
    ways = sorted({*WAYS["cuda"], *WAYS["cpu"]})
    decodes.add_argument("--ways", nargs="+", choices=ways, help="ways to compute; None: graphs on a GPU, else all")
    decodes.add_argument("--transformers", action="store_true", help="also measure transformers")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print.

    Args:
        arguments: the parsed command line.

    Returns:
        0, 1 if a result is wrong or a part failed, 2 if this machine cannot measure, 3 if the time was over before all
        was measured.
    """
    refusal = _refusal(arguments)
    if refusal is not None:
        print(refusal, file=sys.stderr)
        return EXIT_CANNOT_MEASURE
    if len(arguments.parts) == 1:
        return _run_part(arguments)
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
    ends_at = time.monotonic() + arguments.seconds
    scale = arguments.seconds / TOTAL_SECONDS
    outcomes: dict[str, int] = {}
    for name in arguments.parts:
        began = time.monotonic()
        seconds = min(PARTS_SECONDS[name] * scale, ends_at - began)
        outcomes[name] = _run_child(arguments, name, seconds) if seconds > 2 * END_SECONDS else EXIT_CUT_OFF
        outcome = OUTCOMES.get(outcomes[name], f"FAILED with status {outcomes[name]}")
        print(f"=== {name}: {outcome}, {time.monotonic() - began:.0f} s\n", flush=True)
    worst = {outcome for outcome in outcomes.values() if outcome not in OUTCOMES}
    return EXIT_WRONG if worst else max(outcomes.values())


def _refusal(arguments: argparse.Namespace) -> str | None:
    """Return the reason why the cases cannot be measured, as one sentence, or None if they can be measured."""
    device: DeviceType = arguments.device
    ways = arguments.ways or []
    if device == "cuda" and not torch.cuda.is_available():
        return "torch sees no CUDA device: run this on a machine with a GPU, or test it with --device cpu --shape tiny"
    if device == "cpu" and arguments.shape != [TINY]:
        return f"the CPU is only for a test of this program: use --shape {TINY}, not {' '.join(arguments.shape)}"
    if foreign := [way for way in ways if way not in WAYS[device]]:
        return f"--ways has {', '.join(foreign)}, but --device {device} has {', '.join(WAYS[device])}"
    if device == "cuda" and ways != ["torch"] and importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install triton, or use --parts decodes --ways torch"
    if arguments.transformers and importlib.util.find_spec("transformers") is None:
        return "transformers is not installed: pip install transformers, or omit --transformers"
    longest = min(SHAPES[shape].context_tokens_max for shape in arguments.shape)
    if max(arguments.context or [1]) > longest:
        return f"--context has {max(arguments.context)}, but these shapes allow up to {longest} tokens"
    return None


def _run_child(arguments: argparse.Namespace, name: str, seconds: float) -> int:
    """Measure one part in a process, show its output, and add the output to the log. Return its exit code."""
    words = [sys.executable, "-m", "trioserve", "bench", "inside", "gpu", "--parts", name]
    words += ["--seconds", f"{seconds - END_SECONDS:.0f}", "--device", arguments.device, "--shape", *arguments.shape]
    for flag in ("batch", "context", "ways"):
        if (values := getattr(arguments, flag)) is not None:
            words += [f"--{flag}", *map(str, values)]
    if arguments.out is not None:
        words += ["--out", str(arguments.out)]
    if arguments.transformers:
        words.append("--transformers")
    try:
        child = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds)
        exit_code, output = child.returncode, child.stdout
    except subprocess.TimeoutExpired as late:
        exit_code, output = EXIT_CUT_OFF, (late.stdout or b"").decode(errors="replace") + "the process was killed\n"
    print(output, end="", flush=True)
    if arguments.out is not None:
        with (arguments.out / LOG_NAME).open("a") as log:
            log.write(f"=== {name}\n{output}")
    return exit_code


def _run_part(arguments: argparse.Namespace) -> int:
    (name,), device = arguments.parts, arguments.device
    results = None
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        results = arguments.out / RESULTS_NAME
    part = Part(name, device, arguments.seconds, results)
    torch.manual_seed(0)
    with torch.inference_mode():
        _measure(part, arguments)
    if part.wrong_count:
        return EXIT_WRONG
    return EXIT_CUT_OFF if part.was_cut_off else 0


def _measure(part: Part, arguments: argparse.Namespace) -> None:
    # The imports are late, because only the part "served" needs trio.
    shapes, way = arguments.shape, WAYS[arguments.device][-1]
    match part.name:
        case "machine":
            from trioserve.bench.inside.gpu.machine import measure_machine

            measure_machine(part)
        case "checks":
            from trioserve.bench.inside.gpu.kernel_checks import check_kernels

            check_kernels(part)
        case "attention":
            from trioserve.bench.inside.gpu.kernel_checks import time_attention

            time_attention(part)
        case "kernels":
            from trioserve.bench.inside.gpu.kernel_checks import time_kernels

            time_kernels(part, shapes)
        case "decodes":
            _measure_decodes(part, arguments)
        case "prefill":
            from trioserve.bench.inside.gpu.steps import measure_prefill

            measure_prefill(part, shapes[0], way)
        case "profile":
            from trioserve.bench.inside.gpu.steps import measure_kernel_shares

            measure_kernel_shares(part, shapes[0], way)
        case _:
            from trioserve.bench.inside.gpu.served import measure_server

            smallest = min(shapes, key=lambda shape: checkpoint_bytes(SHAPES[shape]))
            measure_server(part, smallest, arguments.out)


def _measure_decodes(part: Part, arguments: argparse.Namespace) -> None:
    from trioserve.bench.inside.gpu.steps import SAMPLINGS, Case, measure_decodes

    chosen: Sequence[tuple[int, int]] = CASES if part.is_gpu else CASES_CPU
    if arguments.batch or arguments.context:
        batches = arguments.batch or sorted({batch for batch, _context in chosen})
        contexts = arguments.context or sorted({context for _batch, context in chosen})
        chosen = list(itertools.product(batches, contexts))
    device: DeviceType = arguments.device
    ways = arguments.ways or WAYS[device][-1 if part.is_gpu else 0 :]
    cases = [Case(batch, context) for batch, context in chosen]
    measure_decodes(part, arguments.shape, cases, ways, list(SAMPLINGS), wants_transformers=arguments.transformers)
