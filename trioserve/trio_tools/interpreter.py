"""How Python and its process are set up in a program that serves. Benchmarks do the same, to measure what serves."""

from __future__ import annotations

import gc
import sys

from trioserve.trio_tools.file_limit import raise_file_limit

__all__ = ["keep_what_is_loaded", "prepare_interpreter"]

SWITCH_INTERVAL_SECONDS = 0.001  # how long Python computing in one thread may keep the others from the GIL
YOUNG_OBJECTS_MAX = 20_000
"""New objects before the garbage collector looks at them, instead of 700, which is a few times a step with many
requests. Nearly all are gone by reference counting before a step has ended, so looking later is looking at less."""


def prepare_interpreter() -> None:
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
    gc.set_threshold(YOUNG_OBJECTS_MAX)
    raise_file_limit()


def keep_what_is_loaded() -> None:
    """What is there now stays: the collector need not search the modules, the model and the tokenizer again and again,
    some 35 ms each time."""
    gc.collect()
    gc.freeze()
