"""Connector `tcp`, which moves KV between engines over TCP. The engines may run on different machines."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from trioserve.connectors.stream.options import StreamOptions, read_options
from trioserve.connectors.stream.policy import StreamPolicy
from trioserve.connectors.stream.signature import signing_key
from trioserve.connectors.stream.transport import StreamTransport
from trioserve.contracts.kv_transfer import ConnectorSetup, Started

__all__ = ["TcpConnector", "make_connector"]


class TcpConnector(StreamPolicy):
    """RunningConnector (see contracts.kv_transfer) that moves KV over TCP.

    Args:
        setup: Engine id, KV cache and wake function of the engine.
        options: Options of the connector.
    """

    def __init__(self, setup: ConnectorSetup, options: StreamOptions) -> None:
        super().__init__(setup, options, lambda: self._transport.wake(), key=signing_key(options))
        self._transport = StreamTransport(self)

    def run(self, *, task_status: Started) -> Coroutine[Any, Any, None]:
        return self._transport.run(task_status=task_status)


def make_connector(setup: ConnectorSetup) -> TcpConnector:
    """Make the connector `tcp`. This function is its ConnectorFactory.

    Args:
        setup: Setup of the engine. Its options must match StreamOptions.

    Raises:
        StartupError: an option is unknown, or its value is not allowed.
    """
    return TcpConnector(setup, read_options(StreamOptions, setup.options))
