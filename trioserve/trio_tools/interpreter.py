"""Settings of the Python interpreter and the process for a server. Benchmarks use the same settings, to measure real
conditions.
"""

from __future__ import annotations

import gc
import sys

from trioserve.trio_tools.file_limit import raise_file_limit

__all__ = ["freeze_loaded_objects", "prepare_interpreter"]

SWITCH_INTERVAL_SECONDS = 0.001  # time after which a thread must release the GIL if another thread waits
YOUNG_OBJECTS_MAX = 20_000
"""Number of new objects after which the garbage collector runs. With Python's default of 700, it would run several
times in a step with many requests. Reference counting frees nearly all objects before a step ends, so later runs find
fewer objects.
"""


def prepare_interpreter() -> None:
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
    gc.set_threshold(YOUNG_OBJECTS_MAX)
    raise_file_limit()


def freeze_loaded_objects() -> None:
    """Exclude all current objects from later garbage collections.

    Without this call, each collection would scan the modules, the model and the tokenizer, which takes about 35 ms.
    """
    gc.collect()
    gc.freeze()
