"""Endpoints from Kubernetes: the EndpointSlices of a service, listed once and then watched.

The source follows the API's rules ("Efficient detection of changes"). It lists the slices, and watches from the
resourceVersion of the list. When a watch ends, it watches from the last version that it has seen. When the server no
longer knows this version (status 410), it lists the slices again.
"""

from __future__ import annotations

import logging
import os
import ssl
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import msgspec
import trio

from trioserve.contracts.endpoint import EndpointId
from trioserve.contracts.errors import EndpointLost, StartupError
from trioserve.proxy.discovery.source import EndpointReceiver, EndpointTemplate, report_endpoints
from trioserve.proxy.remote_endpoint import EndpointAddress, RemoteEndpoint, RemoteResponse

__all__ = ["KubernetesSource", "in_cluster"]

logger = logging.getLogger(__name__)

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
SLICES_BYTES_MAX = 64 * 1024 * 1024
LINE_BYTES_MAX = 4 * 1024 * 1024
# The server ends a watch after this time. A watch may be silent for its whole duration. So this time also limits how
# long the source keeps a dead connection.
WATCH_SECONDS = 60
SILENCE_SECONDS_MAX = 30.0  # A response must arrive within this time.
FAILED_SECONDS_MIN, FAILED_SECONDS_MAX = 1.0, 30.0


class _Metadata(msgspec.Struct):
    name: str = ""
    resourceVersion: str = ""


class _Conditions(msgspec.Struct, frozen=True):
    ready: bool | None = None  # The API defines that null means true.
    serving: bool | None = None
    terminating: bool | None = None


class _Endpoint(msgspec.Struct):
    addresses: list[str] = []
    conditions: _Conditions = _Conditions()


class _Port(msgspec.Struct):
    name: str | None = None
    port: int | None = None


class _Slice(msgspec.Struct):
    metadata: _Metadata
    addressType: str = "IPv4"
    endpoints: list[_Endpoint] | None = None
    ports: list[_Port] | None = None


class _SliceList(msgspec.Struct):
    metadata: _Metadata
    items: list[_Slice] = []


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Status(msgspec.Struct):
    code: int = 0
    message: str = ""


class _Expired(Exception):
    """The server no longer knows the resource version."""


class KubernetesSource:
    """Source of the ready endpoints of one Kubernetes service.

    Args:
        api: Client of the Kubernetes API server.
        namespace: Namespace of the service.
        service: Name of the service.
        port: Name or number of the service's port. None: all of its ports.
        token: File with the access token. It is read for each request, because Kubernetes replaces it regularly. None:
            no token.
        scheme: "http" or "https".
        template: Makes the configuration of an endpoint from its URL.
    """

    def __init__(
        self,
        api: RemoteEndpoint,
        *,
        namespace: str,
        service: str,
        port: str | None = None,
        token: Path | None = None,
        scheme: str = "http",
        template: EndpointTemplate,
    ) -> None:
        self.name = f"kubernetes:{namespace}/{service}"
        self._api = api
        self._namespace = namespace
        self._service = service
        self._port = port
        self._token = token
        self._scheme = scheme
        self._template = template
        self._slices: dict[str, _Slice] = {}
        self._version = ""

    async def run(self, fleet: EndpointReceiver) -> None:
        failed_seconds = FAILED_SECONDS_MIN
        try:
            while True:
                try:
                    if not self._version:
                        await self._list(fleet)
                    failed_seconds = FAILED_SECONDS_MIN
                    await self._watch(fleet)
                except _Expired:
                    self._version = ""
                except (EndpointLost, OSError, msgspec.DecodeError, _Unusable) as error:
                    logger.warning("endpoints kept source=%s: %s", self.name, error)
                    await trio.sleep(failed_seconds)
                    failed_seconds = min(FAILED_SECONDS_MAX, 2 * failed_seconds)
        finally:
            self._api.close()

    async def _list(self, fleet: EndpointReceiver) -> None:
        with trio.move_on_after(SILENCE_SECONDS_MAX):
            async with self._api.request("GET", self._path(), await self._headers(), b"") as response:
                body = await response.whole(SLICES_BYTES_MAX)
                _check(response, body)
                listed = msgspec.json.decode(body or b"", type=_SliceList)
                self._slices = {slice_.metadata.name: slice_ for slice_ in listed.items}
                self._version = listed.metadata.resourceVersion
                self._report(fleet)
                return
        raise _Unusable(f"no list arrived within {SILENCE_SECONDS_MAX:g} s")

    async def _watch(self, fleet: EndpointReceiver) -> None:
        path = self._path(watch="1", resourceVersion=self._version, timeoutSeconds=str(WATCH_SECONDS))
        with trio.move_on_after(WATCH_SECONDS + SILENCE_SECONDS_MAX):
            async with self._api.request("GET", path, await self._headers(), b"") as response:
                if response.status != 200:
                    _check(response, await response.whole(LINE_BYTES_MAX))
                line = bytearray()
                while (piece := await response.next_piece()) is not None:
                    line += piece
                    *events, rest = line.split(b"\n")
                    line = bytearray(rest)
                    if len(line) > LINE_BYTES_MAX:
                        raise _Unusable(f"an event has more than {LINE_BYTES_MAX} bytes")
                    for event in events:
                        if event.strip():
                            self._take(msgspec.json.decode(event, type=_Event))
                    if events:
                        self._report(fleet)

    def _take(self, event: _Event) -> None:
        if event.type == "ERROR":
            status = msgspec.json.decode(event.object, type=_Status)
            if status.code == 410:
                raise _Expired
            raise _Unusable(f"the watch failed with {status.code}: {status.message}")
        changed = msgspec.json.decode(event.object, type=_Slice)
        self._version = changed.metadata.resourceVersion
        if event.type == "DELETED":
            self._slices.pop(changed.metadata.name, None)
        elif event.type in ("ADDED", "MODIFIED"):
            self._slices[changed.metadata.name] = changed

    def _report(self, fleet: EndpointReceiver) -> None:
        urls = {
            f"{self._scheme}://{f'[{address}]' if slice_.addressType == 'IPv6' else address}:{port}"
            for slice_ in self._slices.values()
            for port in self._ports(slice_)
            for endpoint in slice_.endpoints or ()
            if endpoint.conditions.ready is not False and not endpoint.conditions.terminating
            for address in endpoint.addresses
        }
        report_endpoints(fleet, self.name, [self._template(url) for url in sorted(urls)])

    def _ports(self, slice_: _Slice) -> list[int]:
        return [
            port.port
            for port in slice_.ports or ()
            if port.port is not None and self._port in (None, port.name, str(port.port))
        ]

    def _path(self, **parameters: str) -> str:
        query = {"labelSelector": f"kubernetes.io/service-name={self._service}", **parameters}
        if "watch" in parameters:
            query["allowWatchBookmarks"] = "true"
        return f"/apis/discovery.k8s.io/v1/namespaces/{quote(self._namespace)}/endpointslices?{urlencode(query)}"

    async def _headers(self) -> list[tuple[str, str]]:
        if self._token is None:
            return []
        token = await trio.to_thread.run_sync(self._token.read_text)
        return [("authorization", f"Bearer {token.strip()}")]


class _Unusable(Exception):
    """The response of the API server cannot be used."""


def _check(response: RemoteResponse, body: bytes | None) -> None:
    if response.status == 410:
        raise _Expired
    if response.status != 200 or body is None:
        said = (body or b"").decode(errors="replace")[:300]
        raise _Unusable(f"the API server answered with status {response.status}: {said}")


def in_cluster(service: str, *, template: EndpointTemplate, environment: Any = os.environ) -> KubernetesSource:
    """Make a source that uses the service account of the pod in which the router runs.

    Args:
        service: [NAMESPACE/]SERVICE[:PORT]. The default namespace is that of the pod.
        template: Makes the configuration of an endpoint from its URL.
        environment: Environment variables.

    Raises:
        StartupError: The router does not run in a pod, or cannot read the service account.
    """
    host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise StartupError("endpoints from Kubernetes need a pod, but KUBERNETES_SERVICE_HOST is not set here")
    try:
        namespace = (ACCOUNT / "namespace").read_text().strip()
        context = ssl.create_default_context(cafile=ACCOUNT / "ca.crt")
    except OSError as error:
        raise StartupError(f"the service account in {ACCOUNT} cannot be read: {error}") from None
    before, slash, name = service.rpartition("/")
    name, _, wanted_port = name.partition(":")
    api = RemoteEndpoint(
        EndpointId("kubernetes"),
        EndpointAddress(scheme="https", host=host, port=int(port)),
        ssl_context=context,
    )
    return KubernetesSource(
        api,
        namespace=before if slash else namespace,
        service=name,
        port=wanted_port or None,
        token=ACCOUNT / "token",
        template=template,
    )
