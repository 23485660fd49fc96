"""KV over TCP, between engines in two processes or on two machines: the connector that needs nothing but a network."""

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
    """A RunningConnector (contracts.kv_transfer)."""

    def __init__(self, setup: ConnectorSetup, options: StreamOptions) -> None:
        super().__init__(setup, options, lambda: self._transport.wake(), key=signing_key(options))
        self._transport = StreamTransport(self)

    def run(self, *, task_status: Started) -> Coroutine[Any, Any, None]:
        return self._transport.run(task_status=task_status)


def make_connector(setup: ConnectorSetup) -> TcpConnector:
    """The ConnectorFactory of `tcp`. Options: StreamOptions."""
    return TcpConnector(setup, read_options(StreamOptions, setup.options))
