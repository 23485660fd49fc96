"""Tests the sources of endpoints: files, DNS and Kubernetes. The DNS server and the Kubernetes server are small servers
of this test.
"""

from __future__ import annotations

import contextlib
import contextvars
import json
import logging
from collections.abc import Callable

import dns.asyncresolver
import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rrset
import h11
import pytest
import trio
import trio.testing
from trio.testing import wait_all_tasks_blocked

from trioserve.admission.dispatch import Dispatch
from trioserve.contracts.endpoint import EndpointId
from trioserve.contracts.errors import StartupError
from trioserve.proxy.discovery.dns import DnsSource
from trioserve.proxy.discovery.kubernetes import KubernetesSource, in_cluster
from trioserve.proxy.discovery.source import FileSource, read_endpoints
from trioserve.proxy.fleet import EndpointSpec, Fleet
from trioserve.proxy.remote_endpoint import EndpointAddress, RemoteEndpoint
from trioserve.router.policies import POLICIES
from trioserve.router.settings import RouterSettings
from trioserve.testing.memory_client import memory_connection


@pytest.fixture
def fleet() -> Fleet:
    return Fleet(Dispatch(RouterSettings(), POLICIES["least_loaded"]))


def template(url: str) -> EndpointSpec:
    return EndpointSpec(url=url, api_key="secret")


def known(fleet: Fleet) -> list[str]:
    return sorted(fleet.specs())


async def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds that depends on threads and sockets and has no event. The time limit of the test run
    applies.
    """
    while not condition():
        await trio.lowlevel.checkpoint()


# --- repeated reports to a fleet ---


async def test_source_replaces_only_its_own_endpoints(fleet):
    fleet.add(EndpointSpec(url="http://mine:1"))
    fleet.set_all([template("http://a:1"), template("http://b:1")], source="x")
    fleet.set_all([template("http://b:1"), template("http://c:1")], source="x")
    assert known(fleet) == ["http://b:1", "http://c:1", "http://mine:1"]


async def test_report_with_two_endpoints_of_one_id_changes_nothing(fleet):
    fleet.set_all([template("http://a:1")], source="x")
    with pytest.raises(StartupError, match="two endpoints"):
        fleet.set_all([template("http://b:1"), template("http://b:1/v1")], source="x")
    with pytest.raises(StartupError, match="two endpoints"):
        fleet.set_all([template("http://a:1")], source="y")
    assert known(fleet) == ["http://a:1"]


async def test_endpoint_with_a_changed_configuration_is_added_again(fleet):
    fleet.set_all([EndpointSpec(url="http://a:1", leases_max=1)], source="x")
    fleet.set_all([EndpointSpec(url="http://a:1", leases_max=2)], source="x")
    assert fleet.dispatch.core.endpoints[EndpointId("http://a:1")].leases_max == 2


async def test_watch_of_an_endpoint_does_not_log_the_request_that_added_it(fleet, monkeypatch):
    request = contextvars.ContextVar("request", default="none")
    seen = []

    async def watch_endpoint(*_: object, **__: object) -> None:
        seen.append(request.get())

    monkeypatch.setattr("trioserve.proxy.fleet.watch_endpoint", watch_endpoint)
    async with trio.open_nursery() as nursery:
        await nursery.start(fleet.run)
        request.set("the request that adds an endpoint")
        fleet.add(template("http://a:1"))
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert seen == ["none"]


# --- the source that reads a file ---


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.toml", '[[endpoints]]\nurl = "http://a:1"\n[[endpoints]]\nurl = "http://b:1"\nid = "b"\n'),
        ("a.json", '{"endpoints": [{"url": "http://a:1"}, {"url": "http://b:1", "id": "b"}]}'),
    ],
)
def test_json_and_toml_files_are_read(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    specs = read_endpoints(path, "key")
    assert [(spec.endpoint_id, spec.api_key) for spec in specs] == [("http://a:1", "key"), ("b", "key")]


@pytest.mark.parametrize("text", ["endpoints = 3", "[[endpoints]]\nurll = 'x'", "{", "\x00"])
def test_error_names_the_invalid_file(tmp_path, text):
    path = tmp_path / "a.toml"
    path.write_text(text)
    with pytest.raises(StartupError, match=r"a\.toml cannot be used"):
        read_endpoints(path)
    with pytest.raises(StartupError, match=r"none\.toml cannot be read"):
        read_endpoints(tmp_path / "none.toml")


async def test_changed_file_is_read_again_and_an_invalid_file_changes_nothing(fleet, tmp_path, mock_clock, caplog):
    path = tmp_path / "endpoints.toml"
    path.write_text('[[endpoints]]\nurl = "http://a:1"\n')
    async with trio.open_nursery() as nursery:
        nursery.start_soon(FileSource(path).run, fleet)
        await until(lambda: known(fleet) == ["http://a:1"])
        path.write_text('[[endpoints]]\nurl = "http://bb:1"\n')
        await wait_all_tasks_blocked()
        mock_clock.jump(1)
        await until(lambda: known(fleet) == ["http://bb:1"])
        with caplog.at_level(logging.WARNING):
            path.write_text("[[endpoints]]\n")
            await wait_all_tasks_blocked()
            mock_clock.jump(1)
            await until(lambda: "endpoints kept" in caplog.text)
        assert known(fleet) == ["http://bb:1"]
        nursery.cancel_scope.cancel()


# --- the source that asks DNS ---


class NameServer:
    """DNS server for a table of records, over UDP on a free port. Other names do not exist."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, str], list[str]] = {}
        self.ttl = 5
        self._socket = trio.socket.socket(type=trio.socket.SOCK_DGRAM)

    async def run(self, task_status=trio.TASK_STATUS_IGNORED) -> None:
        with self._socket:
            await self._socket.bind(("127.0.0.1", 0))
            task_status.started()
            await self._respond()

    async def _respond(self) -> None:
        while True:
            data, peer = await self._socket.recvfrom(4096)
            query = dns.message.from_wire(data)
            answer = dns.message.make_response(query)
            answer.flags |= dns.flags.RA
            [question] = query.question
            name = question.name.to_text(omit_final_dot=True)
            kind = dns.rdatatype.to_text(question.rdtype)
            values = self.records.get((name, kind))
            if values:
                answer.answer.append(dns.rrset.from_text(question.name, self.ttl, "IN", kind, *values))
            elif not any(known_name == name for known_name, _ in self.records):
                answer.set_rcode(dns.rcode.NXDOMAIN)
            await self._socket.sendto(answer.to_wire(), peer)

    def resolver(self) -> dns.asyncresolver.Resolver:
        resolver = dns.asyncresolver.Resolver(configure=False)
        resolver.nameservers = ["127.0.0.1"]
        resolver.port = self._socket.getsockname()[1]
        return resolver


async def test_every_dns_address_of_a_name_is_an_endpoint_and_changes_are_applied(fleet, mock_clock, caplog):
    async with trio.open_nursery() as nursery:
        server = NameServer()
        server.records = {("llm.test", "A"): ["10.0.0.1", "10.0.0.2"], ("llm.test", "AAAA"): ["fd00::1"]}
        await nursery.start(server.run)
        source = DnsSource("llm.test", port=8000, template=template, resolver=server.resolver())
        nursery.start_soon(source.run, fleet)
        await until(lambda: len(known(fleet)) == 3)
        assert known(fleet) == ["http://10.0.0.1:8000", "http://10.0.0.2:8000", "http://[fd00::1]:8000"]
        assert all(spec.api_key == "secret" for spec in fleet.specs().values())
        server.records = {("llm.test", "A"): ["10.0.0.2", "10.0.0.3"]}
        await wait_all_tasks_blocked()
        mock_clock.jump(5)  # This is the lifetime of the first DNS answer.
        await until(lambda: known(fleet) == ["http://10.0.0.2:8000", "http://10.0.0.3:8000"])
        server.records = {}
        with caplog.at_level(logging.WARNING):
            await wait_all_tasks_blocked()
            mock_clock.jump(5)
            await until(lambda: "endpoints kept" in caplog.text)
        assert known(fleet) == ["http://10.0.0.2:8000", "http://10.0.0.3:8000"]
        nursery.cancel_scope.cancel()


async def test_short_dns_name_is_looked_up_with_the_search_list(fleet, mock_clock):
    async with trio.open_nursery() as nursery:
        server = NameServer()
        server.records = {("routers.ml.svc.cluster.test", "A"): ["10.0.0.1"]}
        await nursery.start(server.run)
        resolver = server.resolver()
        resolver.search = [dns.name.from_text(name) for name in ("ml.svc.cluster.test", "svc.cluster.test")]
        resolver.ndots = 5  # Pods in Kubernetes have the same setting.
        nursery.start_soon(DnsSource("routers", port=8000, template=template, resolver=resolver).run, fleet)
        await until(lambda: known(fleet) == ["http://10.0.0.1:8000"])
        nursery.cancel_scope.cancel()


async def test_dns_srv_records_set_the_ports_of_endpoints(fleet, mock_clock):
    async with trio.open_nursery() as nursery:
        server = NameServer()
        server.records = {("_http._tcp.llm.test", "SRV"): ["0 5 8001 a.llm.test.", "0 5 8002 b.llm.test."]}
        await nursery.start(server.run)
        source = DnsSource("_http._tcp.llm.test", template=template, resolver=server.resolver())
        nursery.start_soon(source.run, fleet)
        await until(lambda: known(fleet) == ["http://a.llm.test:8001", "http://b.llm.test:8002"])
        nursery.cancel_scope.cancel()


# --- the source that asks Kubernetes ---


def endpoint_slice(name: str, *addresses: str, version: int = 1, ready: bool | None = True, **fields: object) -> dict:
    return {
        "metadata": {"name": name, "resourceVersion": str(version)},
        "addressType": "IPv4",
        "endpoints": [{"addresses": [address], "conditions": {"ready": ready}} for address in addresses],
        "ports": [{"name": "http", "port": 8000}, {"name": "metrics", "port": 9000}],
        **fields,
    }


class ApiServer:
    """Server that implements the list and watch requests of the Kubernetes API, as far as the source needs them."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.slices: list[dict] = []
        self.version = 1
        self.requests: list[tuple[str, str | None]] = []
        self.status = 200
        self._nursery = nursery
        self._events: list[trio.MemorySendChannel] = []

    async def connect(self) -> trio.abc.Stream:
        client, server = memory_connection()
        self._nursery.start_soon(self._serve, server)
        return client

    async def send(self, kind: str, value: dict) -> None:
        for sender in self._events:
            await sender.send(json.dumps({"type": kind, "object": value}).encode() + b"\n")
        await wait_all_tasks_blocked()

    def end_watches(self) -> None:
        while self._events:
            self._events.pop().close()

    async def _serve(self, stream: trio.abc.Stream) -> None:
        with contextlib.suppress(trio.BrokenResourceError):  # The client may have closed the connection.
            await self._respond(stream)

    async def _respond(self, stream: trio.abc.Stream) -> None:
        http = h11.Connection(h11.SERVER)
        while True:
            while (event := http.next_event()) is h11.NEED_DATA:
                http.receive_data(await stream.receive_some())
            if isinstance(event, h11.ConnectionClosed):
                return
            if isinstance(event, h11.Request):
                target = event.target.decode()
                authorization = dict(event.headers).get(b"authorization")
                self.requests.append((target, authorization and authorization.decode()))
            elif isinstance(event, h11.EndOfMessage):
                if "watch=1" in target and self.status == 200:
                    await self._watch(http, stream)
                else:
                    body = json.dumps({"metadata": {"resourceVersion": str(self.version)}, "items": self.slices})
                    head = h11.Response(status_code=self.status, headers=[("content-length", str(len(body)))])
                    await stream.send_all(http.send(head) + http.send(h11.Data(data=body.encode())))
                    await stream.send_all(http.send(h11.EndOfMessage()) or b"")
                http.start_next_cycle()

    async def _watch(self, http: h11.Connection, stream: trio.abc.Stream) -> None:
        sender, receiver = trio.open_memory_channel[bytes](0)
        self._events.append(sender)
        await stream.send_all(http.send(h11.Response(status_code=200, headers=[("transfer-encoding", "chunked")])))
        async for line in receiver:
            for part in (line[:7], line[7:]):  # Each line is sent in two pieces, because an event may arrive in pieces.
                await stream.send_all(http.send(h11.Data(data=part)))
        await stream.send_all(http.send(h11.EndOfMessage()))


class Cluster:
    def __init__(self, nursery: trio.Nursery, fleet: Fleet, tmp_path, **options: object) -> None:
        self.api = ApiServer(nursery)
        self.fleet = fleet
        self.token = tmp_path / "token"
        self.token.write_text("first\n")
        remote = RemoteEndpoint(
            EndpointId("kubernetes"),
            EndpointAddress(scheme="http", host="kubernetes", port=80),
            open_stream=self.api.connect,
        )
        self.source = KubernetesSource(
            remote,
            namespace="ml",
            service="llm",
            port="http",
            token=self.token,
            template=template,
            **options,
        )


@pytest.fixture
def cluster(nursery, fleet, tmp_path) -> Cluster:
    return Cluster(nursery, fleet, tmp_path)


async def test_source_follows_the_ready_addresses_of_a_kubernetes_service(cluster, nursery, mock_clock):
    api, fleet = cluster.api, cluster.fleet
    api.slices = [
        endpoint_slice("one", "10.0.0.1", "10.0.0.2"),
        endpoint_slice("two", "10.0.0.9", ready=False),
    ]
    nursery.start_soon(cluster.source.run, fleet)
    await until(lambda: len(api.requests) == 2)
    await wait_all_tasks_blocked()
    assert known(fleet) == ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]
    assert "/namespaces/ml/endpointslices?labelSelector=kubernetes.io%2Fservice-name%3Dllm" in api.requests[0][0]
    assert "resourceVersion=1" in api.requests[1][0]
    await api.send("MODIFIED", endpoint_slice("two", "10.0.0.9", version=2))
    assert "http://10.0.0.9:8000" in known(fleet)
    await api.send("ADDED", endpoint_slice("six", "fd00::1", version=3, addressType="IPv6"))
    assert "http://[fd00::1]:8000" in known(fleet)
    await api.send("DELETED", endpoint_slice("one", version=4))
    assert known(fleet) == ["http://10.0.0.9:8000", "http://[fd00::1]:8000"]


async def test_ended_kubernetes_watch_resumes_at_its_version_with_the_current_token(cluster, nursery, mock_clock):
    api = cluster.api
    api.slices = [endpoint_slice("one", "10.0.0.1")]
    nursery.start_soon(cluster.source.run, cluster.fleet)
    await until(lambda: len(api.requests) == 2)
    await wait_all_tasks_blocked()
    await api.send("BOOKMARK", {"metadata": {"resourceVersion": "77"}})
    cluster.token.write_text("second")
    api.end_watches()
    await until(lambda: len(api.requests) == 3)
    assert "resourceVersion=77" in api.requests[2][0]
    assert [authorization for _, authorization in api.requests] == ["Bearer first", "Bearer first", "Bearer second"]
    assert known(cluster.fleet) == ["http://10.0.0.1:8000"]


async def test_expired_kubernetes_version_causes_a_new_list_request(cluster, nursery, mock_clock):
    api = cluster.api
    api.slices = [endpoint_slice("one", "10.0.0.1")]
    nursery.start_soon(cluster.source.run, cluster.fleet)
    await until(lambda: len(api.requests) == 2)
    await wait_all_tasks_blocked()
    api.slices, api.version = [endpoint_slice("one", "10.0.0.5", version=90)], 90
    await api.send("ERROR", {"code": 410, "message": "too old resource version"})
    await until(lambda: len(api.requests) == 4)
    assert "watch" not in api.requests[2][0]
    assert "resourceVersion=90" in api.requests[3][0]
    await until(lambda: known(cluster.fleet) == ["http://10.0.0.5:8000"])


async def test_refusal_of_the_api_server_changes_nothing_and_is_retried(cluster, nursery, mock_clock, caplog):
    api = cluster.api
    api.slices = [endpoint_slice("one", "10.0.0.1")]
    api.status = 403
    with caplog.at_level(logging.WARNING):
        nursery.start_soon(cluster.source.run, cluster.fleet)
        await until(lambda: "status 403" in caplog.text)
    assert known(cluster.fleet) == []
    api.status = 200
    await wait_all_tasks_blocked()
    mock_clock.jump(1)
    await until(lambda: known(cluster.fleet) == ["http://10.0.0.1:8000"])


def test_source_outside_of_a_cluster_is_refused():
    with pytest.raises(StartupError, match="need a pod"):
        in_cluster("llm", template=template, environment={})
