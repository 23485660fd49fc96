"""Starts a cluster of three nodes on this machine: a head node without CPUs, and two nodes with CPUs.

First the program prints {"address": ...}. Then it executes orders, which are lines of JSON, until standard input ends.
The response to each order is {"ids": [...]}, the process ids of the nodes with CPUs.

{"raylets": true}        changes nothing
{"kill": process id}     kills a node without a warning
{"add": true}            adds a node
{"kill_head": true}      kills the control server (GCS) of the cluster, and leaves the nodes
"""

from __future__ import annotations

import json
import sys
from typing import Any

from ray.cluster_utils import Cluster

OBJECT_BYTES = 80_000_000


class Nodes:
    def __init__(self) -> None:
        head: dict[str, Any] = {"num_cpus": 0, "object_store_memory": OBJECT_BYTES, "include_dashboard": False}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.by_id: dict[int, Any] = {}
        for _ in range(2):
            self.add()

    def add(self) -> None:
        node = self.cluster.add_node(num_cpus=2, object_store_memory=OBJECT_BYTES)
        self.by_id[node.all_processes["raylet"][0].process.pid] = node

    def do(self, order: dict[str, Any]) -> dict[str, Any]:
        if "kill" in order:
            self.cluster.remove_node(self.by_id.pop(order["kill"]), allow_graceful=False)
        elif "add" in order:
            self.add()
        elif "kill_head" in order:
            self.cluster.head_node.kill_gcs_server(check_alive=False)
        return {"ids": list(self.by_id)}


def main() -> None:
    nodes = Nodes()
    print(json.dumps({"address": nodes.cluster.address}), flush=True)
    for line in sys.stdin:
        print(json.dumps(nodes.do(json.loads(line))), flush=True)
    nodes.cluster.shutdown()


if __name__ == "__main__":
    main()
