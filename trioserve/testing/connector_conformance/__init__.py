"""Every promise of a KV connector (contracts/kv_transfer.py), as tests that any connector class can be run through.

    from trioserve.testing.connector_conformance import PairConformance

    class TestMyConnector(PairConformance):
        factory = staticmethod(make_connector)

        def options(self, side):
            return {"port": 0}

That is all; pytest finds the tests in the class. Take the part that fits:

    ConnectorConformance   what holds for every connector, also one that moves nothing
    SenderConformance      and for one that holds blocks of a request with do_remote_decode for somebody else
    PairConformance        and for two engines, of which one reads what the other holds
    StoreConformance       instead, for one that keeps blocks by itself and brings them to the next equal prompt

A test runs a Trio program of its own, by default with a clock that jumps. Set real_time where threads, sockets or other
processes are at work. It plays both cores, judges from outside (reports, and the bytes of both caches), and overwrites
blocks in the very moment in which they belong to another. Some tests do one thing at each moment of a load: after so
many passes of Trio's loop, until the load is over before.
"""

from __future__ import annotations

from trioserve.testing.connector_conformance.every_connector import ConnectorConformance
from trioserve.testing.connector_conformance.pair import PairConformance
from trioserve.testing.connector_conformance.sender import SenderConformance
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
