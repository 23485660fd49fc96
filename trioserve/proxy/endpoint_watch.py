"""Regular checks of one remote endpoint: its health, its models and its load. A slow endpoint does not delay the checks
of other endpoints.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec
import trio
from msgspec import UNSET

from trioserve.admission.dispatch import Dispatch
from trioserve.contracts.endpoint import EndpointId, EndpointLoad
from trioserve.contracts.errors import EndpointLost, StartupError
from trioserve.contracts.kv_transfer import EngineRole
from trioserve.proxy.pushed_reports import PushedLoad
from trioserve.proxy.remote_endpoint import RemoteEndpoint, Unreachable
from trioserve.proxy.response_shape import InvalidAnswer, check_head, check_whole, is_error

__all__ = ["MODELS_PATH", "PeerReports", "ServedModels", "WatchSettings", "load_from_metrics", "watch_endpoint"]

logger = logging.getLogger(__name__)

RESPONSE_BYTES_MAX = 8 * 1024 * 1024  # For comparison, a metrics page has about 100 KB.
# A router with peers requests the load at this interval, even if the endpoint pushes its load.
SIGN_OF_LIFE_SECONDS = 2.0
ROUTER_HEADER = "x-trioserve-router"
# Trio sees ready sockets in the first scheduler turn, and tasks read from them in the second turn.
TURNS_FOR_RESPONSES = 2
MODELS_PATH = "/v1/models"
PROBES: tuple[tuple[str, dict[str, object]], ...] = (
    ("/v1/completions", {"prompt": "a", "max_tokens": 1}),
    ("/v1/embeddings", {"input": "a"}),
)
"""Tiny requests that check whether the endpoint serves requests. The first one that its model supports decides."""
NO_SUCH_PAGE = frozenset({404, 405, 501})


class PeerReports(Protocol):
    """Receiver of reports about which routers an endpoint knows."""

    @property
    def own_name(self) -> str | None:
        """Name of this router, which endpoints get with each load request. None while it is unknown."""

    def note_report(self, endpoint: EndpointId, heard: Mapping[str, float]) -> None:
        """Record the routers that an endpoint has reported with its load.

        Args:
            endpoint: Endpoint that reported.
            heard: Seconds since the last load request of each router, by router name.
        """


class WatchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the checks. Times are in seconds.

    Attributes:
        health_seconds: Time between two health checks.
        load_seconds: Time between two load requests.
        response_seconds_max: Time limit of a response to a check.
        hang_seconds_max: Time without any response after which running requests move to other endpoints.
        listens: Whether the router listens to pushed loads, and then seldom asks for them.
        move_seconds: Time to move requests away from an endpoint that reports that it stops. None: the requests stay
            until they end.
    """

    health_seconds: float = 2.0
    load_seconds: float = 0.25
    response_seconds_max: float = 2.0
    hang_seconds_max: float = 6.0
    listens: bool = True
    move_seconds: float | None = 30.0

    def __post_init__(self) -> None:
        for name in ("health_seconds", "load_seconds", "response_seconds_max", "hang_seconds_max"):
            value = getattr(self, name)
            if not 0 < value <= 3600:
                raise StartupError(f"{name} is {value}, it must be above 0 and at most 3600 seconds")


async def watch_endpoint(
    remote: RemoteEndpoint,
    dispatch: Dispatch,
    settings: WatchSettings,
    *,
    learns_models: bool,
    on_role: Callable[[EngineRole | None], None],
    peers: PeerReports | None = None,
    on_vllm: Callable[[], None] = lambda: None,
    on_models: Callable[[ServedModels], None] = lambda served: None,
    name_there: Callable[[str], str] = lambda model: model,
) -> None:
    """Check an endpoint regularly until cancelled.

    Args:
        remote: Client of the endpoint.
        dispatch: Receives health, models and load of the endpoint.
        settings: Intervals and time limits.
        learns_models: Whether the endpoint's own list of models is used.
        on_role: Called after each load report with the role that the endpoint reports. None: the endpoint reports none.
        peers: Receives the routers that the endpoint knows. None: the router has no peers.
        on_vllm: Called when the metrics of the endpoint are those of vLLM.
        on_models: Called with the models that the endpoint lists.
        name_there: Maps a model name of the router to the endpoint's name for the model.
    """
    watch = _Watch(
        remote,
        dispatch,
        settings,
        learns_models=learns_models,
        on_role=on_role,
        peers=peers,
        on_vllm=on_vllm,
        on_models=on_models,
        name_there=name_there,
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch.ask_health)
        nursery.start_soon(watch.ask_load)
        if settings.listens:
            nursery.start_soon(watch.listen_to_load)


class _Watch:
    def __init__(
        self,
        remote: RemoteEndpoint,
        dispatch: Dispatch,
        settings: WatchSettings,
        *,
        learns_models: bool,
        on_role: Callable[[EngineRole | None], None],
        peers: PeerReports | None,
        on_vllm: Callable[[], None],
        on_models: Callable[[ServedModels], None],
        name_there: Callable[[str], str],
    ) -> None:
        self._name_there = name_there
        self._on_models = on_models
        self._on_role = on_role
        self._on_vllm = on_vllm
        self._peers = peers
        self._remote = remote
        self._dispatch = dispatch
        self._settings = settings
        self._learns_models = learns_models
        self._was_well: bool | None = None
        self._silent_since: float | None = None
        self._is_refused = False  # True if the endpoint refused the connection of the last check.
        self._health_path = "/ready"  # Trioserve has this path. Other servers have only /health.
        self._load_path: str | None = "/load"
        self._pushed = PushedLoad()

    async def ask_health(self) -> None:
        while True:
            response = await self._ask(self._health_path, tries_beat=True)
            if response is not None and response[0] in NO_SUCH_PAGE and self._health_path != "/health":
                self._health_path = "/health"
                continue
            # A 404 also shows that a server responds.
            is_well = response is not None and (response[0] < 400 or response[0] in NO_SUCH_PAGE)
            if is_well and self._learns_models:
                is_well = await self._learn_models()
            if is_well != self._was_well:
                logger.info("endpoint %s endpoint=%s", "well" if is_well else "unwell", self._remote.id)
                self._was_well = is_well
            self._note_health(is_well, response)
            if self._dispatch.wants_probe(self._remote.id):
                is_served = await self._serves_a_request()
                logger.info("endpoint probed endpoint=%s serves=%s", self._remote.id, is_served)
                self._dispatch.note_probe(self._remote.id, is_served)
            await trio.sleep(self._settings.health_seconds)

    def _note_health(self, is_well: bool, response: tuple[int, bytes] | None) -> None:
        id = self._remote.id
        if self._is_refused or (response is not None and _refuses_with(response, "draining")):
            # An endpoint that refuses connections has stopped, or finishes its running requests before it stops.
            self._dispatch.note_leaving(id, move_seconds=self._settings.move_seconds)
            return
        is_overdue = response is not None and _refuses_with(response, "step_overdue")
        is_hung = is_overdue or self._is_silent()
        self._remote.watch.is_hung = is_overdue
        self._dispatch.note_health(id, is_well, hangs=is_overdue or response is None, is_hung=is_hung)

    def _is_silent(self) -> bool:
        """Return True if no check was answered for hang_seconds_max.

        The requests at the endpoint are then assumed to be stuck.
        """
        since = self._silent_since
        return since is not None and trio.current_time() >= since + self._settings.hang_seconds_max

    async def _serves_a_request(self) -> bool | None:
        """Send a tiny request to an endpoint that failed requests of clients while its health checks passed.

        Returns:
            True if the endpoint served the request. None if the endpoint refused the request in a way in which a
            working server may refuse it.
        """
        state = self._dispatch.endpoint(self._remote.id)
        model = self._name_there(min(state.models)) if state is not None and state.models else None
        for path, fields in PROBES:
            body = msgspec.json.encode({"model": model, **fields})
            response = await self._ask(path, [("content-type", "application/json")], method="POST", body=body)
            if response is None:
                return False
            status, said = response
            if status < 400:
                return _is_response(self._remote.id, path, status, said)
            if not is_error(None, said):
                return False
            if status in (429, 503):
                return None  # The endpoint is busy. It reports this in the same format as a working server.
        # The endpoint serves neither texts nor embeddings, or it refuses the router's key. Only a client's request can
        # show whether the endpoint works.
        return False if await self._ask_served() is None else None

    async def _ask_served(self) -> ServedModels | None:
        response = await self._ask(MODELS_PATH)
        return None if response is None else ServedModels.read(response[1])

    async def _learn_models(self) -> bool:
        served = await self._ask_served()
        if served is None:
            return False
        self._on_models(served)
        self._dispatch.set_models(self._remote.id, served.names)
        return True

    async def ask_load(self) -> None:
        asked_at = -math.inf
        while self._load_path is not None:
            is_owed = self._peers is not None and trio.current_time() >= asked_at + SIGN_OF_LIFE_SECONDS
            if is_owed or not self._pushed.is_pushing(trio.current_time()):
                asked_at, sent_total = trio.current_time(), self._dispatch.sent_total
                response = await self._ask(self._load_path, self._own_headers())
                load = None if response is None else self._read_load(response)
                if load is not None:
                    self._pushed.note_asked(load, asked_at)
                    await self._take_load(load, sent_total, asked_at, is_pushed=False)
            await trio.sleep(self._settings.load_seconds)

    async def listen_to_load(self) -> None:
        async def take(load: EndpointLoad, asked_at: float) -> None:
            await self._take_load(load, self._dispatch.sent_times.count_at(asked_at), asked_at, is_pushed=True)

        await self._pushed.listen(self._remote, self._own_headers, take)

    def _own_headers(self) -> list[tuple[str, str]]:
        name = None if self._peers is None else self._peers.own_name
        return [] if name is None else [(ROUTER_HEADER, name)]

    async def _take_load(self, load: EndpointLoad, sent_total: int, asked_at: float, *, is_pushed: bool) -> None:
        """Forward a load report to the router core.

        Args:
            load: Report of the endpoint.
            sent_total: Number of requests that the router had sent to all endpoints when it asked. Later requests
                cannot be part of the report.
            asked_at: Time at which the router asked, or would have asked for a pushed report.
            is_pushed: Whether the endpoint sent the report unasked.
        """
        self._remote.note_load(load, asked_at)
        # The report does not include requests that had ended before it. The responses to these requests have arrived at
        # this router, but may not be read yet. If they counted as running, they would free their slots a second time
        # once they are read.
        for _ in range(TURNS_FOR_RESPONSES):
            await trio.lowlevel.checkpoint()
        self._dispatch.note_fingerprint(self._remote.id, None if load.fingerprint is UNSET else load.fingerprint)
        self._on_role(None if load.role is UNSET else load.role)
        if self._peers is not None:
            self._peers.note_report(self._remote.id, {} if load.routers is UNSET else load.routers)
        self._dispatch.note_load(self._remote.id, load, sent_when_asked=sent_total, is_pushed=is_pushed)

    def _read_load(self, response: tuple[int, bytes]) -> EndpointLoad | None:
        status, body = response
        if self._load_path == "/load":
            try:
                if status == 200:
                    return msgspec.json.decode(body, type=EndpointLoad)
            except msgspec.DecodeError:
                pass
            if status < 500:
                self._load_path = "/metrics"
            return None
        if status in NO_SUCH_PAGE:
            self._load_path = None  # The endpoint does not report its load.
            return None
        if status == 200 and _RUNNING[0].encode() in body:
            self._on_vllm()
        return load_from_metrics(body) if status == 200 else None

    async def _ask(
        self,
        path: str,
        headers: Sequence[tuple[str, str]] = (),
        *,
        method: str = "GET",
        body: bytes = b"",
        tries_beat: bool = False,
    ) -> tuple[int, bytes] | None:
        """Send a request to the endpoint.

        Args:
            path: Path of the request.
            headers: Headers of the request.
            method: HTTP method.
            body: Body of the request.
            tries_beat: Whether to check that the endpoint sends a heartbeat before the head of the response.

        Returns:
            Status and body, or None if no response arrived in time.
        """
        asked_at = trio.current_time()
        with trio.move_on_after(self._settings.response_seconds_max):
            try:
                request = self._remote.request(method, path, list(headers), body, tries_beat=tries_beat)
                async with request as response:
                    if tries_beat:
                        self._remote.watch.sends_beats = response.has_beaten
                    said = await response.whole(RESPONSE_BYTES_MAX)
                    self._silent_since = None
                    self._is_refused = False
                    return response.status, said or b""
            except Unreachable:
                self._is_refused = True
                return None
            except EndpointLost:
                self._is_refused = False
                return None
        self._is_refused = False
        if self._silent_since is None:
            self._silent_since = asked_at
        return None


def _is_response(id: EndpointId, path: str, status: int, said: bytes) -> bool:
    try:
        check_head(id, status, None)
        check_whole(id, path, said)
    except InvalidAnswer:
        return False
    return True


class _NotReady(msgspec.Struct):
    reason: str = ""


def _refuses_with(response: tuple[int, bytes], reason: str) -> bool:
    """Return True if a trioserve server refuses requests for this reason."""
    status, body = response
    if status != 503:
        return False
    try:
        return msgspec.json.decode(body, type=_NotReady).reason == reason
    except msgspec.DecodeError:
        return False


class _Status(msgspec.Struct):
    value: str


class _Model(msgspec.Struct):
    id: str
    parent: str | None = None
    adapter: str | None = None
    status: _Status | None = None


class ServedModels(msgspec.Struct):
    """Response of an endpoint at MODELS_PATH.

    Attributes:
        data: Models, including LoRA adapters.
    """

    data: list[_Model]

    @classmethod
    def read(cls, body: bytes) -> ServedModels | None:
        """Parse a response.

        Args:
            body: Body of the response.

        Returns:
            The models, or None if the body lists none.
        """
        try:
            served = msgspec.json.decode(body, type=cls)
        except msgspec.DecodeError:
            return None
        return served if served.data else None

    @property
    def names(self) -> list[str]:
        return [model.id for model in self.data]

    @property
    def unloaded(self) -> frozenset[str]:
        """Names of models that the endpoint would have to load before it serves them."""
        return frozenset(model.id for model in self.data if model.status is not None and model.status.value != "loaded")

    @property
    def adapters(self) -> dict[str, str | None]:
        """Digests of the LoRA adapters by name. A digest is None if the endpoint does not report it."""
        return {model.id: model.adapter for model in self.data if model.parent is not None}


_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs", "llamacpp:requests_processing")
_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred")
_GENERATED = ("vllm:generation_tokens_total", "sglang:generation_tokens_total", "llamacpp:tokens_predicted_total")
_KV_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")
_SAMPLE = re.compile(rb"^([a-zA-Z_:][\w:]*)(?:\{[^\n]*\})? (\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)(?=\s|\Z)", re.MULTILINE)
_NAMES = frozenset(name.encode() for name in (*_RUNNING, *_WAITING, *_GENERATED, *_KV_USAGE))


def load_from_metrics(page: bytes) -> EndpointLoad | None:
    """Read the load of an endpoint from a metrics page in Prometheus' text format.

    Args:
        page: Page with metrics of vLLM, SGLang, llama.cpp or trioserve (which uses vLLM's names). Series with the same
            name are added up.

    Returns:
        The load, or None if the page lacks the numbers or they are infinite.
    """
    sums: dict[bytes, float] = {}
    for match in _SAMPLE.finditer(page):
        name = match[1]
        if name in _NAMES:
            sums[name] = sums.get(name, 0.0) + float(match[2])

    def first(names: tuple[str, ...]) -> float | None:
        return next((sums[name.encode()] for name in names if name.encode() in sums), None)

    running, waiting = first(_RUNNING), first(_WAITING)
    if running is None or waiting is None or not math.isfinite(running + waiting):
        return None
    generated = first(_GENERATED)
    return EndpointLoad(
        running=round(running),
        waiting=round(waiting),
        kv_usage=min(1.0, first(_KV_USAGE) or 0.0),
        generated=generated if generated is not None and math.isfinite(generated) else UNSET,
    )
