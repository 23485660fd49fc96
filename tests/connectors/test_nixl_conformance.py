"""Tests that the connector `nixl` obeys the contract, in host memory."""

from __future__ import annotations

import pytest

from trioserve.connectors.nixl import make_connector
from trioserve.testing.connector_conformance import PairConformance

pytest.importorskip("nixl")


@pytest.mark.slow
class TestNixl(PairConformance):
    factory = staticmethod(make_connector)
    real_time = True

    def options(self, side):
        return {"landing_bytes": 40_000, "chunk_bytes": 200}
