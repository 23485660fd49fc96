"""Every promise of the connector contract, kept by `tcp` over sockets."""

from __future__ import annotations

import pytest

from trioserve.connectors.tcp import make_connector

conformance = pytest.importorskip("trioserve.testing.connector_conformance")


class TestTcp(conformance.PairConformance):
    factory = staticmethod(make_connector)
    real_time = True


class TestTcpInSmallChunks(conformance.PairConformance):
    factory = staticmethod(make_connector)
    real_time = True

    def options(self, side):
        return {"key": "the key of both of them", "chunk_bytes": 50}
