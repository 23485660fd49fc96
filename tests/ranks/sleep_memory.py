"""Print the resident MiB of an engine: open, asleep at level 1, awake, asleep at level 2, and awake again."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import trio

import trioserve
from trioserve.commands import random_checkpoint
from trioserve.model.real_shapes import SHAPES

SHAPE = "llama-3.2-1b"
KV_BYTES = 128 << 20


def resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


async def resident_bytes_once_claimed(engine: Any, least: int) -> int:
    """Wait until the idle engine has claimed its whole KV cache, then return the resident bytes."""
    await engine.encode("something")
    while resident_bytes() < least:
        await trio.lowlevel.checkpoint()
    return resident_bytes()


async def main(path: str) -> None:
    async with trioserve.open_engine(path, kv_cache_memory=KV_BYTES / 2**30, max_model_len=1024) as engine:
        first = resident_bytes()
        sizes = [await resident_bytes_once_claimed(engine, first + int(0.95 * KV_BYTES))]
        for level in (1, 2):
            await engine.sleep(level)
            sizes.append(resident_bytes())
            await engine.wake_up()
            sizes.append(await resident_bytes_once_claimed(engine, sizes[0] - KV_BYTES // 20))
        print(*(f"{count / 2**20:.1f}" for count in sizes))


if __name__ == "__main__":
    shape = SHAPES[SHAPE]
    SHAPES[SHAPE] = msgspec.structs.replace(shape, layers=shape.layers[:1], vocab_size=4096)
    directory = Path(sys.argv[1])
    stdout, sys.stdout = sys.stdout, sys.stderr
    random_checkpoint.run_random_checkpoint(SHAPE, directory, seed=1)
    sys.stdout = stdout
    trio.run(main, str(directory))
