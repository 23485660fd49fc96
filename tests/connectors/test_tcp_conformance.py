"""Tests that the connector `tcp` obeys the contract over sockets."""

from __future__ import annotations

import pytest

from trioserve.connectors.stream.transport import make_connector
from trioserve.testing.connector_conformance import PairConformance


@pytest.mark.slow
class TestTcp(PairConformance):
    factory = staticmethod(make_connector)
    real_time = True


@pytest.mark.slow
class TestTcpInSmallChunks(PairConformance):
    factory = staticmethod(make_connector)
    real_time = True

    def options(self, side):
        return {"key": "the key of both of them", "chunk_bytes": 50}
