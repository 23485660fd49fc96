"""The router of a simulated pair: a model of any router that uses both engines and whose clients leave.

It requests a prefill, then a decode with the parameters that the prefill returned. If one of them fails before the
first token, the other engine does the whole request. Every client's tokens are compared with those of the reference
engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import msgspec

from trioserve.contracts.events import FinishReason
from trioserve.contracts.ids import RequestId
from trioserve.contracts.kv_transfer_params import KVTransferParams
from trioserve.contracts.request import EngineRequest
from trioserve.contracts.sampling import SamplingParams
from trioserve.simulation.pair.history import Come, HostName, PairWorld
from trioserve.simulation.pair.host import AbortIds, Finished, PairHost, Refused, Submit, Tokens
from trioserve.simulation.pair.network import Connection, Network
from trioserve.simulation.reference_engine import ReferenceResponse

__all__ = ["ROUTER", "Client", "PairRouter", "StageRequest", "request_of"]

ROUTER = "router"
ROUTER_PATIENCE_SECONDS = 60.0  # without a byte of a response

StageKind = Literal["prefill", "decode", "whole"]
State = Literal["open", "done", "left", "failed"]


class Client:
    """One client's request.

    Args:
        event: the request.
        response: the expected response.

    Attributes:
        tokens: tokens received so far.
        stage: the stage that is running.
        prefilled: the request whose blocks may be held.
    """

    def __init__(self, event: Come, response: ReferenceResponse) -> None:
        self.event = event
        self.response = response
        self.tokens: list[int] = []
        self.state: State = "open"
        self.stage: StageRequest | None = None
        self.prefilled: RequestId | None = None
        self.stage_count = 0
        self.was_refused = False


class StageRequest:
    """A request that the router has sent to an engine, and the router's end of its connection.

    Args:
        router: the router.
        client: the client.
        kind: the stage.
        host: the engine.
    """

    def __init__(self, router: PairRouter, client: Client, kind: StageKind, host: HostName) -> None:
        self.router = router
        self.client = client
        self.kind = kind
        self.host = host
        self.id = RequestId(f"{client.event.id}.{kind}{client.stage_count}")
        self.connection: Connection | None = None

    def take(self, connection: Connection, message: msgspec.Struct) -> None:
        self.router.take_from_engine(self, connection, message)

    def broke(self, connection: Connection, why: str) -> None:
        self.router.lost(self)


class OneMessageEnd:
    """The router's end of a connection that serves for one message."""

    def take(self, connection: Connection, message: msgspec.Struct) -> None:
        pass

    def broke(self, connection: Connection, why: str) -> None:
        pass


class PairRouter:
    """The router.

    Args:
        world: settings of both engines.
        network: the network.
        hosts: both engines.
        clock: returns the simulated time.
        count: counts what happened, by name.
    """

    def __init__(
        self,
        world: PairWorld,
        network: Network,
        hosts: Mapping[HostName, PairHost],
        *,
        clock: Callable[[], float],
        count: Callable[[str], None],
    ) -> None:
        self._world = world
        self._network = network
        self._hosts = hosts
        self._clock = clock
        self._count = count

    def begin(self, client: Client, kind: StageKind, host: HostName, params: KVTransferParams | None = None) -> None:
        """Send a stage of the client's request to an engine.

        Args:
            client: the client.
            kind: the stage.
            host: the engine.
            params: for a decode, where the KV of its prompt is.
        """
        client.stage_count += 1
        client.stage = stage = StageRequest(self, client, kind, host)
        self._count(f"stages: {kind}")
        output = 1 if kind == "prefill" else client.event.output
        asked = KVTransferParams(do_remote_decode=True) if kind == "prefill" else params
        if not self._hosts[host].is_up:
            self.lost(stage)
            return
        stage.connection = self._network.open({ROUTER: stage, host: self._hosts[host]})
        stage.connection.send(ROUTER, Submit(request_of(client.event, stage.id, output, asked)))
        stage.connection.patience[ROUTER] = self._clock() + ROUTER_PATIENCE_SECONDS

    def take_from_engine(self, stage: StageRequest, connection: Connection, message: msgspec.Struct) -> None:
        client = stage.client
        connection.patience[ROUTER] = self._clock() + ROUTER_PATIENCE_SECONDS
        if isinstance(message, Refused):
            self.end_stage(client)
            self.lost(stage, is_refused=True)
        elif isinstance(message, Tokens):
            if stage.kind != "prefill":
                client.tokens += message.token_ids
                self._check_response(client)
        else:
            assert isinstance(message, Finished)
            self.end_stage(client)
            self._take_end(stage, message)

    def _take_end(self, stage: StageRequest, end: Finished) -> None:
        client = stage.client
        if end.reason not in (FinishReason.LENGTH, FinishReason.STOP):
            assert end.reason is FinishReason.ERROR, f"{stage.id} ends with {end.reason}, and was not aborted"
            assert self._world.fails_without_kv, f"{stage.id} failed, and missing KV should be computed"
            self.lost(stage)
        elif stage.kind == "prefill":
            client.prefilled = None if end.kv_transfer is None else stage.id
            self.begin(client, "decode", "decode", end.kv_transfer)
        else:
            client.state = "done"
            assert tuple(client.tokens) == client.response.token_ids, f"{client.event.id} got {client.tokens}"
            assert end.reason is client.response.reason, f"{client.event.id} ends with {end.reason}"

    def lost(self, stage: StageRequest, *, is_refused: bool = False) -> None:
        """Handle an engine that does not answer. The other engine does the request, if the response has no token yet.

        Args:
            stage: the stage without an answer.
            is_refused: whether the engine refused it.
        """
        client = stage.client
        if client.state != "open" or client.stage is not stage:
            return
        self._count(f"stages {'refused' if is_refused else 'lost'}: {stage.kind}")
        client.stage = None
        client.was_refused = client.was_refused or is_refused
        if stage.kind == "decode":
            self.release(client)
        if stage.kind == "whole" or client.tokens:
            client.state = "failed"
            return
        self.begin(client, "whole", "decode" if stage.kind == "prefill" else "prefill")

    def end_stage(self, client: Client) -> None:
        """Close the connection of the client's stage, which ends its computation.

        Args:
            client: the client.
        """
        assert client.stage is not None
        connection = client.stage.connection
        if connection is not None:
            if client.stage.kind == "prefill" and client.state == "left":
                # It may have ended already, and then its blocks would be held for no reader.
                connection.send(ROUTER, AbortIds((client.stage.id,)))
            self._network.close(connection, ROUTER)

    def release(self, client: Client) -> None:
        """Release the blocks held for the client, which has no reader for them.

        Args:
            client: the client.
        """
        host = self._hosts["prefill"]
        if client.prefilled is not None and host.is_up:
            connection = self._network.open({ROUTER: OneMessageEnd(), host.name: host})
            connection.send(ROUTER, AbortIds((client.prefilled,)))
            self._network.close(connection, ROUTER)
        client.prefilled = None

    def _check_response(self, client: Client) -> None:
        count = len(client.tokens)
        assert tuple(client.tokens) == client.response.token_ids[:count], (
            f"{client.event.id} got {client.tokens}, the reference has {client.response.token_ids}"
        )


def request_of(event: Come, name: RequestId, output: int, kv_transfer: KVTransferParams | None) -> EngineRequest:
    """Create an engine's request for a client.

    Args:
        event: the client's request.
        name: id of the new request.
        output: most tokens to generate.
        kv_transfer: parameters of the KV transfer.
    """
    return EngineRequest(
        id=name,
        prompt_token_ids=event.prompt,
        sampling=SamplingParams(temperature=event.temperature),
        output_tokens_max=output,
        stop_token_ids=frozenset(event.stops),
        seed=0,
        kv_transfer=kv_transfer,
    )
