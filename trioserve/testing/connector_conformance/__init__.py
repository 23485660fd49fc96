"""Conformance tests for KV connectors. They check every promise of the contract (contracts/kv_transfer.py).

    from trioserve.testing.connector_conformance import PairConformance

    class TestMyConnector(PairConformance):
        factory = staticmethod(make_connector)

        def options(self, side):
            return {"port": 0}

No other code is needed, because pytest finds the tests in the class. Choose the base class that fits the connector:

    ConnectorConformance   for every connector, also for a connector that transfers nothing
    SenderConformance      for a connector that holds blocks of a request with do_remote_decode for another engine
    PairConformance        for two engines, of which one reads blocks that the other holds
    StoreConformance       for a connector that saves blocks and loads them for the next equal prompt

Each test runs its own Trio program, by default with an autojump clock. Set real_time if the connector uses threads,
sockets or other processes. A test makes the calls that the cores of both engines would make. It checks only the
reports of the connectors, and the bytes in both KV caches. When a block belongs to another request, the test overwrites
the block at once. Some tests repeat an action at each moment of a load: after 0, 1, 2, ... passes of Trio's event loop,
until the load ends before the action.
"""

from __future__ import annotations

from trioserve.testing.connector_conformance.every_connector import ConnectorConformance
from trioserve.testing.connector_conformance.loads import StoreConformance
from trioserve.testing.connector_conformance.pair import PairConformance, SenderConformance
from trioserve.testing.connector_conformance.side import TOKENS, Offered, Stage

__all__ = [
    "TOKENS",
    "ConnectorConformance",
    "Offered",
    "PairConformance",
    "SenderConformance",
    "Stage",
    "StoreConformance",
]
