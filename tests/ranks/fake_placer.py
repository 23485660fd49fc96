"""What trioserve.commands.ray_place does, without Ray: `python fake_placer.py HOW LOG`. Each rank is a child of this
process. LOG gets a line with its id, and the first line that it was told.

HOW: places, and keeps the ranks; waits for ever; fails at once; loses a rank that is awaited; ends without a word;
stays when it is to end.
"""

from __future__ import annotations

import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import trio

from trioserve.ranks.headless import keep_ranks
from trioserve.ranks.host import free_port


def tell(**told: Any) -> None:
    print(json.dumps(told), flush=True)


async def keep(wanted: dict[str, Any], door: dict[str, Any]) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(keep_ranks, range(wanted["count"]), path=Path(wanted["model"]), **door))
        await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True)
        nursery.cancel_scope.cancel()


def main(how: str, log: str) -> None:
    line = sys.stdin.readline()
    with Path(log).open("a", encoding="utf-8") as file:
        file.write(f"{os.getpid()} {line}")
    wanted = json.loads(line)
    if how == "waits":
        tell(waits="waiting for room")
        sys.stdin.readline()
    elif how == "fails":
        tell(failure="there is no Ray here")
    elif how == "ends":
        print("a first line\nits last word", file=sys.stderr)
    elif how == "stays":
        tell(waits="waiting for room")
        time.sleep(600)
    else:
        nodes = ["a", "b", "a"][: wanted["count"]]
        tell(nodes=[{"id": node, "address": "127.0.0.1", "port": free_port()} for node in nodes])
        door = json.loads(sys.stdin.readline())
        if how == "loses":
            tell(failure="the actor of rank 1 is gone: it was killed")
            sys.stdin.readline()
        else:
            trio.run(keep, wanted, door)


if __name__ == "__main__":
    main(*sys.argv[1:])
