"""`python -m trioserve bench`: measures servers over HTTP, and parts of trioserve inside of this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trioserve.bench.command import main

__all__ = ["run_bench"]


def run_bench(arguments: Sequence[str]) -> int:
    """Run a benchmark.

    Args:
        arguments: arguments of the command line after `bench`.

    Returns:
        Exit code of the program.

    Raises:
        StartupError: an argument is wrong.
    """
    return main(arguments, run_inside=_run_inside)


def _run_inside(arguments: Sequence[str]) -> int:
    from trioserve.bench.inside.command import run_inside

    return run_inside(arguments, open_engine=_open_engine, open_image_engine=_open_image_engine)


def _open_engine(*options: Any, **more: Any) -> Any:
    # This import is late, because benchmarks of kernels also run on machines without trio.
    from trioserve.assemble import open_engine

    return open_engine(*options, **more)


def _open_image_engine(*options: Any, **more: Any) -> Any:
    from trioserve.assemble_images import open_image_engine

    return open_image_engine(*options, **more)
