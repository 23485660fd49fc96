"""Stand-in for trioserve.commands.ray_place without Ray: `python fake_placer.py HOW LOG`.

Each rank is a child of this process. The process appends a line to LOG: its own id, and the first line of its input.

HOW is one of these:
    places: start the ranks and keep them.
    waits: report again and again that resources are missing.
    fails: report a failure at once.
    loses: report the loss of a rank before it connects.
    ends: exit without a report.
    stays: do not exit when the standard input is closed.
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

from trioserve.ranks.host import free_port, keep_ranks


def report(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


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
        report(waits="waiting for room")
        sys.stdin.readline()
    elif how == "fails":
        report(failure="there is no Ray here")
    elif how == "ends":
        print("a first line\nits last word", file=sys.stderr)
    elif how == "stays":
        report(waits="waiting for room")
        time.sleep(600)
    else:
        nodes = ["a", "b", "a"][: wanted["count"]]
        report(nodes=[{"id": node, "address": "127.0.0.1", "port": free_port()} for node in nodes])
        door = json.loads(sys.stdin.readline())
        if how == "loses":
            report(failure="the actor of rank 1 is gone: it was killed")
            sys.stdin.readline()
        else:
            trio.run(keep, wanted, door)


if __name__ == "__main__":
    main(*sys.argv[1:])
