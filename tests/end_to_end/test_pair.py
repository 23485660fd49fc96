"""Tests a router, a prefill server and a decode server as separate processes, and clients and servers that leave."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator

import pytest

from .conftest import ServerProcess

WAIT_SECONDS_MAX = 120
SMALL = ("--max-num-seqs=4", "--threads=1", "--dtype=float32", "--kv-cache-memory=0.25", "--quantization=none")
LONG = "The keeper of the lighthouse writes down each ship that passes, its flag, its colours and its captain. " * 40

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def get(url: str) -> object:
    with urllib.request.urlopen(url, timeout=30) as response:
        return json.load(response)


def wait_until(condition: Callable[[], bool]) -> None:
    """Poll until the condition holds, because another process has no event to wait for."""
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.05)


def wait_until_healthy(router: ServerProcess) -> None:
    """Wait until all endpoints are healthy. Before, a router may let one endpoint of a pair do the work of both."""
    wait_until(lambda: all(each["health"] == "healthy" for each in get(f"{router.url}/endpoints")["data"]))


class Asker(threading.Thread):
    """Sends one streamed request and reads the response in a thread.

    Attributes:
        status: HTTP status, or 0 before the response head.
        events: decoded events so far.
        is_done: True once the response is complete.
        error: exception that ended the response, or None.
    """

    def __init__(self, url: str, prompt: str, max_tokens: int, **fields: object) -> None:
        super().__init__(daemon=True)
        body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True, "temperature": 0}
        content = json.dumps({**body, **fields}).encode()
        host, _colon, port = url.removeprefix("http://").partition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=WAIT_SECONDS_MAX)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(content)}\r\n"
        self.socket.sendall(head.encode() + b"Connection: close\r\n\r\n" + content)
        self.status = 0
        self.events: list[dict] = []
        self.is_done = False
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            with self.socket.makefile("rb") as file:
                for line in file:
                    if line.startswith(b"HTTP/1.1 "):
                        self.status = int(line.split()[1])
                    elif line.strip() == b"data: [DONE]":
                        self.is_done = True
                    elif line.startswith(b"data: "):
                        self.events.append(json.loads(line[6:]))
        except (OSError, ValueError) as error:
            self.error = error
        finally:
            self.socket.close()

    def leave(self) -> None:
        self.socket.shutdown(socket.SHUT_RDWR)
        self.join(WAIT_SECONDS_MAX)

    def text(self) -> str:
        """Wait for the complete response and return its text."""
        self.join(WAIT_SECONDS_MAX)
        assert self.is_done, (self.status, self.error, self.events[-1:])
        return "".join(event["choices"][0]["text"] for event in self.events if event["choices"])


class Partition:
    """Forwards connections to a port from another address of this machine, or silently drops all bytes."""

    ADDRESS = "127.0.0.2"

    def __init__(self) -> None:
        self.is_dropping = True
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self._sockets = [socket.create_server((self.ADDRESS, self.port))]
        self._threads: list[threading.Thread] = []
        self._begin(self._accept, self._sockets[0])

    def close(self) -> None:
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(WAIT_SECONDS_MAX)
        for each in self._sockets:
            each.close()

    def _begin(self, function: Callable[..., None], *arguments: object) -> None:
        self._threads.append(threading.Thread(target=function, args=arguments, daemon=True))
        self._threads[-1].start()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _address = listener.accept()
                self._sockets.append(here)
                there = socket.create_connection(("127.0.0.1", self.port))
                self._sockets.append(there)
                self._begin(self._pass_on, here, there)
                self._begin(self._pass_on, there, here)

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if not self.is_dropping:
                    target.sendall(data)
            target.shutdown(socket.SHUT_WR)


class Pair:
    """Runs a prefill server, a decode server and a router.

    Args:
        start_server: the fixture of that name.
        connector: "tcp" or "nixl".
        hold_seconds: deadline of holds and of KV loads.
        health_seconds: interval of the router's health checks.
        partition: lies between the connectors of both servers; None connects them directly.
    """

    def __init__(
        self,
        start_server,
        connector: str = "tcp",
        *,
        hold_seconds: float = 10.0,
        health_seconds: float = 0.5,
        partition: Partition | None = None,
    ) -> None:
        self.partition = partition
        listening = {} if partition is None else {"port": partition.port, "advertised_host": partition.ADDRESS}
        flags = (f"--kv-hold-timeout={hold_seconds}", f"--kv-load-timeout={hold_seconds}", *SMALL)
        self.prefill = start_server("--role=prefill", self._connector(connector, **listening), *flags)
        self.decode = start_server("--role=decode", self._connector(connector), *flags)
        self.router = start_server(
            f"--prefill-endpoint=p={self.prefill.url}",
            f"--decode-endpoint=d={self.decode.url}",
            f"--health-interval={health_seconds}",
            "--load-interval=0.1",
            command="route",
        )
        wait_until_healthy(self.router)

    def _connector(self, name: str, **options: object) -> str:
        config = {"kv_connector": name, "kv_connector_extra_config": {"key": "a secret of some length", **options}}
        return f"--kv-transfer-config={json.dumps(config)}"

    def ask(self, prompt: str = LONG, max_tokens: int = 16, **fields: object) -> Asker:
        return Asker(self.router.url, prompt, max_tokens, **fields)

    def blocks(self, server, state: str) -> float:
        return server.metric(f'trioserve:kv_blocks{{state="{state}"}}')

    def is_clean(self, *servers) -> bool:
        """Return True if the servers have no used or held block, and the router has no lease."""
        leases = [each["leases"] for each in get(f"{self.router.url}/endpoints")["data"]]
        here = servers or (self.prefill, self.decode)
        return not any(leases) and not any(self.blocks(server, state) for server in here for state in ("used", "held"))

    def transfers(self) -> float:
        return self.decode.metric("trioserve:kv_transfer_loads_completed_total")


@pytest.fixture
def partition() -> Iterator[Partition]:
    partition = Partition()
    yield partition
    partition.close()


@pytest.mark.slow
@pytest.mark.parametrize("connector", ["tcp", "nixl"])
def test_pair_responds_with_the_same_text_as_a_single_server(start_server, connector):
    if connector == "nixl":
        pytest.importorskip("nixl")
    pair = Pair(start_server, connector)
    alone = start_server(*SMALL)
    prompts = [LONG, LONG[: len(LONG) // 3] + " What is the name of the ship?", "A story about the sea:\n" * 20]
    expected = [Asker(alone.url, prompt, 32).text() for prompt in prompts]
    askers = [pair.ask(prompt, 32) for prompt in prompts]
    assert [asker.text() for asker in askers] == expected
    assert pair.transfers() == len(prompts)
    assert pair.decode.metric("trioserve:kv_transfer_blocks_received_total") > 60

    form = {"structured_outputs": {"json": PERSON}, "max_tokens": 60}
    expected_person = Asker(alone.url, LONG, **form).text()
    assert pair.ask(LONG, **form).text() == expected_person
    assert set(json.loads(expected_person)) == {"name", "age"}
    assert pair.transfers() == len(prompts) + 1
    assert pair.decode.metric("trioserve:forced_tokens_total") > 4
    assert pair.decode.metric("trioserve:kv_transfer_bytes_received_total") > 60 * 16 * 30 * 2 * 3 * 64 * 4
    wait_until(pair.is_clean)
    assert [server.stop() for server in (pair.router, pair.decode, pair.prefill)] == [0, 0, 0]


# --- a client leaves ---


def patient_pair(start_server) -> Pair:
    """Start a pair with deadlines that no test reaches.

    So a free block was released, and did not expire. Health checks are rare, so the router does not notice a suspended
    server.
    """
    return Pair(start_server, hold_seconds=600.0, health_seconds=600.0)


@pytest.fixture(scope="module")
def patient(start_shared_server) -> Pair:
    return patient_pair(start_shared_server)


@pytest.mark.slow
def test_client_that_leaves_during_prefill_leaks_no_block_and_no_lease(patient):
    transfers = patient.transfers()
    asker = patient.ask("During prefill. " + LONG * 2)
    wait_until(lambda: patient.blocks(patient.prefill, "used") > 0)
    asker.leave()
    wait_until(patient.is_clean)
    assert patient.prefill.metric('trioserve:aborts_total{phase="prefill"}') == 1
    assert patient.transfers() == transfers
    assert patient.ask().text()


@pytest.mark.slow
def test_client_that_leaves_while_its_blocks_are_held_frees_them(patient):
    """Scenario S10 of tests/README.md: the suspended decode server reads no blocks, and the deadline is far away."""
    patient.decode.process.send_signal(signal.SIGSTOP)
    asker = patient.ask()
    wait_until(lambda: patient.blocks(patient.prefill, "held") > 0)
    asker.leave()
    wait_until(lambda: patient.blocks(patient.prefill, "held") == 0)
    patient.decode.process.send_signal(signal.SIGCONT)
    wait_until(patient.is_clean)
    assert patient.ask().text()


@pytest.mark.slow
def test_client_that_leaves_during_a_stuck_kv_load_frees_the_held_blocks(start_server, partition):
    pair = Pair(start_server, hold_seconds=600.0, partition=partition)
    asker = pair.ask()
    wait_until(lambda: pair.decode.metric("trioserve:kv_transfer_loads_waiting") == 1)
    assert pair.blocks(pair.prefill, "held") > 0
    asker.leave()
    # The router aborts the request at the prefill server, because the connectors cannot reach each other.
    wait_until(lambda: pair.blocks(pair.prefill, "held") == 0)
    wait_until(pair.is_clean)


@pytest.mark.slow
def test_client_that_leaves_during_decode_leaks_no_block_and_no_lease(patient):
    aborts = patient.decode.metric('trioserve:aborts_total{phase="decode"}')
    asker = patient.ask(max_tokens=1000)
    wait_until(lambda: len(asker.events) > 3)
    assert patient.blocks(patient.decode, "used") > 0
    asker.leave()
    wait_until(patient.is_clean)
    assert patient.decode.metric('trioserve:aborts_total{phase="decode"}') == aborts + 1


@pytest.mark.slow
def test_many_clients_that_leave_at_any_time_leak_no_block_and_no_lease(patient):
    alone = Asker(patient.decode.url, LONG, 8).text()
    for number in range(24):
        asker = patient.ask(f"{number}. {LONG[: 200 * (number % 12)]}", max_tokens=64)
        wait_until(lambda asker=asker, number=number: len(asker.events) >= number % 4)
        asker.leave()
    wait_until(patient.is_clean)
    assert patient.ask(max_tokens=8).text() == alone


# --- a server leaves ---


@pytest.mark.slow
def test_prefill_server_replaces_a_killed_decode_server(start_server):
    """Scenario S07 of tests/README.md: the decode server dies, and no block stays in use."""
    pair = patient_pair(start_server)
    expected = pair.ask().text()
    whole = pair.ask(max_tokens=200).text()
    told = pair.ask(max_tokens=200)
    wait_until(lambda: len(told.events) > 3)
    pair.decode.process.send_signal(signal.SIGKILL)
    assert told.text() == whole
    assert pair.ask().text() == expected
    wait_until(lambda: pair.is_clean(pair.prefill))


@pytest.mark.slow
def test_decode_server_replaces_a_killed_prefill_server(start_server):
    pair = patient_pair(start_server)
    expected = pair.ask().text()
    askers = [pair.ask(LONG + f" {number}") for number in range(3)]
    wait_until(lambda: pair.blocks(pair.prefill, "used") > 0)
    pair.prefill.process.send_signal(signal.SIGKILL)
    assert all(asker.text() for asker in askers)
    assert pair.ask().text() == expected
    wait_until(lambda: pair.is_clean(pair.decode))


@pytest.mark.slow
def test_kill_of_the_router_frees_the_blocks_held_for_its_request(start_server):
    pair = patient_pair(start_server)
    pair.decode.process.send_signal(signal.SIGSTOP)
    pair.ask()
    wait_until(lambda: pair.blocks(pair.prefill, "held") > 0)
    pair.router.process.send_signal(signal.SIGKILL)
    wait_until(lambda: pair.blocks(pair.prefill, "held") == 0)
    pair.decode.process.send_signal(signal.SIGCONT)
    wait_until(lambda: pair.blocks(pair.decode, "used") == 0)


@pytest.mark.slow
def test_suspended_decode_server_loses_the_held_blocks_at_their_deadline(start_server):
    """Scenario S08 of tests/README.md: held blocks are freed at their deadline. The decode server resumes later and
    computes the prompt itself.
    """
    pair = Pair(start_server, hold_seconds=2.0, health_seconds=600.0)
    expected = pair.ask().text()
    pair.decode.process.send_signal(signal.SIGSTOP)
    asker = pair.ask("Once more. " + LONG)
    wait_until(lambda: pair.blocks(pair.prefill, "held") > 0)
    wait_until(lambda: pair.blocks(pair.prefill, "held") == 0)
    late = pair.ask("Later. " + LONG)
    wait_until(lambda: pair.blocks(pair.prefill, "held") > 0)
    assert asker.events == late.events == []  # The suspended server sends nothing.
    pair.decode.process.send_signal(signal.SIGCONT)
    assert asker.text()
    assert late.text()
    assert pair.ask().text() == expected
    wait_until(pair.is_clean)


@pytest.mark.slow
def test_partition_between_servers_costs_the_load_deadline_and_no_response(start_server, partition):
    """Scenario S03 of tests/README.md: the load never ends. The request computes its prompt itself, and the hold ends
    at its deadline.
    """
    pair = Pair(start_server, hold_seconds=2.0, partition=partition)
    bystander = Asker(pair.decode.url, "A long story:", 80)
    assert pair.ask().text() == Asker(pair.prefill.url, LONG, 16).text()
    assert pair.transfers() == 0
    wait_until(lambda: pair.blocks(pair.prefill, "held") == 0)
    assert bystander.text()  # A request without a transfer is not affected.
    wait_until(pair.is_clean)
    partition.is_dropping = False
    assert pair.ask("Again: " + LONG).text()
    wait_until(lambda: pair.transfers() == 1)
