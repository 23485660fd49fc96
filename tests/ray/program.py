"""Starts Ray and Ray Serve, and then executes orders, which are lines of JSON, until standard input ends.

{"run": name, "args": {...}}   runs the application trioserve.ray.app(args) at /name
{"delete": name}               deletes the application
The response to each order is {"error": null}, or the error that `serve status` shows.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import ray
from ray import serve

import trioserve.ray


def run(name: str, args: dict[str, Any]) -> str | None:
    try:
        serve.run(trioserve.ray.app(args), name=name, route_prefix=f"/{name}")
    except RuntimeError:
        return serve.status().applications[name].deployments["trioserve"].message
    return None


def main(port: int) -> None:
    ray.init(address="local", num_cpus=2, object_store_memory=80_000_000, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        for line in sys.stdin:
            order = json.loads(line)
            error = run(order["run"], order["args"]) if "run" in order else serve.delete(order["delete"])
            print(json.dumps({"error": error}), flush=True)
        serve.shutdown()
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]))
