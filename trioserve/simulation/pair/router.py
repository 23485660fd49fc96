"""The router of a simulated pair: a model of any router that speaks to both engines and whose clients leave.

It asks for a prefill, then for a decode with what the prefill says, and has the other engine do all of it when one of
them fails before a token has come. Every client's tokens are compared with the reference engine's.
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
    """One client's request. tokens: what it has got. stage: the one that is out for it. prefilled: the request whose
    blocks may be held."""

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
    """A request that the router has sent to an engine; the router's end of its connection."""

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


class Nobody:
    """The router's end of a connection that is there for one message."""

    def take(self, connection: Connection, message: msgspec.Struct) -> None:
        pass

    def broke(self, connection: Connection, why: str) -> None:
        pass


class PairRouter:
    """clock: the simulation's time. count: counts what came to pass."""

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
        """Send a stage of the client's request to an engine. params: what a decode is told of its prompt's KV."""
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
            assert end.reason is FinishReason.ERROR, f"{stage.id} ends with {end.reason}, and nobody has aborted it"
            assert self._world.fails_without_kv, f"{stage.id} failed, and KV that does not come is computed"
            self.lost(stage)
        elif stage.kind == "prefill":
            client.prefilled = None if end.kv_transfer is None else stage.id
            self.begin(client, "decode", "decode", end.kv_transfer)
        else:
            client.state = "done"
            assert tuple(client.tokens) == client.response.token_ids, f"{client.event.id} got {client.tokens}"
            assert end.reason is client.response.reason, f"{client.event.id} ends with {end.reason}"

    def lost(self, stage: StageRequest, *, is_refused: bool = False) -> None:
        """An engine does not answer; another one does, if no token has come of the response yet."""
        client = stage.client
        if client.state != "open" or client.stage is not stage:
            return
        self._count(f"stages {'refused' if is_refused else 'lost'}: {stage.kind}")
        client.stage = None
        client.was_refused = client.was_refused or is_refused
        if stage.kind == "decode":
            self.let_go(client)
        if stage.kind == "whole" or client.tokens:
            client.state = "failed"
            return
        self.begin(client, "whole", "decode" if stage.kind == "prefill" else "prefill")

    def end_stage(self, client: Client) -> None:
        """Close its connection, which ends whatever is still computed for it."""
        assert client.stage is not None
        connection = client.stage.connection
        if connection is not None:
            if client.stage.kind == "prefill" and client.state == "left":
                # It may have ended already, and then what is held is held for nobody.
                connection.send(ROUTER, AbortIds((client.stage.id,)))
            self._network.close(connection, ROUTER)

    def let_go(self, client: Client) -> None:
        """Nobody will read what is held for it."""
        host = self._hosts["prefill"]
        if client.prefilled is not None and host.is_up:
            connection = self._network.open({ROUTER: Nobody(), host.name: host})
            connection.send(ROUTER, AbortIds((client.prefilled,)))
            self._network.close(connection, ROUTER)
        client.prefilled = None

    def _check_response(self, client: Client) -> None:
        count = len(client.tokens)
        assert tuple(client.tokens) == client.response.token_ids[:count], (
            f"{client.event.id} got {client.tokens}, the reference has {client.response.token_ids}"
        )


def request_of(event: Come, name: RequestId, output: int, kv_transfer: KVTransferParams | None) -> EngineRequest:
    """What an engine is asked for a client: so many tokens of its response, under this name."""
    return EngineRequest(
        id=name,
        prompt_token_ids=event.prompt,
        sampling=SamplingParams(temperature=event.temperature),
        output_tokens_max=output,
        stop_token_ids=frozenset(event.stops),
        seed=0,
        kv_transfer=kv_transfer,
    )
