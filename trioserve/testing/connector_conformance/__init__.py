"""Tests of every promise of a KV connector (contracts/kv_transfer.py). Any connector class can be run through them.

    from trioserve.testing.connector_conformance import PairConformance

    class TestMyConnector(PairConformance):
        factory = staticmethod(make_connector)

        def options(self, side):
            return {"port": 0}

Nothing else is needed: pytest finds the tests in the class. Choose the base class that fits:

    ConnectorConformance   for every connector, also for a connector that moves nothing
    SenderConformance      for a connector that holds blocks of a request with do_remote_decode for another engine
    PairConformance        for two engines, of which one reads blocks that the other holds
    StoreConformance       for a connector that saves blocks and loads them for the next equal prompt

Each test runs its own Trio program, by default with a clock that jumps. Set real_time if the connector uses threads,
sockets or other processes. A test plays the cores of both engines and judges from outside: from the reports and from
the bytes in both caches. It overwrites blocks at the moment at which they belong to another request. Some tests repeat
one act at each moment of a load: after 0, 1, 2, ... passes of Trio's loop, until the load ends before the act.
"""

from __future__ import annotations

from trioserve.testing.connector_conformance.every_connector import ConnectorConformance
from trioserve.testing.connector_conformance.pair import PairConformance, SenderConformance
from trioserve.testing.connector_conformance.stage import TOKENS, Offered, Stage
from trioserve.testing.connector_conformance.store import StoreConformance

__all__ = [
    "TOKENS",
    "ConnectorConformance",
    "Offered",
    "PairConformance",
    "SenderConformance",
    "Stage",
    "StoreConformance",
]
