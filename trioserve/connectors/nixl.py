"""Connector `nixl`, which moves KV with NIXL. It is meant for networks with RDMA, and also works on other networks."""

from __future__ import annotations

from collections.abc import Coroutine
from importlib.util import find_spec
from typing import Any

from trioserve.connectors.nixl_transport import NixlOptions, NixlTransport
from trioserve.connectors.stream.options import read_options
from trioserve.connectors.stream.policy import StreamPolicy
from trioserve.connectors.stream.signature import signing_key
from trioserve.contracts.errors import StartupError
from trioserve.contracts.kv_transfer import ConnectorSetup, Started

__all__ = ["NixlConnector", "make_connector"]


class NixlConnector(StreamPolicy):
    """RunningConnector (see contracts.kv_transfer) that moves KV with NIXL.

    Args:
        setup: Engine id, KV cache and wake function of the engine.
        options: Options of the connector.
    """

    def __init__(self, setup: ConnectorSetup, options: NixlOptions) -> None:
        super().__init__(setup, options, lambda: self._transport.wake(), key=signing_key(options))
        self._transport = NixlTransport(self, options)

    def run(self, *, task_status: Started) -> Coroutine[Any, Any, None]:
        return self._transport.run(task_status=task_status)


def make_connector(setup: ConnectorSetup) -> NixlConnector:
    """Make the connector `nixl`. This function is its ConnectorFactory.

    Args:
        setup: Setup of the engine. Its options must match NixlOptions.

    Raises:
        StartupError: an option is unknown, its value is not allowed, or the package nixl is not installed.
    """
    options = read_options(NixlOptions, setup.options)
    if find_spec("nixl") is None:
        raise StartupError('the connector "nixl" needs the package nixl: pip install "trioserve[nixl]"')
    return NixlConnector(setup, options)
